"""benchmarks/results/<gpu>.jsonl: the newest run of each workload, one JSON object per line; and where a row comes from.

`python -m benchmarks.results FILE...` merges rows that were written elsewhere (`--out`) into the file of their GPU.
"""

import json
import os
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import workloads

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"


def slug(gpu):
    """The file name of a GPU: "NVIDIA H200" is h200."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"^(nvidia|amd)\s+", "", gpu.strip().lower())).strip("-") or "cpu"


def read(path):
    """The rows of a results file, [] where there is none."""
    path = Path(path)
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as fault:
                raise SystemExit(
                    f"{path}, line {number} is not JSON ({fault}); expected one object: mend or delete it"
                ) from None
    return rows


def merge(old, new):
    """Old rows with each (op, workload) that is in `new` replaced where it stands; what is really new comes last."""
    merged = {(row["op"], row["workload"]): row for row in old}
    merged.update({(row["op"], row["workload"]): row for row in new})
    return list(merged.values())


def write(path, new):
    """Merges rows into a results file; the file is replaced whole, so that a stopped run leaves the old one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = merge(read(path), new)
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)


def commit():
    """The commit of the source tree, marked where the tree differs from it; else TILEOPS_COMMIT; else "unknown"."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        # Results are what a run writes, so they alone do not make a tree differ from its commit.
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return head + ("+changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TILEOPS_COMMIT") or "unknown"


def _git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def speeds(row):
    """{column of a table: text}: what bounds the operator is arithmetic or memory."""
    if row["op"] in workloads.PRODUCTS:
        return {"TFLOP/s": f"{row['tflops']:.0f}"}
    return {"GB/s": f"{row['gbps']:.0f}", "% of copy": f"{row['ceiling_pct']:.0f}"}


def stamp(gpu):
    """The fields that every row ends with."""
    return {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d"), "commit": commit(), "gpu": gpu}


def main(paths):
    if not paths:
        raise SystemExit("benchmarks.results: no file was given; expected results files to merge, as bench --out writes them")
    for path in paths:
        rows = read(path)
        for gpu in dict.fromkeys(row["gpu"] for row in rows):
            mine = [row for row in rows if row["gpu"] == gpu]
            write(RESULTS / f"{slug(gpu)}.jsonl", mine)
            print(f"{len(mine)} rows of {path} into {slug(gpu)}.jsonl")


if __name__ == "__main__":
    main(sys.argv[1:])
