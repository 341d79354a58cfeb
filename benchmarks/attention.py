"""`python -m benchmarks.attention`: every kernel of flash_attention beside eager PyTorch and cuDNN, interleaved in one process.

Each problem is a row of the results; --configs writes the times into configs/flash_attention.json, where the dispatcher finds
them (`measured`: near what it was faster than the eager twin, a kernel is taken).
"""

import argparse
import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tileops
from benchmarks import results, timing
from benchmarks.table import aligned
from build_backend.measured import MeasuredAttention
from tileops import knobs
from tileops.demo import Progress
from tileops_dsl import configs

HEAD_DIMS, LENGTHS, BATCHES = (64, 96, 128, 256), (512, 1024, 2048, 4096, 16384), (1, 4, 16)  # of 16 heads
DTYPES = {"bfloat16": LENGTHS, "float16": (1024, 4096, 16384)}
HEADS, MOST = 16, 1 << 20  # rows of q in all
TOLERANCE = {"bfloat16": 2**-7, "float16": 2**-9}  # of the largest value
SAMPLE = 64  # rows of q that are compared with float64


def problems(match: str):
    """(dtype, head dim, causal, batch, length), with the tokens of a pass over a long prompt at most."""
    for dtype, dim, causal in itertools.product(DTYPES, HEAD_DIMS, (False, True)):
        for batch, length in itertools.product(BATCHES, DTYPES[dtype]):
            if batch * HEADS * length <= MOST and match in label(dtype, dim, causal, batch, length):
                yield dtype, dim, causal, batch, length


def label(dtype, dim, causal, batch, length):
    return f"b{batch} h{HEADS} s{length} d{dim} {configs.SHORT[dtype]} {'causal' if causal else 'full'}"


def error(out, q, k, v, causal):
    """The largest distance from float64, relative to the largest value, of some rows of the last head."""
    rows = torch.linspace(0, q.shape[1] - 1, SAMPLE, device=q.device).long()
    q, k, v, out = (t[-1, :, -1] for t in (q, k, v, out))
    scores = q[rows].double() @ k.double().T * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.arange(k.shape[0], device=q.device) > rows[:, None], float("-inf"))
    exact = scores.softmax(-1) @ v.double()
    return ((out[rows].double() - exact).abs().max() / exact.abs().max()).item()


def cudnn(q, k, v, causal):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal).transpose(1, 2)


def forced(name, q, k, v, causal):
    with knobs.scope(force=name):
        return tileops.flash_attention(q, k, v, causal=causal)[0]


def measure(problem, rows, rounds):
    """(row of the results, {kernel: microseconds}, microseconds of the eager twin)."""
    dtype, dim, causal, batch, length = problem
    names = [row.name for row in rows if (row.x, row.tile[2], row.causal) == (dtype, dim, causal)]
    shape = (batch, length, HEADS, dim)
    size = 4 * batch * length * HEADS * dim * 2
    count, calls = timing.rotation(size, timing.l2_bytes())
    calls = max(count, min(calls, 1 + (1 << 32) // (batch * HEADS * length * length)))
    sets = [tuple(torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3)) for _ in range(count)]
    contestants = {name: lambda q, k, v, name=name: forced(name, q, k, v, causal) for name in ("eager", *names)}
    contestants["cudnn"] = lambda q, k, v: cudnn(q, k, v, causal)
    errors = {name: error(fn(*sets[0]), *sets[0], causal) for name, fn in contestants.items()}
    if not max(errors.values()) < TOLERANCE[dtype]:
        raise SystemExit(f"benchmarks.attention: {label(*problem)}: wrong results, {errors}")
    measured = timing.measure({name: timing.GraphReplay(fn, sets, calls) for name, fn in contestants.items()}, rounds)
    best = min(names, key=measured.us.get)
    flops = 4 * batch * HEADS * length * length * dim / (2 if causal else 1)
    peers = [name for name in contestants if name != best]
    row = {
        "op": "flash_attention",
        "workload": label(*problem),
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


def write_configs(path, rows, found):
    """The rows of the configuration with what was measured; `found`: {kernel: measurements}."""
    lines = []
    for row in rows:
        fields = {"target": row.target, "x": row.x, "y": row.y, "tile": row.tile, "stages": row.stages, "causal": row.causal}
        measured = [asdict(problem) for problem in found.get(row.name, row.measured)]
        lines.append(json.dumps(fields | ({"measured": measured} if measured else {})))
    path.write_text("[\n " + ",\n ".join(lines) + "\n]\n")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--match", default="", metavar="LABEL", help="only the problems whose label contains this")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS)
    parser.add_argument("--out", type=Path, help="results file (default: benchmarks/results/<gpu>.jsonl)")
    parser.add_argument("--configs", type=Path, metavar="FILE", help="write the configuration with the times into this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.attention: torch sees no GPU; expected one, since only kernels are timed")
    gpu, rows = torch.cuda.get_device_name(), configs.load("flash_attention")
    path = options.out or results.RESULTS / f"{results.slug(gpu)}.jsonl"
    chosen, found, written = list(problems(options.match)), {}, []
    progress = Progress(len(chosen))
    for problem in chosen:
        progress.step(label(*problem))
        with torch.no_grad():
            row, kernels, eager = measure(problem, rows, options.rounds)
        written.append(row)
        for name, us in kernels.items():
            at = MeasuredAttention(gpu, problem[3] * HEADS, problem[4], problem[4], round(us, 2), round(eager, 2))
            found.setdefault(name, []).append(at)
        results.write(path, [row])
        torch.cuda.empty_cache()
    progress.close()
    head = ["flash_attention", "us", "TFLOP/s", "vs eager", "vs cudnn", "kernel"]
    lines = [
        [r["workload"], r["us"], r["tflops"], *(f"{r['ratios'][peer]:.2f}x" for peer in ("eager", "cudnn")), r["variant"]]
        for r in written
    ]
    print(aligned([head, *lines], left={0, len(head) - 1}))
    if options.configs:
        write_configs(options.configs, rows, found)


if __name__ == "__main__":
    sys.exit(main())
