"""Products of stacks of matrices from aten operators: sums in float32, and no rounding before the caller's own.

Autocast is off inside: it would round the float32 operands to bfloat16.
"""
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

# torch.mm(bfloat16, bfloat16, out_dtype=float32): since torch 2.8, on NVIDIA GPUs
_HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype") and torch.version.hip is None


def result_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Of a @ b, the batch dimensions broadcast."""
    return *torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32. Differentiable where gradients are on, and then from float32 copies of a and b, as on the CPU."""
    with without_autocast(a):
        if _on_tensor_cores(a) and _HAS_OUT_DTYPE and not torch.is_grad_enabled():
            wide = {"out_dtype": torch.float32}
            return _folded(a, b, partial(torch.mm, **wide), partial(torch.bmm, **wide))
        return torch.matmul(a.float(), b.float())


def tensor_core_dtype(t: Tensor) -> torch.dtype:
    """The dtype in which `product` would take it as it is: its own, or float32."""
    wide = not (_on_tensor_cores(t) and _HAS_OUT_DTYPE) or torch.is_grad_enabled()
    return torch.float32 if wide else t.dtype


def rounded_product(a: Tensor, b: Tensor, addend: Tensor | None) -> Tensor | None:
    """a @ b + addend in the dtype that all three have, by torch's own kernels where they sum in float32 and round once; else
    None."""
    if not _on_tensor_cores(a):
        return None
    with without_autocast(a):
        if addend is None:
            return torch.matmul(a, b)
        shape = result_shape(a, b)
        rows = lambda: addend if addend.dim() == 1 else addend.expand(shape).reshape(-1, shape[-1])  # noqa: E731
        stack = lambda: addend.expand(shape).reshape(-1, *shape[-2:])  # noqa: E731
        return _folded(a, b, lambda p, q: torch.addmm(rows(), p, q), lambda p, q: torch.baddbmm(stack(), p, q))


def product_gradients(dz: Tensor, a: Tensor, b: Tensor, wants_a: bool, wants_b: bool) -> tuple[Tensor | None, Tensor | None]:
    """Of a @ b for a float32 dz, in the dtype of a and b. dz is rounded to that dtype first, so that tensor cores can be used;
    the sums, over batch dimensions that were broadcast too, are in float32."""
    dz = dz.to(a.dtype)
    (in_z, z), (in_a, flat_a), (in_b, flat_b) = (_lettered(t, dz.dim()) for t in (dz, a, b))
    with without_autocast(a):
        da = _contract(f"{in_z}MN,{in_b}KN->{in_a}MK", z, flat_b).reshape(a.shape) if wants_a else None
        db = _contract(f"{in_a}MK,{in_z}MN->{in_b}KN", flat_a, z).reshape(b.shape) if wants_b else None
    return da, db


def _contract(equation: str, p: Tensor, q: Tensor) -> Tensor:
    if _on_tensor_cores(p):
        return torch.einsum(equation, p, q)
    return torch.einsum(equation, p.float(), q.float()).to(p.dtype)


def _lettered(tensor: Tensor, rank: int) -> tuple[str, Tensor]:
    """The batch dimensions that `tensor` has in a product of `rank` dimensions as letters, and it without those of size 1."""
    letters = "abcdefghijklmnopqrstuvwxyz"[rank - tensor.dim() :]
    kept = [(letter, size) for letter, size in zip(letters, tensor.shape[:-2]) if size != 1]
    return "".join(letter for letter, _ in kept), tensor.reshape(*(size for _, size in kept), *tensor.shape[-2:])


def _folded(a: Tensor, b: Tensor, mm: Callable[..., Tensor], bmm: Callable[..., Tensor]) -> Tensor:
    """The product through one of matrices where b is one matrix, else through a batched one; the result is not empty."""
    shape = result_shape(a, b)
    if b.shape[:-2].numel() == 1:
        return mm(a.reshape(-1, a.shape[-1]), b.reshape(b.shape[-2:])).reshape(shape)
    stacks = (t.expand(*shape[:-2], *t.shape[-2:]).flatten(0, -3) for t in (a, b))
    return bmm(*stacks).reshape(shape)


def _on_tensor_cores(a: Tensor) -> bool:
    """Half precision on a GPU, where torch's products sum in float32. Not without columns, which is no product."""
    return a.is_cuda and a.dtype != torch.float32 and a.shape[-1] != 0


def without_autocast(a: Tensor) -> AbstractContextManager:
    kind = a.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
