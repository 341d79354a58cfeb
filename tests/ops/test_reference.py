"""The rule itself must be able to fail."""
import pytest
import torch
from ops_reference import DTYPES, assert_as_good_as_eager, assert_rounded_once, eager_softmax, exact_softmax, normal


@pytest.fixture(params=DTYPES)
def case(request):
    x = normal(6, 500, dtype=request.param)
    return exact_softmax(x), eager_softmax(x)


def test_eager_passes(case):
    exact, eager = case
    assert_rounded_once(eager, exact, 500)
    assert_as_good_as_eager(eager, exact, eager, 500)


def off_by(y, units):
    wrong = y.clone()
    integers = wrong.view(torch.int32 if y.dtype == torch.float32 else torch.int16)
    integers[3, 77] += units
    return wrong


def test_one_element_off_is_caught(case):
    exact, eager = case
    with pytest.raises(AssertionError, match=r"1 of 3000 elements are off; the first, \[3, 77\]"):
        assert_rounded_once(off_by(eager, 2 if eager.dtype != torch.float32 else 200), exact, 500)
    with pytest.raises(AssertionError, match="elements are off"):
        wrong = eager.clone()
        wrong[3, 77] *= 1.5
        assert_as_good_as_eager(wrong, exact, eager, 500)


def test_nan_and_zero_are_caught(case):
    exact, eager = case
    for value in (float("nan"), float("inf"), 0.0):
        wrong = eager.clone()
        wrong[5, 499] = value
        with pytest.raises(AssertionError, match="elements are off"):
            assert_rounded_once(wrong, exact, 500)


def test_two_roundings_are_caught():
    x = normal(64, 100)
    exact = exact_softmax(x)
    twice = torch.softmax(x, -1).bfloat16().half()
    with pytest.raises(AssertionError, match="elements are off"):
        assert_rounded_once(twice, exact, 100)
