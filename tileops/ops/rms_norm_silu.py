"""rms_norm_silu: y = z * sigmoid(z) with z = x * rsqrt(mean(x^2) + eps) * weight over a dimension. The norm is in _norm.py."""
from typing import Any

import torch
from torch import Tensor

from . import _norm
from ._table import differentiates, original, refuse_out, register


def _check(x: Tensor, weight: Tensor | None = None, eps: float | None = 1e-5, *, dim: int = -1, **options: Any) -> torch.dtype:
    return _norm.check("rms_norm_silu", x, weight, dim)


def _formula(x: Tensor, weight: Tensor | None = None, eps: float | None = 1e-5, *, dim: int = -1, **options: Any) -> Tensor:
    return torch.nn.functional.silu(_norm.Norm(eps, dim, **options).forward(x, weight))


_op = register(
    "rms_norm_silu(Tensor x, Tensor? weight=None, float? eps=1e-5, *, int dim=-1, bool round_before_weight=False) -> Tensor",
    _check,
    _formula,
)


class _RmsNormSilu(torch.autograd.Function):
    """dz = dy * s * (1 + z * (1 - s)) with s = sigmoid(z), then the gradient of _norm.py; both recomputed from x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float | None, dim: int, round_before_weight: bool) -> Tensor:
        return _op.default(x, weight, eps, dim=dim, round_before_weight=round_before_weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, *ctx.options = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        eps, dim, round_before_weight = ctx.options
        norm = _norm.Norm(eps, dim, round_before_weight=round_before_weight)
        z = norm.forward(x, weight)
        s = torch.sigmoid(z)
        dz = dy.float() * s * (1 + z * (1 - s))
        return *norm.gradients(dz, x, weight, wants_x, wants_weight), None, None, None


def rms_norm_silu(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-5,
    *,
    dim: int = -1,
    round_before_weight: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Root-mean-square norm over the dimension `dim`, then SiLU: z * sigmoid(z) with z = x * rsqrt(mean(x^2) + eps) * weight.

    Args:
        x: any shape and strides; float32, float16 or bfloat16. A tensor without dimensions counts as a row of one.
        weight: None, or one dimension of x.size(dim) elements, any of the three dtypes (not necessarily that of `x`), any
            stride.
        eps: added to the mean of the squares, in units of x^2; None is the epsilon of float32, 1.1920929e-07, whatever the
            dtype of `x`.
        dim: the dimension that is normalised, counted from the end if negative.
        round_before_weight: False: float32 throughout, one rounding, after the SiLU. True: x * rstd is rounded to the dtype of
            `x` before the weight product; that product and the SiLU are float32, and the result is rounded once more.
        out: takes the result: shape, dtype and device of `x`, any strides, in memory that neither `x` nor `weight` uses.

    Returns:
        `out`, or a new tensor with the dtype of `x` and the strides of `torch.empty_like(x)`. A row of zeros gives zeros (NaN
        for eps=0). `F.silu(rms_norm(x))` differs by its rounding of z to the dtype of `x`.

    Gradients: of `x` and `weight`, each only if wanted and in its own dtype, computed and summed in float32 by eager PyTorch,
    recomputing z; rounding counts as the identity; double backward works, forward mode raises.

    Raises:
        ValueError: a dtype other than the three; a weight or `out` that does not fit; an `out` that overlaps an input or
            itself, or that meets a wanted gradient.
        IndexError: `dim` out of range.
        RuntimeError: TILEOPS_FORCE or TILEOPS_REQUIRE_NATIVE asks for what cannot be had.

    Source: the norm of Zhang and Sennrich (2019) and the SiLU of Elfwing, Uchibe and Doya (2017), fused.
    """
    try:
        if differentiates(x, weight, out):
            refuse_out("rms_norm_silu", out)
            return _RmsNormSilu.apply(x, weight, eps, dim, round_before_weight)
        if out is None:
            return _op.default(x, weight, eps, dim=dim, round_before_weight=round_before_weight)
        return _op.into(out, x, weight, eps, dim=dim, round_before_weight=round_before_weight)
    except RuntimeError as error:
        raise original(error) from None
