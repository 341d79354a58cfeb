"""`python -m benchmarks.sweep OP`: every eligible kernel of the build on each workload, so that configs/OP.json can be chosen.

Each variant is forced, checked and timed beside the others, the automatic choice and a copy of the same bytes, all into the
same rotating outputs. A variant that refuses a workload, or is wrong on it, is a row of the report and not the end of it.
"""

import argparse
import gc
import json
import os
import sys
from pathlib import Path

import torch

import tileops
from benchmarks import results, timing, workloads
from benchmarks.bench import add_copy, decide, eager_error_of
from benchmarks.contestants import BenchmarkError, arguments, check, make_sets, worst_error
from benchmarks.table import aligned
from tileops import knobs
from tileops.demo import Progress

MANIFEST = results.ROOT / "csrc" / "generated" / "manifest.json"
AUTOMATIC = "(automatic)"


def read_manifest(path=MANIFEST):
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))["kernels"]
    except FileNotFoundError:
        raise SystemExit(
            f"{path} does not exist; expected the build's manifest: run python -m tileops_dsl.generate, build"
        ) from None


def eligible(kernels, workload, target=None):
    """The names of the kernels that may serve a workload: same operator and dtypes, rows long enough. The library has the last
    word (strides, vector width, GPU), and its refusals are reported."""
    dtypes = {workload.dtype, workloads.SHORT[workload.dtype]}
    return [
        name
        for name, kernel in kernels.items()
        if kernel["op"] == workload.op
        and target in (None, kernel["target"])
        and {kernel["x"], kernel["y"]} <= dtypes
        and (kernel["max_cols"] == 0 or workload.cols <= kernel["max_cols"])
    ]


def into(workload):
    """The operator, writing into `out`, as a function of one set (x, weight, out)."""
    function = getattr(tileops, workload.op)
    return lambda x, weight, out: function(**arguments(workload, x, weight), out=out)


def capture_all(workload, names, sets, calls, eager_error, progress=None):
    """({name: replay}, {name: error}, {name: why not}) over the automatic choice and the forced variants."""
    replays, errors, refused = {}, {}, {}
    for name in [AUTOMATIC, *names]:
        if progress:
            progress.step(f"{workload.name} {name}")
        try:
            with knobs.scope(force="" if name == AUTOMATIC else name, require_native=True):
                replay = timing.GraphReplay(into(workload), sets, calls)
            replay.run_poisoned()
            errors[name] = worst_error(workload, sets, replay.outputs)
            check(workload, name, errors[name], eager_error)
            replays[name] = replay
        except BenchmarkError as wrong:
            refused[name] = f"WRONG: {wrong}"
        except (RuntimeError, ValueError) as refusal:
            torch.cuda.synchronize()  # a fault on the device, unlike a refusal, shows here again and ends the run
            refused[name] = f"refused: {refusal}"
    return replays, errors, refused


def sweep(workload, names, rounds, progress=None):
    """The report of one workload: variants from the fastest on, then those that refused."""
    sets_count, calls = timing.rotation(workload.bytes, timing.l2_bytes())
    sets = [(x, weight, torch.empty_like(x)) for x, weight in make_sets(workload, sets_count, timing.DEVICE)]
    eager_error = eager_error_of(workload, {}, [s[:2] for s in sets[:1]])
    replays, errors, refused = capture_all(workload, names, sets, calls, eager_error, progress)
    chosen = decide(workload, sets[0][:2])[1] if AUTOMATIC in replays else None
    add_copy(replays, workload, sets, calls)
    return report(workload, timing.measure(replays, rounds), errors, refused, chosen)


def report(workload, measured, errors, refused, chosen):
    timed = sorted((name for name in measured.us if name != "copy"), key=measured.us.get)
    variants = [
        {
            "variant": name,
            "us": round(measured.us[name], 3),
            "gbps": round(workload.bytes / measured.us[name] * 1e-3, 1),
            "ceiling_pct": round(100 * measured.ratio("copy", name), 1),
            "of_best": round(measured.ratio(timed[0], name), 3),
            "error": float(f"{errors[name]:.3g}"),
        }
        for name in timed
    ]
    variants += [{"variant": name, "refused": why} for name, why in refused.items()]
    head = {"op": workload.op, "workload": workload.name, "label": workload.label, "automatic": chosen}
    return {**head, "copy_us": round(measured.us["copy"], 3), "variants": variants}


def text(found):
    lines = [[found["workload"], "us", "GB/s", "% copy", "of best", "error"]]
    for v in found["variants"]:
        mark = " *" if v["variant"] == found["automatic"] else ""
        if "refused" not in v:
            figures = [
                f"{v['us']:.2f}",
                f"{v['gbps']:.0f}",
                f"{v['ceiling_pct']:.0f}",
                f"{v['of_best']:.3f}",
                f"{v['error']:.1e}",
            ]
            lines.append([v["variant"] + mark, *figures])
    body = aligned(lines)
    return "\n".join([body, *(f"  {v['variant']}: {v['refused'][:160]}" for v in found["variants"] if "refused" in v)])


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__.split("\n\n")[0])
    parser.add_argument("op", metavar="OP")
    parser.add_argument("--match", metavar="LABEL", help="only the workloads whose name or label contains this")
    parser.add_argument("--target", help="only the kernels of this target")
    parser.add_argument("--variant", metavar="TEXT", help="only the kernels whose name contains this")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="report file (default: sweep_OP.json in $OUT, else in build/)")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    if options.op in workloads.PRODUCTS:
        raise SystemExit(f"benchmarks.sweep: {options.op} has a tuner; run python -m benchmarks.tune {options.op} --gpu GPU")
    chosen, kernels = workloads.load(options.op, options.match), read_manifest()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.sweep: torch sees no GPU; expected one, since only kernels are timed")
    path = options.out or Path(os.environ.get("OUT", results.ROOT / "build")) / f"sweep_{options.op}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    jobs = [(w, [n for n in eligible(kernels, w, options.target) if (options.variant or "") in n]) for w in chosen]
    progress = Progress(sum(1 + len(names) for _, names in jobs))
    found = []
    for workload, names in jobs:
        with torch.no_grad():
            found.append(sweep(workload, names, options.rounds, progress))
        progress.clear()
        print(text(found[-1]), end="\n\n", flush=True)
        content = {**results.stamp(torch.cuda.get_device_name()), "workloads": found}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        gc.collect()
        torch.cuda.empty_cache()
    progress.close()
    print(f"* is the automatic choice. Report in {path}")
    return 1 if any(v.get("refused", "").startswith("WRONG") for f in found for v in f["variants"]) else 0


if __name__ == "__main__":
    sys.exit(main())
