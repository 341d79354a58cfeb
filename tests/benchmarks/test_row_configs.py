"""configs/<op>.json holds what row_configs writes: a tile changed there alone would be lost at the next measurement."""

import json
import shutil
import sys

import pytest

from benchmarks import row_configs
from tileops_dsl.configs import CONFIGS


@pytest.mark.parametrize("op", row_configs.OPS)
def test_the_tiles_are_those_of_the_rules(op):
    rows = json.loads((CONFIGS / f"{op}.json").read_text())
    stored = [{k: v for k, v in row.items() if k not in row_configs.MEASURED} for row in rows]
    assert stored == row_configs.rows_of(op), "run python -m benchmarks.row_configs"


def test_what_was_measured_is_kept(tmp_path, monkeypatch):
    """Also without a file of results, as where only an operator was added."""
    for op in row_configs.OPS:
        shutil.copy(CONFIGS / f"{op}.json", tmp_path)
    monkeypatch.setattr(row_configs, "CONFIGS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["row_configs"])
    row_configs.main()
    assert all((tmp_path / f"{op}.json").read_text() == (CONFIGS / f"{op}.json").read_text() for op in row_configs.OPS)
    assert any("us" in row for row in json.loads((tmp_path / "softmax.json").read_text()))
