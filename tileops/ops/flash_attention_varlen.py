"""flash_attention_varlen: flash_attention for sequences of different lengths, packed one behind the other."""
from typing import Any

import torch
from torch import Tensor

from ._attention import Sequences, fake_gradients, options_of
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
from ._sequences import Load, Packed, attend_packed, backward_packed, cost
from ._table import differentiates, distinct, original, refuse_out, register, register_helper

_OP = "flash_attention_varlen"


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[torch.dtype, torch.dtype]:
    refuse_scales(_OP, q_descale, k_descale, v_descale)
    check_dtype(_OP, "q", q.dtype)
    check_rank(_OP, "q", q, "[total_q, H, D]")
    check_keys(_OP, q, k, v, ("k", "v"), "[total_k, Hk, D]", "[total_k, Hk, Dv]")
    count = check_offsets(_OP, "cu_seqlens_q", cu_seqlens_q, q)
    check_index(_OP, "cu_seqlens_k", cu_seqlens_k, (count + 1,), q)
    check_count(_OP, "max_seqlen_q", max_seqlen_q)
    check_count(_OP, "max_seqlen_k", max_seqlen_k)
    if seqused_k is not None:
        check_index(_OP, "seqused_k", seqused_k, (count,), q)
    check_options(_OP, q, scale, window_left, window_right, softcap, sinks)
    return q.dtype, torch.float32


def _shape(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> tuple[tuple[int, ...], ...]:
    return (*q.shape[:2], v.shape[2]), (q.shape[1], q.shape[0])


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_k: Tensor | None,
) -> tuple[Packed, Packed, Load, int]:  # fmt: skip
    max_seqlen_q, max_seqlen_k = min(max_seqlen_q, q.shape[0]), min(max_seqlen_k, k.shape[0])  # what is padded to has this size
    queries, keys = Packed(cu_seqlens_q, max_seqlen_q), Packed(cu_seqlens_k, max_seqlen_k, seqused_k)

    def load(part: slice) -> Sequences:
        lengths = queries.lengths[part, None], keys.lengths[part, None]
        return Sequences(queries.pad(q, part), keys.pad(k, part), keys.pad(v, part), *lengths)

    return queries, keys, load, cost(max_seqlen_q, max_seqlen_k, q.shape[1], k.shape[1], q.shape[2] + v.shape[2])


def _formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    **descales: None,
) -> tuple[Tensor, Tensor]:
    o = options_of(q, causal, scale, window_left, window_right, softcap, sinks)
    queries, _, load, elements = _sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    return attend_packed(load, queries, q, v.shape[-1], elements, o)


_op = register(
    "flash_attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, "
    "int max_seqlen_k, *, Tensor? seqused_k=None, bool causal=False, float? scale=None, int window_left=-1, "
    "int window_right=-1, float softcap=0.0, Tensor? sinks=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None) -> (Tensor out, Tensor lse)",
    _check,
    _formula,
    _shape,
)


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, seqused_k: Tensor | None,
    causal: bool, scale: float | None, window_left: int, window_right: int, softcap: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v and, if there are any, sinks (else an empty tensor), each in the dtype of its tensor."""
    o = options_of(q, causal, scale, window_left, window_right, softcap, sinks)
    queries, keys, load, elements = _sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    *grads, dsinks = backward_packed(load, queries, keys, (q, k, v, out, lse), (dout, dlse), elements, o)
    dsinks = q.new_empty(0) if sinks is None else dsinks.to(sinks.dtype, copy=True)
    return *(grad.to(t.dtype, copy=True).contiguous() for grad, t in zip(grads, (q, k, v))), dsinks


_backward_op = register_helper(
    f"_{_OP}_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sinks, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, Tensor? seqused_k, "
    "bool causal, float? scale, int window_left, int window_right, float softcap) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    fake_gradients,
)


class _FlashAttentionVarlen(torch.autograd.Function):
    """The scores are computed again, a tile at a time; q, k, v, out and lse are kept for it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, seqused_k: Tensor | None, *options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        causal, scale, window_left, window_right, softcap = options
        return _op.default(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k=seqused_k, causal=causal, scale=scale,
            window_left=window_left, window_right=window_right, softcap=softcap, sinks=sinks,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, max_q, max_k, seqused_k, *options = inputs
        ctx.options = max_q, max_k, options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, out, lse = ctx.saved_tensors
        max_q, max_k, options = ctx.options
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        dout = torch.zeros_like(out) if dout is None else dout
        backward = _backward if torch.is_grad_enabled() else _backward_op  # a second derivative is wanted, or not
        lengths = cu_seqlens_q, cu_seqlens_k, max_q, max_k, seqused_k
        grads = backward(dout, dlse, q, k, v, out, lse, sinks, *lengths, *options)
        wanted = ctx.needs_input_grad
        return *(grad if want else None for grad, want in zip(grads, wanted)), *(None for _ in wanted[4:])


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`flash_attention` of each of B sequences, packed one behind the other; float32 softmax and sums, one rounding.

    Sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 and the keys cu_seqlens_k[b] to cu_seqlens_k[b + 1]
    - 1, either of which may be none; causal masks and windows are bottom-right aligned within each sequence. What lies
    otherwise than in rows at multiples of 16 bytes is copied first, as by `flash_attention`.

    Args:
        q: [total_q, H, D], bfloat16, float16 or float32 (which no kernel takes), any strides.
        k: [total_k, Hk, D], the dtype of `q`, any strides; H is a multiple of Hk.
        v: [total_k, Hk, Dv], the dtype of `q`, any strides.
        cu_seqlens_q: [B + 1], int32 (or int64, converted on the device), from 0 to total_q, not decreasing. Its values are not
            checked. Rows that no sequence has get out 0 and LSE -inf.
        cu_seqlens_k: [B + 1], likewise, for the keys.
        max_seqlen_q: the number of queries of the longest sequence, or more; of a longer one the rest is left out, as if it
            were not there.
        max_seqlen_k: the same for the keys. Both are numbers, so that nothing is read back from the device.
        seqused_k: None, or [B], int32 or int64: of the keys of each sequence, how many count (the first ones; masks are aligned
            with the last of them). The others may hold anything.
        causal: as in `flash_attention`, and so are the options below.
        scale: None is D**-0.5.
        window_left: -1: no limit.
        window_right: -1: no limit.
        softcap: 0 or None is off.
        sinks: None, or [H], any of the three dtypes.
        q_descale: reserved; anything but None raises NotImplementedError.
        k_descale: the same.
        v_descale: the same.
        out: takes the first result: its shape, dtype and device, any strides, in memory that no input uses.
        lse: takes the second result, likewise. Either may be given alone.

    Returns:
        `out` [total_q, H, Dv] in the dtype of `q` and `lse` [H, total_q] in float32, natural logarithm, sinks included; new and
        contiguous where they were not given.

    Gradients: of `q`, `k`, `v` and `sinks`, as for `flash_attention`; exactly 0 for queries that see no key and keys that no
    query sees. Double backward works, forward mode raises.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as `flash_attention`; ValueError also for index tensors that are neither
            int32 nor int64 or do not go together, and for a max_seqlen below 0.

    Source: the packed form of FlashAttention (Dao et al. 2022).
    """
    refuse_scales(_OP, q_descale, k_descale, v_descale)
    softcap = 0.0 if softcap is None else softcap
    args = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    try:
        if differentiates(q, k, v, sinks, out, lse):
            refuse_out(_OP, out)
            refuse_out(_OP, lse, "lse")
            tensors = distinct(q, k, v, sinks, *args[3:], seqused_k)
            return _FlashAttentionVarlen.apply(*tensors, causal, scale, window_left, window_right, softcap)
        options = dict(
            seqused_k=seqused_k, causal=causal, scale=scale, window_left=window_left, window_right=window_right,
            softcap=softcap, sinks=sinks,
        )  # fmt: skip
        if out is None and lse is None:
            return _op.default(*args, **options)
        return _op.into_each((out, lse), *args, **options)
    except RuntimeError as error:
        raise original(error) from None
