"""benchmarks.attention without a GPU: its problems, its error, and the configuration that it writes."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import attention
from build_backend.measured import MeasuredAttention
from tileops_dsl import configs
from tileops_dsl.kernels import configs_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

from attention_reference import exact as exact_attention


def test_every_kernel_has_problems():
    rows = [row for row in configs_of("flash_attention") if not row.lengths and row.target == "sm_90a"]
    problems = list(attention.problems())
    assert {name for problem in problems for name in attention.kernels(problem, rows)} == {row.name for row in rows}
    assert len(set(problems)) == len(problems)
    found = [tuple(problem) for problem in problems if "b4 h16 s1024 d64 bf16 causal" in problem.label]
    assert found[0] == ("bfloat16", 64, True, 4, 1024, 0, 0, False, 0.0)
    assert found[1:] == [("bfloat16", 64, True, 4, 1024, 64, *rest, 0.0) for rest in ((128, True), (0, True))]
    assert {p.dims for p in problems if "d192" in p.label or "sinks" in p.label} == {(64, 64), (192, 192), (192, 128)}
    assert next(p.label for p in problems if "s16384 d192/" in p.label) == "b1 h16 s16384 d192/128 bf16 causal"


def test_the_kernels_with_the_fewest_columns_are_timed():
    rows = configs_of("flash_attention")
    for dim, tile in ((30, 32), (40, 64), (72, 96), (96, 96), (104, 128), (188, 192), (252, 256)):
        problem = attention.Problem("bfloat16", dim, False, 4, 1024)
        found = attention.kernels(problem, rows).values()
        assert {(row.tile[2], row.head_dim_v) for row in found} == {(tile, tile)}
        for row in found:
            at = attention.measurement("GPU", problem, row, 1.234, 5.678)
            assert (at.us, at.baseline_us, at.head_dim, at.head_dim_v) == (1.23, 5.68, *[dim * (dim != tile)] * 2)
    (row,) = attention.kernels(attention.Problem("float16", 192, False, 4, 1024, 128), rows).values()
    assert (row.tile[2], row.head_dim_v, row.causal) == (192, 192, False)
    (row,) = attention.kernels(attention.Problem("bfloat16", 192, True, 4, 1024, 128), rows).values()
    assert (row.tile[2], row.head_dim_v, row.causal) == (192, 128, True)


def test_scores_of_a_query():
    plain = attention.Problem("bfloat16", 64, True, 1, 1024)
    for problem in (plain, plain._replace(causal=False), plain._replace(window=128), plain._replace(window=1000)):
        options = problem.options("cpu")
        row, key = torch.arange(1024)[:, None], torch.arange(1024)
        seen = (key <= row) | (not problem.causal)
        seen &= (key >= row - options["window_left"]) if problem.window else True
        assert abs(seen.sum().item() / 1024 - attention.scores(problem)) < 1


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
    options = {"causal": True, "window_left": 30, "softcap": 1.5, "sinks": torch.linspace(-1, 3, 3)}
    exact = torch.stack([exact_attention(*tensors, **options)[0] for tensors in zip(q, k, v)])
    assert attention.error(exact, q, k, v, **options) < 1e-12
    for name, value in (("window_left", 31), ("softcap", 1.0), ("sinks", None)):
        assert attention.error(exact, q, k, v, **options | {name: value}) > 1e-4


def test_the_configuration_keeps_what_was_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "CONFIGS", tmp_path)
    path, first = tmp_path / "flash_attention.json", MeasuredAttention("NVIDIA H200", 64, 4096, 4096, 900.5, 1200.25)
    row = {"target": "sm_90a", "x": "bfloat16", "y": "bfloat16", "tile": [128, 128, 64], "stages": 2, "causal": True}
    third = row | {"tile": [128, 112, 192], "causal": False, "options": ["window", "sinks"], "head_dim_v": 128}
    path.write_text(json.dumps([row, row | {"tile": [128, 128, 128]}, third]))
    windowed = MeasuredAttention("NVIDIA H200", 64, 4096, 4096, 90.5, 1200.25, 128)
    attention.write_configs(path, rows := configs_of("flash_attention"), {rows[1].name: [first], rows[2].name: [windowed]})
    narrow = replace(first, head_dim=40, head_dim_v=48)
    attention.write_configs(path, configs_of("flash_attention"), {rows[0].name: [first, narrow], rows[1].name: [narrow]})
    faster = replace(first, us=800.0)
    attention.write_configs(path, configs_of("flash_attention"), {rows[0].name: [faster]})
    again = configs_of("flash_attention")
    assert [row.measured for row in again] == [(faster, narrow), (first, narrow), (windowed,)]
    assert [row.name for row in again] == [row.name for row in rows]
