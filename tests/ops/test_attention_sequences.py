"""flash_attention_varlen and flash_attention_paged against float64, sequence by sequence: ragged and empty lengths, pages in
any order, and memory that no sequence owns."""
import math

import pytest
import torch
from attention_reference import OPTIONS, assert_attention, cut, offsets, options, paged, qkv
from ops_reference import DTYPES, normal

import tileops

BF16, INF, NAN = torch.bfloat16, math.inf, math.nan
RAGGED = {  # queries and keys of each sequence
    "ragged": ([5, 40, 20, 7], [9, 60, 3, 7]),
    "no queries": ([0, 0, 40, 20, 0], [0, 30, 60, 30, 30]),
    "no keys": ([4, 1, 6], [0, 5, 0]),
    "one": ([13], [13]),
    "decoding": ([1, 1, 1, 1, 1], [64, 1, 0, 65, 17]),
    "nothing": ([0, 0], [0, 0]),
}


def packed(lengths, heads, dim, dtype, device, seed):
    return normal(sum(lengths), heads, dim, dtype=dtype, device=device, seed=seed)


def varlen(rows, keys, dtype, device, heads=4, kv_heads=2, dim=16, dim_v=24):
    q, k = packed(rows, heads, dim, dtype, device, 1), packed(keys, kv_heads, dim, dtype, device, 2)
    return q, k, packed(keys, kv_heads, dim_v, dtype, device, 3)


def check_varlen(q, k, v, rows, keys, index=torch.int32, longer=0, used=None, **chosen):
    lengths = offsets(rows, q.device, index), offsets(keys, q.device, index), max(rows) + longer, max(keys) + longer
    extra = {} if used is None else {"seqused_k": torch.tensor(used, dtype=index, device=q.device)}
    out, lse = tileops.flash_attention_varlen(q, k, v, *lengths, **extra, **chosen)
    assert out.shape == (*q.shape[:2], v.shape[2]) and lse.shape == (q.shape[1], q.shape[0])
    assert out.is_contiguous() and lse.is_contiguous()
    parts = zip(cut(out, rows), cut(lse, rows, 1), cut(q, rows), cut(k, keys), cut(v, keys), keys if used is None else used)
    for out_b, lse_b, q_b, k_b, v_b, count in parts:
        assert_attention(out_b, lse_b, q_b, k_b[:count], v_b[:count], **chosen)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", ["ragged", "no queries", "decoding"])
def test_varlen(device, lengths, name, dtype):
    rows, keys = RAGGED[lengths]
    check_varlen(*varlen(rows, keys, dtype, device), rows, keys, **options(name, 4, device))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", RAGGED)
def test_varlen_lengths(device, lengths, index):  # B11, B13
    rows, keys = RAGGED[lengths]
    for causal in (False, True):
        check_varlen(*varlen(rows, keys, torch.float16, device), rows, keys, index, longer=3 * causal, causal=causal)


def test_varlen_without_sequences(device):  # B11
    q, k, v = varlen([], [], BF16, device)
    for index in (offsets([], device), offsets([0], device)):
        out, lse = tileops.flash_attention_varlen(q, k, v, index, index, 0, 0)
        assert out.shape == (0, 4, 24) and lse.shape == (4, 0) and out.device == q.device


def test_varlen_is_flash_attention_of_equal_lengths(device):
    q, k, v = qkv(3, 20, 20, 4, 2, 16, device=device)
    whole = tileops.flash_attention(q, k, v, causal=True)
    index = offsets([20] * 3, device)
    out, lse = tileops.flash_attention_varlen(*(t.flatten(0, 1) for t in (q, k, v)), index, index, 20, 20, causal=True)
    torch.testing.assert_close(out.view(3, 20, 4, 16), whole[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse.view(4, 3, 20).transpose(0, 1), whole[1], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_seqused(device, poison):  # B03
    rows, keys, used = [5, 3, 2, 4], [9, 6, 4, 8], [7, 6, 0, 1]
    for dtype in DTYPES:
        q, k, v = varlen(rows, keys, dtype, device)
        clean = check_varlen(q, k, v, rows, keys, used=used, causal=True)
        for start, count, length in zip(offsets(keys).tolist(), used, keys):
            k[start + count : start + length], v[start + count : start + length] = poison, poison
        assert all(map(torch.equal, check_varlen(q, k, v, rows, keys, used=used, causal=True), clean))


def test_rows_that_no_sequence_has(device):
    q, k, v = varlen([9], [9], torch.float32, device)
    index = torch.tensor([2, 5, 7], dtype=torch.int32, device=device)
    out, lse = tileops.flash_attention_varlen(q, k, v, index, index, 3, 3)
    for rows in (slice(0, 2), slice(7, 9)):
        assert not out[rows].any() and (lse[:, rows] == -INF).all()
    for rows in (slice(2, 5), slice(5, 7)):
        assert_attention(out[rows], lse[:, rows], q[rows], k[rows], v[rows])


def test_the_rest_of_a_longer_sequence_is_left_out(device):
    """As if it were not there: masks are aligned with what is left."""
    q, k, v = varlen([9, 2], [9, 4], torch.float32, device)
    index = offsets([9, 2], device), offsets([9, 4], device)
    out, lse = tileops.flash_attention_varlen(q, k, v, *index, 5, 7, causal=True)
    assert_attention(out[:5], lse[:, :5], q[:5], k[:7], v[:7], causal=True)
    assert_attention(out[9:], lse[:, 9:], q[9:], k[9:], v[9:], causal=True)
    assert not out[5:9].any() and (lse[:, 5:9] == -INF).all()


@pytest.mark.parametrize("most", [2**40, 2**62])
def test_the_longest_may_be_any_bound(device, most):  # B65
    """Kernels take what the offsets say, and the fallback makes no room for more."""
    rows, keys = [5, 0, 40], [60, 3, 9]
    for dtype in (torch.float32, BF16):
        tensors = varlen(rows, keys, dtype, device)
        check_varlen(*tensors, rows, keys, longer=most, causal=True)
        leaves, grads = [t.requires_grad_() for t in tensors], []
        for longest in ((40, 60), (most, most)):
            out, lse = tileops.flash_attention_varlen(*leaves, offsets(rows, device), offsets(keys, device), *longest)
            grads.append(torch.autograd.grad(out.sum() + lse.sum(), leaves))
        for found, wanted in zip(*grads):
            torch.testing.assert_close(found, wanted, atol=4 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps)
        q = tensors[0].detach()
        k, v, cache = caches(keys, 16, dtype, device)
        out, lse = tileops.flash_attention_paged(q, *cache, cu_seqlens_q=offsets(rows, device), max_seqlen_q=most, causal=True)
        for parts in zip(cut(out, rows), cut(lse, rows, 1), cut(q, rows), k, v):
            assert_attention(*parts, causal=True)


def sequences(lengths, dtype, device, heads=2, dim=16, seed=5):
    return [normal(length, heads, dim, dtype=dtype, device=device, seed=seed + b) for b, length in enumerate(lengths)]


def caches(lengths, page, dtype, device, dim=16, dim_v=24, **cache):
    k, v = (sequences(lengths, dtype, device, 2, d, seed) for d, seed in ((dim, 5), (dim_v, 50)))
    k_cache, table, used = paged(k, page, device, **cache)
    return k, v, (k_cache, paged(v, page, device, **cache)[0], table, used)


def check_paged(q, k, v, cache, **chosen):
    out, lse = tileops.flash_attention_paged(q, *cache, **chosen)
    assert out.shape == (*q.shape[:3], v[0].shape[2]) and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    for b in range(len(k)):
        assert_attention(out[b], lse[b], q[b], k[b], v[b], **chosen)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [1, 5])
def test_paged(device, rows, name, dtype):
    lengths = [13, 0, 6, 32, 3]
    k, v, cache = caches(lengths, 4, dtype, device)
    check_paged(normal(5, rows, 4, 16, dtype=dtype, device=device), k, v, cache, **options(name, 4, device))


@pytest.mark.parametrize("page", [1, 8, 16, 48, 64, 128])
def test_page_sizes(device, page):
    lengths = [130, 0, 1, 64]
    for index in (torch.int32, torch.int64):
        k, v, cache = caches(lengths, page, torch.float16, device, index=index)
        check_paged(normal(4, 2, 4, 16, dtype=torch.float16, device=device), k, v, cache, causal=True)


@pytest.mark.parametrize("unused", [-1, 2**30])
@pytest.mark.parametrize("poison", [NAN, INF, 0.0])
def test_nothing_but_the_keys_in_use_counts(device, poison, unused):  # B03, B29
    lengths = [130, 0, 0, 64, 65]
    q = normal(5, 1, 4, 16, dtype=BF16, device=device)
    clean = tileops.flash_attention_paged(q, *caches(lengths, 64, BF16, device, poison=1.0, unused=0)[2], causal=True)
    k, v, cache = caches(lengths, 64, BF16, device, poison=poison, unused=unused, width=7)
    found = check_paged(q, k, v, cache, causal=True)
    assert all(map(torch.equal, found, clean))
    nothing = (*cache[:3], torch.zeros_like(cache[3]))
    out, lse = tileops.flash_attention_paged(q, *nothing)
    assert not out.any() and (lse == -INF).all()
    empty = cache[0][:0], cache[1][:0], cache[2][:, :0], nothing[3]
    assert all(map(torch.equal, tileops.flash_attention_paged(q, *empty), (out, lse)))


def test_nan_of_one_request_stays_there(device):  # B03
    k, v, cache = caches([100, 64, 65], 64, BF16, device)
    q = normal(3, 1, 4, 16, dtype=BF16, device=device)
    clean = check_paged(q, k, v, cache)
    cache[1][cache[2][1, 0].long(), 7] = NAN
    out, lse = tileops.flash_attention_paged(q, *cache)
    assert torch.isnan(out[1]).all() and torch.equal(out[::2], clean[0][::2]) and torch.equal(lse, clean[1])


@pytest.mark.parametrize("keys", [1, 17, 63, 64, 65, 257])
@pytest.mark.parametrize("causal", [False, True])
def test_equal_weights(device, keys, causal):  # B31, B33
    k, v, cache = caches([keys], 64, torch.float32, device)
    out, lse = check_paged(torch.zeros(1, 1, 4, 16, device=device), k, v, cache, causal=causal)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(keys)), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(out[0, 0], v[0].mean(0).repeat_interleave(2, 0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_queries(device, name):
    lengths, rows = [13, 0, 16, 32, 5, 9], [3, 2, 0, 20, 1, 0]
    chosen = options(name, 4, device)
    for dtype in (torch.float32, BF16):
        k, v, cache = caches(lengths, 4, dtype, device)
        q = packed(rows, 4, 16, dtype, device, 1)
        out, lse = tileops.flash_attention_paged(q, *cache, cu_seqlens_q=offsets(rows, device), max_seqlen_q=21, **chosen)
        assert out.shape == (26, 4, 24) and lse.shape == (4, 26)
        for parts in zip(cut(out, rows), cut(lse, rows, 1), cut(q, rows), k, v):
            assert_attention(*parts, **chosen)


def test_one_query_of_each_sequence_is_in_its_row(device):
    """Whatever the offsets say."""
    k, v, cache = caches([13, 0, 7], 4, BF16, device)
    q = packed([1] * 3, 4, 16, BF16, device, 1)
    for index in ([0, 1, 2, 3], [0, 0, 1, 2]):
        given = {"cu_seqlens_q": torch.tensor(index, device=device), "max_seqlen_q": 1}
        out, lse = tileops.flash_attention_paged(q, *cache, **given, causal=True)
        assert out.shape == (3, 4, 24) and lse.shape == (4, 3)
        for b in range(3):
            assert_attention(out[b : b + 1], lse[:, b : b + 1], q[b : b + 1], k[b], v[b], causal=True)


def test_pages_without_keys(device):  # B35
    _, _, cache = caches([0, 0], 4, BF16, device)
    q = normal(2, 1, 4, 16, dtype=BF16, device=device)
    for empty in (lambda t: t[:0], lambda t: t[:, :0]):
        out, lse = tileops.flash_attention_paged(q, empty(cache[0]), empty(cache[1]), *cache[2:])
        assert not out.any() and (lse == -INF).all()


def test_number_of_splits_and_layouts_change_nothing(device):  # B22
    k, v, cache = caches([70, 3, 128], 16, BF16, device)
    q = normal(3, 2, 4, 16, dtype=BF16, device=device)
    expected = check_paged(q, k, v, cache, causal=True)
    pair = torch.cat((*cache[:2], cache[0]), -1)
    one_layer = torch.stack((pair, pair), 1)[:, 1]
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in cache[:2]]
    for k_cache, v_cache in ((pair[..., :16], pair[..., 16:40]), (one_layer[..., 40:], one_layer[..., 16:40]), heads_first):
        for splits in (0, 1, 7):
            table = torch.stack((cache[2], cache[2]), -1)[..., 0]
            found = tileops.flash_attention_paged(q, k_cache, v_cache, table, cache[3], causal=True, num_splits=splits)
            assert all(map(torch.equal, found, expected))
    for longest in (0, 2):
        assert torch.equal(tileops.flash_attention_paged(q, *cache, causal=True, max_seqlen_q=longest)[0], expected[0])


def test_chunked_prefill_is_prefill(device):
    """Queries that come in chunks, each over the cache as it is then, give what all of them give at once."""
    q, k, v = qkv(1, 50, 50, 4, 2, 16, 24, device=device)
    whole = tileops.flash_attention(q, k, v, causal=True, window_left=20)
    k_cache, table, _ = paged([k[0]], 8, device)
    v_cache = paged([v[0]], 8, device)[0]
    for start, stop in ((0, 1), (1, 17), (17, 40), (40, 50)):
        used = torch.tensor([stop], device=device)
        chunk = q[:, start:stop]
        out, lse = tileops.flash_attention_paged(chunk, k_cache, v_cache, table, used, causal=True, window_left=20)
        torch.testing.assert_close(out, whole[0][:, start:stop], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse, whole[1][..., start:stop], atol=2e-6, rtol=1e-5)


@pytest.mark.big
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layers", [1, 20])
def test_pages_past_31_bits(layers):  # B18
    pages, page, heads, dim = 131200 // layers, 16, 8, 128
    whole = torch.zeros(pages, layers, page, heads, dim, dtype=BF16, device="cuda")
    cache = whole[:, layers - 1]
    token = normal(page, heads, dim, dtype=BF16, device="cuda")
    cache[0], cache[-1] = token, token
    q, used = normal(1, 1, 32, dim, dtype=BF16, device="cuda"), torch.tensor([page], dtype=torch.int32, device="cuda")
    first, last = (torch.tensor([[n]], dtype=torch.int32, device="cuda") for n in (0, pages - 1))
    near, far = (tileops.flash_attention_paged(q, cache, cache, table, used) for table in (first, last))
    assert all(map(torch.equal, near, far)) and near[0].any()
