"""merge_attention against float64: empty sides, layouts, gradients, and attention over halves of the keys."""
import itertools

import pytest
import torch
from attention_reference import check_dense, qkv
from ops_reference import DTYPES, half_unit, normal

import tileops

INF = float("inf")
SHAPES = [(2, 5, 3, 8), (7, 3, 16), (1, 1, 1, 1), (3, 130, 2, 64)]


def exact(out_a, lse_a, out_b, lse_b):
    out_a, lse_a, out_b, lse_b = (t.double() for t in (out_a, lse_a, out_b, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    safe = lse.masked_fill(lse == -INF, 0.0)
    shares = [torch.exp(side - safe).mT.unsqueeze(-1) for side in (lse_a, lse_b)]
    return torch.where(shares[0] == 0, 0.0, out_a * shares[0]) + torch.where(shares[1] == 0, 0.0, out_b * shares[1]), lse


def sides(shape, dtype, device, empty=True):
    """Two sides, with rows that are empty on one side (where `out` is poison), on the other and on both."""
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    out_a, out_b = (normal(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    lse_a, lse_b = (3 * normal(*lse_shape, device=device, seed=seed) for seed in (3, 4))
    if empty:
        lse_a[..., 0::4] = -INF
        lse_b[..., 1::4] = -INF
        lse_a[..., 2::8] = lse_b[..., 2::8] = -INF
        out_a[lse_a.mT == -INF] = float("nan")
        out_b[lse_b.mT == -INF] = float("nan")
    return out_a, lse_a, out_b, lse_b


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(device, shape, dtype):
    args = sides(shape, dtype, device)
    out, lse = tileops.merge_attention(*args)
    assert out.dtype == dtype and lse.dtype == torch.float32 and out.is_contiguous() and lse.is_contiguous()
    wanted, wanted_lse = exact(*args)
    assert ((out.double() - wanted).abs() <= half_unit(wanted, dtype) + 2.0**-20 * 4).all()
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-6, rtol=1e-6)
    both = ((args[1] == -INF) & (args[3] == -INF)).mT
    assert not out[both].any() and (lse.mT[both] == -INF).all()


def test_an_empty_side_changes_nothing(device):  # B35
    for dtype in DTYPES:
        out_a, lse_a, *_ = sides((2, 9, 3, 8), dtype, device, empty=False)
        nothing = torch.full_like(lse_a, -INF), torch.full_like(out_a, float("nan"))
        for args in ((out_a, lse_a, nothing[1], nothing[0]), (nothing[1], nothing[0], out_a, lse_a)):
            out, lse = tileops.merge_attention(*args)
            assert torch.equal(out, out_a) and torch.equal(lse, lse_a)
        out, lse = tileops.merge_attention(nothing[1], nothing[0], nothing[1], nothing[0])
        assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, nothing[0])


def test_far_apart_and_large(device):
    out_a, lse_a, out_b, lse_b = sides((1, 4, 2, 8), torch.float32, device, empty=False)
    for shift_a, shift_b in ((1e4, 1e4), (-1e4, -1e4), (1e4, -1e4), (3e38, 0), (0, -3e38)):
        args = out_a, lse_a + shift_a, out_b, lse_b + shift_b
        out, lse = tileops.merge_attention(*args)
        wanted, wanted_lse = exact(*args)
        torch.testing.assert_close(out.double(), wanted, atol=2e-3 if shift_a == shift_b else 1e-6, rtol=1e-6)
        torch.testing.assert_close(lse.double(), wanted_lse, atol=0, rtol=1e-6)


@pytest.mark.parametrize("split", [0, 1, 16, 37, 40])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0, "scale": 0.3}], ids=str)
def test_halves_of_the_keys_make_the_whole(device, options, split):  # B33
    q, k, v = qkv(2, 40, 40, 4, 2, 16, device=device)
    whole = check_dense(q, k, v, **options)
    first = options
    if options.get("causal"):  # a causal mask over the first keys only is a right window
        first = {"window_right": 40 - split} if split < 40 else options
    a = tileops.flash_attention(q, k[:, :split], v[:, :split], **first)
    b = tileops.flash_attention(q, k[:, split:], v[:, split:], **options)
    out, lse = tileops.merge_attention(*a, *b)
    torch.testing.assert_close(out, whole[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, whole[1], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_out(device, dtype):
    args = sides((2, 5, 3, 8), dtype, device)
    expected = tileops.merge_attention(*args)
    strided = [t.movedim(1, -1).contiguous().movedim(-1, 1) for t in args]
    for found in (tileops.merge_attention(*strided), tileops.merge_attention(*(torch.stack((t, t), -1)[..., 0] for t in args))):
        assert all(map(torch.equal, found, expected))
    out, lse = torch.empty(2, 3, 5, 8, dtype=dtype, device=device).transpose(1, 2), torch.empty(2, 5, 3, device=device).mT
    for given in ({"out": out}, {"lse": lse}, {"out": out, "lse": lse}):
        out.fill_(7), lse.fill_(7)
        results = tileops.merge_attention(*args, **given)
        assert results[0] is given.get("out", results[0]) and results[1] is given.get("lse", results[1])
        assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("shape", [(0, 5, 3, 8), (2, 0, 3, 8), (0, 3, 8), (4, 0, 8)], ids=str)
def test_empty(device, shape):
    args = [t.requires_grad_() for t in sides(shape, torch.bfloat16, device, empty=False)]
    out, lse = tileops.merge_attention(*args)
    assert out.shape == args[0].shape and lse.shape == args[1].shape
    (out.sum() + lse.sum()).backward()
    assert all(t.grad.shape == t.shape for t in args)


def gradients(run, tensors, dout, dlse, **graph):
    out, lse = run(*tensors)
    finite = lse.masked_fill(lse == -INF, 0.0)
    return torch.autograd.grad((out * dout).sum() + (finite * dlse).sum(), tensors, **graph)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_gradients(device, shape, dtype):
    args = sides(shape, dtype, device, empty=False)
    args[1][..., 0] = args[3][..., 1] = args[1][..., 2] = args[3][..., 2] = -INF
    dout, dlse = normal(*shape, dtype=dtype, device=device, seed=8), normal(*args[1].shape, device=device, seed=9)
    leaves = [t.clone().requires_grad_() for t in args]
    wide = [t.double().requires_grad_() for t in args]
    found = gradients(tileops.merge_attention, leaves, dout, dlse)
    for leaf, ours, wanted in zip(leaves, found, gradients(exact, wide, dout.double(), dlse.double())):
        assert ours.dtype == leaf.dtype
        wanted = torch.nan_to_num(wanted)  # autograd of logaddexp is NaN where both sides are -inf
        torch.testing.assert_close(ours.double(), wanted, atol=2e-5, rtol=torch.finfo(leaf.dtype).eps)


def test_second_derivatives():
    args = sides((2, 4, 3, 5), torch.float32, "cpu", empty=False)
    dout, dlse = normal(2, 4, 3, 5, seed=8), normal(2, 3, 4, seed=9)

    def second(run, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in args]
        first = gradients(run, leaves, dout.to(dtype), dlse.to(dtype), create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)

    for found, wanted in zip(second(tileops.merge_attention, torch.float32), second(exact, torch.float64)):
        torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)


def test_only_what_is_wanted(device):  # B42
    for wanted in itertools.product((True, False), repeat=4):
        tensors = [t.requires_grad_(want) for t, want in zip(sides((3, 2, 4), torch.float32, device, empty=False), wanted)]
        out, lse = tileops.merge_attention(*tensors)
        assert out.requires_grad == lse.requires_grad == any(wanted)
        if any(wanted):
            (out.sum() + lse.sum()).backward()
        assert [t.grad is not None for t in tensors] == list(wanted)
