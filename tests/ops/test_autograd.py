"""Gradients against float64 autograd of the reference; only what is wanted is computed, and nothing is overwritten."""
import functools
import itertools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from ops_reference import DTYPES, EAGER, EXACT, normal, operands

import tileops

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compilers

OPS = ("softmax", "rms_norm", "rms_norm_silu")
NORMS = OPS[1:]
ALL = (*OPS, "gemm")


def gradients(run, x, weight, dy, **options):
    leaves = [t.clone().requires_grad_() for t in (x, weight) if t is not None]
    return torch.autograd.grad(run(*leaves, **options), leaves, dy)


def assert_gradients(op, x, weight, **options):
    """Per tensor: at most twice the error of eager autograd in the same dtype, plus a floor of a few roundings."""
    run, exact_run, eager_run = getattr(tileops, op), EXACT[op], EAGER[op]
    dtype = options.get("dtype") or x.dtype
    dy = normal(*x.shape, dtype=dtype, device=x.device, seed=9)
    ours = gradients(run, x, weight, dy, **options)
    exact = gradients(exact_run, x.double(), None if weight is None else weight.double(), dy.double(), **options)
    eager = gradients(eager_run, x, weight, dy, **options)
    for tensor, found, wanted, theirs in zip((x, weight), ours, exact, eager):
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        worst = (theirs.double() - wanted).abs().amax()
        floor = (torch.finfo(tensor.dtype).eps / 2 + 2.0**-18) * wanted.abs().amax()
        assert (found.double() - wanted).abs().amax() <= 2 * worst + floor


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax(route, dtype):
    for shape, dim in (((7, 33), -1), ((5, 7, 9), 1), ((64, 3), 0), ((5,), 0)):
        assert_gradients("softmax", normal(*shape, dtype=dtype, device=route.device), None, dim=dim)


def test_softmax_of_another_dtype(route):
    x = normal(6, 40, dtype=torch.bfloat16, device=route.device)
    y = tileops.softmax(x.requires_grad_(), dtype=torch.float32)
    y.square().sum().backward()
    assert y.dtype == torch.float32 and x.grad.dtype == torch.bfloat16
    wide = x.detach().double().requires_grad_()
    torch.softmax(wide, -1).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", NORMS)
def test_norms(route, op, dtype):
    for (shape, dim), weighted, eps in itertools.product(
        (((7, 33), -1), ((5, 7, 9), 1), ((64, 3), 0), ((5,), 0)), (False, True), (1e-6, 0.1, None)
    ):
        x = normal(*shape, dtype=dtype, device=route.device)
        weight = normal(shape[dim], dtype=dtype, device=route.device, seed=1) if weighted else None
        assert_gradients(op, x, weight, eps=eps, dim=dim)


def test_norm_options(route):
    x, weight = normal(7, 48, device=route.device), normal(48, device=route.device, seed=1)
    assert_gradients("rms_norm", x, weight, weight_offset=1.0)
    assert_gradients("rms_norm", x, weight, round_before_weight=True)  # float32: the rounding changes nothing
    half = x.bfloat16()
    weight.requires_grad_()
    tileops.rms_norm(half, weight, round_before_weight=True).sum().backward()
    x_hat = tileops.rms_norm(half).double()  # what the weight multiplies, rounded
    torch.testing.assert_close(weight.grad.double(), x_hat.sum(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_gradgradcheck_like(op):
    """Second derivatives, against those of the float64 reference."""
    leaves = [normal(4, 6, seed=3)] + ([normal(6, seed=4)] if op in NORMS else [])

    def second(run, dtype):
        inputs = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        first = torch.autograd.grad(run(*inputs).pow(3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)

    for found, wanted in zip(second(getattr(tileops, op), torch.float32), second(EXACT[op], torch.float64)):
        torch.testing.assert_close(found.double(), wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("op", NORMS)
def test_zero_row(route, op):  # B07 a
    for eps in (1e-12, 1e-6):
        x = torch.zeros(3, 64, dtype=torch.bfloat16, device=route.device, requires_grad=True)
        weight = normal(64, device=route.device)
        dy = normal(3, 64, device=route.device, seed=2, scale=1e-3).bfloat16()
        (dx,) = torch.autograd.grad(getattr(tileops, op)(x, weight, eps), x, dy)
        slope = 0.5 if op == "rms_norm_silu" else 1.0  # silu'(0)
        torch.testing.assert_close(dx.double(), slope * weight.double() * dy.double() / eps**0.5, rtol=2**-8, atol=0)


@pytest.mark.parametrize(("weight_dtype", "allowed"), [(torch.float32, [40000]), (torch.bfloat16, [39936, 40192])])
def test_weight_gradient_is_summed_in_float32(device, weight_dtype, allowed):  # B09
    x = torch.ones(40000, 128, dtype=torch.bfloat16, device=device)
    weight = torch.ones(128, dtype=weight_dtype, device=device, requires_grad=True)
    tileops.rms_norm(x, weight, 1e-6).backward(torch.ones_like(x))
    assert weight.grad.dtype == weight_dtype
    assert all(min(abs(g - a) for a in allowed) <= 0.1 for g in weight.grad.tolist())


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("op", NORMS)
def test_only_what_is_wanted(device, op, wanted):  # B42
    tensors = [normal(3, 8, device=device).requires_grad_(wanted[0]), normal(8, device=device).requires_grad_(wanted[1])]
    y = getattr(tileops, op)(*tensors)
    assert y.requires_grad == any(wanted)
    if any(wanted):
        y.sum().backward()
    for tensor, is_wanted in zip(tensors, wanted):
        assert (tensor.grad is not None) == is_wanted
    with torch.no_grad():
        assert not getattr(tileops, op)(*tensors).requires_grad


@pytest.mark.parametrize("op", ALL)
def test_raw_operator_has_no_gradient_and_says_so(device, op):  # B42
    x = normal(3, 8, device=device).requires_grad_()
    y = getattr(torch.ops.tileops, op)(*operands(op, x))
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        y.sum().backward()
    assert x.grad is None, "on no device: the CPU must not differ from the GPU"


@pytest.mark.parametrize("op", ALL)
def test_nothing_is_overwritten(device, op):  # B44
    x = normal(5, 16, device=device).requires_grad_()
    weights = [t.requires_grad_() for t in operands(op, x)[1:]]
    weights += [normal(16, device=device, seed=1).requires_grad_()] if op in (*NORMS, "gemm") else []
    dy = normal(5, 16, device=device, seed=2)
    kept = [t.detach().clone() for t in (x, *weights, dy)]
    y = getattr(tileops, op)(x, *weights)
    value = y.detach().clone()
    first = torch.autograd.grad(y, (x, *weights), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, *weights), dy)
    for a, b in zip(first, second):
        assert torch.equal(a, b)
    for tensor, before in zip((x, *weights, dy, y), (*kept, value)):
        assert torch.equal(tensor, before)
    both = getattr(tileops, op)(x, *weights)
    (twice,) = torch.autograd.grad((both + both, both), x, (dy, dy))
    torch.testing.assert_close(twice, 3 * first[0])


@pytest.mark.parametrize("op", ALL)
def test_forward_mode_is_refused(op):
    x, *others = operands(op, normal(3, 8))
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda v: getattr(tileops, op)(v, *others), (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        getattr(tileops, op)(forward_ad.make_dual(x, x), *others)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("op", ALL)
def test_vmap_and_functional_gradients(device, op):
    x, *others = operands(op, normal(4, 5, 6, device=device))
    run = (lambda v: tileops.gemm(v, *others, activation="silu")) if op == "gemm" else getattr(tileops, op)
    torch.testing.assert_close(torch.vmap(run)(x), run(x))
    if op in OPS:
        torch.testing.assert_close(torch.vmap(functools.partial(run, dim=0), in_dims=1, out_dims=1)(x), run(x, dim=0))
    loss = lambda v: run(v).pow(2).sum()  # noqa: E731
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(x), leaf.grad)
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(x), leaf.grad)
