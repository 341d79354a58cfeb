"""flash_attention: softmax(q k^T) v and its LSE for a batch of sequences of one length."""
from typing import Any

import torch
from torch import Tensor

from ._attention import Sequences, attend_backward, batches, fake_gradients, options_of
from ._attention_checks import check_keys, check_options, check_rank, refuse_scales
from ._checks import check_dtype
from ._sdpa import sdpa
from ._sequences import attend_all, cost
from ._table import differentiates, distinct, original, refuse_out, register, register_helper

_OP = "flash_attention"


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    check_rank(_OP, "q", q, "[B, Sq, H, D]")
    check_keys(_OP, q, k, v, ("k", "v"), "[B, Sk, Hk, D]", "[B, Sk, Hk, Dv]")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"{_OP}: k has shape {list(k.shape)}; expected a batch of {q.shape[0]}, that of q")
    check_options(_OP, q, scale, window_left, window_right, softcap, sinks)
    return q.dtype, torch.float32


def _shape(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[tuple[int, ...], ...]:
    batch, rows, heads, _ = q.shape
    return (batch, rows, heads, v.shape[-1]), (batch, heads, rows)


def _formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    **descales: None,
) -> tuple[Tensor, Tensor]:
    o = options_of(q, causal, scale, window_left, window_right, softcap, sinks)
    return sdpa(q, k, v, o) or attend_all(lambda part: Sequences(q[part], k[part], v[part]), q.shape[0], _cost(q, k, v), o)


def _cost(q: Tensor, k: Tensor, v: Tensor) -> int:
    return cost(q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3] + v.shape[3])


_op = register(
    "flash_attention(Tensor q, Tensor k, Tensor v, *, bool causal=False, float? scale=None, int window_left=-1, "
    "int window_right=-1, float softcap=0.0, Tensor? sinks=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None) -> (Tensor out, Tensor lse)",
    _check,
    _formula,
    _shape,
)


def _backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None,
    causal: bool, scale: float | None, window_left: int, window_right: int, softcap: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v and, if there are any, sinks (else an empty tensor), each in the dtype of its tensor."""
    o = options_of(q, causal, scale, window_left, window_right, softcap, sinks)
    parts = []
    for part in batches(q.shape[0], _cost(q, k, v)):
        s = Sequences(q[part], k[part], v[part])
        parts.append(attend_backward(s, o, out[part], lse[part], dout[part], None if dlse is None else dlse[part]))
    dsinks = q.new_empty(0) if sinks is None else q.new_zeros(sinks.shape, dtype=torch.float32)
    dq, dk, dv = (torch.cat([part[i] for part in parts]) if parts else torch.zeros_like(t) for i, t in enumerate((q, k, v)))
    dsinks = dsinks if sinks is None else sum((part.sinks for part in parts), dsinks).to(sinks.dtype)
    return *(grad.to(t.dtype).contiguous() for grad, t in zip((dq, dk, dv), (q, k, v))), dsinks


_backward_op = register_helper(
    f"_{_OP}_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sinks, "
    "bool causal, float? scale, int window_left, int window_right, float softcap) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    fake_gradients,
)


class _FlashAttention(torch.autograd.Function):
    """The scores are computed again, a tile at a time; q, k, v, out and lse are kept for it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
        causal, scale, window_left, window_right, softcap = options
        return _op.default(
            q, k, v, causal=causal, scale=scale, window_left=window_left, window_right=window_right, softcap=softcap,
            sinks=sinks,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, sinks, *ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        dout = torch.zeros_like(out) if dout is None else dout
        backward = _backward if torch.is_grad_enabled() else _backward_op  # a second derivative is wanted, or not
        grads = backward(dout, dlse, q, k, v, out, lse, sinks, *ctx.options)
        wanted = ctx.needs_input_grad
        return *(grad if want else None for grad, want in zip(grads, wanted)), *(None for _ in ctx.options)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    """Attention softmax(q k^T * scale) v, and the logarithm of the sum of its exponentials; softmax and sums in float32.

    Query i sees keys j with i + Sk - Sq - window_left <= j <= i + Sk - Sq + window_right: the last query stands on the last key
    (bottom-right alignment). A query that sees no key has out 0 and LSE -inf.

    Kernels take D and Dv up to 256, bfloat16 and float16. What is no multiple of 8, or lies in memory otherwise than in rows at
    multiples of 16 bytes, is copied first (`tileops.explain` says what), and larger ones are computed by eager PyTorch.

    Args:
        q: [B, Sq, H, D], bfloat16, float16 or float32 (which no kernel takes), any strides.
        k: [B, Sk, Hk, D], the dtype of `q`, any strides. H is a multiple of Hk: head h of `q` reads head h // (H / Hk) of `k`
            (multi-head, grouped-query and multi-query attention). B, Sq and Sk may be 0.
        v: [B, Sk, Hk, Dv], the dtype of `q`, any strides, not necessarily those of `k`; Dv need not be D.
        causal: whether a query sees no key after the one it stands on: window_right = 0.
        scale: what q k^T is multiplied with; None is D**-0.5. 0 and negative numbers are taken as they are.
        window_left: how many keys before the one it stands on a query sees; -1: all.
        window_right: how many after it; -1: all.
        softcap: c > 0 turns a score s, already scaled and not yet masked, into c * tanh(s / c); 0 or None is off. Kernels take
            the GPU's own tanh, whose relative error is 2**-11.
        sinks: None, or [H], any of the three dtypes: for each head a score that takes part in the softmax and has no value. It
            is neither scaled nor capped, and is part of the LSE (but not where a query sees no key: there it is -inf).
        q_descale: reserved for scaled operands; anything but None raises NotImplementedError.
        k_descale: the same.
        v_descale: the same.
        out: takes the first result: its shape, dtype and device, any strides, in memory that no input uses.
        lse: takes the second result, likewise. Either may be given alone.

    Returns:
        `out` [B, Sq, H, Dv] in the dtype of `q`, rounded once, and `lse` [B, H, Sq] in float32, natural logarithm; new and
        contiguous where they were not given. There is no dropout and no ALiBi: a keyword for them is a TypeError.
        In eager PyTorch this is `scaled_dot_product_attention` where its options suffice (it rounds the weights to the dtype of
        `v`, and on a CPU in half precision its exponentials, and so the LSE, err by some 5e-5), else tiles of query rows: no
        more than 2**25 scores are in memory at a time.

    Gradients: of `q`, `k`, `v` and `sinks`, each only if wanted and in its own dtype, from gradients of both results, by eager
    PyTorch: the scores are computed again, a tile at a time. Double backward works (and keeps all scores), forward mode raises.

    Raises:
        ValueError: shapes that do not go together, a dtype other than the three, tensors of two dtypes or devices, a window
            below -1, a softcap below 0, a scale that is not finite; an `out` or `lse` that does not fit, that overlaps an
            input, the other one or itself, or that meets a wanted gradient.
        NotImplementedError: a descale.
        RuntimeError: TILEOPS_FORCE or TILEOPS_REQUIRE_NATIVE asks for what cannot be had.

    Source: Dao et al., FlashAttention (2022); sinks as in gpt-oss, softcap as in Gemma 2.
    """
    refuse_scales(_OP, q_descale, k_descale, v_descale)
    softcap = 0.0 if softcap is None else softcap
    try:
        if differentiates(q, k, v, sinks, out, lse):
            refuse_out(_OP, out)
            refuse_out(_OP, lse, "lse")
            tensors = distinct(q, k, v, sinks)
            return _FlashAttention.apply(*tensors, causal, scale, window_left, window_right, softcap)
        options = dict(
            causal=causal, scale=scale, window_left=window_left, window_right=window_right, softcap=softcap, sinks=sinks
        )
        if out is None and lse is None:
            return _op.default(q, k, v, **options)
        return _op.into_each((out, lse), q, k, v, **options)
    except RuntimeError as error:
        raise original(error) from None
