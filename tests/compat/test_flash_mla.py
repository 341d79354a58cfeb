"""FlashMLA's functions against float64: both forms of its interface, its order of arguments, its LSE, and what is refused."""

import copy
import inspect
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_reference import assert_attention, paged
from ops_reference import DTYPES, normal

import tileops
from tileops.compat import flash_mla
from tileops.compat.flash_mla import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata

BF16, INF, NAN = torch.bfloat16, math.inf, math.nan
LENGTHS = [130, 0, 1, 64, 65]


def requests(lengths, heads, device, dtype=BF16, page=64, dim=576, **cache):
    """Tokens [S, Hk, dim] of each request, and the same in pages in random order: k_cache, block_table, cache_seqlens."""
    tokens = [normal(length, heads, dim, dtype=dtype, device=device, seed=5 + b) for b, length in enumerate(lengths)]
    return tokens, paged(tokens, page, device, **cache)


def check(q, tokens, cache, metadata=None, head_dim_v=512, causal=False, softmax_scale=None):
    metadata = get_mla_metadata() if metadata is None else metadata
    out, lse = flash_mla_with_kvcache(q, *cache, head_dim_v, *metadata, softmax_scale, causal)
    batch, rows, heads, _ = q.shape
    assert out.shape == (batch, rows, heads, head_dim_v) and lse.shape == (batch, heads, rows)
    assert out.is_contiguous() and lse.is_contiguous() and not torch.isneginf(lse).any()
    ours = torch.where(lse == INF, -INF, lse)
    for b, token in enumerate(tokens):
        assert_attention(out[b], ours[b], q[b], token, token[..., :head_dim_v], scale=softmax_scale, causal=causal)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(16, 1, 1), (128, 1, 2), (3, 1, 4), (9, 3, 2), (8, 8, 1)])
def test_values(device, heads, kv_heads, rows, causal, dtype):
    tokens, cache = requests(LENGTHS, kv_heads, device, dtype)
    q = normal(5, rows, heads, 576, dtype=dtype, device=device)
    check(q, tokens, cache, causal=causal)


@pytest.mark.parametrize(("page", "dim", "index"), [(64, 512, torch.int32), (16, 576, torch.int64), (128, 576, torch.int32)])
def test_pages_and_widths(device, page, dim, index):
    tokens, cache = requests(LENGTHS, 1, device, page=page, dim=dim, index=index)
    check(normal(5, 2, 4, dim, dtype=BF16, device=device), tokens, cache, causal=True)


@pytest.mark.parametrize("scale", [192**-0.5, 0.0, -0.01])
def test_scale_is_taken_as_it_is(device, scale):  # B40
    tokens, cache = requests(LENGTHS, 1, device)
    check(normal(5, 2, 4, 576, dtype=BF16, device=device), tokens, cache, softmax_scale=scale)


def test_nothing_seen_is_plus_infinity(device):  # B35
    """By a request without tokens, and by queries that causal masking leaves none."""
    tokens, cache = requests([0, 1, 0, 3], 1, device)
    q = normal(4, 3, 2, 576, dtype=BF16, device=device)
    out, lse = check(q, tokens, cache, causal=True)
    seen = torch.tensor([0, 1, 0, 3], device=device)[:, None] >= torch.tensor([3, 2, 1], device=device)
    assert torch.equal(torch.isposinf(lse), ~seen[:, None].expand_as(lse)) and not out[~seen].any()
    out, lse = flash_mla_with_kvcache(q, cache[0], cache[1], torch.zeros_like(cache[2]), 512, *get_mla_metadata())
    assert torch.isposinf(lse).all() and not out.any()


def test_it_is_mla_decode_but_for_that(device):
    _, cache = requests(LENGTHS, 1, device)
    q = normal(5, 2, 4, 576, dtype=BF16, device=device)
    out, lse = flash_mla_with_kvcache(q, *cache, 512, *get_mla_metadata(), causal=True)
    wanted, wanted_lse = tileops.mla_decode(q, cache[0].squeeze(2), *cache[1:], 576**-0.5)
    assert torch.equal(out, wanted) and torch.equal(lse, torch.where(wanted_lse == -INF, INF, wanted_lse))


@pytest.mark.parametrize(("heads", "kv_heads"), [(128, 1), (63, 3), (64, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_as_flashmlas_own_tests_call_it(device, heads, kv_heads, causal):
    """bfloat16 and the device as defaults, inference mode, NaN in all unused slots and pages that are none past the end."""
    tokens, cache = requests([0, 20, 140, 0, 1, 64], kv_heads, device, unused=2147480000)
    q = normal(6, 2, heads, 576, dtype=BF16, device=device)
    wanted = check(q, tokens, cache, causal=causal)
    try:
        torch.set_default_dtype(BF16)
        with torch.inference_mode(), torch.device(device):
            found = [flash_mla_with_kvcache(q, *cache, 512, *data, causal=causal)
                     for data in (get_mla_metadata(), get_mla_metadata(cache[2], 2 * heads // kv_heads, kv_heads))]  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(*pair) for results in found for pair in zip(results, wanted))


def test_nan_of_one_request_stays_there(device):  # B03
    tokens, cache = requests([100, 64], 1, device)
    q = normal(2, 1, 4, 576, dtype=BF16, device=device)
    clean = check(q, tokens, cache)
    cache[0][cache[1][1, 0].long(), 7] = NAN
    out, lse = flash_mla_with_kvcache(q, *cache, 512, *get_mla_metadata())
    assert torch.isnan(out[1]).all() and torch.isnan(lse[1]).all()
    assert torch.equal(out[0], clean[0][0]) and torch.equal(lse[0], clean[1][0])


def test_both_interfaces(device):
    tokens, cache = requests(LENGTHS, 1, device)
    q = normal(5, 2, 16, 576, dtype=BF16, device=device)
    newer = get_mla_metadata()
    older = get_mla_metadata(cache[2], 2 * 16 // 1, 1)
    assert isinstance(newer[0], FlashMLASchedMeta) and newer[1] is None
    assert [(t.dtype, t.device, t.shape[-1]) for t in older] == [(torch.int32, q.device, 8), (torch.int32, q.device, 6)]
    kept = torch.zeros(132, 8, dtype=torch.int32, device=device), torch.zeros(65, dtype=torch.int32, device=device)
    kept[0][: older[0].shape[0]].copy_(older[0])  # as in the static buffers of a CUDA graph
    kept[1][:6].copy_(older[1])
    expected = check(q, tokens, cache, newer)
    for metadata in (newer, older, (kept[0], kept[1][:6]), (FlashMLASchedMeta(), None), get_mla_metadata(cache[2], 32, 1, 16)):
        assert all(map(torch.equal, check(q, tokens, cache, metadata), expected))
    check(q[:2, :1, :3].contiguous(), tokens[:2], (cache[0], cache[1][:2], cache[2][:2]), newer, causal=True)


def test_arguments_are_flashmlas():
    """Names, order and defaults of the two interfaces, the older of which is the beginning of the newer."""
    required, missing = inspect.Parameter.empty, None
    assert [(name, p.default) for name, p in inspect.signature(flash_mla_with_kvcache).parameters.items()] == [
        ("q", required), ("k_cache", required), ("block_table", required), ("cache_seqlens", required),
        ("head_dim_v", required), ("tile_scheduler_metadata", required), ("num_splits", missing), ("softmax_scale", missing),
        ("causal", False), ("is_fp8_kvcache", False), ("indices", missing), ("attn_sink", missing), ("extra_k_cache", missing),
        ("extra_indices_in_kvcache", missing), ("topk_length", missing), ("extra_topk_length", missing),
    ]  # fmt: skip
    assert list(inspect.signature(get_mla_metadata).parameters) == [
        "cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k", "num_heads_q", "is_fp8_kvcache", "topk",
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(0, 1, 16), (2, 0, 16), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_empty(device, shape, kv_heads):
    batch, rows, heads = shape
    table = torch.zeros(batch, 3, dtype=torch.int32, device=device)
    q, cache = (torch.ones(*s, 576, dtype=BF16, device=device) for s in (shape, (2, 64, kv_heads)))
    out, lse = flash_mla_with_kvcache(q, cache, table, table[:, 0], 512, *get_mla_metadata(table[:, 0], rows * heads, 1))
    assert out.shape == (*shape, 512) and lse.shape == (batch, heads, rows)


def test_under_torch_compile(device):
    tokens, cache = requests([70, 0], 2, device)
    q = normal(2, 2, 4, 576, dtype=BF16, device=device)

    def step(q, *cache):
        return flash_mla_with_kvcache(q, *cache, 512, *get_mla_metadata(), causal=True)

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, *cache)
    assert all(map(torch.equal, found, check(q, tokens, cache, causal=True)))


def good():
    """Arguments by name; whole new tensors."""
    table = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
    metadata = {"tile_scheduler_metadata": FlashMLASchedMeta(), "num_splits": None}
    return {"q": torch.ones(2, 1, 4, 6), "k_cache": torch.ones(3, 4, 1, 6), "block_table": table,
            "cache_seqlens": torch.tensor([5, 3], dtype=torch.int32), "head_dim_v": 4, **metadata}  # fmt: skip


ELSE = "or FlashMLA itself for this call"
SPARSE = f"was given; it belongs to sparse attention, which tileops does not have; expected None, {ELSE}"
FP8 = f"is_fp8_kvcache is True; tileops has no fp8 caches; expected False and a k_cache of the dtype of q, {ELSE}"
NO_TENSOR = "is None, which only sparse attention allows; expected a tensor"
TWO = get_mla_metadata(torch.ones(2, dtype=torch.int32))
BESIDE = "beside a tile_scheduler_metadata of type"
RETURNED = "the two as get_mla_metadata returned them"
BAD = [  # what differs from a good call, error, text
    *[({name: torch.ones(1)}, NotImplementedError, f"{name} {SPARSE}") for name in
      ("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")],
    ({"is_fp8_kvcache": True}, NotImplementedError, FP8),
    ({"k_cache": torch.ones(3, 4, 1, 6).to(torch.float8_e4m3fn)}, ValueError,
     "k_cache has dtype torch.float8_e4m3fn; expected torch.float32, that of q"),
    ({"block_table": None}, ValueError, f"block_table {NO_TENSOR} [B, W]"),
    ({"cache_seqlens": None}, ValueError, f"cache_seqlens {NO_TENSOR} [B]"),
    ({"q": torch.ones(2, 1, 4, 6, dtype=torch.float64)}, ValueError,
     "q has dtype torch.float64; expected torch.float32, torch.float16 or torch.bfloat16"),
    ({"q": torch.ones(2, 4, 6)}, ValueError, "q has shape [2, 4, 6]; expected [B, Sq, Hq, D]"),
    ({"k_cache": torch.ones(3, 4, 6)}, ValueError, "k_cache has shape [3, 4, 6]; expected [pages, page, Hk, D]"),
    ({"k_cache": torch.ones(3, 4, 1, 7)}, ValueError,
     "k_cache has shape [3, 4, 1, 7]; expected the head dim of q, 6, as its last dimension"),
    ({"k_cache": torch.ones(3, 4, 3, 6)}, ValueError,
     "q has 4 heads and k_cache has 3; expected a multiple of the heads of k_cache"),
    ({"q": torch.ones(2, 1, 0, 6), "k_cache": torch.ones(3, 4, 0, 6)}, ValueError,
     "k_cache has shape [3, 4, 0, 6]; expected [pages, page, Hk, D] with one head or more"),
    ({"tile_scheduler_metadata": None}, TypeError, "tile_scheduler_metadata is of type builtins.NoneType; "
     "expected what get_mla_metadata of this module returns (tileops.compat.flash_mla)"),
    ({"num_splits": TWO[1]}, ValueError, f"num_splits is given {BESIDE} FlashMLASchedMeta; expected None: {RETURNED}"),
    ({"tile_scheduler_metadata": TWO[0]}, ValueError, f"num_splits is None {BESIDE} Tensor; expected a tensor: {RETURNED}"),
    ({"tile_scheduler_metadata": TWO[0][:, :5], "num_splits": TWO[1]}, ValueError,
     "tile_scheduler_metadata has shape [1, 5]; expected [parts, 8]"),
    ({"tile_scheduler_metadata": TWO[0], "num_splits": TWO[1][:2]}, ValueError, "num_splits has shape [2]; expected [3]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "text"), BAD, ids=lambda value: " ".join(value) if isinstance(value, dict) else "")
def test_what_is_refused(change, error, text):
    flash_mla_with_kvcache(**good())
    with pytest.raises(error) as caught:
        flash_mla_with_kvcache(**{**good(), **change})
    assert str(caught.value) == f"flash_mla_with_kvcache: {text}"


@pytest.mark.parametrize("change", [
    {"block_table": torch.zeros(1, 2, dtype=torch.int32)}, {"cache_seqlens": torch.ones(2)}, {"head_dim_v": 7},
    {"softmax_scale": NAN},
], ids=lambda change: next(iter(change)))  # fmt: skip
def test_what_mla_decode_refuses(change):
    (name,) = change
    with pytest.raises(ValueError, match=rf"^mla_decode: {name.removeprefix('softmax_')} (is|has) "):
        flash_mla_with_kvcache(**{**good(), **change})


@pytest.mark.parametrize(("name", "inner"), [("q", "q"), ("k_cache", "kv_cache")])
def test_gradients_are_refused(name, inner):  # B42
    call = good()
    call[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"mla_decode: {inner} wants a gradient"):
        flash_mla_with_kvcache(**call)
    with torch.no_grad():
        assert not flash_mla_with_kvcache(**call)[0].requires_grad


def test_meta():  # B61
    call = good()
    expected = flash_mla_with_kvcache(**call)
    found = flash_mla_with_kvcache(**{n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in call.items()})
    for ours, real in zip(found, expected):
        assert (ours.device.type, ours.dtype, ours.shape, ours.stride()) == ("meta", real.dtype, real.shape, real.stride())


def test_metadata_travels():  # B63
    """Before and after a call."""
    call = good()
    for _ in range(2):
        expected = flash_mla_with_kvcache(**call)
        for metadata in (call["tile_scheduler_metadata"], TWO[0]):
            for other in (copy.deepcopy(metadata), pickle.loads(pickle.dumps(metadata))):
                splits = TWO[1] if metadata is TWO[0] else None
                found = flash_mla_with_kvcache(**{**call, "tile_scheduler_metadata": other, "num_splits": splits})
                assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("given", "text"), [({"is_fp8_kvcache": True}, FP8), ({"topk": 2048}, f"topk {SPARSE}")])
def test_metadata_that_is_refused(given, text):
    with pytest.raises(NotImplementedError) as caught:
        get_mla_metadata(**given)
    assert str(caught.value) == f"get_mla_metadata: {text}"


def test_only_its_user_imports_it():
    program = """
import sys, tileops
assert not [name for name in sys.modules if name.startswith("tileops.compat")]
from tileops.compat import flash_mla
assert "flash_mla" not in sys.modules
"""
    root = Path(tileops.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert flash_mla.__all__ == ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]
