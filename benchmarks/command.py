"""The frame of the commands that time a list of problems: their options, and the loop that keeps each row as it is measured."""

import argparse
from pathlib import Path

import torch

from benchmarks import results, timing
from tileops.demo import Progress


def options_of(name: str, doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    text = "only the problems whose label contains this (repeatable)"
    parser.add_argument("--match", action="append", metavar="LABEL", help=text)
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS)
    parser.add_argument("--out", type=Path, help="results file (default: benchmarks/results/<gpu>.jsonl)")
    return parser


def require_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        raise SystemExit(f"benchmarks.{name}: torch sees no GPU; expected one, since only kernels are timed")


def measured(options: argparse.Namespace, problems, measure) -> list[dict]:
    """measure(problem) of each that --match names: the rows, each written at once, so that a stopped run leaves them."""
    path = options.out or results.RESULTS / f"{results.slug(torch.cuda.get_device_name())}.jsonl"
    chosen = [problem for problem in problems if any(match in problem.label for match in options.match or [""])]
    progress, rows = Progress(len(chosen)), []
    for problem in chosen:
        progress.step(problem.label)
        with torch.no_grad():
            rows.append(measure(problem))
        results.write(path, rows[-1:])
        torch.cuda.empty_cache()
    progress.close()
    return rows
