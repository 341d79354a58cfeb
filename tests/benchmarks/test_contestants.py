"""The contestants compute what they claim, and a wrong one is noticed. On the CPU, at small shapes."""

import pytest
import torch

from benchmarks import contestants
from benchmarks.contestants import BenchmarkError, Refused
from benchmarks.workloads import GemmWorkload, Workload
from tileops.demo import error

SMALL = [
    Workload("softmax", "rows", (12, 200), "bfloat16", -1, "none", "here"),
    Workload("softmax", "float32", (3, 1000), "float32", -1, "none", "here"),
    Workload("softmax", "dim 1", (2, 30, 4, 5), "float16", 1, "none", "here"),
    Workload("rms_norm", "rows", (12, 256), "bfloat16", -1, "same", "here"),
    Workload("rms_norm", "no weight", (2, 3, 64), "float16", -1, "none", "here"),
    Workload("rms_norm", "dim 1", (2, 24, 3, 5), "bfloat16", 1, "same", "here"),
    Workload("rms_norm_silu", "rows", (50, 96), "bfloat16", -1, "same", "here"),
    Workload("rms_norm_silu", "float32 weight", (50, 96), "bfloat16", -1, "float32", "here"),
    Workload("rms_norm_silu", "dim 1", (1, 24, 2, 3, 5), "bfloat16", 1, "same", "here"),
]

PRODUCTS = [
    GemmWorkload("gemm", "linear layer", (6, 40, 24), "bfloat16", "here", epilogue="bias+gelu_tanh+residual"),
    GemmWorkload("gemm", "float32 result", (6, 40, 24), "bfloat16", "here", layout="tn", out="float32"),
    GemmWorkload("gemm", "batch", (3, 6, 40, 24), "float16", "here", layout="tt", epilogue="silu"),
    GemmWorkload("gemm", "nn", (1, 40, 24), "float16", "here", layout="nn", epilogue="residual"),
]


@pytest.fixture(params=SMALL, ids=lambda w: f"{w.op}-{w.label}")
def workload(request):
    return request.param


MIXED = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of torch, once in a process


@MIXED
@pytest.mark.parametrize("name", ["eager", "formula", "tileops"])
def test_a_contestant_passes_its_own_check(workload, name):
    if name == "tileops":
        fn = contestants.ours(workload).fn
    else:
        fn = {"eager": contestants._eager, "formula": contestants._formula}[name](workload)
    sets = contestants.make_sets(workload, 3, "cpu")
    outputs = [fn(*sets[call % 3]) for call in range(5)]
    contestants.check(workload, name, contestants.worst_error(workload, sets, outputs))


@pytest.mark.parametrize("workload", PRODUCTS, ids=lambda w: w.label)
def test_a_product_passes_its_own_check_and_a_spoilt_one_does_not(workload):
    sets = contestants.make_sets(workload, 2, "cpu")
    transposed = {"n": lambda t: t.stride(-1) == 1, "t": lambda t: t.stride(-2) == 1}
    assert all(transposed[letter](tensor) for letter, tensor in zip(workload.layout, sets[0]))
    fn = contestants.ours(workload).fn
    with contestants.Contestant("eager", fn, (("force", "eager"),)).scope():
        outputs = [fn(*sets[call % 2]) for call in range(3)]
    assert outputs[0].dtype == getattr(torch, workload.result_dtype)
    found = contestants.worst_error(workload, sets, outputs)
    contestants.check(workload, "eager", found)
    if workload.result_dtype == workload.dtype:  # the CPU's mm has no out_dtype
        contestants.check(workload, "plain", contestants.worst_error(workload, sets, [contestants._eager(workload)(*sets[0])]))
    outputs[-1].view(-1)[-1] += 0.2 * outputs[-1].abs().max()
    with pytest.raises(BenchmarkError, match=r"mine is wrong by"):
        contestants.check(workload, "mine", contestants.worst_error(workload, sets, outputs), found)


@MIXED
def test_a_result_of_another_set_or_a_single_wrong_element_is_refused(workload):
    fn = contestants._eager(workload)
    sets = contestants.make_sets(workload, 2, "cpu")
    with pytest.raises(BenchmarkError, match=r"mine is wrong by .* it is not timed"):
        contestants.check(workload, "mine", contestants.worst_error(workload, sets, [fn(*sets[1]), fn(*sets[1])]))
    spoilt = fn(*sets[0]).contiguous()
    spoilt.view(-1)[-1] += 0.2
    with pytest.raises(BenchmarkError):
        contestants.check(workload, "mine", contestants.worst_error(workload, sets, [spoilt]))


def test_an_unwritten_element_is_refused(workload):
    sets = contestants.make_sets(workload, 1, "cpu")
    output = contestants._eager(workload)(*sets[0]).contiguous()
    output.view(-1)[0] = float("nan")
    found = contestants.worst_error(workload, sets, [output])
    assert found == float("inf")
    with pytest.raises(BenchmarkError):
        contestants.check(workload, "tileops", found, eager_error=0.004)
    assert error(workload.op, *sets[0], output[:1].new_empty(0), workload.dim) == float("inf"), "a wrong shape"


def test_ours_may_err_twice_as_much_as_eager_and_a_floor_and_no_more():
    workload = SMALL[0]
    floor = contestants.FLOOR[torch.bfloat16]
    contestants.check(workload, "tileops", 0.008 + floor, eager_error=0.004)
    with pytest.raises(BenchmarkError):
        contestants.check(workload, "tileops", 0.0081 + floor, eager_error=0.004)
    with pytest.raises(BenchmarkError):
        contestants.check(workload, "tileops", float("nan"), eager_error=0.004)


def test_input_sets_differ_and_repeat_with_the_seed():
    first, again = contestants.make_sets(SMALL[3], 2, "cpu"), contestants.make_sets(SMALL[3], 2, "cpu")
    assert not torch.equal(first[0][0], first[1][0])
    assert all(torch.equal(a, b) for one, two in zip(first, again) for a, b in zip(one, two))
    assert first[0][0].float().std() == pytest.approx(1, abs=0.1)


def test_the_formula_runs_where_plain_pytorch_has_no_single_kernel():
    names = {w.label: list(contestants.peers_of(w)) for w in SMALL if w.op == "rms_norm"}
    assert names["rows"] == ["eager", "inductor"]
    assert names["dim 1"] == ["eager", "inductor", "formula"]
    assert list(contestants.peers_of(SMALL[0], without=["inductor"])) == ["eager"]
    with pytest.raises(SystemExit, match="no peer 'cublas'"):
        contestants.peers_of(SMALL[0], ["cublas"])


def test_a_requested_peer_that_is_not_there_is_an_error_and_one_that_does_not_serve_says_so(monkeypatch):
    monkeypatch.setattr(contestants.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchmarkError, match="quack was asked for and is not importable"):
        contestants.peers_of(SMALL[0], ["quack"])["quack"](SMALL[0])
    monkeypatch.setattr(contestants.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(Refused, match="multiple of 8"):
        contestants.peers_of(SMALL[2], ["quack"])["quack"](SMALL[2])
