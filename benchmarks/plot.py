"""`python -m benchmarks.plot`: the roofline plot and the tables of README.md, from the rows of a results file alone."""

import argparse
import sys
from pathlib import Path
from statistics import median

from benchmarks import results, workloads
from benchmarks.table import markdown

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
HOST_OPS = ("startup", "host")  # rows in which nothing moves through device memory
ATTENTION = ("flash_attention", "attention_peers", "flash_attention_paged", "mla_decode")
APART = (*HOST_OPS, "epilogue", *ATTENTION)  # of other tables, or of none
SHOWN_ATTENTION = "b4 h16", "bf16", ("s4096",)  # of its many rows
READING = (
    "Times are medians of CUDA-graph replays over buffers larger than the L2 cache, contestants interleaved; `% of copy` "
    "compares with a copy kernel that moves the same bytes in the same run; `vs` is how many times faster tileops is; "
    "`error` is the largest distance to float64, relative to the row's largest value."
)
# name -> (what a reader calls it, colour, marker); the order is that of the columns
SERIES = {
    "tileops": ("tileops", "#1d4ed8", "o"),
    "eager": ("eager PyTorch", "#6b7280", "s"),
    "inductor": ("Inductor", "#d97706", "^"),
    "formula": ("eager formula", "#c4b5fd", "D"),
    "quack": ("quack", "#059669", "v"),
}


def moved(row):
    """Bytes of one call, as the run counted them."""
    return row["gbps"] * row["us"] * 1e3


def roof(rows):
    """[(bytes, GB/s of the copy kernel at that size)], by size: what the memory gives, measured in the same runs.

    Sizes that agree in two digits are one point, the median of their runs.
    """
    points = {}
    for row in rows:
        points.setdefault(float(f"{moved(row):.1e}"), []).append(row["gbps"] / row["ceiling_pct"] * 100)
    return sorted((size, median(found)) for size, found in points.items())


def by_op(rows):
    """{op: kernel rows, in the order of configs/workloads.json}; rows of workloads that are there no longer come last."""
    order = {(w.op, w.name): i for i, w in enumerate(workloads.load())}
    kernels = [row for row in rows if row["op"] not in APART]
    kernels.sort(key=lambda row: order.get((row["op"], row["workload"]), len(order)))
    return {op: [row for row in kernels if row["op"] == op] for op in dict.fromkeys(row["op"] for row in kernels)}


def of_memory(groups):
    """The operators that the memory bounds, which are all but the products."""
    return {op: group for op, group in groups.items() if op not in workloads.PRODUCTS}


def panel(axis, op, group, ceiling):
    """One operator: the roof, then a point for each contestant and workload; tileops last, so that it lies on top."""
    sizes, roof_gbps = zip(*ceiling)
    roof_style = {"color": "#111827", "linewidth": 1.2, "label": "copy kernel (the roof)"}
    axis.plot([x / 1e6 for x in sizes], [y / 1e3 for y in roof_gbps], **roof_style)
    for name, (label, colour, marker) in reversed(SERIES.items()):
        times = [(moved(row), row["us"] if name == "tileops" else row["peers_us"].get(name)) for row in group]
        points = [(x / 1e6, x / us * 1e-6) for x, us in times if us]
        if points:
            area = 36 if name == "tileops" else 22
            axis.scatter(*zip(*points), s=area, color=colour, marker=marker, label=label, zorder=3, linewidths=0)
    axis.set_xscale("log")
    axis.set_title(op)
    axis.set_xlabel("bytes moved by a call (MB)")
    axis.grid(True, color="#e5e7eb", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = of_memory(by_op(rows))
    ceiling = roof([row for group in groups.values() for row in group])
    size = (4.6 * len(groups), 4.2)
    figure, axes = plt.subplots(1, len(groups), figsize=size, sharey=True, squeeze=False, layout="constrained")
    legend = {}
    for axis, (op, group) in zip(axes[0], groups.items()):
        panel(axis, op, group, ceiling)
        handles, labels = axis.get_legend_handles_labels()
        legend.update(zip(labels, handles))
    axes[0][0].set_ylabel("achieved bandwidth (TB/s)")
    axes[0][0].set_ylim(bottom=0)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=len(legend), frameon=False)
    figure.suptitle(f"{rows[0]['gpu']}: bandwidth against the measured copy bandwidth")
    figure.savefig(path, dpi=140, metadata={"Software": None})
    plt.close(figure)


def kernel_table(group):
    peers = [name for name in SERIES if any(name in row["peers_us"] for row in group)]
    head = ["workload", "shape", "time (us)", *results.speeds(group[0]), *[f"vs {SERIES[name][0]}" for name in peers], "error"]
    body = [
        [row["label"], row["workload"], f"{row['us']:.1f}", *results.speeds(row).values()]
        + [f"{row['ratios'][name]:.2f}x" if name in row["ratios"] else "" for name in peers]
        + [f"{row['error']:.1e}"]
        for row in group
    ]
    return markdown([head, *body], left=(0, 1))


def epilogue_table(rows):
    head = ["gemm and what follows it", "time (us)", "TFLOP/s", "more than alone"]
    body = [
        [row["workload"], f"{row['us']:.1f}", f"{row['tflops']:.0f}", f"{100 / row['ratios']['none'] - 100:.1f}%"]
        for row in rows
        if row["op"] == "epilogue"
    ]
    return markdown([head, *body]) if body else ""


def attention_table(rows):
    batch, dtype, lengths = SHOWN_ATTENTION
    head = ["flash_attention", "time (us)", "TFLOP/s", "vs eager PyTorch", "vs cuDNN", "error"]
    body = [
        [row["workload"], f"{row['us']:.1f}", f"{row['tflops']:.0f}"]
        + [f"{row['ratios'][name]:.2f}x" if name in row["ratios"] else "" for name in ("eager", "cudnn")]
        + [f"{row['error']:.1e}"]
        for row in rows
        if row["op"] == "flash_attention" and row["workload"].startswith(batch)
        if {dtype, *lengths}.intersection(row["workload"].split()) > {dtype}
    ]
    return markdown([head, *body]) if body else ""


def peers_table(rows):
    peers = {"fa4": "FA4", "cudnn": "cuDNN", "fa2": "FA2"}
    beside = [f"vs {name}" for name in peers.values()]
    head = ["flash_attention beside its peers", "time (us)", "TFLOP/s", *beside, "error", "theirs"]
    body = [
        [row["workload"], f"{row['us']:.1f}", f"{row['tflops']:.0f}"]
        + [f"{row['ratios'][name]:.2f}x" if name in row["ratios"] else "" for name in peers]
        + [f"{row['errors']['tileops']:.1e}", f"{min(row['errors'][name] for name in row['peers_us']):.1e}"]
        for row in rows
        if row["op"] == "attention_peers"
    ]
    return markdown([head, *body]) if body else ""


def host_table(rows):
    head = ["on the host", "tileops", "beside it"]
    body = [
        [row["workload"], amount(row["us"]), ", ".join(f"{name} {amount(us)}" for name, us in row["peers_us"].items())]
        for row in rows
        if row["op"] in HOST_OPS
    ]
    return markdown([head, *body]) if body else ""


def amount(us):
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.1f} ms"


def origin(rows):
    dates, commits = sorted({row["date"] for row in rows}), list(dict.fromkeys(row["commit"] for row in rows))
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Measured on {rows[0]['gpu']}, {when}, commit {', '.join(commits)}."


def section(rows, picture):
    """The text between the markers."""
    groups = by_op(rows)
    parts = [f"{origin(rows)} {READING}"]
    if of_memory(groups):
        parts.append(f"![Bandwidth of the row operators against the copy bandwidth]({picture})")
    parts += [f"**{op}**\n\n{kernel_table(group)}" for op, group in groups.items()]
    others = [table(rows) for table in (epilogue_table, attention_table, peers_table, host_table)]
    return "\n\n".join([*parts, *filter(None, others)])


def replace_section(text, content):
    """README text with what is between the markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"README.md has no single pair {BEGIN} ... {END}; expected one: add it where the results belong")
    return text[: text.index(BEGIN) + len(BEGIN)] + f"\n{content}\n" + text[text.index(END) :]


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("--results", type=Path, default=results.RESULTS / "h200.jsonl")
    parser.add_argument("--readme", type=Path, default=results.ROOT / "README.md")
    parser.add_argument("--picture", type=Path, default=results.RESULTS / "roofline.png")
    options = parser.parse_args(arguments)
    rows = results.read(options.results)
    if not rows:
        raise SystemExit(f"{options.results} has no rows; expected some: run `python -m benchmarks.bench` on a GPU first")
    if not options.readme.exists():
        raise SystemExit(f"{options.readme} does not exist; expected a file with a line {BEGIN} and a line {END}")
    if of_memory(by_op(rows)):
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        draw(rows, options.picture)
    picture = options.picture.resolve()
    root = options.readme.resolve().parent
    shown = picture.relative_to(root).as_posix() if picture.is_relative_to(root) else picture.as_posix()
    text = options.readme.read_text(encoding="utf-8")
    options.readme.write_text(replace_section(text, section(rows, shown)), encoding="utf-8")
    print(f"{len(rows)} rows of {options.results.name} into {options.readme.name} and {options.picture.name}")


if __name__ == "__main__":
    sys.exit(main())
