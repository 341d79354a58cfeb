"""flash_attention against float64: shapes, masks, options, layouts, and the exact cases."""
import math
import sys

import pytest
import torch
from attention_reference import OPTIONS, assert_attention, assert_close, check_dense, exact, options, qkv
from ops_reference import DTYPES, normal

import tileops
from tileops.ops import _attention

INF = math.inf
SHAPES = [  # batch, Sq, Sk, H, Hk, D, Dv
    (2, 7, 7, 4, 4, 16, 16), (2, 5, 9, 4, 2, 8, 24), (1, 9, 5, 6, 1, 8, 8), (2, 1, 65, 4, 2, 64, 64),
    (1, 33, 130, 2, 2, 40, 40),
    (1, 130, 33, 2, 1, 72, 72), (1, 64, 64, 2, 2, 128, 128), (1, 20, 20, 2, 1, 192, 128), (1, 3, 3, 1, 1, 384, 384),
    (3, 2, 2, 3, 3, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_values(device, shape, name, dtype):
    q, k, v = qkv(*shape, dtype=dtype, device=device)
    check_dense(q, k, v, **options(name, shape[3], device))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 16, 0, 4, 2, 64), (2, 0, 16, 4, 2, 64), (0, 4, 4, 2, 2, 8), (1, 4, 4, 0, 0, 8)], ids=str)
def test_empty(device, shape, causal):  # B11, B35
    for dtype in DTYPES:
        tensors = [t.requires_grad_() for t in qkv(*shape, dtype=dtype, device=device)]
        for sinks in (None, torch.zeros(shape[3], device=device)):
            out, lse = tileops.flash_attention(*tensors, causal=causal, sinks=sinks)
            assert out.shape == (*shape[:2], shape[3], shape[5]) and out.dtype == dtype and not out.any()
            assert lse.shape == (shape[0], shape[3], shape[1]) and (lse == -INF).all()
            grads = torch.autograd.grad(out.sum() + lse.masked_fill(lse == -INF, 0).sum(), tensors)
            assert all(torch.equal(grad, torch.zeros_like(t)) for grad, t in zip(grads, tensors))


@pytest.mark.parametrize(("rows", "keys"), [(8, 4), (200, 72), (2048, 1024), (130, 1)])
def test_more_queries_than_keys(device, rows, keys):  # B01
    tensors = [t.requires_grad_() for t in qkv(1, rows, keys, 2, 2, 64, dtype=torch.bfloat16, device=device)]
    out, lse = tileops.flash_attention(*tensors, causal=True)
    assert not out[:, : rows - keys].any() and (lse[..., : rows - keys] == -INF).all()
    assert_attention(out[0].detach(), lse[0].detach(), *(t[0].detach() for t in tensors), causal=True)
    dq, dk, dv = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert not dq[:, : rows - keys].any() and dk.isfinite().all() and dv.isfinite().all() and dv.any()


@pytest.mark.parametrize("keys", [1, 17, 63, 64, 65, 100, 255, 257])
def test_equal_weights(device, keys):  # B31, B33
    for dtype, chosen in ((torch.float32, {}), (torch.bfloat16, {"scale": 0.3}), (torch.float16, {"softcap": 5.0})):
        q, k, v = qkv(1, 1, keys, 4, 2, 32, dtype=dtype, device=device)
        for causal in (False, True):
            out, lse = tileops.flash_attention(torch.zeros_like(q), k, v, causal=causal, **chosen)
            atol = 1e-4 if device == "cpu" and dtype != torch.float32 else 1e-6
            torch.testing.assert_close(lse, torch.full_like(lse, math.log(keys)), atol=atol, rtol=1e-6)
            mean = v.double().mean(1, keepdim=True).repeat_interleave(2, 2)
            assert_close(out, mean, 2 * torch.finfo(dtype).eps * v.double().abs().amax())


def test_window_counts_both_ends(device):  # B36
    q, v = torch.zeros(1, 8, 1, 8, device=device), torch.eye(8, device=device).view(1, 8, 1, 8)
    out, _ = tileops.flash_attention(q, normal(1, 8, 1, 8, device=device), v, causal=True, window_left=2)
    for i in range(8):
        seen = range(max(0, i - 2), i + 1)
        wanted = torch.tensor([1 / len(seen) if j in seen else 0.0 for j in range(8)], device=device)
        torch.testing.assert_close(out[0, i, 0], wanted)


def test_spellings_of_causal(device):  # B36
    q, k, v = qkv(1, 512, 512, 2, 2, 16, device=device)
    first = check_dense(q, k, v, causal=True)
    for left, right, causal in ((-1, 0, False), (511, 0, False), (512, 0, True), (4096, -1, True), (2**62, 2**62, True)):
        for found, wanted in zip(tileops.flash_attention(q, k, v, causal=causal, window_left=left, window_right=right), first):
            torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)


def test_cap_comes_before_the_mask(device):  # B38
    q, k, _ = qkv(1, 64, 64, 1, 1, 16, device=device)
    v = torch.full((1, 64, 1, 16), 1000.0, device=device)
    v[:, 0] = 1
    out, _ = tileops.flash_attention(q, k, v, causal=True, softcap=1.0)
    assert torch.equal(out[0, 0], torch.ones_like(out[0, 0]))


@pytest.mark.parametrize("dim", [40, 72])
def test_scale(device, dim):  # B40
    q, k, v = qkv(1, 6, 10, 2, 1, dim, device=device)
    for found, wanted in zip(check_dense(q, k, v), tileops.flash_attention(q, k, v, scale=dim**-0.5)):
        assert torch.equal(found, wanted)
    for scale in (-1.0, 1e-3, 10.0):
        check_dense(q, k, v, scale=scale)
    out, lse = tileops.flash_attention(q, k, v, scale=0.0)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand(1, 6, 2, dim), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(10)))


def test_sinks(device):
    """Of any dtype and stride; one of -inf is none; a huge one leaves nothing for the keys."""
    q, k, v = qkv(2, 5, 9, 4, 2, 16, device=device)
    for dtype in DTYPES:
        check_dense(q, k, v, sinks=normal(4, dtype=dtype, device=device, scale=3.0), causal=True)
        check_dense(q, k, v, sinks=normal(8, dtype=dtype, device=device)[::2], window_left=0, window_right=0)
    none = torch.full((4,), -INF, device=device)
    for found, wanted in zip(tileops.flash_attention(q, k, v, sinks=none), tileops.flash_attention(q, k, v)):
        torch.testing.assert_close(found, wanted)
    out, lse = tileops.flash_attention(q, k, v, sinks=torch.full((4,), 1e4, device=device))
    assert not out.any() and torch.equal(lse, torch.full_like(lse, 1e4))
    out, lse = tileops.flash_attention(q, k[:, :3], v[:, :3], sinks=torch.zeros(4, device=device), causal=True)
    assert not out[:, :2].any() and (lse[..., :2] == -INF).all() and (lse[..., 2:] > 0).all()


LAYOUTS = {
    "packed": lambda t: t.contiguous(),
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every second token": lambda t: torch.stack((t, t), 2).flatten(1, 2)[:, ::2],
    "half of a pair": lambda t: torch.cat((t, t), -1)[..., t.shape[-1] :],
    "no unit stride": lambda t: torch.stack((t, t), -1)[..., 0],
    "base + 1": lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape),
    "pitch + 1": lambda t: torch.nn.functional.pad(t, (0, 1))[..., :-1],
    "batch, repeated": lambda t: t[:1].expand(t.shape),
    "a token, repeated": lambda t: t[:, :1].expand(t.shape),
    "a head, repeated": lambda t: t[:, :, :1].expand(t.shape),
}


@pytest.mark.parametrize("name", ["full", "causal", "window"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, name):  # B22, B24
    tensors = qkv(2, 12, 12, 4, 2, 16, dtype=torch.bfloat16, device=device)
    others = [LAYOUTS[layout](t) for t in tensors]
    check_dense(*others, **options(name, 4))
    for which in ((0,), (1,), (2,)):
        mixed = [others[i] if i in which else t for i, t in enumerate(tensors)]
        found = tileops.flash_attention(*mixed, **options(name, 4))
        for ours, packed in zip(found, tileops.flash_attention(*(t.contiguous() for t in mixed), **options(name, 4))):
            torch.testing.assert_close(ours, packed, atol=2.0**-8, rtol=2.0**-8)


def test_inputs_are_left_alone(device):
    tensors = qkv(2, 12, 12, 4, 2, 16, device=device)
    kept = [t.clone() for t in tensors]
    for name in OPTIONS:
        tileops.flash_attention(*tensors, **options(name, 4, device))
    assert all(map(torch.equal, tensors, kept))


@pytest.mark.parametrize("name", ["full", "all", "band"])
def test_small_tiles_change_nothing(device, name, monkeypatch):
    """Tiles of rows and of the batch, which large inputs have, on small ones."""
    tensors = [t.requires_grad_() for t in qkv(3, 13, 17, 4, 2, 8, device=device)]
    chosen = options(name, 4, device)

    def run():
        out, lse = tileops.flash_attention(*tensors, **chosen)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.square().sum(), tensors)

    whole = run()
    monkeypatch.setattr(sys.modules["tileops.ops.flash_attention"], "sdpa", lambda *args: None)
    for scores in (1, 17 * 4 * 2, 17 * 4 * 16, 17 * 4 * 13 * 2, 2**25):
        monkeypatch.setattr(_attention, "SCORES", scores)
        for found, wanted in zip(run(), whole):
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("gpu_route_on_cpu")
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("name", OPTIONS)
def test_gpu_route(name, dtype, monkeypatch):
    """Products of half precision that sum in float32, with the weights rounded to the dtype of v."""
    monkeypatch.setattr(sys.modules["tileops.ops.flash_attention"], "sdpa", lambda *args: None)
    seen, product = set(), _attention.product

    def recorded(a, b):
        seen.update((a.dtype, b.dtype))
        return product(a, b)

    monkeypatch.setattr(_attention, "product", recorded)
    for shape in ((2, 5, 9, 4, 2, 8, 24), (1, 1, 40, 4, 1, 16, 16), (1, 12, 7, 2, 2, 64, 64)):
        chosen = options(name, shape[3], dtype=dtype)
        tensors = [t.requires_grad_() for t in qkv(*shape, dtype=dtype)]
        out, lse = check_dense(*(t.detach() for t in tensors), **chosen)
        out, lse = tileops.flash_attention(*tensors, **chosen)
        grads = torch.autograd.grad(out.float().sum() + lse.masked_fill(lse == -INF, 0).sum(), tensors)
        wide = [t.detach().double().requires_grad_() for t in tensors]
        loss = 0
        for b in range(shape[0]):
            out, lse = exact(*(t[b] for t in wide), **chosen)
            loss = loss + out.sum() + lse.masked_fill(lse == -INF, 0).sum()
        for found, wanted in zip(grads, torch.autograd.grad(loss, wide)):
            atol = 8 * torch.finfo(dtype).eps * wanted.abs().amax().item() + 1e-5
            torch.testing.assert_close(found.double(), wanted, atol=atol, rtol=0)
    assert seen == {dtype}


@pytest.mark.parametrize("name", ["causal", "window", "all"])
def test_16k_tokens(device, name):
    """Sq * Sk scores of all heads would be 2 GiB in float32; the check is on rows at both ends and in the middle."""
    tokens = 16384
    q, k, v = qkv(1, tokens, tokens, 2, 1, 16, dtype=torch.bfloat16, device=device)
    chosen = options(name, 2, device)
    out, lse = tileops.flash_attention(q, k, v, **chosen)
    for stop in (3, tokens // 2, tokens):
        rows = slice(stop - 3, stop)
        assert_attention(out[0, rows], lse[0, :, rows], q[0, rows], k[0, :stop], v[0, :stop], **chosen)


def test_no_more_scores_than_a_tile(device, monkeypatch):
    """What products yield is counted: of all scores of a row of queries, as many rows as go into a tile."""
    largest, product = 0, _attention.product

    def counted(a, b):
        nonlocal largest
        largest = max(largest, a.shape[:-1].numel() * b.shape[-1])
        return product(a, b)

    monkeypatch.setattr(_attention, "product", counted)
    monkeypatch.setattr(_attention, "SCORES", 2**13)
    tensors = [t.requires_grad_() for t in qkv(2, 64, 64, 8, 2, 4, device=device)]
    for causal in (False, True):
        out, _ = tileops.flash_attention(*tensors, causal=causal, softcap=1.0)
        out.sum().backward()
    assert 2**12 <= largest <= 2**13


def test_nan_and_infinity_stay_in_their_rows(device):
    q, k, v = qkv(2, 8, 8, 2, 2, 16, device=device)
    q[0, 3, 1] = math.nan
    v[1, 7] = math.nan
    torchs = torch.nn.functional.scaled_dot_product_attention(*(t[:1].transpose(1, 2) for t in (q, k, v)), is_causal=True)
    lost = device == "cpu" and not torchs.isnan().any()  # on some processors by PyTorch's own attention, which serves the CPU
    for chosen in ({"causal": True}, {"causal": True, "softcap": 3.0}):
        out, lse = tileops.flash_attention(q, k, v, **chosen)
        bad = torch.isnan(out).any(-1)
        kept = "softcap" in chosen or not lost
        assert bad[0].nonzero().tolist() == [[3, 1]] * kept and bad[1, 7].all()
        assert torch.isnan(lse).nonzero().tolist() == [[0, 1, 3]] * kept


def test_the_rule_can_fail():
    q, k, v = qkv(1, 20, 20, 2, 2, 32, dtype=torch.bfloat16)
    out, lse = exact(q[0], k[0], v[0], causal=True)
    assert_attention(out.bfloat16(), lse.float(), q[0], k[0], v[0], causal=True)
    for wrong in (
        lambda: (out.bfloat16(), lse.float() / math.log(2)),
        lambda: ((out * 1.02).bfloat16(), lse.float()),
        lambda: tuple(t[0] for t in tileops.flash_attention(q, k, v)),
        lambda: tuple(t[0] for t in tileops.flash_attention(q, k, v, causal=True, window_left=18)),
        lambda: tuple(t[0] for t in tileops.flash_attention(q, k, v, causal=True, scale=33**-0.5)),
    ):
        with pytest.raises(AssertionError, match="elements are off"):
            assert_attention(*wrong(), q[0], k[0], v[0], causal=True)
