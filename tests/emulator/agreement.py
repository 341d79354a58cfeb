"""One small problem for each kernel of the library: as the operator is called, and as the emulator launches its text."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import lengths
import mla
import numpy as np
import torch
from golden_launch import as_array

from tileops_dsl import emulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

import attention_reference
import merge_reference
import ops_reference
from ops_reference import ACTIVATIONS, normal

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CODES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # DTypeCode of csrc/include/tileops/types.h
# Times K and the sum of the sizes of K products: what two sums of them in float32 differ by, in whatever order. An addition
# errs by 2^-24 where it rounds, as the emulator's, by 2^-23 where it cuts off, as a tensor core's; the fourth is for the rest.
ANY_ORDER = 4 * 2.0**-24
FUNCTIONS = 2.0**-20  # relative error of ex2, lg2, rcp and rsqrt of the GPU, and of the few operations around them
SOFTCAP, TANH = 1.0, 2.0**-10  # of tanh.approx: 2^-11 on either side of what the emulator has


@dataclass
class Problem:
    """Tensors of the CPU. args, options: of the operator. outs: what it writes, by the argument's name, NaN before.

    exact: the results in float64. slack: what each may differ by before it is rounded; share: how many of the elements of 16
    bits may then be rounded the other way. emulate: launches the text of a file with a seed.
    """

    args: tuple[torch.Tensor, ...]
    options: dict
    outs: dict[str, torch.Tensor]
    exact: tuple[torch.Tensor, ...]
    slack: tuple[torch.Tensor, ...]
    emulate: Callable[[Path, int], None]
    share: float = 0.01
    op: str = ""  # the operator, if it is not called as the kernel


def in_gaps(shape, dtype, pitch=None, gap=1, offset=0, seed=None) -> torch.Tensor:
    """Normal values, or NaN without a seed: rows `pitch` apart, elements `gap`, the first at `offset` of an aligned storage."""
    *outer, rows, columns = shape
    pitch = pitch or columns * gap
    storage = torch.full((math.prod(outer) * rows * pitch + offset,), torch.nan, dtype=dtype)
    view = storage[offset:].view(*outer, rows, pitch)[..., : columns * gap : gap]
    return view if seed is None else view.copy_(normal(*shape, seed=seed))


def moved(view: torch.Tensor, device: str) -> torch.Tensor:
    """The same on a device: its strides, and its distance from alignment."""
    whole = view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)
    return whole.to(device).as_strided(view.shape, view.stride(), view.storage_offset())


def launch(kernel: dict, values: dict, outs: dict, path: Path, seed: int, grid) -> None:
    """values: by field, tensors (None: absent) and numbers. outs: those that the kernel writes."""
    arrays = {name: as_array(v) if isinstance(v, torch.Tensor) else v for name, v in values.items()}
    packed, _ = emulate.fields(kernel, arrays, outs)
    launched = grid, kernel["threads"], kernel["shared_bytes"]
    emulate.launch_kernel(path, kernel["name"], packed, *launched, cluster=kernel.get("cluster", 1), seed=seed)


def launch_rows(kernel: dict, values: dict, outs: dict, path: Path, seed: int) -> None:
    rows = -(-values["inner"] // kernel["rows_per_block"])
    launch(kernel, values, outs, path, seed, (rows, *(values[extent] for extent in ("outer", "batch") if extent in values)))


# ---- row kernels


def row_problem(kernel: dict, seed: int) -> Problem:
    """Rows that fill no tile, as the kernel wants them: aligned, anywhere in a vector, with gaps, or lying across."""
    vector, along = kernel["vector"], not (kernel["shifted"] or kernel["lanes_on_rows"])
    cols = kernel["max_cols"] or 3 * kernel["threads"] * max(vector, 8)
    cols -= (vector if along else 1) * (cols > vector)  # no whole tile, where there is a shorter one
    rows = kernel["rows_per_block"] + (vector if kernel["lanes_on_rows"] else 1)
    place, shape, dim = {}, (1, rows, cols), -1
    if kernel["lanes_on_rows"]:
        shape, dim = (2, cols, rows), 1
    elif kernel["shifted"]:
        place = {"offset": 5}
    elif vector == 1:
        place = {"pitch": 2 * cols + 1, "gap": 2, "offset": 1}
    x, y = in_gaps(shape, DTYPES[kernel["x"]], seed=seed, **place), in_gaps(shape, DTYPES[kernel["y"]], **place)
    options, values = {"dim": dim}, {"x": x.movedim(dim, -1), "y": y.movedim(dim, -1)}
    values |= dict(zip(("outer", "inner", "cols"), values["x"].shape))
    if kernel["op"] == "softmax":
        options["dtype"] = y.dtype
    else:
        weight = None if seed % 4 == 0 else normal(cols, dtype=(*DTYPES.values(),)[seed % 3], seed=seed + 1)
        scalars = {"eps": 1e-5, "round_before_weight": False} | ({"weight_offset": 1.0} if kernel["op"] == "rms_norm" else {})
        options |= {"weight": weight} | scalars
        values |= {"weight": weight, "weight_dtype": 0 if weight is None else CODES[weight.dtype]} | scalars
    exact = getattr(ops_reference, f"exact_{kernel['op']}")(x, **options)
    slack = FUNCTIONS * exact.abs()
    if kernel["op"] == "rms_norm_silu":  # the error of v in exp(v)
        slack *= 1 + ops_reference.exact_rms_norm(x, **options).abs()
    return Problem((x,), options, {"out": y}, (exact,), (slack,), lambda *at: launch_rows(kernel, values, ("y",), *at))


def merge_problem(kernel: dict, seed: int) -> Problem:
    cols = kernel["max_cols"] or 3 * kernel["threads"] * kernel["vector"]
    rows = kernel["rows_per_block"] + 1
    args = merge_reference.sides((2, rows, 2, cols), DTYPES[kernel["x"]], "cpu")
    out, lse = torch.full_like(args[0], torch.nan), torch.full_like(args[1], torch.nan)
    values = dict(zip(("out_a", "lse_a", "out_b", "lse_b", "out", "lse"), (*args, out, lse)))
    values = {name: v.transpose(1, 2) if v.dim() == 4 else v for name, v in values.items()}
    values |= {"batch": 2, "outer": 2, "inner": rows, "cols": cols}
    exact = merge_reference.exact(*args)
    size = exact[1].abs()
    slack = torch.tensor(4 * FUNCTIONS), FUNCTIONS * (1 + size.masked_fill(size.isinf(), 0))
    outs = {"out": out, "lse": lse}
    return Problem(args, {}, outs, exact, slack, lambda *at: launch_rows(kernel, values, outs, *at))


# ---- products


def gemm_problem(kernel: dict, seed: int) -> Problem:
    """Two tiles or more, ragged in each dimension, with bias, activation and residual."""
    bm, bn, bk = kernel["tile"]
    x, y, anywhere = DTYPES[kernel["x"]], DTYPES[kernel["y"]], kernel["vector"] == 1
    m, n, k = (extent - 3 * anywhere for extent in (bm * kernel["cluster"] + 8, bn + 8, 2 * bk + 8))

    def matrix(rows, columns, dtype, transposed=False, seed=None):
        if transposed:
            return matrix(columns, rows, dtype, seed=seed).mT
        pitch = columns + 1 if anywhere else columns + 16 // dtype.itemsize
        return in_gaps((1, rows, columns), dtype, pitch, offset=int(anywhere), seed=seed)

    a, b = matrix(m, k, x, kernel["transpose_a"], seed), matrix(k, n, x, kernel["transpose_b"], seed + 1)
    residual, c = matrix(m, n, y, seed=seed + 2), matrix(m, n, y)
    bias, activation = normal(n, seed=seed + 3), list(ACTIVATIONS)[seed % 5]
    options = {"bias": bias, "activation": activation, "residual": residual, "out_dtype": y}
    stored = {"a": a.mT if kernel["transpose_a"] else a, "b": b.mT if kernel["transpose_b"] else b}
    stored |= {"c": c, "residual": residual}
    numbers = {"batch": 1, "m": m, "n": n, "k": k, "bias_dtype": CODES[bias.dtype]}
    numbers |= {"activation": seed % 5, "has_residual": 1}

    def run(path: Path, seed: int) -> None:
        grid = (2 * kernel["cluster"], 1)
        launch(kernel, stored | numbers | {"bias": bias}, ("c",), path, seed, grid)

    sizes = a.double().abs() @ b.double().abs()
    steepest = 1.2  # slope of an activation
    slack = steepest * ANY_ORDER * k * sizes + FUNCTIONS * (sizes + bias.abs() + residual.double().abs())
    return Problem((a, b), options, {"out": c}, (ops_reference.exact_gemm(a, b, **options),), (slack,), run)


# ---- attention


def attention_problem(kernel: dict, seed: int) -> Problem:
    """Ragged tiles and blocks, grouped heads, all that the kernel has."""
    dtype, head_dim, (b, sq, sk, h, hk) = DTYPES[kernel["x"]], kernel["tile"][2], (1, 150, 400, 4, 2)
    head_dim_v = kernel["head_dim_v"]
    q, k, v = (
        normal(b, s, n, d, dtype=dtype, seed=seed + i)
        for i, (s, n, d) in enumerate(((sq, h, head_dim), (sk, hk, head_dim), (sk, hk, head_dim_v)))
    )
    out, lse = torch.full((b, sq, h, head_dim_v), torch.nan, dtype=dtype), torch.full((b, h, sq), torch.nan)
    options = {"causal": kernel["causal"] or kernel["window"]} | ({"window_left": 170} if kernel["window"] else {})
    options |= {"sinks": torch.linspace(-2, 3, h)} if kernel["sinks"] else {}
    options |= {"softcap": SOFTCAP} if kernel["softcap"] else {}
    scale, sinks, cap = head_dim**-0.5, options.get("sinks"), options.get("softcap", 0.0)

    def run(path: Path, seed: int) -> None:
        values = {name: t.transpose(1, 2) for name, t in {"q": q, "k": k, "v": v, "out": out}.items()}
        values |= {"lse": lse, "sinks": sinks, "sinks_dtype": 0 if sinks is None else 3}
        values |= {"batches": b, "heads": h, "kv_heads": hk, "sq": sq, "sk": sk, "head_dim": head_dim, "head_dim_v": head_dim_v}
        values |= {"scale_log2": (cap or scale) * math.log2(math.e), "cap_scale": scale / cap if cap else 0.0}
        values["unscale"] = 1 / values["scale_log2"]
        values |= {"window_left": min(options.get("window_left", sk), sk), "window_right": 0 if options["causal"] else sq}
        values["section"], tiles = 2, -(-sq // kernel["tile"][0]) * h * b
        launch(kernel, values, ("out", "lse"), path, seed, tiles if kernel["longest_first"] else 4)

    sequences = [attention_reference.exact(*t, **options) for t in zip(q, k, v, strict=True)]
    exact = tuple(map(torch.stack, zip(*sequences, strict=True)))
    sizes = (q.double().abs().view(-1, head_dim) @ k.double().abs().view(-1, head_dim).T).amax()
    of_lse = ANY_ORDER * head_dim * scale * sizes + TANH * cap + FUNCTIONS * (1 + exact[1].abs())
    # A score that differs by its last bit may round P, of 16 bits, the other way: less than a unit of the row's largest value.
    # Scores and sums that differ by 1e-6 of themselves change up to 8% of the results of float16 so, 2% of bfloat16.
    of_out = torch.finfo(dtype).eps * exact[0].abs().amax(-1, keepdim=True) + 2 * TANH * cap * v.double().abs().amax()
    return Problem((q, k, v), options, {"out": out, "lse": lse}, exact, (of_out, of_lse), run, share=1.0 if cap else 0.2)


# ---- MLA decode


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The same memory; 16 bits without a sign are bfloat16."""
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == np.uint16 else torch.from_numpy(array)


def mla_problem(kernel: dict, seed: int) -> Problem:
    """Whole requests: nothing is merged."""
    n, sq, heads, d = 4, 2, min(40, kernel["tile"][0] // 2), kernel["tile"][2]
    page = mla.PAGES[kernel["unit"]][0]
    values, grid, exact = mla.decode_problem(SimpleNamespace(**kernel), [130, 0, 65, 300], heads, sq, parts=1, page=page)
    values |= {name: as_tensor(v) for name, v in values.items() if isinstance(v, np.ndarray)}
    names, by_query = ("q", "kv_cache", "block_table", "cache_seqlens"), (n, sq, heads, -1)
    args = tuple(values[name].view(by_query) if name == "q" else values[name] for name in names)
    outs = {"out": values["out"].view(by_query), "lse": values["lse"]}
    of_out, of_lse = (torch.from_numpy(exact[name][0]) for name in outs)
    of_out = of_out.view(by_query)
    sizes = (args[0].double().abs().view(-1, d) @ args[1].double().nan_to_num().abs().view(-1, d).T).amax()
    slack_of_lse = ANY_ORDER * d**0.5 * sizes + FUNCTIONS * (1 + of_lse.abs().nan_to_num(posinf=0.0))
    slack = torch.finfo(args[0].dtype).eps * of_out.abs().amax(-1, keepdim=True), slack_of_lse  # as of attention
    options = {"scale": d**-0.5, "num_splits": 1}
    return Problem(args, options, outs, (of_out, of_lse), slack, lambda *at: launch(kernel, values, exact, *at, grid), 0.2)


# ---- attention over requests of different lengths and over caches


def slack_of(kernel: dict, values: dict, exact: tuple, cap: float) -> tuple:
    """As of attention."""
    q, k, v = (values[name].double().nan_to_num() for name in "qkv")
    head_dim, scale = q.shape[-1], q.shape[-1] ** -0.5
    sizes = (q.abs().reshape(-1, head_dim) @ k.abs().reshape(-1, head_dim).T).amax()
    of_lse = ANY_ORDER * head_dim * scale * sizes + TANH * cap + FUNCTIONS * (1 + exact[1].abs().nan_to_num(posinf=0.0))
    return torch.finfo(values["q"].dtype).eps * exact[0].abs().amax(-1, keepdim=True) + 2 * TANH * cap * v.abs().amax(), of_lse


def lengths_problem(kernel: dict, seed: int) -> Problem:
    """Packed queries, of keys that are packed or in pages."""
    (rows, keys), heads = ([150, 0, 30], [300, 70, 20]), 4
    options = {"causal": kernel["causal"] or kernel["window"]} | ({"window_left": 170} if kernel["window"] else {})
    options |= {"sinks": np.linspace(-2, 3, heads, dtype=np.float32)} if kernel["sinks"] else {}
    options |= {"softcap": SOFTCAP} if kernel["softcap"] else {}
    page, row = 16 * kernel["paged"], SimpleNamespace(**kernel)
    arrays, grid, exact = lengths.lengths_problem(row, rows, keys, heads, 2, ctas=4, page=page, **options)
    values = arrays | {name: as_tensor(v) for name, v in arrays.items() if isinstance(v, np.ndarray)}
    values["out"].fill_(torch.nan)
    of_out, of_lse = torch.from_numpy(exact["out"][0][0]).transpose(0, 1), torch.from_numpy(exact["lse"][0][0])
    places, used = (torch.tensor([0, *counts], dtype=torch.int32).cumsum(0) for counts in (rows, keys)), torch.tensor(keys)
    queries = values["q"][0].transpose(0, 1)
    caches = [values[name].transpose(1, 2) if page else values[name][0].transpose(0, 1) for name in "kv"]
    if page:
        args = queries, *caches, values["block_table"], used
        more = {"cu_seqlens_q": next(places), "max_seqlen_q": max(rows)}
    else:
        args, more = (queries, *caches, *places, max(rows), max(keys)), {}
    options |= {"sinks": torch.from_numpy(options["sinks"])} if kernel["sinks"] else {}
    outs = {"out": values["out"][0].transpose(0, 1), "lse": values["lse"][0]}
    slack, share = slack_of(kernel, values, (of_out, of_lse), options.get("softcap", 0.0)), 1.0 if kernel["softcap"] else 0.2
    op = "flash_attention_paged" if page else "flash_attention_varlen"
    run = lambda *at: launch(kernel, values, exact, *at, grid)  # noqa: E731
    return Problem(args, options | more, outs, (of_out, of_lse), slack, run, share, op)


def decode_problem(kernel: dict, seed: int) -> Problem:
    """One query of each request, whole items: nothing is merged."""
    keys, heads, kv_heads, cap = [300, 0, 64], 4, 2, SOFTCAP if kernel["softcap"] else 0.0
    options = {"causal": True, "window_left": 170, "sinks": True} | ({"softcap": cap} if cap else {})
    arrays, grid, exact = lengths.decode_problem(SimpleNamespace(**kernel), keys, 1, heads, 16, 1, options, kv_heads)
    values = arrays | {name: as_tensor(v) for name, v in arrays.items() if isinstance(v, np.ndarray)}
    values["out"].fill_(torch.nan)
    of_out = torch.from_numpy(exact["out"][0]).flatten(1, 2)[:, None]
    of_lse = torch.from_numpy(exact["lse"][0]).flatten(1, 2)[..., None]
    caches = [values[name].transpose(1, 2) for name in "kv"]
    args = values["q"].flatten(1, 2)[:, None], *caches, values["block_table"], values["cache_seqlens"]
    outs = {"out": values["out"].flatten(1, 2)[:, None], "lse": values["lse"].flatten(1, 2)[..., None]}
    options |= {"sinks": values["sinks"].flatten(), "num_splits": 1}
    slack, share = slack_of(kernel, values, (of_out, of_lse), cap), 1.0 if cap else 0.2
    run = lambda *at: launch(kernel, values, exact, *at, grid)  # noqa: E731
    return Problem(args, options, outs, (of_out, of_lse), slack, run, share, "flash_attention_paged")


def combine_problem(kernel: dict, seed: int) -> Problem:
    """No operator of its own: mla_decode calls it."""
    row = SimpleNamespace(**kernel, tile=(kernel["rows_per_block"], kernel["max_cols"]))
    values, grid, exact = mla.combine_problem(row, *mla.COMBINES[seed % 2])
    outs = {name: as_tensor(values[name]) for name in exact}
    of_out, of_lse = (torch.from_numpy(exact[name][0]) for name in outs)
    slack = torch.tensor(4 * FUNCTIONS), FUNCTIONS * (1 + of_lse.abs().nan_to_num(posinf=0.0))
    return Problem((), {}, outs, (of_out, of_lse), slack, lambda *at: launch(kernel, values, exact, *at, grid))


PROBLEMS = {"gemm": gemm_problem, "flash_attention": attention_problem, "merge_attention": merge_problem}
PROBLEMS |= {"mla_decode": mla_problem, "mla_decode_few": mla_problem, "mla_combine": combine_problem}
PROBLEMS["attention_decode"] = decode_problem


def problem_of(kernel: dict, seed: int) -> Problem:
    return (lengths_problem if kernel.get("lengths") else PROBLEMS.get(kernel["op"], row_problem))(kernel, seed)


def disagreement(found: torch.Tensor, emulated: torch.Tensor, slack: torch.Tensor, share: float) -> str:
    """Empty, if the two differ by the slack and then by one rounding, and few of 16 bits differ at all."""
    both = found.double(), emulated.double()
    if not torch.equal(both[0].isnan(), both[1].isnan()):
        return f"{int(both[0].isnan().sum())} and {int(both[1].isnan().sum())} are NaN"
    first, second = (torch.nan_to_num(t) for t in both)
    limits = torch.finfo(emulated.dtype)
    unit = limits.eps * torch.exp2(torch.frexp(second.abs().clamp(min=limits.tiny))[1] - 1.0)
    excess = ((first - second).abs() - unit - slack).max().item()
    differing = (first != second).double().mean().item()
    problems = [f"beyond what summation order explains by {excess:.1e}"] * (excess > 0)
    many = found.dtype != torch.float32 and differing > share
    problems += [f"{differing:.2%} of the elements differ; expected at most {share:.0%}"] * many
    return ", ".join(problems)
