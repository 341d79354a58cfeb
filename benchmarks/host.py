"""`python -m benchmarks.host`: what one call costs the host, in microseconds, while the GPU has not run out of queue."""

import argparse
import sys
import time
from pathlib import Path

import torch

import tileops
from benchmarks import results, timing
from benchmarks.table import aligned
from tileops._schemas import NAMESPACE
from tileops.demo import OPERATORS

CALLS = 200  # of one measurement: below the some 1000 launches after which CUDA makes the host wait
ROUNDS = 31
SHAPE = (1, 256)
CUBE = {"cuda": 4096, "cpu": 64}  # of gemm: one that has a kernel


class HostReplay:
    """CALLS calls in a row, timed on the host without waiting for the device."""

    def __init__(self, call):
        self.call = call

    def enqueue(self):
        synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            self.call()
        return (time.perf_counter() - start) / CALLS * 1e6

    def microseconds(self, pending):
        return pending


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tensors_of(op, device):
    if op == "gemm":
        a, b = (torch.randn(CUBE[device], CUBE[device], device=device, dtype=torch.bfloat16) for _ in range(2))
        return {"a": a, "b": b.t()}
    x = torch.randn(SHAPE, device=device, dtype=torch.bfloat16)
    weight = {} if op == "softmax" else {"weight": torch.ones(SHAPE[-1], device=device, dtype=torch.bfloat16)}
    return {"x": x, **weight}


def contestants(op, tensors):
    """The public function, the raw operator under it, and what PyTorch has."""
    public, raw = getattr(tileops, op), getattr(getattr(torch.ops, NAMESPACE), op)
    eager = torch.matmul if op == "gemm" else lambda *_: OPERATORS[op].eager(**tensors)
    functions = {"tileops": public, "raw operator": raw, "eager": eager}
    return {name: HostReplay(lambda call=call: call(*tensors.values())) for name, call in functions.items()}


def measure(op, tensors, rounds):
    return timing.measure(contestants(op, tensors), rounds, synchronize)


def row(op, measured, variant, gpu):
    peers = [name for name in measured.us if name != "tileops"]
    return {
        "op": "host",
        "workload": f"one call of {op}",
        "target": "host",
        "variant": variant,
        "us": round(measured.us["tileops"], 2),
        "peers_us": {name: round(measured.us[name], 2) for name in peers},
        "ratios": {name: round(measured.ratio(name, "tileops"), 3) for name in peers},
        "error": 0.0,
        **results.stamp(gpu),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="results file (default with a GPU: benchmarks/results/<gpu>.jsonl)")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    rows = []
    with torch.no_grad():
        for op in (*OPERATORS, "gemm"):
            tensors = tensors_of(op, device)
            decision = tileops.explain(op, *tensors.values())
            rows.append(row(op, measure(op, tensors, options.rounds), decision.variant or "eager", gpu))
    head = ["host cost of a call (us)", "tileops", *rows[0]["peers_us"], "vs eager", "path"]
    lines = [[r["workload"], r["us"], *r["peers_us"].values(), f"{r['ratios']['eager']:.2f}x", r["variant"]] for r in rows]
    print(aligned([head, *lines], left={0, len(head) - 1}))
    path = options.out or (results.RESULTS / f"{results.slug(gpu)}.jsonl" if device == "cuda" else None)
    if path:
        results.write(path, rows)
        print(f"rows in {path}")


if __name__ == "__main__":
    sys.exit(main())
