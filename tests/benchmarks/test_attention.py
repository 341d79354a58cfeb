"""benchmarks.attention without a GPU: its problems, its error, and the configuration that it writes."""

import json

import torch

from benchmarks import attention
from build_backend.measured import MeasuredAttention
from tileops_dsl import configs


def test_every_kernel_has_problems():
    kinds = {(dtype, dim, causal) for dtype, dim, causal, _, _ in attention.problems("")}
    assert kinds == {(row.x, row.tile[2], row.causal) for row in configs.load("flash_attention")}
    assert list(attention.problems("b4 h16 s1024 d64 bf16 causal")) == [("bfloat16", 64, True, 4, 1024)]


def test_error_is_that_of_the_rows_compared():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 200, 3, 16, dtype=torch.float64) for _ in range(3))
    for causal in (False, True):
        exact = attention.F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal).transpose(
            1, 2
        )
        assert attention.error(exact, q, k, v, causal) < 1e-12
        assert attention.error(exact + 0.1, q, k, v, causal) > 0.01
    assert attention.error(exact, q, k, v, False) > 0.01


def test_the_configuration_keeps_what_was_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "CONFIGS", tmp_path)
    path, first = tmp_path / "flash_attention.json", MeasuredAttention("NVIDIA H200", 64, 4096, 4096, 900.5, 1200.25)
    row = {"target": "sm_90a", "x": "bfloat16", "y": "bfloat16", "tile": [128, 128, 64], "stages": 2, "causal": True}
    path.write_text(json.dumps([row, row | {"tile": [128, 128, 128]}]))
    attention.write_configs(path, rows := configs.load("flash_attention"), {rows[1].name: [first]})
    attention.write_configs(path, configs.load("flash_attention"), {rows[0].name: [first, first]})
    again = configs.load("flash_attention")
    assert [row.measured for row in again] == [(first, first), (first,)]
    assert [row.name for row in again] == [row.name for row in rows]
