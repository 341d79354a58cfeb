"""benchmarks.attention_peers without a GPU: its problems, its error and its summary."""

import torch
import torch.nn.functional as F

from benchmarks import attention_peers as peers


def test_problems_are_those_of_long_prompts():
    assert len(set(peers.PROBLEMS)) == len(peers.PROBLEMS) >= 24
    assert {problem.dim for problem in peers.PROBLEMS} == {64, 128, 256}
    assert {problem.length for problem in peers.PROBLEMS} >= {512, 1024, 4096, 16384}
    assert peers.PROBLEMS[0].label == "b32 h32/32 s512 d64 full"
    problem = peers.Problem(4, 16, 16, 4096, 128, True)
    assert problem.flops == 4 * 4 * 16 * 4096 * 4096 * 128 / 2 and problem.label == "b4 h16/16 s4096 d128 causal"


def test_error_is_the_distance_from_float64():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 200, 4, 16, dtype=torch.float64) for _ in range(3))
    for causal in (False, True):
        heads = (t.transpose(1, 2) for t in (q, k, v))
        exact = F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)
        assert peers.error(exact, q, k, v, causal) < 1e-12
        assert abs(peers.error(exact * 1.01, q, k, v, causal) - 0.01) < 1e-9


def test_summary_names_the_mean_and_the_least():
    row = {"workload": "one", "us": 1.0, "tflops": 2.0, "fastest": "fa4", "errors": {"tileops": 1e-3, "fa4": 2e-3}}
    rows = [row | {"ratios": {"fa4": 0.5}}, row | {"workload": "two", "ratios": {"fa4": 2.0}}]
    assert peers.summary(rows).splitlines()[-1] == "against the fastest: geometric mean 1.000, least 0.500, 2 rows"
