"""`python -m benchmarks.startup`: what tileops adds to the start of a program, in processes of their own.

Two figures: `import tileops` after `import torch`, and the first finished tileops kernel after torch's own CUDA start and first
kernel, that is, loading our code onto the GPU. Medians over processes; the first, which reads from disk, is left out.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks import results

IMPORT = """
import json, time
import torch
start = time.perf_counter()
import tileops
print(json.dumps({"us": (time.perf_counter() - start) * 1e6, "loaded": tileops.status().loaded}))
"""

# torch.softmax of the same tensor comes first: what is left is our own module load, launch and run.
FIRST_KERNEL = """
import json, time
import torch, tileops
from tileops import knobs
x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
start = time.perf_counter()
torch.softmax(x, -1)
torch.cuda.synchronize()
torch_us = (time.perf_counter() - start) * 1e6
with knobs.scope(require_native=True):
    start = time.perf_counter()
    y = tileops.softmax(x)
    torch.cuda.synchronize()
    us = (time.perf_counter() - start) * 1e6
assert torch.allclose(y.float(), torch.softmax(x.float(), -1), atol=1e-2)
print(json.dumps({"us": us, "torch_us": torch_us}))
"""


def run(program):
    """The object that a program prints last, run by this interpreter in a process of its own."""
    paths = os.pathsep.join(filter(None, [str(results.ROOT), os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, "-c", program], {**os.environ, "PYTHONPATH": paths}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode != 0:
        raise SystemExit(f"benchmarks.startup: the measured process failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def medians(program, times):
    """The median of each number over `times` processes, after one that is not counted."""
    answers = [run(program) for _ in range(times + 1)][1:]
    return {key: median(answer[key] for answer in answers) for key in answers[0]}


def row(workload, us, peers, variant, gpu):
    return {
        "op": "startup",
        "workload": workload,
        "target": "host",
        "variant": variant,
        "us": round(us, 1),
        "peers_us": {name: round(value, 1) for name, value in peers.items()},
        "error": 0.0,
        **results.stamp(gpu),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__.split("\n\n")[0])
    parser.add_argument("--times", type=int, default=7, help="processes for each figure")
    parser.add_argument("--out", type=Path, help="results file (default with a GPU: benchmarks/results/<gpu>.jsonl)")
    options = parser.parse_args(arguments)
    import torch  # not at the top: the measured processes import it themselves, and --help needs none

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found = medians(IMPORT, options.times)
    library = "native library loaded" if found["loaded"] else "without native library"
    rows = [row("import tileops, after import torch", found["us"], {}, library, gpu or "cpu")]
    print(f"import tileops after import torch: {found['us'] / 1e3:.1f} ms ({library})")
    if gpu:
        found = medians(FIRST_KERNEL, options.times)
        rows.append(row("first softmax, after torch's own first", found["us"], {"torch's own": found["torch_us"]}, "", gpu))
        own, torch_own = found["us"] / 1e3, found["torch_us"] / 1e3
        print(f"first softmax after torch's own first: {own:.2f} ms (torch's own: {torch_own:.2f} ms)")
    else:
        print("first kernel: not measured, torch sees no GPU")
    path = options.out or (results.RESULTS / f"{results.slug(gpu)}.jsonl" if gpu else None)
    if path:
        results.write(path, rows)
        print(f"rows in {path}")


if __name__ == "__main__":
    sys.exit(main())
