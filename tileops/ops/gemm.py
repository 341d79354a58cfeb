"""gemm: y = activation(a @ b + bias) + residual, for matrices and stacks of them."""
from typing import Any

import torch
from torch import Tensor

from ._activation import activate, check_activation, gradient
from ._checks import DTYPES, EXPECTED_DTYPES, check_device, check_dtype
from ._matmul import product, product_gradients, result_shape, rounded_product
from ._table import differentiates, distinct, original, refuse_out, register


def _check(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> torch.dtype:
    _refuse_scales(scale_a, scale_b)
    _check_operands(a, b)
    if bias is not None:
        check_dtype("gemm", "bias", bias.dtype)
        if bias.dim() != 1 or bias.shape[0] != b.shape[-1]:
            raise ValueError(
                f"gemm: bias has shape {list(bias.shape)}; expected [{b.shape[-1]}], the number of columns of b"
            )
        check_device("gemm", "bias", bias, a, "a")
    check_activation("gemm", activation)
    if residual is not None:
        _check_residual(residual, a, b)
    if out_dtype not in (None, *DTYPES):
        raise ValueError(f"gemm: out_dtype is {out_dtype}; expected {EXPECTED_DTYPES}")
    return out_dtype or a.dtype


def _check_operands(a: Tensor, b: Tensor) -> None:
    check_dtype("gemm", "a", a.dtype)
    if b.dtype != a.dtype:
        raise ValueError(f"gemm: b has dtype {b.dtype}; expected {a.dtype}, that of a")
    for name, tensor, expected in (("a", a, "[..., M, K]"), ("b", b, "[..., K, N]")):
        if tensor.dim() < 2:
            raise ValueError(f"gemm: {name} has shape {list(tensor.shape)}; expected two dimensions or more, {expected}")
    check_device("gemm", "b", b, a, "a")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"gemm: b has shape {list(b.shape)}; expected [..., {a.shape[-1]}, N] for a of shape {list(a.shape)}"
        )
    for of_a, of_b in zip(reversed(a.shape[:-2]), reversed(b.shape[:-2])):
        if of_a != of_b and of_a != 1 and of_b != 1:
            raise ValueError(
                f"gemm: b has shape {list(b.shape)}; expected batch dimensions that broadcast with those of a of shape "
                f"{list(a.shape)}"
            )


def _check_residual(residual: Tensor, a: Tensor, b: Tensor) -> None:
    check_dtype("gemm", "residual", residual.dtype)
    shape = result_shape(a, b)
    pairs = zip(reversed(residual.shape), reversed(shape))
    if residual.dim() > len(shape) or any(own not in (1, size) for own, size in pairs):
        raise ValueError(
            f"gemm: residual has shape {list(residual.shape)}; expected one that broadcasts to the result, {list(shape)}"
        )
    check_device("gemm", "residual", residual, a, "a")


def _refuse_scales(scale_a: Tensor | None, scale_b: Tensor | None) -> None:
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale is not None:
            raise NotImplementedError(f"gemm: {name} was given; scales do not work yet, expected None")


def _shape(a: Tensor, b: Tensor, *args: Any, **options: Any) -> tuple[int, ...]:
    return result_shape(a, b)


def _formula(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **scales: None,
) -> Tensor:
    addends = [t for t in (bias, residual) if t is not None]
    if activation == "none" and len(addends) < 2 and all(dtype in (None, a.dtype) for dtype in _dtypes(out_dtype, addends)):
        rounded = rounded_product(a, b, *addends or [None])
        if rounded is not None:
            return rounded
    y = activate(activation, _with_bias(product(a, b), bias))
    return y if residual is None else y + residual


def _dtypes(out_dtype: torch.dtype | None, addends: list[Tensor]) -> tuple[torch.dtype | None, ...]:
    return out_dtype, *(t.dtype for t in addends)


def _with_bias(z: Tensor, bias: Tensor | None) -> Tensor:
    return z if bias is None else z + bias


_op = register(
    "gemm(Tensor a, Tensor b, Tensor? bias=None, *, str activation='none', Tensor? residual=None, ScalarType? out_dtype=None, "
    "Tensor? scale_a=None, Tensor? scale_b=None) -> Tensor",
    _check,
    _formula,
    _shape,
)


class _Gemm(torch.autograd.Function):
    """dz = dy * activation'(z) in float32, with z = a @ b + bias computed again: nothing but the inputs is kept for it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        activation: str,
        residual: Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        return _op.default(a, b, bias, activation=activation, residual=residual, out_dtype=out_dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, bias, ctx.activation, residual, _ = inputs
        ctx.residual = None if residual is None else (residual.shape, residual.dtype)
        ctx.save_for_backward(a, b, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, b, bias = ctx.saved_tensors
        wants_a, wants_b, wants_bias, _, wants_residual, _ = ctx.needs_input_grad
        dz = dy = dy.float()
        if ctx.activation != "none" and (wants_a or wants_b or wants_bias):
            dz = gradient(ctx.activation, dy, _before_activation(a, b, bias))
        da, db = product_gradients(dz, a, b, wants_a, wants_b)
        dbias = dz.sum(tuple(range(dz.dim() - 1))).to(bias.dtype) if wants_bias else None
        dresidual = None
        if wants_residual:
            shape, dtype = ctx.residual
            dresidual = dy.sum_to_size(shape).to(dtype)
        return da, db, dbias, None, dresidual, None


def _before_activation(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if torch.is_grad_enabled():  # a second derivative is wanted
        return _with_bias(product(a, b), bias)
    return _op.twin(a, b, bias, out_dtype=torch.float32)  # one operator, also in a compiled graph


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Matrix product with an epilogue, activation(a @ b + bias) + residual; float32 sums and one rounding, of the result.

    Args:
        a: [..., M, K], bfloat16, float16 or float32 (which no kernel takes). Any strides: a transposed matrix is not copied,
            one whose elements all lie apart is, once.
        b: [..., K, N], the dtype of `a`, any strides. `weight.t()` of a weight [N, K], as in `F.linear`, is the fast layout.
            The batch dimensions (...) of `a` and `b` broadcast as in `torch.matmul`; a tensor of one dimension is refused. M,
            N and K may be 0; for K = 0 the product is 0.
        bias: None, or [N], any of the three dtypes (not necessarily that of `a`), any stride. Added before the activation.
        activation: "none", "relu", "gelu" (with the error function), "gelu_tanh" (its tanh form) or "silu".
        residual: None, or a tensor that broadcasts to the result, any of the three dtypes, any strides. Added after the
            activation.
        out_dtype: dtype of the result, one of the three; None is that of `a`. Only the result is rounded to it: float32 gives
            the sums as they are.
        scale_a: reserved for scaled operands; anything but None raises NotImplementedError.
        scale_b: the same.
        out: takes the result: its shape, dtype and device, any strides, in memory that no input uses.

    Returns:
        `out`, or a new contiguous tensor [..., M, N].
        A kernel serves the call where one was measured to be faster than cuBLAS near its shape; `tileops.explain` says which,
        or why none. Kernels take a `residual` of the result's dtype with contiguous rows, an `out_dtype` of `a` or float32,
        and batch dimensions that merge into one.
        In eager PyTorch on a GPU, torch's own settings hold for the product: TF32 for float32, and reductions in the result's
        dtype (`allow_bf16_reduced_precision_reduction`) where it is a product and at most a bias or a residual in one dtype.

    Gradients: of `a`, `b`, `bias` and `residual`, each only if wanted and in its own dtype, by eager PyTorch. The product is
    computed again where there is an activation. Its gradient is rounded to the dtype of `a` before it meets `a` and `b` (as in
    torch's own linear layers); sums are in float32. Double backward works, forward mode raises.

    Raises:
        ValueError: shapes that do not go together, a dtype other than the three, `a` and `b` of two dtypes, an unknown
            activation; an `out` that does not fit, that overlaps an input or itself, or that meets a wanted gradient.
        NotImplementedError: a scale.
        RuntimeError: TILEOPS_FORCE or TILEOPS_REQUIRE_NATIVE asks for what cannot be had.

    Source: the product of BLAS (gemm) with the epilogue of a linear layer.
    """
    _refuse_scales(scale_a, scale_b)
    try:
        if differentiates(a, b, bias, residual, out):
            refuse_out("gemm", out)
            return _Gemm.apply(*distinct(a, b, bias, activation, residual, out_dtype))
        if out is None:
            return _op.default(a, b, bias, activation=activation, residual=residual, out_dtype=out_dtype)
        return _op.into(out, a, b, bias, activation=activation, residual=residual, out_dtype=out_dtype)
    except RuntimeError as error:
        raise original(error) from None
