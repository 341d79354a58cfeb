"""What the RMS norms share: the check, the formula in float32 and its gradient.

    x_hat = x * rstd,  rstd = rsqrt(mean(x^2) + eps)        over one dimension of n elements
    z     = x_hat * (weight + weight_offset)                x_hat alone without a weight

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); the epsilon inside the root as in torch.nn.RMSNorm.
With g = dz * (weight + weight_offset), the derivative of rstd gives dx = rstd * (g - x_hat * mean(g * x_hat)), and dweight =
sum(dz * x_hat). Everything is a plain differentiable expression of x and weight, so the backward pass can be differentiated
again.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import check_dim, check_weight, check_x, row_length

EPS_OF_NONE = 1.1920929e-07  # the epsilon of float32, which F.rms_norm takes for eps=None in its compute type


@dataclass(frozen=True)
class Norm:
    """The options of a norm, less its tensors."""

    eps: float | None
    dim: int
    weight_offset: float = 0.0
    round_before_weight: bool = False

    def x_hat(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised rows, not yet rounded, and rstd, with the dimension kept; float32."""
        x = x.float()
        eps = EPS_OF_NONE if self.eps is None else self.eps
        rstd = torch.rsqrt((x * x).mean(self.dim, keepdim=True) + eps)
        return x * rstd, rstd

    def rounded(self, x_hat: Tensor, dtype: torch.dtype) -> Tensor:
        """What the weight multiplies, float32."""
        return x_hat.to(dtype).float() if self.round_before_weight else x_hat

    def scale(self, x: Tensor, weight: Tensor) -> Tensor:
        """weight + weight_offset, float32, in the shape that broadcasts against x."""
        shape = [1] * x.dim()
        if shape:
            shape[self.dim] = row_length(x, self.dim)
        return weight.float().reshape(shape) + self.weight_offset

    def forward(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """z, float32."""
        z = self.rounded(self.x_hat(x)[0], x.dtype)
        return z if weight is None else z * self.scale(x, weight)

    def gradients(
        self, dz: Tensor, x: Tensor, weight: Tensor | None, wants_x: bool, wants_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """dx and dweight in the dtypes of x and weight, from a float32 dz; None if not wanted. Rounding counts as identity."""
        x_hat, rstd = self.x_hat(x)
        dx = dweight = None
        if wants_x:
            g = dz if weight is None else dz * self.scale(x, weight)
            dx = (rstd * (g - x_hat * (g * x_hat).mean(self.dim, keepdim=True))).to(x.dtype)
        if wants_weight:
            column = self.dim % max(x.dim(), 1)
            others = [d for d in range(x.dim()) if d != column]
            products = dz * self.rounded(x_hat, x.dtype)
            summed = products.sum(others) if others else products.reshape(weight.shape)  # sum([]) would sum over all
            dweight = summed.to(weight.dtype)
        return dx, dweight


def check(op: str, x: Tensor, weight: Tensor | None, dim: int) -> torch.dtype:
    check_x(op, x)
    check_dim(op, x, dim)
    check_weight(op, x, weight, dim)
    return x.dtype
