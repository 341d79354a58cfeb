"""mla_decode: multi-head latent attention of a few queries over a paged latent cache, absorbed into one key and value."""

from typing import Any

import torch
from torch import Tensor

from ._attention import Sequences, options_of
from ._attention_checks import check_count, check_index, check_rank, check_scale
from ._checks import check_device, check_dtype
from ._sequences import Pages, attend_all, cost
from ._table import original, refuse_gradients, register

_OP = "mla_decode"


def _check(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    scale: float,
    *,
    q_rope: Tensor | None = None,
    head_dim_v: int = 512,
    causal: bool = True,
    num_splits: int = 0,
) -> tuple[torch.dtype, torch.dtype]:
    check_dtype(_OP, "q", q.dtype)
    check_rank(_OP, "q", q, "[B, Sq, H, D]")
    for name, tensor, form in (("kv_cache", kv_cache, "[pages, page, D]"), ("q_rope", q_rope, "[B, Sq, H, D]")):
        if tensor is not None:
            if tensor.dtype != q.dtype:
                raise ValueError(f"{_OP}: {name} has dtype {tensor.dtype}; expected {q.dtype}, that of q")
            check_rank(_OP, name, tensor, form)
            check_device(_OP, name, tensor, q, "q")
    if q_rope is not None and q_rope.shape[:3] != q.shape[:3]:
        expected = "[" + ", ".join(map(str, q.shape[:3])) + ", D]"
        raise ValueError(f"{_OP}: q_rope has shape {list(q_rope.shape)}; expected {expected} for q of shape {list(q.shape)}")
    dim = q.shape[3] + (0 if q_rope is None else q_rope.shape[3])
    if kv_cache.shape[2] != dim:
        raise ValueError(f"{_OP}: kv_cache has shape {list(kv_cache.shape)}; expected [pages, page, {dim}], the head dim of q")
    if not 1 <= head_dim_v <= dim:
        raise ValueError(f"{_OP}: head_dim_v is {head_dim_v}; expected 1 to {dim}, the head dim of q")
    check_index(_OP, "block_table", block_table, (q.shape[0], "W"), q)
    check_index(_OP, "cache_seqlens", cache_seqlens, (q.shape[0],), q)
    check_scale(_OP, scale, "a finite number")
    check_count(_OP, "num_splits", num_splits)
    return q.dtype, torch.float32


def _shape(q: Tensor, *args: Any, head_dim_v: int = 512, **options: Any) -> tuple[tuple[int, ...], ...]:
    batch, rows, heads, _ = q.shape
    return (batch, rows, heads, head_dim_v), (batch, heads, rows)


def _formula(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    scale: float,
    *,
    q_rope: Tensor | None = None,
    head_dim_v: int = 512,
    causal: bool = True,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor]:
    q = q if q_rope is None else torch.cat((q, q_rope), -1)
    o = options_of(q, causal, scale, -1, -1, 0.0, None)
    keys = Pages(block_table, cache_seqlens, kv_cache.shape[1])

    def load(part: slice) -> Sequences:
        latent = keys.pad(kv_cache, part).unsqueeze(2)  # one head, which all queries read
        return Sequences(q[part], latent, latent[..., :head_dim_v], None, keys.lengths[part, None])

    return attend_all(load, q.shape[0], cost(q.shape[1], keys.longest, q.shape[2], 1, q.shape[3] + head_dim_v), o)


_op = register(
    "mla_decode(Tensor q, Tensor kv_cache, Tensor block_table, Tensor cache_seqlens, float scale, *, Tensor? q_rope=None, "
    "int head_dim_v=512, bool causal=True, int num_splits=0) -> (Tensor out, Tensor lse)",
    _check,
    _formula,
    _shape,
)


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    scale: float,
    *,
    q_rope: Tensor | None = None,
    head_dim_v: int = 512,
    causal: bool = True,
    num_splits: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed multi-head latent attention over a paged cache (DeepSeek-V2 and V3); float32 softmax and sums, one rounding.

    A token of the cache is one vector c of 512 latent and 64 rotary numbers, shared by all heads: c is the key, c[:512] the
    value, so out = softmax(q c^T * scale) c[:, :512]. Token j of request b, for j < cache_seqlens[b], is slot j % page of page
    block_table[b, j // page].

    Args:
        q: [B, Sq, H, 576], latent part first, or with `q_rope` [B, Sq, H, 512]; bfloat16, float16 or float32 (which no kernel
            takes), any strides. Other widths work too, in eager PyTorch, if those of `q`, `q_rope` and `kv_cache` go together.
        kv_cache: [pages, page, 576], the dtype of `q`, any strides and any page size.
        block_table: [B, W], int32 (or int64, converted on the device), any strides: the pages of each request. Entries past the
            last page in use may be anything (-1, 2**30); those in use must be pages of the cache, which is not checked.
        cache_seqlens: [B], int32 or int64: the number of tokens of each request, at most W * page, those of the queries
            included; 0 gives out 0 and LSE -inf. Slots past it may hold anything, NaN included, without effect.
        scale: what q c^T is multiplied with. There is no default: the widths here do not tell it, for DeepSeek-V3 it is
            (128 + 64)**-0.5 times the square of its YaRN factor.
        q_rope: None, or [B, Sq, H, 64], the dtype of `q`, any strides: the rotary part, apart.
        head_dim_v: how many numbers of a token are its value, the first ones.
        causal: whether query i sees only tokens j <= i + cache_seqlens[b] - Sq (bottom-right alignment). For one query it makes
            no difference.
        num_splits: into how many parts a kernel splits the tokens of a request; 0: it chooses. The result is the same up to the
            order of float32 sums; eager PyTorch does not split.
        out: takes the first result: its shape, dtype and device, any strides, in memory that no input uses.
        lse: takes the second result, likewise. Either may be given alone.

    Returns:
        `out` [B, Sq, H, head_dim_v] in the dtype of `q`, and `lse` [B, H, Sq] in float32, natural logarithm; new and contiguous
        where they were not given.
        The fallback to eager PyTorch reads the longest length back from the GPU, but not while a stream is captured: a captured
        graph serves any lengths up to W * page.

    Gradients: none; it is for inference. An input that wants one, or forward mode, is an error.

    Raises:
        ValueError: shapes that do not go together, a dtype other than the three, tensors of two dtypes or devices, index
            tensors that are neither int32 nor int64, a scale that is not finite, head_dim_v outside the head dim, num_splits
            below 0; an `out` or `lse` that does not fit, that overlaps an input, the other one or itself.
        NotImplementedError: an input that wants a gradient while gradients are on.
        RuntimeError: TILEOPS_FORCE or TILEOPS_REQUIRE_NATIVE asks for what cannot be had.

    Source: DeepSeek-AI, DeepSeek-V2 (2024), the absorbed form; the interface follows FlashMLA.
    """
    refuse_gradients(_OP, q=q, kv_cache=kv_cache, q_rope=q_rope, out=out, lse=lse)
    args = q, kv_cache, block_table, cache_seqlens, scale
    options = dict(q_rope=q_rope, head_dim_v=head_dim_v, causal=causal, num_splits=num_splits)
    try:
        if out is None and lse is None:
            return _op.default(*args, **options)
        return _op.into_each((out, lse), *args, **options)
    except RuntimeError as error:
        raise original(error) from None
