"""flash_attention_paged's kernels over a made-up CUDA.

Those that take tiles of queries (fake_lengths.cpp), and those that take a few queries of each request (fake_decode.cpp).
"""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

import tileops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from attention_reference import offsets, paged
from test_attention_kernels import BF16, F16, F32, LAUNCH_FAILURE, randn
from test_lengths_kernels import INDICES, MASKS, close, none, ragged, same_as_eager, sinks_of

TILES = "flash_attention_sm_90a_bf16_{}_lengths_paged"
CAUSAL, SINKS = TILES.format("128x128x64_causal"), TILES.format("128x128x64") + "_window_sinks"
SOFTCAP = TILES.format("64x96x64") + "_window_softcap"
DECODE, WIDE_DECODE = "attention_decode_sm_90a_bf16_64x128x64", "attention_decode_sm_90a_bf16_64x96x192x128"
PAGES = [1, 2, 16, 48, 64, 100, 256]


def cache_of(k, v, page, index=torch.int32, **given):
    k_cache, table, used = paged(k, page, "cpu", index=index, **given)
    return k_cache, paged(v, page, "cpu", index=index, **given)[0], table, used


def check(fake, q, k, v, cache, given=None, packed=False, **options):
    """q [B, Sq, H, D], or those of each request. The kernel that served the call, whose results were right and new."""
    if packed:
        lengths = [len(t) for t in q]
        options |= {"cu_seqlens_q": offsets(lengths), "max_seqlen_q": max(lengths)}
    given = (torch.cat(q) if packed else torch.stack(list(q))) if given is None else given
    before = fake.get("launches")
    out, lse = fake.ops.flash_attention_paged(given, *cache, **options)
    name = fake.library.fake_last_kernel().decode()
    assert out.is_contiguous() and lse.is_contiguous()
    assert out.shape == (*given.shape[:-1], v[0].shape[2]) and lse.shape == (*given.shape[:-3], *given.shape[-2:-4:-1])
    found = explain(fake, given, *cache, **options)
    assert found[0] == "kernel"
    decodes = found[1].startswith("attention_decode")
    assert fake.get("launches") - before == (1 if not decodes or options.get("num_splits") == 1 else 2)  # the merge is one, too
    assert name == ("mla_combine_sm_90a_f32_bf16_v4" if decodes and options.get("num_splits") != 1 else found[1])
    if not packed:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    plain = {key: value for key, value in options.items() if key not in ("cu_seqlens_q", "max_seqlen_q", "num_splits")}
    close(out, lse, q, k, v, **plain)
    return found[1]


def explain(fake, *args, **options):
    return fake.ops._explain_flash_attention_paged(*args, **options).split("\t")


def launched(fake):
    return tuple(map(int, fake.library.fake_last_launch().split()))


def chunk(rows, keys, page, **sizes):
    q, k, v = ragged(rows, keys, **sizes)
    return q, k, v, cache_of(k, v, page)


# ---- tiles of queries


@pytest.mark.parametrize("page", PAGES)
def test_pages_of_tiles(fake, page):
    q, k, v, cache = chunk([130, 0, 1, 60], [130, 40, 70, 61], page)
    assert check(fake, q, k, v, cache, packed=True, causal=True) == CAUSAL
    assert launched(fake)[1] == 2 + 0 + 1 + 1
    q, k, v, cache = chunk([40] * 3, [130, 0, 7], page)
    assert check(fake, q, k, v, cache, causal=True) == CAUSAL
    assert launched(fake) == (10, 3, 3)


@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_tiles(fake, mask):
    options, name = MASKS[mask]
    for rows, keys, packed in (([130, 0, 1, 3], [130, 40, 70, 0], True), ([40, 40], [130, 31], False)):
        kernel = name.replace("lengths", "lengths_paged")
        assert check(fake, *chunk(rows, keys, 16), packed=packed, **options) == kernel


@pytest.mark.parametrize("page", [*PAGES, 3])
def test_portable(fake, page):
    """Pages of any size; keys of a few queries are split."""
    fake.knobs(force="portable")
    options = {"causal": True, "window_left": 50}
    calls = ([130, 0, 1, 60], [130, 40, 70, 61], True), ([70, 70], [130, 0], False), ([1, 1], [90, 3], False)
    for rows, keys, packed in calls:
        given = chunk(rows, keys, page)
        if len({*rows}) == 1 and rows[0] == 1:
            q, k, v, cache = given
            out, lse = fake.ops.flash_attention_paged(torch.stack(q), *cache, **options)
            assert explain(fake, torch.stack(q), *cache, **options)[1] == "attention_decode_portable_bf16_64x64x64"
            close(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), q, k, v, **options)
        else:
            name = check(fake, *given, packed=packed, **options)
            assert name == "flash_attention_portable_bf16_64x64x64_lengths_paged_window_sinks"


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (6, 1)])
def test_heads_of_tiles(fake, heads, kv_heads):
    for packed in (False, True):
        check(fake, *chunk([70, 70], [75, 4], 16, heads=heads, kv_heads=kv_heads), packed=packed, causal=True)


def test_rows_that_no_request_has(fake):
    q, k, v, cache = chunk([3, 2], [30, 5], 16)
    rows, index = torch.cat((q[0][:2], *q, q[0])), torch.tensor([2, 5, 7])
    for options in ({}, {"causal": True}):
        out, lse = fake.ops.flash_attention_paged(rows, *cache, cu_seqlens_q=index, max_seqlen_q=3, **options)
        assert launched(fake)[1] == 4
        for part in (slice(0, 2), slice(7, 10)):
            none(out, lse, part)
        close(out[2:7], lse[:, 2:7], q, k, v, **options)


@pytest.mark.parametrize("most", [2, 3])
def test_the_rest_of_a_longer_request_is_left_out(fake, most):
    """As if it were not there; the same in Python."""
    q, k, v, cache = chunk([5, 2], [30, 9], 16)
    given = torch.cat(q), *cache
    options = {"cu_seqlens_q": offsets([5, 2]), "max_seqlen_q": most, "causal": True}
    out, lse = fake.ops.flash_attention_paged(*given, **options)
    none(out, lse, slice(most, 5))
    close(torch.cat((out[:most], out[5:])), torch.cat((lse[:, :most], lse[:, 5:]), 1), [q[0][:most], q[1]], k, v, causal=True)
    for found, wanted in zip((out, lse), tileops.flash_attention_paged(*given, **options), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("most", [100, 2**31 - 1, 2**32 + 1, 2**62])
def test_more_than_the_longest(fake, most):
    q, k, v, cache = chunk([5, 2], [30, 9], 16)
    for mask in ("full", "causal", "band"):
        options = {"cu_seqlens_q": offsets([5, 2]), "max_seqlen_q": most, **MASKS[mask][0]}
        out, lse = fake.ops.flash_attention_paged(torch.cat(q), *cache, **options)
        close(out, lse, q, k, v, **MASKS[mask][0])


def test_requests_that_do_not_lie_one_behind_the_other(fake):
    q, *_, cache = chunk([70, 70], [75, 4], 16)
    apart = pad(torch.stack(q), (0, 0, 0, 0, 0, 1))[:, :-1]
    reason = "sequences of q or out do not lie one behind the other"
    assert explain(fake, apart, *cache) == ["eager", "", reason]
    assert fake.kernel(lambda: fake.ops.flash_attention_paged(apart, *cache)) == "eager"
    one = chunk([70], [75], 16)
    check(fake, *one, pad(torch.stack(one[0]), (0, 0, 0, 0, 0, 1))[:, :-1], causal=True)


LSES = {  # of shape [2, 4, 70], and whether a kernel writes there itself
    "contiguous": (lambda: torch.empty(2, 4, 70), True),
    "heads last": (lambda: torch.empty(2, 70, 4).mT, True),
    "every second": (lambda: torch.empty(2, 4, 70, 2)[..., 1], True),
    "requests second": (lambda: torch.empty(4, 2, 70).transpose(0, 1), True),
    "requests last": (lambda: torch.empty(4, 70, 2).permute(2, 0, 1), False),
    "a number behind each request": (lambda: torch.empty(2, 4 * 140 + 1)[:, :-1].view(2, 4, 70, 2)[..., 0], False),
}


@pytest.mark.parametrize("layout", LSES)
def test_lse_of_tiles(fake, layout):
    q, k, v, cache = chunk([70, 70], [75, 4], 16)
    lse, direct = LSES[layout][0](), LSES[layout][1]
    whole(fake, q, k, v, cache, torch.empty(2, 70, 4, 64, dtype=BF16), lse, 0 if direct else 2)


def whole(fake, q, k, v, cache, out, lse, copies, given=None, **options):
    """Checks results that are given, and that nothing else is written."""
    storages = [torch.as_strided(t, [t.untyped_storage().nbytes() // t.element_size()], [1], 0) for t in (out, lse)]
    for storage in storages:
        storage.fill_(7)
    before = fake.get("copies")
    given = torch.stack(q) if given is None else given
    fake.ops.flash_attention_paged.out(given, *cache, causal=True, out=out, lse=lse, **options)
    assert fake.get("copies") - before == copies
    flat = (out, lse) if given.dim() == 3 else (out.flatten(0, 1), lse.transpose(0, 1).flatten(1))
    close(*flat, q, k, v, causal=True)
    out.fill_(7)
    lse.fill_(7)
    assert all((storage == 7).all() for storage in storages)


@pytest.mark.parametrize("number", range(5))
def test_out_of_tiles(fake, number):
    q, k, v, cache = chunk([70, 70], [75, 4], 16)
    outs = [  # and copies of out and lse
        (randn(2, 70, 4, 72)[..., :64], 0),
        (randn(4, 2, 70, 64).permute(1, 2, 0, 3), 0),
        (randn(2, 71, 4, 64)[:, :-1], 2),
        (randn(2, 70, 4, 65)[..., :64], 1),
        (randn(2, 4, 70, 64).transpose(1, 2), 2),
    ]
    whole(fake, q, k, v, cache, outs[number][0], torch.empty(2, 4, 70), outs[number][1])


# ---- a few queries of each request


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("queries, heads, kv_heads", [(1, 8, 2), (5, 8, 2), (2, 3, 3), (1, 1, 1), (16, 4, 1), (1, 4, 4)])
def test_pages(fake, queries, heads, kv_heads, page):
    keys = [130, 0, 1, 64, 65]
    q, k, v, cache = chunk([queries] * 5, keys, page, heads=heads, kv_heads=kv_heads)
    assert check(fake, q, k, v, cache, causal=True) == DECODE
    rows = queries * heads // kv_heads
    assert launched(fake) == (5, rows, page, min(page & -page, 128), 0)
    text = f"it serves bfloat16 head dim 64, page {page}, {rows} queries and heads of a group"
    assert explain(fake, torch.stack(q), *cache) == ["kernel", DECODE, text]


@pytest.mark.parametrize("page, pages, requests, small", [
    (16, 256, 5, True), (48, 86, 4, True), (16, 255, 5, False), (16, 256, 6, False), (32, 256, 5, False), (8, 512, 5, False),
])  # fmt: skip
def test_scattered_pages(fake, page, pages, requests, small):
    """Fewer keys in one step of long requests in pages of 16, if there are 4096 for each of the 10 multiprocessors, at most."""
    q, k, v, (*caches, table, lengths) = chunk([1] * requests, [13] * requests, page, heads=8, kv_heads=2)
    table = torch.nn.functional.pad(table, (0, pages - table.shape[1]))
    name = check(fake, q, k, v, (*caches, table, lengths), causal=True)
    assert name == (DECODE.replace("x128x", "x64x") if small else DECODE)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", [1, 3])
def test_masks(fake, queries, mask):
    """Sinks are repeated for each query, rows may see no key."""
    options = MASKS[mask][0]
    for page in (16, 48):
        name = check(fake, *chunk([queries] * 4, [130, 0, 2, 64], page), **options)
        assert name == DECODE + "_softcap" * ("softcap" in options)


def test_sinks_of_every_dtype(fake):
    for dtype in (BF16, F16, F32):
        for queries in (1, 3):
            check(fake, *chunk([queries] * 2, [13, 2], 16), causal=True, sinks=sinks_of(dtype=dtype))


@pytest.mark.parametrize("splits", [0, 1, 7, 2**40])
def test_number_of_splits(fake, splits):
    check(fake, *chunk([2] * 2, [13, 70], 16), num_splits=splits)
    assert launched(fake)[4] == min(splits, 2**31 - 1)


def test_one_query_of_each_in_a_packed_row(fake):
    """In its row, whatever the offsets say."""
    q, k, v, cache = chunk([1] * 4, [13, 0, 2, 64], 16)
    assert check(fake, q, k, v, cache, packed=True, causal=True) == DECODE
    assert check(fake, q, k, v, cache, packed=True, sinks=sinks_of()) == DECODE
    options = {"cu_seqlens_q": torch.tensor([0, 0, 1, 2, 3]), "max_seqlen_q": 1, "causal": True}
    close(*fake.ops.flash_attention_paged(torch.cat(q), *cache, **options), q, k, v, causal=True)
    fake.knobs(force=CAUSAL)
    close(*fake.ops.flash_attention_paged(torch.cat(q), *cache, **options), q, k, v, causal=True)
    assert launched(fake)[1] == 4
    out, lse = randn(4, 4, 72)[..., :64], torch.empty(4, 4)
    whole(fake, q, k, v, cache, out, lse, 0, torch.cat(q), cu_seqlens_q=offsets([1] * 4), max_seqlen_q=1)
    fake.knobs(force="")
    whole(fake, q, k, v, cache, out, lse, 1, torch.cat(q), cu_seqlens_q=offsets([1] * 4), max_seqlen_q=1)


@pytest.mark.parametrize("d, dv, name", [(8, 8, DECODE), (40, 64, DECODE), (160, 104, WIDE_DECODE)])
def test_head_dims_below_the_tile(fake, d, dv, name):
    for queries in (1, 3):
        assert check(fake, *chunk([queries] * 2, [13, 2], 16, d=d, dv=dv), causal=True) == name
    if d < 64:
        assert check(fake, *chunk([3, 2], [13, 2], 16, d=d, dv=dv), packed=True) == SINKS


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("d", [60, 64])
def test_q_is_copied_where_it_must_be(fake, queries, d):
    """Head dims that are not whole 16 bytes too, in caches whose rows are."""
    q, k, v = ragged([queries] * 2, [13, 2], d=d, dv=64)
    cache = cache_of(k, v, 16)
    cache = pad(cache[0], (0, 4), value=math.nan)[..., :d] if d == 60 else cache[0], *cache[1:]
    rows = torch.stack(q)
    ways = {
        "as it is": (rows, queries > 1 or d == 60),
        "columns apart": (torch.stack((rows, rows), -1)[..., 1], True),
        "rows apart": (pad(rows, (0, 3))[..., :-3], True),
        "heads first": (rows.transpose(1, 2).contiguous().transpose(1, 2), queries > 1 or d == 60),
        "batch second": (pad(rows, (0, 72 - d)).transpose(0, 1).contiguous().transpose(0, 1)[..., :d], queries > 1),
    }
    for given, copied in ways.values():
        before = fake.get("copies")
        assert check(fake, q, k, v, cache, given, causal=True) == DECODE
        assert fake.get("copies") - before == copied + 2 * (queries > 1)
        if queries == 1:
            check(fake, q, k, v, cache, given[:, 0], packed=True, causal=True)


OUTS = {  # of shape [3, queries, 4, 64], and whether a kernel writes there itself if there is one query
    "contiguous": (lambda n: torch.empty(3, n, 4, 64, dtype=BF16), True),
    "padded rows": (lambda n: randn(3, n, 4, 72)[..., :64], True),
    "requests second": (lambda n: randn(n, 3, 4, 64).transpose(0, 1), True),
    "heads first": (lambda n: randn(4, 3, n, 64).permute(1, 2, 0, 3), False),
    "requests apart": (lambda n: randn(3, n + 1, 4, 64)[:, :n], False),
}


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("layout", OUTS)
def test_out(fake, layout, queries):
    q, k, v, cache = chunk([queries] * 3, [13, 0, 2], 16)
    make, direct = OUTS[layout]
    lses = [(torch.empty(3, 4, queries), True), (torch.empty(3, 4, queries, 2)[..., 1], True)]
    for lse, lse_direct in (*lses, (torch.empty(queries, 4, 3).permute(2, 1, 0), False)):
        copies = (1 + 2 if queries > 1 else (not direct) + (not lse_direct))
        whole(fake, q, k, v, cache, make(queries), lse, copies)


def test_an_out_that_is_not_aligned_takes_a_copy_of_the_results(fake):
    q, k, v, cache = chunk([1] * 3, [13, 0, 2], 16)
    for out in (randn(3, 1, 4, 65)[..., :64], randn(3, 1, 4, 64, 2)[..., 0], randn(3, 1, 4, 64, offset=1)):
        whole(fake, q, k, v, cache, out, torch.empty(3, 4, 1), 1)


# ---- what all of them read


KINDS = {"few": ([3, 3], False), "tiles": ([40, 40], False), "packed": ([40, 3], True)}


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("kind", KINDS)
def test_index_tensors(fake, kind, index):
    rows, packed = KINDS[kind]
    q, k, v, (*caches, table, used) = chunk(rows, [70, 45], 16)
    tables = {"strided": torch.stack((table, table), -1)[..., 0], "int64": table.long(), "within another": table}
    tables["int64, strided"] = tables["strided"].long().mT.contiguous().mT
    wide = pad(table, (3, 5), value=2**30)[:, 3:-5]
    for of_table in (tables[index], wide):
        check(fake, q, k, v, (*caches, of_table, INDICES[index](torch.cat((used[:1], used)))[1:]), packed=packed, causal=True)
    if packed:
        options = {"cu_seqlens_q": INDICES[index](offsets(rows)), "max_seqlen_q": 40}
        close(*fake.ops.flash_attention_paged(torch.cat(q), *caches, table, used, **options), q, k, v)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [16, 48])
def test_nothing_but_the_keys_in_use_is_read(fake, kind, page):  # B03, B29
    rows, packed = KINDS[kind]
    q, k, v = ragged(rows, [70, 45])
    for unused, poison in ((-1, math.nan), (2**30, math.nan), (-1, math.inf)):
        check(fake, q, k, v, cache_of(k, v, page, unused=unused, poison=poison, width=9), packed=packed, causal=True)
    cache = cache_of(k, v, page)
    nothing = *cache[:3], torch.zeros_like(cache[3])
    empty = [[t[:0] for t in of] for of in (k, v)]
    check(fake, q, *empty, nothing, packed=packed)


@pytest.mark.parametrize("kind", KINDS)
def test_caches_are_read_where_they_are(fake, kind):  # B22, B24
    rows, packed = KINDS[kind]
    q, k, v, (k_cache, v_cache, *rest) = chunk(rows, [70, 45], 16)
    pair = torch.stack((k_cache, v_cache), 1)
    wide = torch.cat((k_cache, v_cache, k_cache), -1)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k_cache, v_cache)]
    mixed = (k_cache, heads_first[1]), (heads_first[0], wide[..., 64:128]), (pair[:, 0], v_cache)
    for caches in ((pair[:, 0], pair[:, 1]), (wide[..., :64], wide[..., 64:128]), heads_first, *mixed):
        before = fake.get("copies")
        check(fake, q, k, v, (*caches, *rest), packed=packed, causal=True)
        assert fake.get("copies") - before == (3 if kind == "few" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_repeated(fake, kind):  # B20
    rows, packed = KINDS[kind]
    q, k, v, (k_cache, v_cache, *rest) = chunk(rows, [70, 45], 16, kv_heads=1)
    check(fake, q, k, v, (k_cache.expand(-1, -1, 2, -1), v_cache.expand(-1, -1, 2, -1), *rest), packed=packed, causal=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fallback_gives_the_same(fake, kind, mask):  # B65
    """For other widths of values too: values, dtypes and strides of both results."""
    rows, packed = KINDS[kind]
    for dv in (64, 40):
        q, _, _, cache = chunk(rows, [70, 45], 16, dv=dv)
        options = MASKS[mask][0] | ({"cu_seqlens_q": offsets(rows), "max_seqlen_q": 40} if packed else {})
        same_as_eager(fake, "flash_attention_paged", torch.cat(q) if packed else torch.stack(q), *cache, **options)


# ---- the choice


COPIES = "; by copies with rows of whole 16 bytes: "
TEXT = "flash_attention_paged kernel for bfloat16"


@pytest.mark.parametrize("rows", [1, 70])
def test_what_no_kernel_serves(fake, rows):
    q, *_, cache = chunk([rows] * 2, [13, 2], 16)
    q = torch.stack(q)

    def reason(q, cache, **options):
        path, name, why = explain(fake, q, *cache, **options)
        assert (path, name) == ("eager", "")
        return why

    floats = [t.float() for t in (q, *cache[:2])]
    types = "flash_attention_paged kernels take bfloat16 and float16, and q is float32"
    assert reason(floats[0], (*floats[1:], *cache[2:])) == types
    assert reason(q, cache, scale=-1.0) == "flash_attention_paged kernels take a scale above 0 in float32"
    apart = pad(cache[0], (0, 1, 0, 0, 0, 0, 0, 100))[..., :-1]
    assert reason(q, (apart, pad(cache[1], (0, 0, 0, 0, 0, 0, 0, 100)), *cache[2:])) == (
        "rows of the caches are not aligned to 16 bytes, and the caches have more than twice the pages that block_table lists"
    )
    wide = chunk([rows] * 2, [13, 2], 16, d=300)
    assert reason(torch.stack(wide[0]), wide[3]) == f"this build has no {TEXT} head dim 300, page 16"
    assert reason(q, (*cache[:2], cache[2][:, :0], cache[3])) == "block_table lists no page"
    for empty in (lambda t: t[:0], lambda t: t[:, :0]):
        nothing = empty(cache[0]), empty(cache[1]), *cache[2:]
        assert reason(q, nothing) == "the caches hold no key"
        out, lse = fake.ops.flash_attention_paged(q, *nothing[:3], torch.zeros_like(cache[3]))
        assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("d, dv, names", [(60, 60, "q, k, v, out"), (64, 36, "v, out"), (37, 64, "q, k")])
@pytest.mark.parametrize("rows", [1, 70])
def test_other_head_dims_are_copied(fake, rows, d, dv, names):
    q, _, _, cache = chunk([rows] * 2, [130, 70], 16, d=d, dv=dv)
    same_as_eager(fake, "flash_attention_paged", torch.stack(q), *cache, causal=True)
    assert explain(fake, torch.stack(q), *cache, causal=True)[2].endswith(COPIES + names)


@pytest.mark.parametrize("rows", [1, 70])
def test_pages_of_one_token_that_boxes_do_not_reach(fake, rows):
    """128 boxes: enough for the 128 keys in a step of a few queries, not for the 192 of tiles of queries."""
    odd = "kernel" if rows == 1 else "eager"
    for page, path in ((1, odd), (3, odd), (2, "kernel"), (6, "kernel")):
        q, k, v, cache = chunk([rows] * 2, [13, 2], page, d=128)
        found = explain(fake, torch.stack(q), *cache)
        assert found[0] == path
        if path == "eager":
            assert found[2] == f"no {TEXT} head dim 128, page {page} fits (the last one tried: a page is not a multiple of 2)"
        else:
            check(fake, q, k, v, cache)


@pytest.mark.parametrize("rows", [1, 70])
def test_more_keys_than_a_kernel_can_number(fake, rows):
    """Of pages whose number is a quotient that is not exact, and in 32 bits."""
    q = randn(1, rows, 4, 64)
    used = torch.ones(1, dtype=torch.int32)
    most = 2**32 // (-(-(2**32) // 1000) * 1000 - 2**32) // 1000
    for page, width in ((1000, most), (512, (2**31 - 65537 - 70) // 512)):
        cache = torch.zeros(1, 2, 64, dtype=BF16).expand(1, page, 2, 64)
        for count, path in ((width, "kernel"), (width + 1, "eager")):
            found = explain(fake, q, cache, cache, torch.zeros(1, 1, dtype=torch.int32).expand(1, count), used)
            assert found[0] == path
            assert path == "kernel" or found[2] == "block_table lists more keys than a kernel can number"


def test_force(fake):
    q, k, v, cache = chunk([3] * 2, [13, 2], 16)
    for force, options, name in (
        ("sm_90a", {"causal": True}, DECODE),
        (DECODE, {"window_left": 2}, DECODE),
        (CAUSAL, {"causal": True}, CAUSAL),
        (SINKS, {"causal": True}, SINKS),
        (SOFTCAP, {"softcap": 2.0}, SOFTCAP),
    ):
        fake.knobs(force=force)
        assert check(fake, q, k, v, cache, **options) == name
        assert explain(fake, torch.stack(q), *cache, **options)[2] == f"TILEOPS_FORCE={force} is set"
    fake.knobs(force="attention_decode_sm_90a_bf16_64x192x128")
    check(fake, q, k, v, cache)


CANNOT = [  # rows, packed, options, why
    (DECODE, [3, 3], False, {"softcap": 2.0}, "it has no softcap"),
    (DECODE + "_softcap", [3, 3], False, {}, "it is for a softcap"),
    (DECODE, [70, 70], False, {}, "it is for fewer queries and heads of a group"),
    (DECODE, [3, 2], True, {}, "it is for as many queries of each request"),
    (CAUSAL, [3, 3], False, {}, "it is for causal attention"),
    (CAUSAL.removesuffix("_paged"), [70, 70], False, {"causal": True}, "it is for keys that lie otherwise"),
]


@pytest.mark.parametrize("name, rows, packed, options, why", CANNOT)
def test_what_cannot_be_forced_says_why(fake, name, rows, packed, options, why):
    q, *_, cache = chunk(rows, [13, 2], 16)
    if packed:
        options = options | {"cu_seqlens_q": offsets(rows), "max_seqlen_q": max(rows)}
    fake.knobs(force=name)
    with pytest.raises(RuntimeError, match=rf"TILEOPS_FORCE={name} cannot apply: no .* fits \(the last one tried: {why}\); "):
        fake.ops.flash_attention_paged(torch.cat(q) if packed else torch.stack(q), *cache, **options)


@pytest.mark.parametrize("rows", [1, 70])
def test_names_and_targets_without_such_a_kernel(fake, rows):
    q, _, _, cache = chunk([rows] * 2, [13, 2], 16, dtype=F16)
    texts = {"portable": "this build has no portable flash_attention_paged kernel for float16 head dim 64, page 16"}
    texts["softmax_sm_90a_bf16_bf16_v8"] = 'this build has no flash_attention_paged kernel of that name for Fake "GPU"'
    for force, text in texts.items():
        fake.knobs(force=force)
        with pytest.raises(RuntimeError, match=f"^flash_attention_paged: TILEOPS_FORCE={force} cannot apply: {text}; "):
            fake.ops.flash_attention_paged(torch.stack(q), *cache)


def test_dtypes(fake):
    q, _, _, cache = chunk([1] * 2, [13, 2], 16, dtype=F16)
    assert explain(fake, torch.stack(q), *cache)[1] == DECODE.replace("bf16", "f16")
    q, _, _, cache = chunk([70] * 2, [13, 2], 16, dtype=F16)
    reason = "this build has no flash_attention_paged kernel for float16 head dim 64, page 16"
    assert explain(fake, torch.stack(q), *cache) == ["eager", "", reason]


def test_empty(fake):
    q, _, _, cache = chunk([3, 3], [13, 2], 16)
    for rows, lengths in ((torch.stack(q)[:0], cache[2:]), (torch.stack(q)[:, :0], ())):
        given = rows, *cache[:2], *([t[:0] for t in lengths] or cache[2:])
        assert explain(fake, *given) == ["kernel", "", "the results are empty, so nothing is launched"]
        assert fake.kernel(lambda given=given: fake.ops.flash_attention_paged(*given)) == "eager"


@pytest.mark.parametrize("rows, first", [(1, "attention_decode_sm_90a_bf16_64x128x64"), (70, "attention_tiles")])
def test_launches(fake, rows, first):
    q, _, _, cache = chunk([rows] * 2, [13, 2], 16)
    fake.ops.flash_attention_paged(torch.stack(q), *cache)
    assert fake.get("loads_outside_relaxed") == 0 and fake.get("relaxed") == 0
    fake.set(launch_error=LAUNCH_FAILURE)
    with pytest.raises(RuntimeError, match=f"launching {first} failed: a made-up failure"):
        fake.ops.flash_attention_paged(torch.stack(q), *cache)
