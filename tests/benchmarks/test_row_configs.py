"""configs/<op>.json holds what row_configs writes: a tile changed there alone would be lost at the next measurement."""

import json

import pytest

from benchmarks import row_configs
from tileops_dsl.configs import CONFIGS

MEASURED = ("workload", "us", "baseline_us")


@pytest.mark.parametrize("op", ["softmax", "rms_norm", "rms_norm_silu"])
def test_the_tiles_are_those_of_the_rules(op):
    stored = [{k: v for k, v in row.items() if k not in MEASURED} for row in json.loads((CONFIGS / f"{op}.json").read_text())]
    assert stored == [row for target in ("sm_90a", "portable") for row in row_configs._rows(op, target)]
