"""Results against float64, over dtypes, row lengths, dims and options."""
import itertools

import pytest
import torch
from ops_reference import DTYPES, check, exact_rms_norm, has_gpu, normal

import tileops

OPS = ("softmax", "rms_norm", "rms_norm_silu")
AROUND_POWERS = sorted({2**k + d for k in range(1, 18) for d in (-1, 0, 1)} | {769, 1400, 50257, 262144})  # B26
SHORT = range(1, 301) if has_gpu() else (*range(1, 20), 31, 33, 63, 65, 100, 127, 129, 200, 255, 257, 300)
FEWER = [511, 512, 513, 769, 1400, 4095, 4096, 4097, 50257, 131071, 131073]
LONG = [n for n in AROUND_POWERS if n > 300] if has_gpu() else FEWER


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_short_rows(route, op, dtype):
    for cols in SHORT:
        x = normal(7, cols, dtype=dtype, device=route.device, seed=cols)
        weights = () if op == "softmax" else (normal(cols, device=route.device, dtype=dtype),)
        check(op, x, *weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", LONG)
@pytest.mark.parametrize("op", OPS)
def test_long_rows(route, op, cols, dtype):
    x = normal(7 if cols < 20000 else 3, cols, dtype=dtype, device=route.device)
    weights = () if op == "softmax" else (normal(cols, device=route.device, dtype=dtype),)
    check(op, x, *weights)


@pytest.mark.parametrize("op", OPS)
def test_one_row_of_262144(route, op):
    check(op, normal(1, 262144, dtype=torch.bfloat16, device=route.device))


@pytest.mark.parametrize("op", OPS)
def test_more_rows_than_a_grid_is_high(route, op):
    x = normal(70000, 3, 4, dtype=torch.bfloat16, device=route.device)
    for dim in (1, 2):
        check(op, x, dim=dim)


SHAPES = [(), (1,), (5,), (3, 1), (1, 1, 1), (33, 64), (5, 7, 33), (2, 3, 4, 5), (4097, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_shapes_and_dims(route, op, shape):
    for dtype, dim in itertools.product(DTYPES, range(-max(len(shape), 1), max(len(shape), 1))):
        x = normal(*shape, dtype=dtype, device=route.device)
        check(op, x, dim=dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("result", DTYPES)
def test_softmax_result_dtype(route, dtype, result):
    x = normal(9, 300, dtype=dtype, device=route.device, scale=4)
    check("softmax", x, dtype=result)
    check("softmax", x, 0, dtype=result)


def test_softmax_takes_x_as_it_is(route):
    """torch.softmax(x, dtype=float16) rounds x first, which loses the difference of these two."""
    x = torch.tensor([[4096.0, 4097.0]], device=route.device)
    ours = tileops.softmax(x, dtype=torch.float16)
    assert torch.equal(ours, torch.softmax(x, -1).half())
    assert not torch.equal(ours, torch.softmax(x, -1, dtype=torch.float16))


@pytest.mark.parametrize("cols", [3, 100, 1000, 4096, 50000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_infinities(route, dtype, cols):  # B05
    inf = float("inf")
    x = normal(5, cols, dtype=dtype, device=route.device)
    x[0], x[1], x[1, -1], x[2, 1], x[3, 2 % cols] = -inf, -inf, 0, inf, float("nan")
    y = tileops.softmax(x)
    assert y[[0, 2, 3]].isnan().all()
    assert torch.equal(y[1], torch.nn.functional.one_hot(torch.tensor(cols - 1), cols).to(y))
    assert torch.equal(y[4], tileops.softmax(x[4:])[0])
    assert torch.equal(y.isnan(), torch.softmax(x, -1).isnan())


def test_softmax_of_equal_elements_is_exact(route):
    for value, cols in itertools.product((0.0, -60000.0, 60000.0), (1, 2, 64, 1024, 32768)):
        x = torch.full((3, cols), value, device=route.device, dtype=torch.float16)
        assert torch.equal(tileops.softmax(x, dtype=torch.float32), torch.full((3, cols), 1 / cols, device=route.device))


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS[1:])
def test_weight_dtypes_and_roundings(route, op, dtype, weight_dtype):
    for cols, rounded, eps in itertools.product((64, 257, 4096), (False, True), (1e-6, 1e-2, None)):
        x = normal(5, cols, dtype=dtype, device=route.device)
        weight = normal(cols, dtype=weight_dtype, device=route.device, seed=1)
        check(op, x, weight, eps, round_before_weight=rounded)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_offset(route, dtype, rounded):
    x, weight = normal(5, 320, dtype=dtype, device=route.device), normal(320, device=route.device, seed=1, scale=0.1)
    check("rms_norm", x, weight, weight_offset=1.0, round_before_weight=rounded)
    without = tileops.rms_norm(x, weight_offset=1.0, round_before_weight=rounded)
    assert torch.equal(without, tileops.rms_norm(x, round_before_weight=rounded)), "no weight: no offset"


def test_rounding_order_is_that_of_llama(route):
    """With bfloat16, rounding before the weight changes about a fifth of the elements; both orders must be what they say."""
    x = normal(64, 1024, dtype=torch.bfloat16, device=route.device)
    weight = normal(1024, dtype=torch.bfloat16, device=route.device, seed=1)
    x_hat = exact_rms_norm(x).to(torch.bfloat16)
    llama = (x_hat.double() * weight.double()).to(torch.bfloat16)
    once = exact_rms_norm(x, weight).to(torch.bfloat16)
    assert (llama != once).double().mean() > 0.05
    # float32 and float64 round a quotient differently only where it lies on a tie
    assert (tileops.rms_norm(x, weight, round_before_weight=True) == llama).double().mean() > 0.999
    assert (tileops.rms_norm(x, weight) == once).double().mean() > 0.999


@pytest.mark.parametrize("op", OPS[1:])
def test_half_squares_do_not_overflow(route, op):  # B06
    x = torch.full((3, 4096), 300.0, dtype=torch.float16, device=route.device)
    x[1] = -60000
    x[2], x[2, 5] = 0, 65504
    expected = torch.full((3, 4096), 1.0, dtype=torch.float64, device=route.device)
    expected[1] = -1
    expected[2], expected[2, 5] = 0, 64
    if op == "rms_norm_silu":
        expected = expected * torch.sigmoid(expected)
    ones = torch.ones(4096, dtype=torch.float16, device=route.device)
    assert torch.equal(getattr(tileops, op)(x, ones), expected.half())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS[1:])
def test_epsilon(route, op, dtype):  # B07
    run = getattr(tileops, op)
    x = normal(3, 256, dtype=dtype, device=route.device)
    x[1] = 0
    for eps in (1e-12, 1e-6):
        assert torch.equal(run(x, None, eps)[1], torch.zeros_like(x[1]))
    y = run(x, None, 0.0)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()
    spike = torch.full((2, 4096), 1e-3, dtype=dtype, device=route.device)
    spike[:, 7] = 1e4
    check(op, spike, None, 1e-6)
    check(op, torch.full((2, 512), 1e-3, dtype=dtype, device=route.device), None, None)


def test_eps_none_is_that_of_float32(route):  # B07 c: the epsilon of bfloat16 would give 0.011
    x = torch.full((2, 512), 1e-3, dtype=torch.bfloat16, device=route.device)
    assert abs(tileops.rms_norm(x, eps=None).float().mean().item() - 0.945) < 0.005


def test_weight_is_applied_once(route):  # B65
    x, weight = normal(4, 128, device=route.device), torch.full((128,), 3.0, device=route.device)
    torch.testing.assert_close(tileops.rms_norm(x, weight), 3 * tileops.rms_norm(x))


@pytest.mark.parametrize("op", OPS)
def test_repeats_are_bitwise_equal(route, op):
    x = normal(300, 4097, dtype=torch.bfloat16, device=route.device)
    first = getattr(tileops, op)(x)
    for _ in range(50 if route.device == "cuda" else 3):
        assert torch.equal(getattr(tileops, op)(x), first)


@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_depend_on_its_batch(route, op):
    x = normal(257, 1000, dtype=torch.float16, device=route.device)
    assert torch.equal(getattr(tileops, op)(x)[128], getattr(tileops, op)(x[128:129])[0])
