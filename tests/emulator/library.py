"""The library's kernels on the emulator: their schedules, each at a small tile, and problems against float64.

A schedule is what the order of a kernel's words depends on. Rows of configs/ that differ in nothing but dtypes of one size and
in sizes share one, which `small` shows at a tile that runs fast (test_library.py: the words are the same).
"""

import functools
import itertools
import re
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "ops")]

import lengths  # noqa: E402
import mla  # noqa: E402
import test_kernels as rows  # noqa: E402
import test_merge_attention as merges  # noqa: E402
import torch  # noqa: E402
from attention_reference import exact as exact_attention  # noqa: E402
from mla import ROUNDING  # noqa: E402

from tileops_dsl import emulate, output  # noqa: E402
from tileops_dsl.emulate_rows import CODES, decode, encode, error_bound  # noqa: E402
from tileops_dsl.kernels import configs_of  # noqa: E402

OPS = ("gemm", "flash_attention", "attention_decode", "mla_decode", "mla_decode_few", "softmax", "rms_norm", "rms_norm_silu")
OPS += ("merge_attention", "mla_combine")
MLA = ("mla_decode", "mla_decode_few")
MERGES = ("merge_attention", "mla_combine")  # whose threads exchange nothing
ACTIVATIONS = {0: lambda v: v, 1: lambda v: np.maximum(v, 0), 4: lambda v: v / (1 + np.exp(-v))}


# ---- schedules


def schedule(row) -> str:
    """flash_attention/sm_90a_causal; the same for all rows that the compiler writes in the same words."""
    return f"{row.op}/{'_'.join([row.target, *SCHEDULES.get(row.op, of_rows)(row)])}"


def of_gemm(row):
    layout = f"{'nt'[row.transpose_a]}{'nt'[row.transpose_b]}"
    if row.target == "portable":
        roles = ["elements"] * (row.vector == 1)
    else:
        roles = ["alternate" if row.alternate else "cooperative", f"cluster{row.cluster}"]
        roles += ["two_parts"] * (row.tile[1] <= 2 * row.store_columns)  # of c: each has a stage of its own
    return [layout, *roles, *["float32"] * (row.y == "float32")]


def of_attention(row):
    mask = "causal" if row.causal else "window" if row.window else "full"
    if row.target == "portable":  # whose words depend on neither mask nor tile; two stages of each mask are shown
        kind = ["paged"] * row.paged or ["lengths"] * row.lengths
        return ["one_stage", *kind] if row.stages == 1 else kind or [mask, *(o for o in row.options if o != "window")]
    rows_of_tile = [f"{row.tile[0]}rows"] * (row.tile[0] != 128)
    values = ["values"] * (row.head_dim_v != row.tile[2])
    of_queries = ["over_queries"] * row.o_over_q or ["shared"] * in_shared(row)
    return [mask, *(name for name in row.options if name != "window"), *values, *rows_of_tile, *of_queries]


def in_shared(row) -> bool:
    """Whether products of attention take the queries from shared memory, where others of two groups have them in registers."""
    return row.groups == 2 and not row.q_registers


def of_rows(row):
    """Threads of several warps share a row through shared memory."""
    kinds = {"lanes_on_rows": row.lanes_on_rows, "shifted": row.shifted, "looped": row.looped, "passes": row.passes > 1}
    shared = row.op not in MERGES and row.threads_per_row > (1 if row.lanes_on_rows else 32)
    names = [name for name, holds in kinds.items() if holds]
    return ["elements" if row.vector == 1 else "vectors", *names, *["shared"] * shared]


SCHEDULES = {"gemm": of_gemm, "flash_attention": of_attention, "mla_decode": lambda row: [f"u{row.unit}"] * (row.unit > 0)}
SCHEDULES["attention_decode"] = lambda row: (
    ["values"] * (row.head_dim_v != row.tile[2]) + ["one_stage"] * (row.stages == 1) + ["softcap"] * row.softcap
)
SCHEDULES["mla_decode_few"] = lambda row: [f"{row.tile[0]}rows"]


def small(row):
    """The row of its schedule at a tile that is small, but takes more than one part of everything."""
    if row.op == "gemm" and row.target == "sm_90a":
        columns = 64 if row.tile[1] <= 2 * row.store_columns else 32
        tile = (64 if row.alternate else 128, 128, 64)
        return replace(row, tile=tile, stages=3, store_columns=columns, group_size=2, measured=())
    if row.op == "gemm":
        return replace(row, tile=(64, 64, 32), warps=4, store_columns=16, group_size=2, measured=())
    if row.op == "flash_attention":
        if row.target == "portable":
            deep = 192 if row.stages == 1 else 64
            return replace(row, tile=(row.tile[0], 32, deep), head_dim_v=deep)
        if row.o_over_q or in_shared(row):  # by its size
            return replace(row, measured=())
        values = 64 if row.head_dim_v != row.tile[2] else 0
        deep = 128 if row.lengths else 96  # a box of one row is 128 bytes
        return replace(row, tile=(row.tile[0], 32, deep if values else 64), head_dim_v=values, measured=())
    if row.op == "attention_decode" and row.stages == 1:
        return replace(row, tile=(64, 32, 192), head_dim_v=192)
    if row.op == "attention_decode":
        return replace(row, tile=(64, 64, 128 if row.head_dim_v != row.tile[2] else 64), head_dim_v=64)
    if row.op == "mla_decode":  # products of half of a group's columns have boxes of 64 of them
        return replace(row, tile=(64, 64, 320, 256))
    return replace(row, tile=(row.tile[0], 64, 192, 128)) if row.op in MLA else row


@functools.cache
def all_schedules() -> dict:
    """Each schedule of configs/, and some that no row has yet -> a row that stands for it."""
    found = {}
    for op in OPS:
        for row in sorted(configs_of(op), key=lambda r: r.tile[0] * r.tile[1]):
            found.setdefault(schedule(row), small(row))
    product = found["gemm/sm_90a_nt_cooperative_cluster2"]
    attention = found["flash_attention/sm_90a_full"]
    more = [replace(product, cluster=1, tag="c1", alternate=turns) for turns in (False, True)]
    more += [replace(attention, tile=(rows_of_tile, *attention.tile[1:])) for rows_of_tile in (64, 192)]
    more += [replace(attention, options=options) for options in (("sinks",), ("softcap",))]
    return found | {schedule(row): row for row in more}


WORD = re.compile(r"\b([a-z_]+)(?:<[^;()]*>)?\(")


def words(text: str) -> list[str]:
    """The kernel's words that order or move something, in order; what is repeated counts once."""
    found = []
    for word in WORD.findall(re.sub(r"//.*", "", text)):
        if word in ORDERING and (not found or found[-1] != word):
            found.append(word)
    return found


ORDERING = (
    *("sync_threads", "sync_warp", "named_barrier_sync", "named_barrier_arrive", "cluster_sync", "reduce_members"),
    *("init_barrier", "fence_barrier_init", "arrive", "arrive_expect_bytes", "arrive_at_rank", "wait"),
    *("tma_load", "tma_load_multicast", "tma_store", "store_commit", "store_wait_read", "store_wait", "fence_async_shared"),
    *(
        "copy_async",
        "copy_async_part",
        "copy_commit",
        "copy_wait",
        "load_matrix",
        "store_matrix",
        "load_shared",
        "store_shared",
    ),
    *("wgmma", "wgmma_fence", "wgmma_commit", "wgmma_wait", "mma"),
)


# ---- launches


@dataclass
class Problem:
    """arrays: by parameter, arrays (None: not given) and numbers. exact: by result, its least and greatest value in float64,
    and how far a result may lie outside them."""

    arrays: dict
    grid: tuple[int, ...]
    exact: dict


class Kernel:
    """The kernel of a row; one file may hold several."""

    def __init__(self, row, made=None, path=None):
        self.row, self.made = row, made or output.compile_config(row)
        self.path = path or write([self.made])

    def __call__(self, problem: Problem, seed: int = 0, **more) -> dict:
        """The results in float64. more: mutate, suppress, as run() of emulate.py takes them."""
        entry = self.made.entry
        for name in problem.exact:
            problem.arrays[name][...] = encode(np.nan, dtype_of(self.row, name))
        values, names = emulate.fields(entry, problem.arrays, problem.exact)
        launched = problem.grid, entry["threads"], entry["shared_bytes"]
        options = {"cluster": entry.get("cluster", 1), "sites": entry["sites"], "names": names} | more
        folders = (self.path.parent,)
        emulate.launch_kernel(self.path, self.row.name, values, *launched, seed=seed, include_dirs=folders, **options)
        return {name: decode(problem.arrays[name], dtype_of(self.row, name)) for name in problem.exact}

    def check(self, problem: Problem, seed: int = 0) -> None:
        for name, found in self(problem, seed).items():
            low, high, bound = problem.exact[name]
            with np.errstate(invalid="ignore"):
                right = (found >= low - bound) & (found <= high + bound) | (found == low) | np.isnan(found) & np.isnan(low)
            assert right.all(), f"{self.row.name}, {name}: {np.argwhere(~right)[:4]} of {found.shape}, seed {seed}"


def dtype_of(row, name):
    return row.y if name in ("out", "c", "y") else "float32"


@functools.cache
def folder() -> Path:
    folder.kept = tempfile.TemporaryDirectory()
    return Path(folder.kept.name)


def write(kernels: list, name: str = "") -> Path:
    """One file of kernels that take the same parameters."""
    (folder() / f"{kernels[0].params}.h").write_text(output.params_header(kernels[0].params, kernels[0].fields))
    path = folder() / f"{name or kernels[0].config.name}.cu"
    path.write_text(output.source_text(kernels))
    return path


# ---- problems


def gemm_problem(row, items, m, n, k, bias=None, activation=0, residual=False, ctas=None) -> Problem:
    """Of a random product; ctas: the grid, by default one cluster."""
    rng = np.random.default_rng(m + n + k)

    def matrix(dtype, *shape):
        """Rows begin at multiples of 16 bytes where the kernel wants that, and at odd places where it does not."""
        pitch = shape[-1] + 3 if row.vector == 1 else -(-shape[-1] // 8) * 8 + 8
        storage = np.zeros((*shape[:-1], pitch), encode(np.zeros(1), dtype).dtype)
        storage[..., : shape[-1]] = encode(rng.standard_normal(shape), dtype)
        return storage[..., : shape[-1]]

    a = matrix(row.x, items, *((k, m) if row.transpose_a else (m, k)))
    b = matrix(row.x, items, *((n, k) if row.transpose_b else (k, n)))
    c, r = matrix(row.y, items, m, n), matrix(row.y, items, m, n)
    v = encode(rng.standard_normal(n), bias or "float32")
    arrays = {"a": a, "b": b, "c": c, "residual": r if residual else None, "bias": v if bias else None}
    arrays |= {"batch": items, "m": m, "n": n, "k": k, "activation": activation, "has_residual": int(residual)}
    arrays["bias_dtype"] = CODES[bias] if bias else 0
    wide = decode(a, row.x), decode(b, row.x)
    a, b = (x.swapaxes(1, 2) if turned else x for x, turned in zip(wide, (row.transpose_a, not row.transpose_b), strict=True))
    exact = ACTIVATIONS[activation](a @ b.swapaxes(1, 2) + (decode(v, bias) if bias else 0))
    exact = exact + (decode(r, row.y) if residual else 0)
    bound = np.abs(exact) * ROUNDING[row.y] + 1e-3
    return Problem(arrays, (ctas or row.cluster, 1), {"c": (exact, exact, bound)})


def attention_problem(row, b, sq, sk, h, hk, ctas=2, dims=None, **options) -> Problem:
    """options: as exact() of attention_reference.py has them, `causal` where the kernel has a window. dims: head dims."""
    rng, (d, dv) = np.random.default_rng(b + sq + sk + h), dims or (row.tile[2], row.head_dim_v)
    shapes = {"q": (b, sq, h, d), "k": (b, sk, hk, d), "v": (b, sk, hk, dv), "out": (b, sq, h, dv)}

    def matrix(*shape):
        """Rows begin at multiples of 16 bytes; behind them is NaN."""
        storage = encode(np.full((*shape[:-1], -(-shape[-1] // 8) * 8), np.nan), row.x)
        storage[..., : shape[-1]] = encode(rng.standard_normal(shape), row.x)
        return storage[..., : shape[-1]].swapaxes(1, 2)

    arrays = {name: matrix(*shape) for name, shape in shapes.items()}
    given = {"causal": row.causal} | options
    sinks = given.get("sinks")
    q, k, v = (torch.from_numpy(decode(arrays[name], row.x)).transpose(1, 2) for name in "qkv")
    wanted = [
        exact_attention(*item, **given | {"sinks": None if sinks is None else torch.from_numpy(sinks)})
        for item in zip(q, k, v, strict=True)
    ]
    out, lse = (torch.stack(parts).numpy() for parts in zip(*wanted, strict=True))
    cap, log2e = given.get("softcap", 0.0), np.log2(np.e)
    left, right = given.get("window_left", -1), given.get("window_right", -1)
    arrays |= {"lse": np.empty((b, h, sq), np.float32), "sinks": sinks, "sinks_dtype": 0 if sinks is None else 3}
    arrays |= {"batches": b, "heads": h, "kv_heads": hk, "sq": sq, "sk": sk, "head_dim": d, "head_dim_v": dv}
    arrays |= {"scale_log2": (cap or d**-0.5) * log2e, "cap_scale": d**-0.5 / cap if cap else 0.0}
    arrays["unscale"] = 1 / arrays["scale_log2"]
    arrays["window_left"] = sk if left < 0 else min(left, sk)
    arrays["window_right"] = 0 if given["causal"] else sq if right < 0 else min(right, sq)
    out = out.swapaxes(1, 2)
    exact = {"out": (out, out, 2 * 2**-8 * np.abs(out).max()), "lse": (lse, lse, 1e-3)}
    tiles, arrays["section"] = -(-sq // row.tile[0]) * h * b, 2
    return Problem(arrays, (tiles if row.longest_first else min(ctas, tiles), 1), exact)


def row_problem(row, shape, places, n=0) -> Problem:
    """Of softmax, rms_norm or rms_norm_silu; n: of the choices of weight, rounding and offset."""
    x, y = (rows.place(shape, dtype, **at) for dtype, at in zip((row.x, row.y), places, strict=True))
    x[...] = encode(np.random.default_rng(n).standard_normal(shape), row.x)
    choice, scalars = rows.arguments(row, n)
    arrays = {"x": x, "y": y, "outer": shape[0], "inner": shape[1], "cols": shape[2], "weight": None, **scalars}
    weight = None
    if choice:
        arrays["weight"] = rows.place((shape[2],), choice[0], (0,), gap=choice[1], offset=int(row.shifted))
        arrays["weight"][...] = encode(np.random.default_rng(n).standard_normal(shape[2]), choice[0])
        weight = decode(arrays["weight"], choice[0])
    arrays["weight_dtype"] = CODES[choice[0]] if choice else 0
    low, high = rows.exact(row, decode(x, row.x), weight, scalars)
    bound = np.maximum(error_bound(row, low), error_bound(row, high))
    return Problem(arrays, (-(-shape[1] // row.rows_per_block), shape[0]), {"y": (low, high, bound)})


def merge_problem(row, shape) -> Problem:
    rng, arrays = np.random.default_rng(sum(shape)), {}
    for name in ("out_a", "out_b", "out"):
        arrays[name] = merges.spread(shape, (0, 1, 2, 3), 1, row.x)
    for name in ("lse_a", "lse_b", "lse"):
        arrays[name] = merges.spread(shape[:3], (0, 1, 2), 1, "float32")
    for side in "ab":
        arrays[f"out_{side}"][...] = encode(rng.standard_normal(shape), row.x)
        arrays[f"lse_{side}"][...] = 3 * rng.standard_normal(shape[:3])
    arrays["lse_a"][..., 0::4] = arrays["lse_b"][..., 1::4] = -np.inf
    arrays["lse_a"][..., 2::8] = arrays["lse_b"][..., 2::8] = -np.inf
    sides = [decode(arrays[f"out_{s}"], row.x) if w else arrays[f"lse_{s}"].astype(np.float64) for s in "ab" for w in (1, 0)]
    out, lse = merges.exact(*sides)
    exact = {"out": (out, out, error_bound(row, out) + 1e-6), "lse": (lse, lse, 1e-6)}
    grid = (-(-shape[2] // row.rows_per_block), shape[1], shape[0])
    return Problem(arrays | dict(zip(("batch", "outer", "inner", "cols"), shape, strict=True)), grid, exact)


def mla_problem(row, *call, **more) -> Problem:
    """Of mla_decode and mla_decode_few: lengths, heads, queries, causal, parts."""
    return Problem(*mla.decode_problem(row, *call, **more))


def edges(row) -> list[Problem]:
    """Ragged tiles, no or one step, one tile, more tiles than CTAs, more steps than stages, all that a call may switch on."""
    if row.op == "gemm":
        return gemm_edges(row)
    if row.op == "flash_attention":
        return lengths_edges(row) if row.lengths else attention_edges(row)
    if row.op == "attention_decode":
        capped = {"softcap": 5.0} if row.softcap else {}
        below = [None, (row.tile[2] - 8, row.head_dim_v - 16)] if row.target == "portable" else [None]
        cases = zip(lengths.DECODES, itertools.cycle(below))  # TMA's tensors say how long their rows are
        return [Problem(*lengths.decode_problem(row, *case, more | capped, dims=dims)) for (*case, more), dims in cases]
    if row.op in MLA:
        calls = zip(mla.few(row.tile[0]) if row.op == "mla_decode_few" else mla.DECODES, itertools.cycle(mla.PAGES[row.unit]))
        return [mla_problem(row, *call, spread=2.0 + 2 * n, page=page) for n, (call, page) in enumerate(calls)]
    if row.op == "mla_combine":
        return [Problem(*mla.combine_problem(row, *call)) for call in mla.COMBINES]
    if row.op == "merge_attention":
        return [merge_problem(row, (2, 2, row.tile[0] + 1, cols)) for cols in merges.lengths(row)]
    return [row_problem(row, shape, places, n) for n, (shape, places) in enumerate(rows.problems(row))]


def gemm_edges(row):
    (bm, bn, bk), v = row.tile, row.vector
    bm, odd = bm * row.cluster, 1 if v == 1 else 8
    everything = {"bias": "float32", "activation": 4, "residual": True}
    return [
        gemm_problem(row, 1, bm, bn, bk),
        gemm_problem(row, 1, odd if row.transpose_a else 1, odd, odd, "bfloat16", 1),
        gemm_problem(row, 3, bm + odd, bn + odd, bk * (row.stages + 1) + odd, **everything),
        gemm_problem(row, 1, 3 * bm - odd, 2 * bn, bk * 2 - odd, "float16", residual=True, ctas=2 * row.cluster),
    ]


def options_of(row, heads, left=70):
    """A call with all that the kernel has. left: of a window."""
    options = {"causal": True, "window_left": left} if row.window else {}
    options |= {"sinks": np.linspace(-2, 3, heads, dtype=np.float32)} if row.sinks else {}
    return options | ({"softcap": 2.0} if row.softcap else {})


def lengths_edges(row):
    """Requests without queries or keys, with more queries than keys, of several tiles and steps; rows that are not full."""
    pages = {"page": 16}, {"page": 1}, {"page": 48, "dims": (row.tile[2] - 8, row.head_dim_v - 16)}
    band = {"causal": False, "window_right": 9} if row.window else {}
    options = options_of(row, 2), options_of(row, 2, 7), options_of(row, 2) | band
    more = pages if row.paged else ({}, {}, {"dims": pages[2]["dims"]})
    calls = zip(lengths.LENGTHS, options, more, strict=True)
    return [Problem(*lengths.lengths_problem(row, *case, **chosen, **other)) for case, chosen, other in calls]


def attention_edges(row):
    """One tile; one row of one key; ragged with grouped heads; rows that see no key; more blocks than stages."""
    bm, bn, _ = row.tile
    shapes = [(1, bm, bn, 1, 1), (1, 1, 1, 2, 2), (2, bm + 9, 2 * bn + 5, 2, 1), (1, 2 * bm + 44, bm - 28, 3, 1)]
    shapes.append((1, bm + 2, bn * (row.stages + 2) + 1, 2, 2))
    problems = [attention_problem(row, *shape, **options_of(row, shape[3])) for shape in shapes]
    if row.target == "portable":  # TMA's tensors say how long their rows are
        dims = row.tile[2] - 11, row.head_dim_v - 5
        problems.append(attention_problem(row, 1, bm + 3, 2 * bn + 1, 2, 1, dims=dims, **options_of(row, 2)))
    if row.window:
        ends = {"causal": False, "window_left": 31, "window_right": 100}
        problems.append(attention_problem(row, 1, bm + 9, 5 * bn, 1, 1, **options_of(row, 1) | ends))
    return problems
