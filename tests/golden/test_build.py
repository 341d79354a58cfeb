"""The golden kernels compile for sm_90a without anything that costs speed silently."""

from pathlib import Path

import launch
import pytest

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
