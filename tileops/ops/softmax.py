"""softmax: y = exp(x - max(x)) / sum(exp(x - max(x))) over one dimension."""
from typing import Any

import torch
from torch import Tensor

from ._checks import DTYPES, EXPECTED_DTYPES, check_dim, check_x
from ._table import differentiates, original, refuse_out, register


def _check(x: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> torch.dtype:
    check_x("softmax", x)
    check_dim("softmax", x, dim)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"softmax: dtype is {dtype}; expected {EXPECTED_DTYPES}")
    return dtype or x.dtype


def _formula(x: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.softmax(x, dim, dtype=torch.float32)


_op = register("softmax(Tensor x, int dim=-1, *, ScalarType? dtype=None) -> Tensor", _check, _formula)


class _Softmax(torch.autograd.Function):
    """dx = y * dy - y * sum(y * dy), in float32 from the stored (rounded) y, as torch does; rounded once, to x's dtype."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        return _op.default(x, dim, dtype=dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.dim, _ = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        y = y.float()
        y_dy = y * dy.float()
        return (y_dy - y * y_dy.sum(ctx.dim, keepdim=True)).to(ctx.dtype), None, None


def softmax(x: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """Softmax over the dimension `dim`, with float32 arithmetic whatever the dtype of `x`, and one rounding, of the result.

    Args:
        x: any shape and strides; float32, float16 or bfloat16. A tensor without dimensions counts as a row of one.
        dim: the dimension that sums to 1, counted from the end if negative.
        dtype: dtype of the result, one of the three; None is that of `x`. Unlike `torch.softmax(x, dtype=...)`, which converts
            `x` to `dtype` before anything else, this takes `x` as it is and rounds the result only. The two differ where
            `dtype` is narrower than that of `x`.
        out: takes the result: shape and device of `x`, the dtype of the result, any strides, in memory that `x` does not use.

    Returns:
        `out`, or a new tensor with the strides of `torch.empty_like(x)`.
        A row whose elements are all -inf, or that has a NaN or +inf, is NaN throughout, as in PyTorch.

    Gradients: of `x`, in the dtype of `x`, computed in float32 by eager PyTorch from the result; double backward works, forward
    mode raises.

    Raises:
        ValueError: a dtype other than the three; an `out` that does not fit, that overlaps `x` or itself, or that meets a
            wanted gradient.
        IndexError: `dim` out of range.
        RuntimeError: TILEOPS_FORCE or TILEOPS_REQUIRE_NATIVE asks for what cannot be had.

    Source: the usual stabilised form; subtracting the maximum first is what keeps exp from overflowing.
    """
    try:
        if differentiates(x, out):
            refuse_out("softmax", out)
            return _Softmax.apply(x, dim, dtype)
        if out is None:
            return _op.default(x, dim, dtype=dtype)
        return _op.into(out, x, dim, dtype=dtype)
    except RuntimeError as error:
        raise original(error) from None
