"""`python -m benchmarks.attention`: every kernel of flash_attention beside eager PyTorch and cuDNN, interleaved in one process.

Each problem is a row of the results; --configs writes the times into configs/flash_attention.json, where the dispatcher finds
them (`measured`: near what it was faster than the eager twin, a kernel is taken).
"""

import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tileops
from benchmarks import command, results, timing
from benchmarks.table import aligned
from build_backend.measured import MeasuredAttention
from tileops import knobs
from tileops_dsl import configs
from tileops_dsl.kernels import configs_of
from tileops_dsl.kernels.flash_attention_config import AttentionConfig

HEAD_DIMS, LENGTHS, BATCHES = (64, 96, 128, 256), (512, 1024, 2048, 4096, 16384), (1, 4, 16, 64)  # of 16 heads
DTYPES = {"bfloat16": LENGTHS, "float16": (1024, 4096, 16384)}
HEADS, MOST = 16, 1 << 20  # rows of q in all
# Causal: head dim, that of values, window (how many keys a query sees; 0: all), sinks, softcap; and whose layers they are.
OPTIONS = (
    (64, 64, 128, True, 0.0),  # gpt-oss, every other layer
    (64, 64, 0, True, 0.0),  # the others
    (64, 64, 1024, False, 0.0),
    (128, 128, 128, False, 0.0),
    (128, 128, 1024, False, 0.0),  # Gemma 3 27B
    (128, 128, 4096, False, 0.0),  # Mistral 7B
    (128, 128, 4096, False, 50.0),  # Gemma 2 27B, every other layer
    (128, 128, 0, False, 50.0),  # the others
    (256, 256, 1024, False, 0.0),  # Gemma 3 12B
    (256, 256, 4096, False, 50.0),  # Gemma 2 9B, every other layer
    (256, 256, 0, False, 50.0),  # the others
    (192, 128, 0, False, 0.0),  # DeepSeek-V3, a prompt
)
OPTION_LENGTHS, OPTION_BATCHES = (1024, 4096, 16384), (1, 4)
# Full and causal, at fewer lengths: head dims with and without a tile of their own, and for each tile one of copied tensors.
MORE_DIMS = *((dim, dim) for dim in (32, 40, 72, 80, 104, 112, 192, 30, 60, 90, 124, 188, 252)), (192, 128)
TOLERANCE = {"bfloat16": 2**-7, "float16": 2**-9}  # of the largest value
SAMPLE = 64  # rows of q that are compared with float64
DEFAULTS = ("window", "head_dim", "head_dim_v")  # of MeasuredAttention; 0 is not written


class Problem(NamedTuple):
    dtype: str
    dim: int
    causal: bool
    batch: int
    length: int
    dim_v: int = 0  # 0: as dim
    window: int = 0  # how many keys a query sees; 0: a window hides none
    sinks: bool = False
    softcap: float = 0.0

    plain = property(lambda self: not (self.window or self.sinks or self.softcap))

    @property
    def label(self) -> str:
        dims = f"d{self.dim}" + f"/{self.dim_v}" * (self.dim_v not in (0, self.dim))
        text = f"b{self.batch} h{HEADS} s{self.length} {dims} {configs.SHORT[self.dtype]} {'causal' if self.causal else 'full'}"
        options = f" window {self.window}" * (self.window > 0), " sinks" * self.sinks, f" softcap {self.softcap:g}"
        return text + options[0] + options[1] + options[2] * (self.softcap > 0)

    dims = property(lambda self: (self.dim, self.dim_v or self.dim))

    def served_by(self, row: AttentionConfig) -> bool:
        """As csrc/attention_choice.cpp has it."""
        fits = row.tile[2] >= self.dims[0] and row.head_dim_v >= self.dims[1]
        if row.lengths or row.target != "sm_90a" or row.x != self.dtype or not fits:
            return False
        if self.plain:
            return row.causal == self.causal and not row.options
        return row.window and row.sinks >= self.sinks and row.softcap == (self.softcap > 0)

    def options(self, device="cuda") -> dict:
        options = {"causal": self.causal, "softcap": self.softcap}
        options |= {"window_left": self.window - 1} if self.window else {}
        return options | ({"sinks": torch.linspace(-1, 3, HEADS, device=device)} if self.sinks else {})


def kernels(problem: Problem, rows: list[AttentionConfig]) -> dict[str, AttentionConfig]:
    """Those among which the dispatcher chooses: of all that serve the problem, the ones with the fewest columns."""
    serving = [row for row in rows if problem.served_by(row)]
    fewest = min(row.tile[2] + row.head_dim_v for row in serving)
    return {row.name: row for row in serving if row.tile[2] + row.head_dim_v == fewest}


def problems():
    """With the tokens of a long prompt at most, which is longer than the window."""
    plain = [
        Problem(dtype, dim, causal, batch, length)
        for dtype, dim, causal in itertools.product(DTYPES, HEAD_DIMS, (False, True))
        for batch, length in itertools.product(BATCHES, DTYPES[dtype])
    ]
    others = [
        Problem(dtype, dim, True, batch, length, *rest)
        for dtype, (dim, *rest) in itertools.product(DTYPES, OPTIONS)
        for batch, length in itertools.product(OPTION_BATCHES, OPTION_LENGTHS)
    ]
    more = [
        Problem(dtype, dim, causal, batch, length, dim_v * (dim_v != dim))
        for dtype, (dim, dim_v), causal in itertools.product(DTYPES, MORE_DIMS, (False, True))
        for batch, length in itertools.product(BATCHES, OPTION_LENGTHS)
        if dim == dim_v or not causal
    ]
    for problem in (*plain, *others, *more):
        if problem.batch * HEADS * problem.length <= MOST and problem.window < problem.length:
            yield problem


def error(out, q, k, v, causal, window_left=-1, softcap=0.0, sinks=None):
    """The largest distance from float64, relative to the largest value, of some rows of the last head."""
    rows, keys = torch.linspace(0, q.shape[1] - 1, SAMPLE, device=q.device).long(), torch.arange(k.shape[1], device=q.device)
    q, k, v, out = (t[-1, :, -1] for t in (q, k, v, out))
    scores = q[rows].double() @ k.double().T * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    hidden = (keys > rows[:, None]) & causal | (keys < rows[:, None] - window_left) & (window_left >= 0)
    scores = scores.masked_fill(hidden, float("-inf"))
    scores = scores if sinks is None else torch.cat((scores, sinks[-1].double().expand(SAMPLE, 1)), 1)
    exact = scores.softmax(-1)[:, : k.shape[0]] @ v.double()
    return ((out[rows].double() - exact).abs().max() / exact.abs().max()).item()


def of_torch(backend: SDPBackend, causal: bool):
    """PyTorch's attention by one of its backends, as we have it: [B, S, H, D], grouped heads."""

    def run(q, k, v):
        with sdpa_kernel(backend):
            heads = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)

    return run


def forced(name, q, k, v, options):
    with knobs.scope(force=name):
        return tileops.flash_attention(q, k, v, **options)[0]


def scores(problem: Problem) -> float:
    """That a query of the problem has on average."""
    seen = problem.length / (2 if problem.causal else 1)
    return min(seen, problem.window - problem.window**2 / (2 * problem.length)) if problem.window else seen


def measure(problem, names, rounds):
    """(row of the results, {kernel: microseconds}, microseconds of the eager twin)."""
    dtype, _, causal, batch, length = problem[:5]
    options, (dim, dim_v) = problem.options(), problem.dims
    shapes = [(batch, length, HEADS, columns) for columns in (dim, dim, dim_v)]
    size = batch * length * HEADS * (2 * dim + 2 * dim_v) * 2
    count, calls = timing.rotation(size, timing.l2_bytes())
    calls = max(count, min(calls, 1 + (1 << 32) // (batch * HEADS * length * length)))
    sets = [tuple(torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for shape in shapes) for _ in range(count)]
    contestants = {name: lambda q, k, v, name=name: forced(name, q, k, v, options) for name in ("eager", *names)}
    if problem.plain and dim == dim_v and dim % 8 == 0:  # what cuDNN takes
        contestants["cudnn"] = of_torch(SDPBackend.CUDNN_ATTENTION, causal)
    errors = {name: error(fn(*sets[0]), *sets[0], **options) for name, fn in contestants.items()}
    if not max(errors.values()) < TOLERANCE[dtype]:
        raise SystemExit(f"benchmarks.attention: {problem.label}: wrong results, {errors}")
    measured = timing.measure({name: timing.GraphReplay(fn, sets, calls) for name, fn in contestants.items()}, rounds)
    best = min(names, key=measured.us.get)
    flops = 2 * batch * HEADS * length * scores(problem) * (dim + dim_v)
    peers = [name for name in contestants if name != best]
    row = {
        "op": "flash_attention",
        "workload": problem.label,
        "target": "sm_90a",
        "variant": best,
        "us": round(measured.us[best], 2),
        "tflops": round(flops / measured.us[best] * 1e-6, 1),
        "peers_us": {name: round(measured.us[name], 2) for name in peers},
        "ratios": {name: round(measured.ratio(name, best), 3) for name in peers},
        "error": float(f"{errors[best]:.3g}"),
        **results.stamp(torch.cuda.get_device_name()),
    }
    return row, {name: measured.us[name] for name in names}, measured.us["eager"]


def ratio(row, peer) -> str:
    return f"{row['ratios'][peer]:.2f}x" if peer in row["ratios"] else "-"


def measurement(gpu, problem, row, us, eager) -> MeasuredAttention:
    dims = (0, 0) if problem.dims == (row.tile[2], row.head_dim_v) else problem.dims
    size = problem.batch * HEADS, problem.length, problem.length
    return MeasuredAttention(gpu, *size, round(us, 2), round(eager, 2), problem.window, *dims)


def write_configs(path, rows, found):
    """The rows of the configuration with what was measured last at each problem; `found`: {kernel: measurements}."""
    lines = []
    for row in rows:
        fields = {"target": row.target, "x": row.x, "y": row.y, "tile": row.tile, "stages": row.stages, "causal": row.causal}
        fields |= {"options": row.options} if row.options else {}
        fields |= {"head_dim_v": row.head_dim_v} if row.head_dim_v != row.tile[2] else {}
        fields |= {name: getattr(row, name) for name in ("longest_first", "warps") if getattr(row, name)}
        newest = {(at.gpu, at.problem): at for at in (*row.measured, *found.get(row.name, ()))}
        measured = [{k: v for k, v in asdict(at).items() if v or k not in DEFAULTS} for at in newest.values()]
        lines.append(json.dumps(fields | ({"measured": measured} if measured else {})))
    path.write_text("[\n " + ",\n ".join(lines) + "\n]\n")


def main(arguments=None):
    parser = command.options_of("attention", __doc__)
    parser.add_argument("--configs", type=Path, metavar="FILE", help="write the configuration with the times into this file")
    options = parser.parse_args(arguments)
    command.require_gpu("attention")
    gpu, rows, found = torch.cuda.get_device_name(), configs_of("flash_attention"), {}

    def of_all_kernels(problem: Problem) -> dict:
        contestants = kernels(problem, rows)
        row, times, eager = measure(problem, list(contestants), options.rounds)
        for name, us in times.items():
            found.setdefault(name, []).append(measurement(gpu, problem, contestants[name], us, eager))
        return row

    written = command.measured(options, problems(), of_all_kernels)
    head = ["flash_attention", "us", "TFLOP/s", "vs eager", "vs cudnn", "kernel"]
    lines = [
        [r["workload"], r["us"], r["tflops"], *(ratio(r, peer) for peer in ("eager", "cudnn")), r["variant"]] for r in written
    ]
    print(aligned([head, *lines], left={0, len(head) - 1}))
    if options.configs:
        write_configs(options.configs, rows, found)


if __name__ == "__main__":
    sys.exit(main())
