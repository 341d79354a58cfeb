"""The activations of an epilogue by name, on float32 tensors, and their derivatives.

Source: GELU, Hendrycks and Gimpel (2016), with the error function or the tanh form; SiLU, Elfwing, Uchibe and Doya (2017).
"""
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .._schemas import ACTIVATIONS

_aten = torch.ops.aten


def _silu_backward(dy: Tensor, z: Tensor) -> Tensor:
    """aten's own cannot be differentiated again."""
    s = torch.sigmoid(z)
    return dy * s * (1 + z * (1 - s))


_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
# (dy, z) -> dy * derivative at z; all of them can be differentiated again
_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda dy, z: _aten.threshold_backward(dy, z, 0),
    "gelu": _aten.gelu_backward,
    "gelu_tanh": partial(_aten.gelu_backward, approximate="tanh"),
    "silu": _silu_backward,
}


def check_activation(op: str, name: str) -> None:
    if name not in ACTIVATIONS:
        raise ValueError(f"{op}: activation is {name!r}; expected one of {', '.join(ACTIVATIONS)}")


def activate(name: str, z: Tensor) -> Tensor:
    return _FORWARD[name](z)


def gradient(name: str, dy: Tensor, z: Tensor) -> Tensor:
    """dy times the derivative at z; not for "none", which needs no z."""
    return _BACKWARD[name](dy, z)
