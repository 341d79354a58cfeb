"""merge_attention: attention over two sets of keys from the attention over each of them."""
from typing import Any

import torch
from torch import Tensor

from ._checks import check_device, check_dtype
from ._matmul import without_autocast
from ._table import differentiates, distinct, original, refuse_out, register


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[torch.dtype, torch.dtype]:
    check_dtype("merge_attention", "out_a", out_a.dtype)
    if out_a.dim() not in (3, 4):
        expected = "[B, Sq, H, D] or [total, H, D]"
        raise ValueError(f"merge_attention: out_a has shape {list(out_a.shape)}; expected {expected}")
    if out_b.dtype != out_a.dtype:
        raise ValueError(f"merge_attention: out_b has dtype {out_b.dtype}; expected {out_a.dtype}, that of out_a")
    if out_b.shape != out_a.shape:
        raise ValueError(
            f"merge_attention: out_b has shape {list(out_b.shape)}; expected {list(out_a.shape)}, that of out_a"
        )
    check_device("merge_attention", "out_b", out_b, out_a, "out_a")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.dtype != torch.float32:
            raise ValueError(f"merge_attention: {name} has dtype {lse.dtype}; expected torch.float32")
        if lse.shape != _lse_shape(out_a):
            raise ValueError(
                f"merge_attention: {name} has shape {list(lse.shape)}; expected {list(_lse_shape(out_a))} for out_a of shape "
                f"{list(out_a.shape)}"
            )
        check_device("merge_attention", name, lse, out_a, "out_a")
    return out_a.dtype, torch.float32


def _lse_shape(out: Tensor) -> tuple[int, ...]:
    """[B, H, Sq] of [B, Sq, H, D], [H, total] of [total, H, D]."""
    return *out.shape[:-3], out.shape[-2], out.shape[-3]


def _shape(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(out_a.shape), _lse_shape(out_a)


def _formula(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    with without_autocast(out_a):
        weight_a, weight_b, lse = _weights(lse_a, lse_b)
        return _side(out_a, weight_a) + _side(out_b, weight_b), lse


def _weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of both sides, 0 and 0 where neither saw a key, and the logarithm of the sum."""
    top = torch.maximum(lse_a, lse_b).detach()  # it cancels, so it has no gradient
    top = torch.where(top == -torch.inf, 0.0, top)
    share_a, share_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = share_a + share_b
    divisor = torch.where(total == 0, 1.0, total)
    return share_a / divisor, share_b / divisor, top + torch.log(total)


def _side(out: Tensor, weight: Tensor) -> Tensor:
    """What one side adds to the result; nothing, not even a NaN, where its weight is 0."""
    weight = weight.mT.unsqueeze(-1)  # [..., H, Sq] -> [..., Sq, H, 1]
    return torch.where(weight == 0, 0.0, out.float() * weight)


_op = register(
    "merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)",
    _check,
    _formula,
    _shape,
)


class _MergeAttention(torch.autograd.Function):
    """With the shares w of both sides: d out_a = w_a * d out, and d lse_a = w_a * (d lse + sum(d out * (out_a - out)))."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        return _op.default(out_a, lse_a, out_b, lse_b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        out_a, lse_a, out_b, lse_b = ctx.saved_tensors
        dout = dout.float()
        weight_a, weight_b, _ = _weights(lse_a, lse_b)
        side_a, side_b = _side(out_a, weight_a), _side(out_b, weight_b)
        along_out = (dout * (side_a + side_b)).sum(-1).mT
        grads = []
        for out, weight, side in ((out_a, weight_a, side_a), (out_b, weight_b, side_b)):
            grads.append((dout * weight.mT.unsqueeze(-1)).to(out.dtype))
            grads.append(weight * (dlse - along_out) + (dout * side).sum(-1).mT)
        return tuple(grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad))


def merge_attention(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from out and LSE of the same queries over each; in float32, one
    rounding.

        lse = log(exp(lse_a) + exp(lse_b)),    out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)

    Args:
        out_a: [B, Sq, H, D] or [total, H, D], bfloat16, float16 or float32, any strides.
        lse_a: float32, natural logarithm, [B, H, Sq] or [H, total], any strides. Where it is -inf that side saw no key, and its
            `out` counts for nothing, whatever it holds. Sinks, if any, must be in one of the two sides only.
        out_b: shape and dtype of `out_a`, any strides.
        lse_b: as `lse_a`.
        out: takes the first result: its shape, dtype and device, any strides, in memory that no input uses.
        lse: takes the second result, likewise. Either may be given alone.

    Returns:
        `out` and `lse`, new and contiguous where they were not given: the shape and dtype of `out_a`, and float32 of the shape
        of `lse_a`. Where neither side saw a key: 0 and -inf. Where one did not: exactly the other side.

    Gradients: of all four, each only if wanted, from gradients of both results. Double backward works, forward mode raises.

    Raises:
        ValueError: shapes that do not go together, a dtype other than the three, an LSE that is not float32; an `out` or `lse`
            that does not fit, that overlaps an input, the other one or itself, or that meets a wanted gradient.
        RuntimeError: TILEOPS_FORCE or TILEOPS_REQUIRE_NATIVE asks for what cannot be had.

    Source: the rescaling of the online softmax (Milakov and Gimelshein 2018), as in split-KV attention and ring attention.
    """
    try:
        if differentiates(out_a, lse_a, out_b, lse_b, out, lse):
            refuse_out("merge_attention", out)
            refuse_out("merge_attention", lse, "lse")
            return _MergeAttention.apply(*distinct(out_a, lse_a, out_b, lse_b))
        if out is None and lse is None:
            return _op.default(out_a, lse_a, out_b, lse_b)
        return _op.into_each((out, lse), out_a, lse_a, out_b, lse_b)
    except RuntimeError as error:
        raise original(error) from None
