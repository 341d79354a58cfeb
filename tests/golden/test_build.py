"""The golden kernels compile for sm_90a without anything that costs speed silently."""

import subprocess
import sys
from pathlib import Path

import launch
import pytest
import racecheck

from build_backend import checks

HERE = Path(__file__).parent
SOURCES = sorted(p for p in HERE.glob("*.cu") if "sm_90a.h" in p.read_text())


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_no_spill_no_serialised_wgmma_no_ignored_setmaxnreg(source):
    _, log = launch.compile_cubin(source)
    report = checks.Report(source.name, log, {})
    assert checks.parse_ptxas(log), "ptxas named no kernel"
    assert checks.register_problems(report) + checks.warning_problems(report) == []


def test_there_are_sources():
    assert {"gemm", "flash_attention_full", "flash_attention_causal", "mla_decode"} <= {p.stem for p in SOURCES}


def test_racecheck_runs_tests_that_exist():
    collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", HERE / "test_kernels.py"]
    found = subprocess.run(collect, capture_output=True, text=True).stdout
    assert all(f"::{test}\n" in found for test, _ in racecheck.CASES.values()), found
