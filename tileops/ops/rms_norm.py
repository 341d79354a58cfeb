"""rms_norm: y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset) over one dimension. The formula is in _norm.py."""
from typing import Any

import torch
from torch import Tensor

from . import _norm
from ._table import differentiates, original, refuse_out, register


def _check(x: Tensor, weight: Tensor | None = None, eps: float | None = 1e-6, *, dim: int = -1, **options: Any) -> torch.dtype:
    return _norm.check("rms_norm", x, weight, dim)


def _formula(x: Tensor, weight: Tensor | None = None, eps: float | None = 1e-6, *, dim: int = -1, **options: Any) -> Tensor:
    return _norm.Norm(eps, dim, **options).forward(x, weight)


_op = register(
    "rms_norm(Tensor x, Tensor? weight=None, float? eps=1e-6, *, int dim=-1, float weight_offset=0.0, "
    "bool round_before_weight=False) -> Tensor",
    _check,
    _formula,
)


class _RmsNorm(torch.autograd.Function):
    """The gradient of _norm.py, recomputed from x: nothing but the inputs is kept for it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, eps: float | None, dim: int, weight_offset: float, round_before_weight: bool
    ) -> Tensor:
        return _op.default(x, weight, eps, dim=dim, weight_offset=weight_offset, round_before_weight=round_before_weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, *ctx.options = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        return *_norm.Norm(*ctx.options).gradients(dy.float(), x, weight, wants_x, wants_weight), None, None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    dim: int = -1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Root-mean-square norm over the dimension `dim`: x * rsqrt(mean(x^2) + eps) * (weight + weight_offset).

    Args:
        x: any shape and strides; float32, float16 or bfloat16. A tensor without dimensions counts as a row of one.
        weight: None, or one dimension of x.size(dim) elements, any of the three dtypes (not necessarily that of `x`), any
            stride.
        eps: added to the mean of the squares, in units of x^2; None is the epsilon of float32, 1.1920929e-07, whatever the
            dtype of `x`.
        dim: the dimension that is normalised, counted from the end if negative.
        weight_offset: added to the weight in float32 (Gemma stores weight - 1 and passes 1.0). No effect without a weight.
        round_before_weight: where the roundings are. False: float32 throughout, one rounding at the end (torch.nn.RMSNorm,
            FlashInfer).
            True: x * rstd is rounded to the dtype of `x`, then multiplied by the weight in float32 and rounded again (Llama in
            Transformers, vLLM).
        out: takes the result: shape, dtype and device of `x`, any strides, in memory that neither `x` nor `weight` uses.

    Returns:
        `out`, or a new tensor with the dtype of `x` and the strides of `torch.empty_like(x)`. A row of zeros gives zeros (NaN
        for eps=0).

    Gradients: of `x` and `weight`, each only if wanted and in its own dtype, computed and summed in float32 by eager PyTorch,
    recomputing x * rstd; rounding counts as the identity; double backward works, forward mode raises.

    Raises:
        ValueError: a dtype other than the three; a weight or `out` that does not fit; an `out` that overlaps an input or
            itself, or that meets a wanted gradient.
        IndexError: `dim` out of range.
        RuntimeError: TILEOPS_FORCE or TILEOPS_REQUIRE_NATIVE asks for what cannot be had.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    try:
        if differentiates(x, weight, out):
            refuse_out("rms_norm", out)
            return _RmsNorm.apply(x, weight, eps, dim, weight_offset, round_before_weight)
        if out is None:
            return _op.default(x, weight, eps, dim=dim, weight_offset=weight_offset, round_before_weight=round_before_weight)
        return _op.into(out, x, weight, eps, dim=dim, weight_offset=weight_offset, round_before_weight=round_before_weight)
    except RuntimeError as error:
        raise original(error) from None
