"""python tests/golden/racecheck.py: the golden kernels at small sizes under racecheck, on a GPU of capability 9.0.

compute-sanitizer's racecheck does not follow bar.arrive: it reports handover.cu, in which one group writes and arrives and the
other syncs and reads, and is silent once both sync. So MLA, whose groups hand over in this way, is checked with each arrival
as a sync, which orders more. That arrivals are enough is the emulator's to show: it follows them and notices each one that is
taken out (tests/emulator/mutants.py).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import launch

HERE = Path(__file__).parent
CASES = {  # arguments of Python: whether arrivals become syncs
    "gemm": ("test_gemm[300-264-200]", False),
    "attention, full": ("test_flash_attention[by hand-shape2-False]", False),
    "attention, causal": ("test_flash_attention[by hand-shape2-True]", False),
    "generated attention, full": ("test_flash_attention[generated-shape2-False]", False),
    "generated attention, causal": ("test_flash_attention[generated-shape2-True]", False),
    "mla": ("test_mla_decode[by hand-1-64-lengths1-1]", True),
    "generated mla": ("test_mla_decode[generated-1-64-lengths1-1]", True),
}


def hazards(arguments: list[str], arrive_as_sync: bool, limit_s: int = 300) -> int:
    """That racecheck reports while Python runs with the arguments; RuntimeError if the run itself fails."""
    more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "ARRIVE_AS_SYNC": "1" * arrive_as_sync}
    limit = ["timeout", "--signal=KILL", str(limit_s)]  # ends the whole group of processes
    command = [*limit, "compute-sanitizer", "--tool", "racecheck", "--print-limit", "1", sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | more)
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazard", done.stdout)
    if done.returncode or not summary:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}")
    return int(summary[1])


def run_handover(late: int) -> None:
    import torch

    sums = torch.zeros(128, device="cuda")
    launch.load(HERE / "handover.cu", "handover")(launch.pack(sums, launch.I32(late)), 1, 256, 512)
    expected = 4.0 * ((torch.arange(128) + 37) % 128) + 6
    assert torch.equal(sums.cpu(), expected), "handover.cu computes something else"


def main() -> int:
    wrong = 0
    for late in (0, 1):
        found = [hazards([__file__, str(late)], as_sync) for as_sync in (False, True)]
        print(f"handover, group {late} late: {found[0]} hazards reported, {found[1]} where both groups sync", flush=True)
        wrong += found[1]
    for name, (test, as_sync) in CASES.items():
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"{HERE / 'test_kernels.py'}::{test}"]
        found = hazards(pytest, as_sync)
        print(f"{name}{', arrivals as syncs' * as_sync}: {found} hazards", flush=True)
        wrong += found
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_handover(int(sys.argv[1]))
    else:
        sys.exit(main())
