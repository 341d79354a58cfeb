"""`python -m benchmarks.bench [OP]`: tileops beside its peers on the workloads, into benchmarks/results/<gpu>.jsonl."""

import argparse
import gc
import re
import sys
from pathlib import Path

import torch

import tileops
from benchmarks import results, timing, workloads
from benchmarks.contestants import BenchmarkError, Contestant, Refused, arguments, check, make_sets, ours, peers_of, worst_error
from benchmarks.table import aligned
from tileops.demo import Progress

QUICK_ROUNDS = 5
QUICK_BYTES = 256 << 20  # --quick leaves out the workloads above this


def capture(workload, contestant, sets, calls):
    """A contestant's graph and its error. Its outputs are poisoned first, so the error is of what the graph itself wrote."""
    with contestant.scope():
        replay = timing.GraphReplay(contestant.fn, sets, calls)
    replay.run_poisoned()
    return replay, worst_error(workload, sets, replay.outputs)


def capture_peers(workload, options, sets, calls):
    replays, errors, notes = {}, {}, []
    for name, build in peers_of(workload, options.peers, options.without).items():
        try:
            contestant = Contestant(name, build(workload))
        except Refused as refusal:
            notes.append(f"{workload.name}: no {name}: {refusal}")
            continue
        try:
            replays[name], errors[name] = capture(workload, contestant, sets, calls)
        except RuntimeError as fault:
            raise BenchmarkError(f"{workload.op} {workload.name}: baseline {name} does not run: {fault}") from fault
        check(workload, name, errors[name])
    return replays, errors, notes


def capture_forced(workload, names, sets, calls, eager_error):
    """The forced variants beside the automatic choice; one that refuses is a note, not a fault."""
    replays, notes = {}, []
    for name in names:
        try:
            replays[name], found = capture(workload, ours(workload, name), sets, calls)
        except (RuntimeError, ValueError) as refusal:
            torch.cuda.synchronize()  # a fault on the device, unlike a refusal, shows here again and ends the run
            notes.append(f"{workload.name}: {name} refused: {refusal}")
            continue
        check(workload, name, found, eager_error)
    return replays, notes


def eager_error_of(workload, errors, sets):
    """What ours is held to; measured here where --without eager left it out."""
    if "eager" in errors:
        return errors["eager"]
    eager = peers_of(workload)["eager"](workload)
    return worst_error(workload, sets[:1], [eager(*sets[0])])


def add_copy(replays, workload, sets, calls):
    from benchmarks.copy_kernel import copy

    words = timing.copy_words(workload.bytes)
    replays["copy"] = timing.GraphReplay(copy, [(torch.randn(words, device=timing.DEVICE),) for _ in sets], calls)
    replays["copy"].run_poisoned()
    if not torch.equal(replays["copy"].outputs[-1], replays["copy"].sets[(calls - 1) % len(sets)][0]):
        raise BenchmarkError(f"{workload.op} {workload.name}: the copy kernel does not copy; the ceiling would be wrong")


def decide(workload, inputs):
    """(target, variant) of the automatic choice."""
    variant = tileops.explain(workload.op, **arguments(workload, *inputs)).variant
    return target_of(variant, workload.op), variant


def target_of(variant, op):
    """The target in a variant's name, which is op_target_dtype_dtype_..."""
    found = re.match(rf"{op}_(.+?)_(?:{'|'.join(workloads.SHORT.values())})_", variant)
    return found.group(1) if found else "unknown"


def measure(workload, options):
    """(result row, notes) of one workload."""
    sets_count, calls = timing.rotation(workload.bytes, timing.l2_bytes())
    sets = make_sets(workload, sets_count, timing.DEVICE)
    target, variant = decide(workload, sets[0])
    peers, errors, notes = capture_peers(workload, options, sets, calls)
    eager_error = eager_error_of(workload, errors, sets)
    own, own_error = capture(workload, ours(workload), sets, calls)
    check(workload, "tileops", own_error, eager_error)
    forced, refusals = capture_forced(workload, options.force, sets, calls, eager_error)
    replays = {"tileops": own, **peers, **forced}
    add_copy(replays, workload, sets, calls)
    measured = timing.measure(replays, QUICK_ROUNDS if options.quick else options.rounds)
    return result_row(workload, measured, target, variant, own_error, list(peers), list(forced)), notes + refusals


def result_row(workload, measured, target, variant, error, peers, forced=()):
    us = measured.us["tileops"]
    row = {
        "op": workload.op,
        "workload": workload.name,
        "label": workload.label,
        "target": target,
        "variant": variant,
        "us": round(us, 3),
        "tflops": round(workload.flops / us * 1e-6, 3),
        "gbps": round(workload.bytes / us * 1e-3, 1),
        "ceiling_pct": round(100 * measured.ratio("copy", "tileops"), 1),
        "peers_us": {name: round(measured.us[name], 3) for name in peers},
        "ratios": {name: round(measured.ratio(name, "tileops"), 3) for name in peers},
        "error": float(f"{error:.3g}"),
        **results.stamp(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"),
    }
    if forced:
        row["forced_us"] = {name: round(measured.us[name], 3) for name in forced}
    return row


def print_rows(rows):
    for op in dict.fromkeys(row["op"] for row in rows):
        mine = [row for row in rows if row["op"] == op]
        peers = list(dict.fromkeys(name for row in mine for name in row["peers_us"]))
        forced = list(dict.fromkeys(name for row in mine for name in row.get("forced_us", {})))
        columns = [f"vs {name}" for name in peers] + [f"{name} us" for name in forced]
        head = [op, "us", *results.speeds(mine[0]), *columns, "error", "variant"]
        lines = [
            [row["workload"], f"{row['us']:.1f}", *results.speeds(row).values()]
            + [f"{row['ratios'][name]:.2f}x" if name in row["ratios"] else "-" for name in peers]
            + [f"{row['forced_us'][name]:.1f}" if name in row.get("forced_us", {}) else "-" for name in forced]
            + [f"{row['error']:.1e}", row["variant"]]
            for row in mine
        ]
        print(aligned([head, *lines], left={0, len(head) - 1}), end="\n\n")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("op", nargs="?", metavar="OP", help="one operator; all where left out")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, no large workload, kept with --out only")
    parser.add_argument("--out", type=Path, help="results file to merge into (default: benchmarks/results/<gpu>.jsonl)")
    parser.add_argument("--match", metavar="LABEL", help="only the workloads whose name or label contains this")
    parser.add_argument("--force", action="append", default=[], metavar="VARIANT", help="a variant or target to time as well")
    parser.add_argument("--peers", action="append", default=[], metavar="NAME", help="an optional peer to run as well: quack")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="a baseline to leave out")
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    chosen = workloads.load(options.op, options.match)
    if options.quick:
        chosen = [w for w in chosen if w.bytes <= QUICK_BYTES]
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.bench: torch sees no GPU; expected one, since only kernels are timed")
    path = options.out or (None if options.quick else results.RESULTS / f"{results.slug(torch.cuda.get_device_name())}.jsonl")
    rows, notes, faults = [], [], []
    progress = Progress(len(chosen))
    for workload in chosen:
        progress.step(f"{workload.op} {workload.name}")
        try:
            with torch.no_grad():
                row, said = measure(workload, options)
        except (BenchmarkError, RuntimeError, ValueError) as fault:
            faults.append(f"{workload.op} {workload.name}: {fault}")
            torch.cuda.synchronize()
        else:
            rows.append(row)
            notes += said
            if path:
                results.write(path, [row])
        gc.collect()
        torch.cuda.empty_cache()
    progress.close()
    print_rows(rows)
    for line in dict.fromkeys(notes):
        print(f"note: {line}")
    for line in faults:
        print(f"error: {line}", file=sys.stderr)
    kept = f"rows in {path}" if path else "nothing kept"
    print(f"{len(rows)} of {len(chosen)} workloads measured on {torch.cuda.get_device_name()}; {kept}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
