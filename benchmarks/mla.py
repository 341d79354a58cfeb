"""`python -m benchmarks.mla`: mla_decode beside FlashMLA and TileLang, interleaved in one process; alone without them.

Pages in random order, of 64 tokens unless the label says otherwise (FlashMLA has no others), bfloat16, each result checked
against float64. Times are of a whole call: the kernel, whose CTAs find their parts themselves, and the merge of split requests;
FlashMLA's as well, which is asked to make its schedule in each call. TileLang's kernel comes from the file that
--tilelang names (mla_tilelang.py) and runs where it fills the GPU without splits.
"""

import importlib
import sys
from pathlib import Path
from typing import NamedTuple

import torch

import tileops
from benchmarks import command, mla_tilelang, results, timing
from benchmarks.table import aligned

PAGE, DIM, DIM_V, SCALE = 64, 576, 512, 192**-0.5
TOLERANCE = 2**-7  # of the largest value
PEERS = ("flash_mla",)  # modules that register the operators of dense_decode_fwd


class Problem(NamedTuple):
    batch: int
    tokens: int  # cached, of each request; of mixed ones at most
    heads: int
    queries: int = 1
    mixed: bool = False  # lengths from 1 to `tokens`
    page: int = PAGE

    @property
    def label(self) -> str:
        tokens = f"s1..{self.tokens}" if self.mixed else f"s{self.tokens}"
        return f"b{self.batch} {tokens} h{self.heads} q{self.queries}" + f" p{self.page}" * (self.page != PAGE)

    def lengths(self) -> list[int]:
        if not self.mixed:
            return [self.tokens] * self.batch
        return torch.randint(1, self.tokens + 1, (self.batch,), generator=torch.Generator().manual_seed(0)).tolist()


PROBLEMS = [
    *(Problem(batch, tokens, 128) for batch in (32, 64, 128) for tokens in (1024, 4096, 8192)),
    *(Problem(batch, tokens, 16) for batch, tokens in ((64, 4096), (128, 8192))),
    Problem(1, 65536, 128),
    *(Problem(batch, 4096, heads) for batch in (32, 128) for heads in (32, 64)),
    *(Problem(batch, 4096, 64, 2) for batch in (32, 128)),
    *(Problem(batch, 32768, heads, mixed=True) for batch in (32, 128) for heads in (16, 128)),
    *(Problem(128, 8192, heads, page=page) for heads in (16, 128) for page in (1, 2, 4, 8, 16, 32, 128)),
]


def inputs(problem: Problem, lengths: list[int]):
    counts = [-(-length // problem.page) for length in lengths]
    order = torch.randperm(sum(counts), device=timing.DEVICE, dtype=torch.int32)
    table = torch.zeros(problem.batch, max(counts), device=timing.DEVICE, dtype=torch.int32)
    for request, pages in enumerate(order.split(counts)):
        table[request, : len(pages)] = pages
    q = torch.randn(problem.batch, problem.queries, problem.heads, DIM, device=timing.DEVICE, dtype=torch.bfloat16)
    return q, torch.randn(len(order), problem.page, DIM, device=timing.DEVICE, dtype=torch.bfloat16), table


def error(out, q, cache, table, lengths):
    """The largest distance from float64, relative to the largest value, of the longest request."""
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    tokens = lengths[longest]
    keys = cache[table[longest].long()].reshape(-1, DIM)[:tokens].double()
    scores = torch.einsum("qhd,kd->qhk", q[longest].double(), keys) * SCALE
    rows = torch.arange(q.shape[1], device=q.device)[:, None, None] + tokens - q.shape[1]
    exact = scores.masked_fill(torch.arange(tokens, device=q.device) > rows, -torch.inf).softmax(-1) @ keys[:, :DIM_V]
    return ((out[longest].double() - exact).abs().max() / exact.abs().max()).item()


def peer(lengths):
    def run(q, cache, table):
        given = (q, cache.unsqueeze(2), DIM_V, lengths, table, SCALE, True, None, None)
        return torch.ops.flash_mla_legacy.dense_decode_fwd(*given)[0]

    return run


def measure(problem: Problem, has_peer: bool, rounds: int, example: mla_tilelang.Example | None = None) -> dict:
    numbers = problem.lengths()
    lengths = torch.tensor(numbers, device=timing.DEVICE, dtype=torch.int32)
    rows, tokens = problem.queries * problem.heads, sum(numbers)
    size = 2 * (tokens * DIM + problem.batch * rows * (DIM + DIM_V))
    count, calls = timing.rotation(size, timing.l2_bytes())
    calls = max(count, min(calls, 1 + (1 << 31) // (tokens * rows)))
    sets = [inputs(problem, numbers) for _ in range(count)]
    contestants = {"tileops": (lambda q, cache, table: tileops.mla_decode(q, cache, table, lengths, SCALE)[0], sets)}
    contestants |= {"flashmla": (peer(lengths), sets)} if has_peer else {}
    if example and mla_tilelang.serves(example, problem):
        contestants["tilelang"] = mla_tilelang.contestant(example, problem, lengths, sets, DIM_V, SCALE)
    errors = {name: error(fn(*own[0]), *sets[0], numbers) for name, (fn, own) in contestants.items()}
    if not max(errors.values()) < TOLERANCE:
        raise SystemExit(f"benchmarks.mla: {problem.label}: wrong results, {errors}")
    measured = timing.measure({name: timing.GraphReplay(*given, calls) for name, given in contestants.items()}, rounds)
    us, peers = measured.us["tileops"], [name for name in contestants if name != "tileops"]
    return {
        "op": "mla_decode",
        "workload": problem.label,
        "target": "sm_90a",
        "variant": tileops.explain("mla_decode", *sets[0], lengths, SCALE).variant,
        "us": round(us, 2),
        "tflops": round(2 * tokens * rows * (DIM + DIM_V) / us * 1e-6, 1),
        "gbps": round(size / us * 1e-3, 1),
        "peers_us": {name: round(measured.us[name], 2) for name in peers},
        "ratios": {name: round(measured.ratio(name, "tileops"), 3) for name in peers},
        "error": float(f"{errors['tileops']:.3g}"),
        **results.stamp(torch.cuda.get_device_name()),
    }


def main(arguments=None):
    parser = command.options_of("mla", __doc__)
    text = "TileLang's example_mla_decode_paged.py, whose kernel is measured too (see benchmarks/mla_tilelang.py)"
    parser.add_argument("--tilelang", type=Path, metavar="FILE", help=text)
    options = parser.parse_args(arguments)
    command.require_gpu("mla")
    example = mla_tilelang.load(options.tilelang) if options.tilelang else None
    has_peer = all(importlib.util.find_spec(name) and importlib.import_module(name) for name in PEERS)

    def beside(problem: Problem) -> dict:
        return measure(problem, has_peer and problem.page == PAGE, options.rounds, example)

    written = command.measured(options, PROBLEMS, beside)
    names = [name for name in ("flashmla", "tilelang") if any(name in row["ratios"] for row in written)]
    lines = [
        [r["workload"], r["us"], r["tflops"], r["gbps"], *(r["ratios"].get(name, "-") for name in names), r["error"]]
        for r in written
    ]
    print(aligned([["mla_decode", "us", "TFLOP/s", "GB/s", *(f"vs {name}" for name in names), "error"], *lines]))


if __name__ == "__main__":
    sys.exit(main())
