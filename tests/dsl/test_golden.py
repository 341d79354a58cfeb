"""Generated text, exactly. Rewrite tests/golden with: pytest tests/dsl/test_golden.py --update-golden, and read the diff.

The tiles are those of no tuned row, so that tuning leaves these files alone.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tileops_dsl import output
from tileops_dsl.configs import RowConfig

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


def config(op, dtype, vector, threads, threads_per_row, chunks, **more):
    return RowConfig(op, "sm_90a", dtype, dtype, vector, threads, threads_per_row, chunks, **more)


CONFIGS = {
    "softmax_several_warps": config("softmax", "bfloat16", 8, 128, 128, 3, min_blocks=8),
    "softmax_looped_shifted": config("softmax", "float32", 4, 256, 256, 3, shifted=True, looped=True),
    "rms_norm_silu_passes": config("rms_norm_silu", "bfloat16", 8, 128, 16, 2, passes=2),
    "rms_norm_lanes_on_rows": config("rms_norm", "float16", 1, 256, 8, 10, lanes_on_rows=True),
}


def text(row: RowConfig) -> str:
    return output.source_text([output.compile_row(row)])


def compare(name: str, found: str, update: bool) -> None:
    path = GOLDEN / f"{name}.cu"
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(found)
    assert path.exists(), f"{path} is missing; write it with --update-golden"
    assert found == path.read_text()


@pytest.mark.parametrize("name", CONFIGS)
def test_golden(name, update_golden):
    compare(name, text(CONFIGS[name]), update_golden)


def test_no_golden_without_a_test():
    assert {path.stem for path in GOLDEN.iterdir()} == set(CONFIGS)


def test_a_missing_or_different_golden_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GOLDEN", tmp_path)
    with pytest.raises(AssertionError, match=r"any\.cu is missing; write it with --update-golden"):
        compare("any", "text", update=False)
    compare("any", "text", update=True)
    compare("any", "text", update=False)
    with pytest.raises(AssertionError):
        compare("any", "other text", update=False)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_targets_have_one_text(name):
    """The tiles differ between the targets, the compiler's work does not."""
    row = CONFIGS[name]
    portable = text(replace(row, target="portable"))
    assert "portable" in portable and "sm_90a" not in portable
    assert portable.replace("portable", "sm_90a") == text(row)


def test_generation_is_deterministic(tmp_path):
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "tileops_dsl.generate", f"--out={tmp_path / seed}"]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed})
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / seed).iterdir()} for seed in ("1", "2"))
    assert len(first) >= 24 and first == second
