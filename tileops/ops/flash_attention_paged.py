"""flash_attention_paged: attention over keys and values in the pages of a cache, for prefill in chunks and for decoding."""
from typing import Any

import torch
from torch import Tensor

from ._attention import Sequences, options_of
from ._attention_checks import (
    check_count,
    check_index,
    check_keys,
    check_offsets,
    check_options,
    check_rank,
    refuse_scales,
)
from ._checks import check_dtype
from ._sequences import Packed, Pages, attend_all, attend_packed, cost
from ._table import original, refuse_gradients, register

_OP = "flash_attention_paged"


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[torch.dtype, torch.dtype]:
    refuse_scales(_OP, q_descale, k_descale, v_descale)
    check_dtype(_OP, "q", q.dtype)
    check_rank(_OP, "q", q, "[B, Sq, H, D]" if cu_seqlens_q is None else "[total_q, H, D]")
    names = "k_cache", "v_cache"
    check_keys(_OP, q, k_cache, v_cache, names, "[pages, page, Hk, D]", "[pages, page, Hk, Dv]")
    count = q.shape[0] if cu_seqlens_q is None else check_offsets(_OP, "cu_seqlens_q", cu_seqlens_q, q)
    check_index(_OP, "block_table", block_table, (count, "W"), q)
    check_index(_OP, "cache_seqlens", cache_seqlens, (count,), q)
    check_count(_OP, "max_seqlen_q", max_seqlen_q)
    if cu_seqlens_q is None and max_seqlen_q not in (0, q.shape[1]):
        raise ValueError(f"{_OP}: max_seqlen_q is {max_seqlen_q}; expected 0 or {q.shape[1]}, as in q, without cu_seqlens_q")
    if cu_seqlens_q is not None and max_seqlen_q == 0 and q.shape[0]:
        raise ValueError(f"{_OP}: max_seqlen_q is 0; expected the number of queries of the longest sequence, with cu_seqlens_q")
    check_options(_OP, q, scale, window_left, window_right, softcap, sinks)
    check_count(_OP, "num_splits", num_splits)
    return q.dtype, torch.float32


def _shape(q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **options: Any) -> tuple[tuple[int, ...], ...]:
    return (*q.shape[:-1], v_cache.shape[-1]), (*q.shape[:-3], q.shape[-2], q.shape[-3])


def _formula(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    **descales: None,
) -> tuple[Tensor, Tensor]:
    o = options_of(q, causal, scale, window_left, window_right, softcap, sinks)
    keys = Pages(block_table, cache_seqlens, k_cache.shape[1])
    have_one = cu_seqlens_q is not None and max_seqlen_q == 1 and q.shape[0] == block_table.shape[0]
    q = q[:, None] if have_one else q
    queries = None if cu_seqlens_q is None or have_one else Packed(cu_seqlens_q, min(max_seqlen_q, q.shape[0]))
    rows = q.shape[1] if queries is None else queries.longest

    def load(part: slice) -> Sequences:
        k, v = keys.pad(k_cache, part), keys.pad(v_cache, part)
        if queries is None:
            return Sequences(q[part], k, v, None, keys.lengths[part, None])
        return Sequences(queries.pad(q, part), k, v, queries.lengths[part, None], keys.lengths[part, None])

    elements = cost(rows, keys.longest, q.shape[-2], k_cache.shape[2], q.shape[-1] + v_cache.shape[-1])
    if queries is None:
        out, lse = attend_all(load, q.shape[0], elements, o)
        return (out[:, 0], lse[:, :, 0].mT) if have_one else (out, lse)
    return attend_packed(load, queries, q, v_cache.shape[-1], elements, o)


_op = register(
    "flash_attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cache_seqlens, *, "
    "Tensor? cu_seqlens_q=None, int max_seqlen_q=0, bool causal=False, float? scale=None, int window_left=-1, "
    "int window_right=-1, float softcap=0.0, Tensor? sinks=None, int num_splits=0, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None) -> (Tensor out, Tensor lse)",
    _check,
    _formula,
    _shape,
)


def flash_attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`flash_attention` over keys and values in the pages of a cache; float32 softmax and sums, one rounding.

    Key j of sequence b, for j < cache_seqlens[b], is slot j % page of page block_table[b, j // page]. Causal masks and windows
    are bottom-right aligned within each sequence, so the last query stands on the last key in the cache: the keys of the
    queries themselves are in the cache already. Caches that lie otherwise than in rows at multiples of 16 bytes (head dims
    that are no multiple of 8) are copied in each call, if they have no more than twice the pages that `block_table` lists;
    eager PyTorch computes the others.

    Args:
        q: [B, Sq, H, D], or with `cu_seqlens_q` [total_q, H, D]; bfloat16, float16 or float32 (which no kernel takes), any
            strides.
        k_cache: [pages, page, Hk, D], the dtype of `q`, any strides and any page size; H is a multiple of Hk.
        v_cache: [pages, page, Hk, Dv], the dtype of `q`, any strides.
        block_table: [B, W], int32 (or int64, converted on the device), any strides: the pages of each sequence. Entries past
            the last page in use may be anything (-1, 2**30); those in use must be pages of the cache, which is not checked.
        cache_seqlens: [B], int32 or int64: the number of keys of each sequence, at most W * page; 0 gives out 0 and LSE -inf.
            Slots past it may hold anything, NaN included, without effect.
        cu_seqlens_q: None, or [B + 1], int32 or int64: the queries are packed, those of sequence b in rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] - 1.
        max_seqlen_q: with `cu_seqlens_q`, the number of queries of the longest sequence, or more; of a longer one the rest is
            left out, as if it were not there. With 1 and as many rows as sequences, sequence b has row b, whatever
            `cu_seqlens_q` says. Without `cu_seqlens_q`, 0 or Sq.
        causal: as in `flash_attention`, and so are the options below.
        scale: None is D**-0.5.
        window_left: -1: no limit.
        window_right: -1: no limit.
        softcap: 0 or None is off.
        sinks: None, or [H], any of the three dtypes.
        num_splits: into how many parts a kernel splits the keys of a sequence; 0: it chooses. The result is the same up to the
            order of float32 sums; eager PyTorch does not split.
        q_descale: reserved; anything but None raises NotImplementedError.
        k_descale: the same.
        v_descale: the same.
        out: takes the first result: its shape, dtype and device, any strides, in memory that no input uses.
        lse: takes the second result, likewise. Either may be given alone.

    Returns:
        `out` [B, Sq, H, Dv] or [total_q, H, Dv] in the dtype of `q`, and `lse` [B, H, Sq] or [H, total_q] in float32, natural
        logarithm, sinks included; new and contiguous where they were not given.
        The fallback to eager PyTorch reads the longest length back from the GPU, but not while a stream is captured: a captured
        graph serves any lengths up to W * page.

    Gradients: none; it is for inference. An input that wants one, or forward mode, is an error.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as `flash_attention`; ValueError also for index tensors that are neither
            int32 nor int64 or do not go together, for a max_seqlen_q that does not fit, and for num_splits below 0.
        NotImplementedError: an input that wants a gradient while gradients are on.

    Source: Kwon et al., PagedAttention (2023); split keys as in Flash-Decoding.
    """
    refuse_scales(_OP, q_descale, k_descale, v_descale)
    refuse_gradients(_OP, q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, out=out, lse=lse)
    softcap = 0.0 if softcap is None else softcap
    args = q, k_cache, v_cache, block_table, cache_seqlens
    options = dict(
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, causal=causal, scale=scale, window_left=window_left,
        window_right=window_right, softcap=softcap, sinks=sinks, num_splits=num_splits,
    )  # fmt: skip
    try:
        if out is None and lse is None:
            return _op.default(*args, **options)
        return _op.into_each((out, lse), *args, **options)
    except RuntimeError as error:
        raise original(error) from None
