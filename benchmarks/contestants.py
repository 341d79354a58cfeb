"""Who runs beside us: for each operator, tileops and what a user would otherwise write, checked before it is timed.

A contestant is a function of one input set: fn(x, weight), or fn(a, b, bias, residual) of gemm. The row operators, their plain
PyTorch form and their float64 formula are the rows of tileops.demo.OPERATORS; products.py has those of gemm.
"""

import importlib.util
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import tileops
from benchmarks import products
from tileops import knobs
from tileops.demo import OPERATORS, error

# What an error may be, relative to the row's largest value (tileops.demo.error).
# Ours: twice that of eager PyTorch, plus this floor: half of one rounding; for float32, an approximate exponential.
FLOOR = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2e-6}
# A peer: four roundings of its dtype, and for float32 a sum of 131072 terms.
PEER_LIMIT = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-5}
OPTIONAL_PEERS = ("quack",)


class Refused(Exception):
    """A contestant that does not serve this workload, and why; never raised by a required one."""


class BenchmarkError(Exception):
    """A required contestant is missing or wrong."""


@dataclass(frozen=True)
class Contestant:
    name: str
    fn: object
    knobs: tuple = ()  # of tileops, while it is warmed and captured

    @contextmanager
    def scope(self):
        with knobs.scope(**dict(self.knobs)):
            yield


def _norm_formula(x, weight, dim, eps, silu=False):
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(dim, keepdim=True) + eps)
    if weight is not None:
        shape = [1] * x.ndim
        shape[dim] = -1
        value = value * weight.float().view(shape)
    return (F.silu(value) if silu else value).to(x.dtype)


# The formula as one writes it, which is what Inductor gets to fuse.
FORMULAS = {
    "softmax": lambda x, weight, dim: torch.softmax(x, dim),
    "rms_norm": lambda x, weight, dim: _norm_formula(x, weight, dim, 1e-6),
    "rms_norm_silu": lambda x, weight, dim: _norm_formula(x, weight, dim, 1e-5, silu=True),
}


def arguments(workload, *inputs):
    """The keyword arguments of the public function and, for row operators, of the eager form."""
    if workload.op == "gemm":
        return products.arguments(workload, *inputs)
    x, weight = inputs
    given = {"x": x, "dim": workload.dim}
    return given if weight is None else {**given, "weight": weight}


def _tileops(workload):
    function = getattr(tileops, workload.op)
    return lambda *inputs: function(**arguments(workload, *inputs))


def _eager(workload):
    if workload.op == "gemm":
        return products.plain(workload)
    function = OPERATORS[workload.op].eager
    return lambda x, weight: function(**arguments(workload, x, weight))


def _formula(workload):
    if workload.op == "gemm":
        return products.plain(workload)
    function, dim = FORMULAS[workload.op], workload.axis
    return lambda x, weight: function(x, weight, dim)


def _inductor(workload):
    torch._dynamo.reset()  # each workload is compiled for its own shape, as its first call would be
    return torch.compile(_formula(workload), dynamic=False)


def _quack(workload):
    if importlib.util.find_spec("quack") is None:
        raise BenchmarkError("peer quack was asked for and is not importable; install quack-kernels or leave out --peers quack")
    row_op = workload.op in ("softmax", "rms_norm")
    if not row_op or workload.axis != len(workload.shape) - 1 or workload.cols % 8:
        raise Refused("quack has softmax and rms_norm along a last dimension that is a multiple of 8")
    cols = workload.cols
    if workload.op == "softmax":
        from quack.softmax import softmax

        return lambda x, weight: softmax(x.view(-1, cols)).view(x.shape)
    from quack.rmsnorm import rmsnorm

    return lambda x, weight: rmsnorm(x.view(-1, cols), weight, eps=1e-6).view(x.shape)


def peers_of(workload, optional=(), without=()):
    """The builders of this workload's peers, by name. `formula` is the eager form without F.rms_norm: a peer where that one
    cannot do the whole job in one kernel."""
    builders = {"eager": _eager, "inductor": _inductor}
    if workload.op == "rms_norm_silu" or (workload.op == "rms_norm" and workload.axis != len(workload.shape) - 1):
        builders["formula"] = _formula
    for name in optional:
        if name not in OPTIONAL_PEERS:
            raise SystemExit(f"--peers: no peer {name!r}; expected one of {', '.join(OPTIONAL_PEERS)}")
        builders[name] = _quack
    return {name: build for name, build in builders.items() if name not in without}


def ours(workload, force=""):
    """tileops by its own choice, or forced to one variant."""
    setting = (("require_native", True), *((("force", force),) if force else ()))
    return Contestant(force or "tileops", _tileops(workload), setting)


def make_sets(workload, count, device, seed=0):
    """`count` distinct input sets, normal-distributed, each tensor an allocation of its own and so aligned like a user's."""
    if workload.op == "gemm":
        return products.make_sets(workload, count, device, seed)
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, workload.dtype)
    sets = []
    for _ in range(count):
        x = torch.randn(workload.shape, dtype=dtype, device=device, generator=generator)
        weight = None
        if workload.weight_dtype:
            weight = 1 + 0.1 * torch.randn(workload.cols, device=device, generator=generator)
            weight = weight.to(getattr(torch, workload.weight_dtype))
        sets.append((x, weight))
    return sets


def worst_error(workload, sets, outputs):
    """The error of the first and the last call of a graph, whose inputs are sets (x, weight, ...) in rotation."""
    if workload.op == "gemm":
        return products.worst_error(workload, sets, outputs)
    calls = {0, len(outputs) - 1}
    return max(error(workload.op, *sets[call % len(sets)][:2], outputs[call], workload.dim) for call in calls)


def check(workload, name, found, eager_error=None):
    """Raises BenchmarkError where an error is more than rounding. Ours is held to eager's, a peer to a plain limit."""
    dtype = getattr(torch, workload.result_dtype)
    limit = PEER_LIMIT[dtype] if eager_error is None else 2 * eager_error + FLOOR[dtype]
    limit += products.truncation(workload) if workload.op == "gemm" else 0
    if not found <= limit:
        raise BenchmarkError(
            f"{workload.op} {workload.name}: {name} is wrong by {found:.2e} of the row's largest value; "
            f"expected at most {limit:.2e}, so it is not timed"
        )
