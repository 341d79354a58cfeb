"""mla_decode against float64: heads, query tokens, pages, lengths, and memory that no request owns."""
import math

import pytest
import torch
from attention_reference import assert_attention, paged
from ops_reference import DTYPES, normal

import tileops

BF16, INF, NAN = torch.bfloat16, math.inf, math.nan
SCALE = 192**-0.5
LENGTHS = [130, 0, 1, 64, 65]


def requests(lengths, page, dtype, device, dim=576, **cache):
    tokens = [normal(length, dim, dtype=dtype, device=device, seed=5 + b) for b, length in enumerate(lengths)]
    return tokens, paged(tokens, page, device, **cache)


def check(q, tokens, cache, scale=SCALE, head_dim_v=512, causal=True, **given):
    out, lse = tileops.mla_decode(q, *cache, scale, head_dim_v=head_dim_v, causal=causal, **given)
    whole = torch.cat((q, given["q_rope"]), -1) if "q_rope" in given else q
    batch, rows, heads, _ = q.shape
    assert out.shape == (batch, rows, heads, head_dim_v) and lse.shape == (batch, heads, rows)
    for b, token in enumerate(tokens):
        key = token[:, None]
        assert_attention(out[b], lse[b], whole[b], key, key[..., :head_dim_v], scale=scale, causal=causal)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rows"), [(1, 1), (16, 1), (16, 8), (32, 3), (64, 2), (128, 1)])
def test_values(device, heads, rows, dtype):
    tokens, cache = requests(LENGTHS, 64, dtype, device)
    q = normal(5, rows, heads, 576, dtype=dtype, device=device)
    for causal in (True, False):
        check(q, tokens, cache, causal=causal)


@pytest.mark.parametrize("page", [1, 16, 32, 48, 64, 128])
def test_page_sizes(device, page):
    for index in (torch.int32, torch.int64):
        tokens, cache = requests(LENGTHS, page, BF16, device, index=index)
        check(normal(5, 2, 4, 576, dtype=BF16, device=device), tokens, cache)


@pytest.mark.parametrize("unused", [-1, 2**30])
@pytest.mark.parametrize("poison", [NAN, INF, 0.0])
@pytest.mark.parametrize("page", [16, 64, 128])
def test_nothing_but_the_tokens_in_use_counts(device, page, poison, unused):  # B03, B29, B35
    q = normal(5, 2, 16, 576, dtype=BF16, device=device)
    clean = tileops.mla_decode(q, *requests(LENGTHS, page, BF16, device, poison=1.0, unused=0)[1], SCALE)
    tokens, cache = requests(LENGTHS, page, BF16, device, poison=poison, unused=unused, width=9)
    assert all(map(torch.equal, check(q, tokens, cache), clean))
    nothing = torch.zeros_like(cache[2])
    for given in ((*cache[:2], nothing), (cache[0][:0], cache[1][:, :0], nothing)):
        out, lse = tileops.mla_decode(q, *given, SCALE)
        assert not out.any() and (lse == -INF).all()


def test_nan_of_one_request_stays_there(device):  # B03
    tokens, cache = requests([100, 64, 65], 64, BF16, device)
    q = normal(3, 1, 4, 576, dtype=BF16, device=device)
    clean = check(q, tokens, cache)
    cache[0][cache[1][1, 0].long(), 7] = NAN
    out, lse = tileops.mla_decode(q, *cache, SCALE)
    assert torch.isnan(out[1]).all() and torch.isnan(lse[1]).all()
    assert torch.equal(out[::2], clean[0][::2]) and torch.equal(lse[::2], clean[1][::2])


@pytest.mark.parametrize("length", [1, 17, 63, 64, 65, 257])
def test_equal_weights(device, length):  # B31, B33
    tokens, cache = requests([length], 64, torch.float32, device)
    for causal in (True, False):
        out, lse = check(torch.zeros(1, 1, 4, 576, device=device), tokens, cache, causal=causal)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(length)), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(out[0, 0], tokens[0][:, :512].mean(0).expand(4, 512), atol=1e-5, rtol=1e-5)


def test_rotary_part_apart(device):
    tokens, cache = requests([70, 3], 64, BF16, device)
    q = normal(2, 3, 16, 576, dtype=BF16, device=device)
    expected = check(q, tokens, cache)
    for latent, rope in (
        (q[..., :512], q[..., 512:]),
        (q[..., :512].contiguous(), q[..., 512:].contiguous()),
        (q[..., :512].transpose(1, 2).contiguous().transpose(1, 2), torch.stack((q, q), -1)[..., 512:, 0]),
    ):
        assert all(map(torch.equal, check(latent, tokens, cache, q_rope=rope), expected))


def test_layouts(device):  # B24
    tokens, cache = requests([70, 3], 16, BF16, device)
    q = normal(2, 2, 4, 576, dtype=BF16, device=device)
    expected = check(q, tokens, cache)
    layers = torch.stack((cache[0], cache[0]), 1)[:, 1]
    wide = torch.nn.functional.pad(cache[0], (0, 80))[..., :576]
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    for kv_cache in (layers, wide, torch.stack((cache[0], cache[0]), -1)[..., 0]):
        for splits in (0, 1, 5):
            found = tileops.mla_decode(q, kv_cache, *cache[1:], SCALE, num_splits=splits)
            rounding = 0.0 if device == "cpu" else 2**-6  # kernels split the keys, and not all layouts have one
            torch.testing.assert_close(found, expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-3, 1.0])
def test_scale_is_taken_as_it_is(device, scale):  # B40
    tokens, cache = requests([9, 33], 16, torch.float32, device, dim=24)
    check(normal(2, 2, 3, 24, device=device), tokens, cache, scale=scale, head_dim_v=16)


@pytest.mark.parametrize(("dim", "dim_v"), [(320, 256), (24, 24), (8, 1)])
def test_other_widths(device, dim, dim_v):
    tokens, cache = requests([9, 33], 16, BF16, device, dim=dim)
    check(normal(2, 2, 3, dim, dtype=BF16, device=device), tokens, cache, head_dim_v=dim_v)


@pytest.mark.parametrize("shape", [(0, 1, 16), (2, 0, 16), (2, 1, 0)], ids=str)
def test_empty(device, shape):  # B11
    batch, rows, heads = shape
    table = torch.zeros(batch, 3, dtype=torch.int32, device=device)
    q, cache = torch.ones(*shape, 576, dtype=BF16, device=device), torch.ones(2, 64, 576, dtype=BF16, device=device)
    out, lse = tileops.mla_decode(q, cache, table, table[:, 0], SCALE)
    assert out.shape == (*shape, 512) and lse.shape == (batch, heads, rows) and out.dtype == BF16


def test_mixed_lengths_up_to_a_long_one(device):
    lengths = [20000, 5, 700]
    tokens, cache = requests(lengths, 64, BF16, device)
    check(normal(3, 1, 2, 576, dtype=BF16, device=device), tokens, cache)
