"""Ten planted bugs: the emulator reports each, and a GPU shows it, or PLANTED.md says why it does not."""

from pathlib import Path

import golden_launch
import planted
import pytest
import torch

KINDS = (
    *("wrong phase", "missing fence", "wrong swizzle", "early release", "short expect_tx", "off-by-one trip count"),
    *("missing wgmma wait", "dropped WAW order", "wrong arrival count", "aliased buffer in use"),
)
NOTES = Path(planted.__file__).with_name("PLANTED.md").read_text()
EXPLAINED = [name for name in planted.PLANTED if f"\n**{name}**" in NOTES]  # what a GPU need not show


def test_ten_kinds():
    assert [kind for kind in KINDS if not any(name.startswith(kind) for name in planted.PLANTED)] == []
    assert all(f"| {name} |" in NOTES for name in planted.PLANTED)


@pytest.mark.parametrize("name", planted.PLANTED)
def test_the_emulator_reports(name, monkeypatch):
    bug = planted.PLANTED[name]
    verdict, message = planted.by_emulator(golden_launch.Emulated(monkeypatch, 4), *planted.text(name))
    assert verdict in bug.emulator.split("|"), message
    assert verdict == "wrong result" or ": block (" in message


def test_an_edit_that_does_not_apply(monkeypatch):
    monkeypatch.setitem(planted.PLANTED, "x", planted.Planted("gemm", "", (("site(1)", ""),)))
    with pytest.raises(ValueError, match=r"gemm.cu has 5 times 'site\(1\)'; 'x' needs it once"):
        planted.source("x")


@pytest.mark.gpu
@pytest.mark.parametrize("name", planted.NAMES)
def test_a_gpu_agrees(name):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of capability 9.0")
    found = planted.measure(name)
    if name in planted.SOURCES:
        assert (found["gpu"], found["racecheck"]) == ("right", "silent"), found
    else:
        assert found["gpu"] != "right" or "hazards" in found["racecheck"] or name in EXPLAINED, found
