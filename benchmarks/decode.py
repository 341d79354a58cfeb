"""`python -m benchmarks.decode`: flash_attention_paged for one query of each request, beside a copy of as many bytes.

Pages in random order, bfloat16, head dim 128, each result checked against float64. Times are of a whole call: the kernel
and the merge of split requests. `of copy`: the time of an elementwise copy of as many bytes as the cache has, half of them
read, over that of the call.
"""

import sys
from typing import NamedTuple

import torch

import tileops
from benchmarks import command, results, timing
from benchmarks.copy_kernel import copy
from benchmarks.table import aligned

DIM = 128
TOLERANCE = 2**-7  # of the largest value


class Problem(NamedTuple):
    batch: int
    tokens: int  # cached, of each request
    heads: int
    page: int
    kv_heads: int = 8

    @property
    def label(self) -> str:
        return f"b{self.batch} s{self.tokens} h{self.heads}/{self.kv_heads} d{DIM} p{self.page}"

    @property
    def bytes(self) -> int:
        return self.batch * self.tokens * self.kv_heads * DIM * 2 * 2


SIZES = [(1, 65536), (4, 16384), (8, 8192), (16, 8192), (32, 4096), (32, 8192), (64, 4096), (128, 1024), (128, 4096)]
PROBLEMS = [Problem(*size, heads, page) for heads in (32, 64) for page in (16, 64) for size in (*SIZES, (256, 1024))]


def inputs(problem: Problem):
    count = -(-problem.tokens // problem.page)
    table = torch.randperm(problem.batch * count, device="cuda", dtype=torch.int32).view(problem.batch, count)
    shape = table.numel(), problem.page, problem.kv_heads, DIM
    q = torch.randn(problem.batch, 1, problem.heads, DIM, device="cuda", dtype=torch.bfloat16)
    return q, *(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)), table


def error(out, problem, q, k, v, table):
    """The largest distance from float64, relative to the largest value, of the last request."""
    keys, values = (cache[table[-1].long()].flatten(0, 1)[: problem.tokens].double() for cache in (k, v))
    group = problem.heads // problem.kv_heads
    rows = q[-1, 0].double().view(problem.kv_heads, group, DIM)
    weights = torch.einsum("hgd,khd->hgk", rows, keys).mul(DIM**-0.5).softmax(-1)
    exact = torch.einsum("hgk,khd->hgd", weights, values).flatten(0, 1)
    return ((out[-1, 0].double() - exact).abs().max() / exact.abs().max()).item()


def measure(problem: Problem, rounds: int) -> dict:
    lengths = torch.full((problem.batch,), problem.tokens, device="cuda", dtype=torch.int32)
    count, calls = timing.rotation(problem.bytes, timing.l2_bytes())
    sets, halves = [inputs(problem) for _ in range(count)], problem.bytes // 2 // 64 * 16
    ours = timing.GraphReplay(lambda *given: tileops.flash_attention_paged(*given, lengths, causal=True)[0], sets, calls)
    wrong = error(tileops.flash_attention_paged(*sets[0], lengths, causal=True)[0], problem, *sets[0])
    if not wrong < TOLERANCE:
        raise SystemExit(f"benchmarks.decode: {problem.label}: wrong results, {wrong}")
    copied = timing.GraphReplay(copy, [(k.view(torch.float32).flatten()[:halves],) for _, k, *_ in sets], calls)
    measured = timing.measure({"tileops": ours, "copy": copied}, rounds)
    us = measured.us["tileops"]
    return {
        "op": "flash_attention_paged",
        "workload": problem.label,
        "target": "sm_90a",
        "variant": tileops.explain("flash_attention_paged", *sets[0], lengths, causal=True).variant,
        "us": round(us, 2),
        "gbps": round(problem.bytes / us * 1e-3, 1),
        "ceiling_pct": round(100 * measured.ratio("copy", "tileops"), 1),
        "peers_us": {"copy": round(measured.us["copy"], 2)},
        "error": float(f"{wrong:.3g}"),
        **results.stamp(torch.cuda.get_device_name()),
    }


def main(arguments=None):
    options = command.options_of("decode", __doc__).parse_args(arguments)
    command.require_gpu("decode")
    with tileops.knobs.scope(require_native=True):
        written = command.measured(options, PROBLEMS, lambda problem: measure(problem, options.rounds))
    lines = [[r["workload"], r["us"], r["gbps"], r["ceiling_pct"] / 100, r["error"]] for r in written]
    print(aligned([["flash_attention_paged", "us", "GB/s", "of copy", "error"], *lines]))


if __name__ == "__main__":
    sys.exit(main())
