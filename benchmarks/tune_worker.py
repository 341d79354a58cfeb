"""The tuner's child process: measures variants of one workload at a time in the library of the tree that it runs in.

It may hang or die of a variant, so it says what it begins before it does. A job is a line of JSON on standard input, an event a
line on standard output: {"gpu"} once, then for each job {"begin": variant}, {"end": variant, "error" | "failed"} of each, the
baseline ("") first, {"begin": null} for the timing of all, and {"times": {variant: {"us", "baseline_us", "ratio"}}}.
"""

import gc
import json
import os
import sys

import torch

import tileops
from benchmarks import timing
from benchmarks.contestants import BenchmarkError, arguments, check, make_sets, worst_error
from benchmarks.workloads import KINDS, Workload
from tileops import knobs

BASELINE = ""  # eager PyTorch, as the dispatcher would fall back to


def capture(workload, name, sets, calls, eager_error):
    """(replay, error) of one variant."""
    function = getattr(tileops, workload.op)
    setting = {"force": "eager"} if name == BASELINE else {"force": name, "require_native": True}
    with knobs.scope(**setting):
        replay = timing.GraphReplay(lambda *inputs: function(**arguments(workload, *inputs)), sets, calls)
    replay.run_poisoned()
    found = worst_error(workload, sets, replay.outputs)
    check(workload, name or "eager", found, eager_error)
    return replay, found


def measure(job, emit):
    workload = KINDS.get(job["workload"]["op"], Workload)(**{**job["workload"], "shape": tuple(job["workload"]["shape"])})
    sets_count, calls = timing.rotation(workload.bytes, timing.l2_bytes())
    sets = make_sets(workload, sets_count, timing.DEVICE)
    replays, eager_error = {}, None
    for name in [BASELINE, *job["variants"]]:
        emit({"begin": name})
        try:
            replays[name], found = capture(workload, name, sets, calls, eager_error)
        except (BenchmarkError, RuntimeError, ValueError) as fault:
            torch.cuda.synchronize()  # a fault on the device, unlike a refusal, shows here again and ends the process
            emit({"end": name, "failed": f"{type(fault).__name__}: {str(fault).splitlines()[0]}"})
            if name == BASELINE:
                return
            continue
        eager_error = found if name == BASELINE else eager_error
        emit({"end": name, "error": float(f"{found:.3g}")})
    emit({"begin": None})
    measured = timing.measure(replays, job["rounds"])
    emit({"times": {name: times(measured, name) for name in replays if name != BASELINE}})


def times(measured, name):
    """`ratio`: how many times faster than the baseline, which is the median over rounds and steadier than the two medians."""
    us, baseline_us, ratio = measured.us[name], measured.us[BASELINE], measured.ratio(BASELINE, name)
    return {"us": round(us, 3), "baseline_us": round(baseline_us, 3), "ratio": round(ratio, 4)}


def main():
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an event

    def emit(event):
        print(json.dumps(event), file=events, flush=True)

    emit({"gpu": torch.cuda.get_device_name()})
    for line in sys.stdin:
        with torch.no_grad():
            measure(json.loads(line), emit)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
