"""FlashMLA's dense decoding, as its users call it, over tileops.mla_decode."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops._attention_checks import check_index, check_keys, check_rank
from ..ops._checks import check_dtype
from ..ops.mla_decode import mla_decode

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

_METADATA, _DECODE = "get_mla_metadata", "flash_mla_with_kvcache"
_PART = 8  # numbers that FlashMLA's schedule has for each part of the work


@dataclass
class FlashMLASchedMeta:
    """FlashMLA keeps its schedule here. Our kernels plan by themselves, so that the fields stay as they are and one object
    serves calls of any shapes and lengths."""

    have_initialized: bool = False
    config: object | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def get_mla_metadata(
    cache_seqlens: Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[FlashMLASchedMeta | Tensor, Tensor | None]:
    """The `tile_scheduler_metadata` and `num_splits` of `flash_mla_with_kvcache`, in either form of FlashMLA's interface.

    Args:
        cache_seqlens: None for the newer form. For the older one [B]: the number of tokens of each request.
        num_q_tokens_per_head_k, num_heads_k, num_heads_q: without effect; our kernels see them at the call.
        is_fp8_kvcache, topk: False and None; FlashMLA's fp8 caches and sparse attention are not here.

    Returns:
        Without `cache_seqlens` a `FlashMLASchedMeta` and None. With it two int32 tensors on its device, [1, 8] and [B + 1],
        that stand for a schedule of one part; copies of them, in the buffers of a CUDA graph for example, serve as well.

    Raises:
        NotImplementedError: is_fp8_kvcache or topk.
    """
    _refuse_fp8(_METADATA, is_fp8_kvcache)
    _refuse_sparse(_METADATA, topk=topk)
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    parts = torch.zeros(1, _PART, dtype=torch.int32, device=cache_seqlens.device)
    return parts, torch.arange(cache_seqlens.shape[0] + 1, dtype=torch.int32, device=cache_seqlens.device)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | Tensor,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Latent attention of a few queries over a paged cache: all that FlashMLA's dense decoding serves, on any device, and also
    other page sizes, widths and strides, float32, int64 index tensors and an empty batch.

    Args:
        q: [B, Sq, Hq, D], bfloat16, float16 or float32; D is 576 for DeepSeek-V2 and V3.
        k_cache: [pages, page, Hk, D], the dtype of `q`, where Hk divides Hq: head h of `q` reads head h // (Hq / Hk). Each of
            the Hk heads is a call of `mla_decode`; DeepSeek's models have one.
        block_table: [B, W], int32: the pages of each request; entries past the last page in use may be anything.
        cache_seqlens: [B], int32: the number of tokens of each request, those of the queries included.
        head_dim_v: how many numbers of a token are its value, the first ones; 512 for DeepSeek-V2 and V3.
        tile_scheduler_metadata, num_splits: what `get_mla_metadata` returned: an object and None, or two tensors.
        softmax_scale: what q k^T is multiplied with. None means D**-0.5, as in FlashMLA; DeepSeek's models use another one.
        causal: whether query i sees only tokens j <= i + cache_seqlens[b] - Sq. For `mla_decode` the default is True.
        is_fp8_kvcache, indices and all that follow: False and None; FlashMLA's fp8 caches and sparse attention are not here.

    Returns:
        `out` [B, Sq, Hq, head_dim_v] in the dtype of `q`, and `lse` [B, Hq, Sq] in float32, natural logarithm. A query that
        sees no token has out 0 and, as in FlashMLA, LSE +inf, where `mla_decode` has -inf.

    Gradients: none, as in FlashMLA; an input that wants one is an error.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together, no block_table or cache_seqlens, metadata of one form
            with num_splits of the other.
        TypeError: tile_scheduler_metadata that is not from this module.
        NotImplementedError: an fp8 cache, an argument of sparse attention, an input that wants a gradient.

    Source: DeepSeek-AI, FlashMLA, https://github.com/deepseek-ai/FlashMLA.
    """
    _refuse_fp8(_DECODE, is_fp8_kvcache)
    sparse = dict(indices=indices, attn_sink=attn_sink, extra_k_cache=extra_k_cache, topk_length=topk_length)
    _refuse_sparse(_DECODE, **sparse, extra_indices_in_kvcache=extra_indices_in_kvcache, extra_topk_length=extra_topk_length)
    _check(q, k_cache, block_table, cache_seqlens)
    _check_metadata(q, tile_scheduler_metadata, num_splits)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    kv_heads = k_cache.shape[2]
    results = [
        mla_decode(queries, cache, block_table, cache_seqlens, scale, head_dim_v=head_dim_v, causal=causal)
        for queries, cache in zip(q.tensor_split(kv_heads, 2), k_cache.unbind(2))
    ]
    out, lse = results[0] if kv_heads == 1 else (torch.cat(parts, dim) for parts, dim in zip(zip(*results), (2, 1)))
    return out, lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.inf)  # one kernel, where masked_fill_ needs two


def _refuse_fp8(op: str, is_fp8_kvcache: bool) -> None:
    if is_fp8_kvcache:
        raise NotImplementedError(
            f"{op}: is_fp8_kvcache is True; tileops has no fp8 caches; expected False and a k_cache of the dtype of q, "
            "or FlashMLA itself for this call"
        )


def _refuse_sparse(op: str, **arguments: Tensor | int | None) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{op}: {name} was given; it belongs to sparse attention, which tileops does not have; expected None, "
                "or FlashMLA itself for this call"
            )


def _check(q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None) -> None:
    """In this function's names; mla_decode checks the rest in the same ones."""
    for name, tensor, form in (("block_table", block_table, "[B, W]"), ("cache_seqlens", cache_seqlens, "[B]")):
        if tensor is None:
            raise ValueError(f"{_DECODE}: {name} is None, which only sparse attention allows; expected a tensor {form}")
    check_dtype(_DECODE, "q", q.dtype)
    check_rank(_DECODE, "q", q, "[B, Sq, Hq, D]")
    form = "[pages, page, Hk, D]"
    check_keys(_DECODE, q, k_cache, k_cache, ("k_cache", "k_cache"), form, form)  # the values are a part of the keys
    if not k_cache.shape[2]:
        raise ValueError(f"{_DECODE}: k_cache has shape {list(k_cache.shape)}; expected {form} with one head or more")


def _check_metadata(q: Tensor, metadata: FlashMLASchedMeta | Tensor, num_splits: Tensor | None) -> None:
    if not isinstance(metadata, FlashMLASchedMeta | Tensor):
        raise TypeError(
            f"{_DECODE}: tile_scheduler_metadata is of type {type(metadata).__module__}.{type(metadata).__qualname__}; "
            f"expected what {_METADATA} of this module returns ({__name__})"
        )
    older = isinstance(metadata, Tensor)
    if older == (num_splits is None):
        found, expected = ("None", "a tensor") if older else ("given", "None")
        raise ValueError(
            f"{_DECODE}: num_splits is {found} beside a tile_scheduler_metadata of type {type(metadata).__name__}; "
            f"expected {expected}: the two as {_METADATA} returned them"
        )
    if older:
        check_index(_DECODE, "tile_scheduler_metadata", metadata, ("parts", _PART), q)
        check_index(_DECODE, "num_splits", num_splits, (q.shape[0] + 1,), q)
