"""What a gemm workload computes: its inputs, the call, plain PyTorch's form and float64's; for bench and tune alike.

An input set is (a, b, bias, residual), each a tensor of the operator's shape or None.
"""

import torch
import torch.nn.functional as F

CHUNK_ELEMENTS = 1 << 26  # float64 results compared at a time: 512 MB for each temporary
ACTIVATIONS = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def arguments(workload, a, b, bias, residual):
    """The keyword arguments of tileops.gemm."""
    given = {"a": a, "b": b, "bias": bias, "activation": workload.activation, "residual": residual}
    return {**given, "out_dtype": getattr(torch, workload.result_dtype)}


def make_sets(workload, count, device, seed=0):
    """`count` distinct input sets, normal-distributed; the operands are stored as the workload's layout says."""
    generator = torch.Generator(device).manual_seed(seed)
    m, n, k = workload.mnk
    batch = workload.shape[:-3]

    def normal(shape, dtype):
        return torch.randn(shape, dtype=getattr(torch, dtype), device=device, generator=generator)

    sets = []
    for _ in range(count):
        a = normal((*batch, k, m), workload.dtype).mT if workload.layout[0] == "t" else normal((*batch, m, k), workload.dtype)
        b = normal((*batch, n, k), workload.dtype).mT if workload.layout[1] == "t" else normal((*batch, k, n), workload.dtype)
        bias = normal((n,), workload.dtype) if "bias" in workload.steps else None
        residual = normal((*batch, m, n), workload.result_dtype) if "residual" in workload.steps else None
        sets.append((a, b, bias, residual))
    return sets


def plain(workload):
    """What a user of PyTorch writes: each step in the dtype of a, the product by cuBLAS."""
    activate, dtype = ACTIVATIONS[workload.activation], getattr(torch, workload.result_dtype)

    def run(a, b, bias, residual):
        if dtype != a.dtype and a.ndim == 2:
            z = torch.mm(a, b, out_dtype=dtype)
        else:
            z = (a @ b if bias is None else F.linear(a, b.mT, bias)).to(dtype)
        y = activate(z)
        return y if residual is None else y + residual

    return run


def truncation(workload):
    """What tensor cores may lose of a float32 sum: half a unit in the last place for each 16 of K, not rounded but cut off."""
    return workload.mnk[2] / 16 * 2.0**-24


def worst_error(workload, sets, outputs):
    """The error of the first and the last call of a graph: the largest distance to float64, relative to its row's largest."""
    calls = {0, len(outputs) - 1}
    return max(error(workload, sets[call % len(sets)][:4], outputs[call]) for call in calls)


def error(workload, inputs, result):
    """inf: a NaN or a wrong shape."""
    m, n, _ = workload.mnk
    if tuple(result.shape) != (*workload.shape[:-3], m, n):
        return float("inf")
    a, b, bias, residual = (None if t is None else t.reshape(-1, *t.shape[-2:]) if t.ndim > 1 else t for t in inputs)
    found, rows = 0.0, max(1, CHUNK_ELEMENTS // n)
    for item, part in enumerate(result.reshape(-1, m, n)):
        wide = b[item].double()
        for first in range(0, m, rows):
            chunk = slice(first, first + rows)
            z = a[item, chunk].double() @ wide
            want = ACTIVATIONS[workload.activation](z if bias is None else z + bias.double())
            want = want if residual is None else want + residual[item, chunk].double()
            off = (part[chunk].double() - want).abs() / want.abs().amax(-1, keepdim=True)
            found = max(found, float(off.nan_to_num(nan=float("inf"), posinf=float("inf")).max()))
    return found
