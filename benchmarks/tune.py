"""`python -m benchmarks.tune OP --gpu h200`: which tiles the kernels of an operator should have, into configs/OP.json.

Enumerates the rows that the GPU's target can hold, keeps for each workload those that an estimate promises most of, builds
them into one library, checks each against float64, times them beside eager PyTorch in the same rounds, and chooses the few that
serve all workloads best. What was measured is in a journal, by the hash of a kernel's text: a second run measures only what is
missing. Three rounds: bfloat16 in the layout of a linear layer; the other layouts and float32 results with the tiles chosen
there; float16 with those of bfloat16, on the workloads that these won.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks import results, tune_choice, tune_library, workloads
from benchmarks.gpus import GPUS
from benchmarks.table import aligned
from benchmarks.tune_candidates import candidates, prune
from benchmarks.tune_measure import MeasureError, Worker
from tileops.demo import Progress
from tileops_dsl.configs import CONFIGS
from tileops_dsl.kernels import KINDS
from tileops_dsl.targets import TARGETS

MAIN = ("bfloat16", "bfloat16", "nt")  # the group whose tiles the others take
ROUNDS = 3
TIE = 0.985  # as fast, but for the noise
EVERY = "*"  # in the journal: a fault that does not depend on the workload


class Journal:
    """One JSON object a line: {"key", "variant", "workload", "gpu"} and either times or why it failed."""

    def __init__(self, path):
        self.path, self.entries = path, {}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith("\n"):  # a run that was killed while it wrote
            lines.pop()
            path.write_text("".join(lines), encoding="utf-8")
        for line in lines:
            entry = json.loads(line)
            self.entries[entry["key"], entry["workload"], entry["gpu"]] = entry

    def find(self, key, workload, gpu):
        return self.entries.get((key, EVERY, gpu)) or self.entries.get((key, workload, gpu))

    def add(self, entry):
        self.entries[entry["key"], entry["workload"], entry["gpu"]] = entry
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class Tuner:
    def __init__(self, options):
        self.options, self.gpu = options, GPUS[options.gpu]
        self.target = options.target or self.gpu.targets[0]
        self.deadline = time.monotonic() + 60 * options.minutes
        self.journal = Journal(options.journal)
        self.products = workloads.load(options.op)
        self.chosen = {}  # group -> rows
        self.results = {}  # group -> {workload: {row: journal entry}}
        self.missing = 0  # measurements
        self.faults = []  # (variant, workload, why)

    def jobs(self, number):
        """{workload: rows to measure on it} of a round."""
        main = [w for w in self.products if group_of(w) == MAIN]
        if number == 0:
            rows = candidates(self.options.op, self.target, *MAIN)
            return {w: prune(rows, w, self.gpu, self.options.candidates) for w in main}
        if number == 1:
            return {w: self.like(w, self.chosen.get(MAIN, [])) for w in self.products if w.dtype == MAIN[0] and w not in main}
        halves = {replace(w, dtype="float16"): self.chosen[group_of(w)] for w in self.products if self.wins(w)}
        return {w: self.like(w, rows) for w, rows in halves.items()}

    def wins(self, workload):
        """Whether a chosen kernel was measured to be as fast as eager PyTorch."""
        found = self.results.get(group_of(workload), {}).get(workload, {})
        return any(e["ratio"] >= TIE for row, e in found.items() if row in self.chosen[group_of(workload)])

    def like(self, workload, rows):
        """The candidates of the workload's dtypes and layout that have the tiles of these rows."""

        def kind(row):
            return row.tile, row.alternate, row.tag

        kept = set(map(kind, rows))
        return [row for row in candidates(self.options.op, self.target, *group_of(workload)) if kind(row) in kept]

    def run(self, number):
        """Builds and measures what the journal lacks of a round, then chooses."""
        jobs = self.jobs(number)
        kernels = tune_library.generate(list(dict.fromkeys(row for rows in jobs.values() for row in rows)))
        self.faults += [(row.name, EVERY, text) for row, text in kernels.items() if isinstance(text, str)]
        kernels = {row: kernel for row, kernel in kernels.items() if not isinstance(kernel, str)}
        keys = {row: tune_library.key(kernel) for row, kernel in kernels.items()}
        if self.lacking(jobs, keys) and not self.options.write:
            self.measure(number, jobs, kernels, keys)
        self.missing += sum(map(len, self.lacking(jobs, keys).values()))
        self.collect(jobs, keys)

    def lacking(self, jobs, keys):
        """{workload: rows that the journal has nothing of}."""
        found = {w: [r for r in rows if r in keys and not self.entry(keys[r], w)] for w, rows in jobs.items()}
        return {w: rows for w, rows in found.items() if rows}

    def entry(self, key, workload):
        return self.journal.find(key, workload.name, self.gpu.name)

    def measure(self, number, jobs, kernels, keys):
        tree = results.ROOT / "build" / "tune" / f"{self.options.op}_{self.options.gpu}_{self.target}" / str(number)
        library = tune_library.build(list(kernels.values()), self.gpu, tree)
        for row in kernels:
            if row.name in library.failures and (keys[row], EVERY, self.gpu.name) not in self.journal.entries:
                self.record(row, keys[row], EVERY, {"failed": library.failures[row.name]})
        if self.options.build_only:
            return
        part = (self.options.workloads or "").lower()
        lacking = {w: rows for w, rows in self.lacking(jobs, keys).items() if part in f"{w.name} {w.label}".lower()}
        progress = Progress(len(lacking))
        worker = Worker(library.tree, self.gpu.name, self.options.limit, self.options.rounds)
        try:
            for workload, rows in lacking.items():
                if time.monotonic() > self.deadline:
                    break
                progress.step(f"{workload.name}, {len(rows)} variants")
                self.measure_one(worker, workload, {row.name: row for row in rows}, keys)
        finally:
            worker.close()
            progress.close()

    def measure_one(self, worker, workload, rows, keys):
        try:
            found = worker.measure(workload, list(rows))
        except MeasureError as fault:
            self.faults.append(("eager PyTorch", workload.name, str(fault)))
            return
        for name, result in found.items():
            self.record(rows[name], keys[rows[name]], workload.name, result)

    def record(self, row, key, workload, result):
        self.journal.add({"key": key, "variant": row.name, "workload": workload, **result, **results.stamp(self.gpu.name)})

    def collect(self, jobs, keys):
        """What the journal has on a round, and the choice from it."""
        for workload, rows in jobs.items():
            entries = {row: self.entry(keys[row], workload) for row in rows if row in keys}
            failed = [(row, e) for row, e in entries.items() if e and "failed" in e]
            self.faults += [(row.name, entry["workload"], entry["failed"]) for row, entry in failed]
            times = {row: entry for row, entry in entries.items() if entry and "failed" not in entry}
            self.results.setdefault(group_of(workload), {})[workload] = times
        for group in dict.fromkeys(map(group_of, jobs)):
            times = {w: {row: 1 / e["ratio"] for row, e in found.items()} for w, found in self.results[group].items()}
            x, y, layout = group
            self.chosen[group] = tune_choice.choose(times, tune_choice.budget(x == y, layout, self.options.kernels))

    def rows(self):
        """{group: rows of the configuration}."""
        return {g: tune_choice.with_measurements(r, self.results[g], self.gpu.name) for g, r in self.chosen.items()}


def group_of(workload):
    """What needs kernels of its own: dtype, dtype of the result, layout."""
    return workload.dtype, workload.result_dtype, workload.layout


def table(tuner):
    lines = [["workload", "us", "TFLOP/s", "vs eager", "of best", "variant"]]
    for group, found in tuner.results.items():
        for workload, times in found.items():
            served = {row: e for row, e in times.items() if row in tuner.chosen[group]}
            if not served:
                lines.append([workload.name, "-", "-", "-", "-", "not measured"])
                continue
            row = max(served, key=lambda r: served[r]["ratio"])
            entry, best = served[row], max(e["ratio"] for e in times.values())
            speed = f"{workload.flops / entry['us'] * 1e-6:.0f}"
            figures = [f"{entry['us']:.1f}", speed, f"{entry['ratio']:.3f}x", f"{entry['ratio'] / best:.3f}"]
            lines.append([workload.name, *figures, row.name])
    return aligned(lines, left=(0, 5))


def report(tuner):
    """The closing table, then the candidates that are no use, each with the first workload that it fails on."""
    print(table(tuner))
    first = {}
    for variant, workload, why in tuner.faults:
        first.setdefault((variant, why), workload)
    if first:
        lines = [["candidate", "workload", "fault"], *([v, w, why[:200]] for (v, why), w in first.items())]
        print("\n" + aligned(lines, left=(0, 1, 2)))


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.split("\n\n")[0])
    ops = [op for op, kind in KINDS.items() if hasattr(kind, "measurement")]
    parser.add_argument("op", metavar="OP", choices=ops, help=", ".join(ops))
    parser.add_argument("--gpu", required=True, choices=list(GPUS), help="the GPU to choose for; the machine must have it")
    parser.add_argument("--target", choices=list(TARGETS), help="whose kernels; default: the GPU's own")
    parser.add_argument("--workloads", metavar="TEXT", help="measure only those whose name or label contains this")
    parser.add_argument("--candidates", type=int, default=10, metavar="N", help="candidates a workload (10)")
    parser.add_argument("--kernels", type=int, default=6, metavar="N", help="kernels kept for bfloat16 nt (6); fewer of others")
    parser.add_argument("--minutes", type=float, default=60, help="begin no workload after this long")
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="of silence that mean a hang (60)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of a workload (15)")
    parser.add_argument("--journal", type=Path, help="what was measured (build/tune/OP_GPU.jsonl)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--build-only", action="store_true", help="build and check the candidates; needs no GPU")
    only.add_argument("--write", action="store_true", help="measure nothing: write the file from what the journal has")
    options = parser.parse_args(arguments)
    options.journal = options.journal or results.ROOT / "build" / "tune" / f"{options.op}_{options.gpu}.jsonl"
    return options


def main(arguments=None):
    options = parse(arguments)
    tuner = Tuner(options)
    for number in range(ROUNDS):
        tuner.run(number)
        if tuner.missing and not options.write:
            break  # the next round's tiles are not known yet
    report(tuner)
    if tuner.missing and not options.write:
        print(f"{tuner.missing} measurements are missing in {options.journal}: run again, or --write what there is")
        return 1
    path = CONFIGS / f"{options.op}.json"
    path.write_text(tune_choice.text(tune_choice.merged(options.op, tuner.rows(), tuner.target)), encoding="utf-8")
    print(f"{sum(map(len, tuner.chosen.values()))} kernels of {tuner.target} in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
