"""Which of the measured kernels are shipped, and the rows of configs/<op>.json that say so."""

import json
from dataclasses import asdict, fields, replace
from math import inf, log

from build_backend.measured import Measured
from tileops_dsl.kernels import configs_of

WORTH = 0.005  # what a further kernel must save of the summed logarithms of times
LAYOUTS = ("nt", "nn", "tn", "tt")


def budget(y_is_x, layout, most):
    """Kernels of one layout and result dtype; `most` for the layout of a linear layer."""
    if y_is_x:
        return most if layout == "nt" else max(1, most // 2)
    return max(1, most // 3)


def choose(times, count):
    """At most `count` rows, greedily those that together leave the smallest sum of log time over the workloads.

    times: {workload: {row: time relative to the baseline}}. Where no chosen row beats the baseline, the baseline runs, at 1.
    Where none does anywhere, the row that comes nearest is chosen, so that the layout has a kernel to force.
    """
    current = dict.fromkeys(times, 1.0)
    rows = list(dict.fromkeys(row for measured in times.values() for row in measured))
    chosen = []
    while rows and len(chosen) < count:
        best = min(rows, key=lambda row: total(current, times, row))
        if sum(map(log, current.values())) - total(current, times, best) < WORTH:
            break
        current = {workload: min(now, times[workload].get(best, inf)) for workload, now in current.items()}
        chosen.append(best)
        rows.remove(best)
    if not chosen and rows:
        chosen = [min(rows, key=lambda row: mean(times, row))]
    return chosen


def total(current, times, row):
    """The sum of log time with the row as well."""
    return sum(log(min(now, times[workload].get(row, inf))) for workload, now in current.items())


def mean(times, row):
    found = [log(measured[row]) for measured in times.values() if row in measured]
    return sum(found) / len(found)


def with_measurements(rows, results, gpu):
    """The rows, each with the workloads on which it is the fastest of them: {workload: {row: result}}."""
    measured = {row: [] for row in rows}
    for workload, found in results.items():
        served = {row: found[row] for row in rows if row in found}
        if served:
            fastest = max(served, key=lambda row: served[row]["ratio"])
            measured[fastest].append(problem(workload, served[fastest], gpu))
    return [replace(row, measured=tuple(measured[row])) for row in rows]


def problem(workload, result, gpu):
    """The baseline is put so that it and `us` have the ratio that was measured, the median over rounds."""
    m, n, k = workload.mnk
    us, baseline_us = round(result["us"], 2), round(result["us"] * result["ratio"], 2)
    return Measured(gpu, m, n, k, us, baseline_us, workload.batch, workload.epilogue)


def order(row):
    """bfloat16 before float16, results of the same dtype before float32, a linear layer's layout first."""
    layout = "nt"[row.transpose_a] + "nt"[row.transpose_b]
    return row.x != "bfloat16", row.y != row.x, LAYOUTS.index(layout)


def merged(op, tuned, target):
    """The rows of configs/<op>.json with those of the tuned groups in place of the present ones of the target.

    tuned: {(x, y, layout): rows}; a group without rows keeps what it has, and so do kernels for any alignment.
    """
    present = configs_of(op)
    tuned = {group: rows for group, rows in tuned.items() if rows}
    kept = [r for r in present if r.target != target or r.vector == 1 or group_of(r) not in tuned]
    mine = [row for rows in tuned.values() for row in rows] + [row for row in kept if row.target == target and row.vector > 1]
    return sorted(mine, key=order) + [row for row in kept if row.target != target or row.vector == 1]


def group_of(row):
    return row.x, row.y, "nt"[row.transpose_a] + "nt"[row.transpose_b]


def text(rows):
    """One kernel a line, its defaults left out."""
    lines = [json.dumps(stated(row)) for row in rows]
    return "[\n" + ",\n".join(f" {line}" for line in lines) + "\n]\n"


def stated(row):
    """The fields that are not what the dataclass has anyway, and the transposes; the file's name has the operator."""
    values = {f.name: getattr(row, f.name) for f in fields(row) if f.name != "op"}
    always = ("transpose_a", "transpose_b")
    kept = {f.name: values[f.name] for f in fields(row)[1:] if f.name in always or values[f.name] != f.default}
    if "measured" in kept:
        kept["measured"] = [stated_problem(problem) for problem in row.measured]
    return kept


def stated_problem(problem):
    defaults = {f.name: f.default for f in fields(problem)}
    return {name: value for name, value in asdict(problem).items() if value != defaults[name]}
