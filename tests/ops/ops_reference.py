"""What tileops is held against: each op in float64, the same in eager PyTorch of the input's dtype, and the rule for errors."""

import functools
from typing import Any

import torch
import torch.nn.functional as F

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
F32_ROUNDING = 2.0**-24
EPS_OF_NONE = 1.1920929e-07


def exact_softmax(x, dim=-1, *, dtype=None):
    return torch.softmax(x.double(), dim)


def _weight_view(x, weight, dim):
    shape = [1] * x.dim()
    if shape:
        shape[dim] = -1
    return weight.reshape(shape)


def exact_rms_norm(x, weight=None, eps=1e-6, *, dim=-1, weight_offset=0.0, round_before_weight=False):
    """With round_before_weight the one rounding inside is that of the float64 quotient."""
    wide = x.double()
    z = wide * torch.rsqrt((wide * wide).mean(dim, keepdim=True) + (EPS_OF_NONE if eps is None else eps))
    if round_before_weight:
        z = z.to(x.dtype).double()
    return z if weight is None else z * (_weight_view(x, weight.double(), dim) + weight_offset)


def exact_rms_norm_silu(x, weight=None, eps=1e-5, *, dim=-1, round_before_weight=False):
    z = exact_rms_norm(x, weight, eps, dim=dim, round_before_weight=round_before_weight)
    return z * torch.sigmoid(z)


def eager_softmax(x, dim=-1, *, dtype=None):
    return torch.softmax(x, dim) if dtype in (None, x.dtype) else torch.softmax(x.float(), dim).to(dtype)


def eager_rms_norm(x, weight=None, eps=1e-6, *, dim=-1, weight_offset=0.0, round_before_weight=False):
    """F.rms_norm in x's dtype; with round_before_weight what Llama in Transformers does."""
    rows = x.movedim(dim, -1) if x.dim() else x.reshape(1)
    scale = None if weight is None else weight.to(x.dtype) + weight_offset
    if round_before_weight:
        wide = rows.float()
        y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (EPS_OF_NONE if eps is None else eps))).to(x.dtype)
        y = y if scale is None else scale * y
    else:
        y = F.rms_norm(rows, rows.shape[-1:], scale, EPS_OF_NONE if eps is None else eps)
    return y.movedim(-1, dim) if x.dim() else y.reshape(())


def eager_rms_norm_silu(x, weight=None, eps=1e-5, *, dim=-1, round_before_weight=False):
    return F.silu(eager_rms_norm(x, weight, eps, dim=dim, round_before_weight=round_before_weight))


ACTIVATIONS = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def _gemm(a, b, bias, activation, residual):
    z = torch.matmul(a, b)
    y = ACTIVATIONS[activation](z if bias is None else z + bias)
    return y if residual is None else y + residual


def exact_gemm(a, b, bias=None, *, activation="none", residual=None, out_dtype=None):
    wide = [None if t is None else t.double() for t in (a, b, bias, residual)]
    return _gemm(*wide[:3], activation, wide[3])


def eager_gemm(a, b, bias=None, *, activation="none", residual=None, out_dtype=None):
    """Each step in a's dtype."""
    same = [None if t is None else t.to(a.dtype) for t in (bias, residual)]
    return _gemm(a, b, same[0], activation, same[1]).to(out_dtype or a.dtype)


EXACT = {"softmax": exact_softmax, "rms_norm": exact_rms_norm, "rms_norm_silu": exact_rms_norm_silu, "gemm": exact_gemm}
EAGER = {"softmax": eager_softmax, "rms_norm": eager_rms_norm, "rms_norm_silu": eager_rms_norm_silu, "gemm": eager_gemm}


def operands(op: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that `op` needs, x first, for a result of the shape of x: others like x, but gemm takes a square b."""
    import tileops

    needed = getattr(tileops, op).__globals__["_op"].contract.operands
    shape = (x.shape[-1], x.shape[-1]) if op == "gemm" else x.shape
    return x, *(normal(*shape, dtype=x.dtype, device=x.device, seed=5 + n) for n in range(len(needed) - 1))


def arithmetic_floor(exact: torch.Tensor, cols: int) -> torch.Tensor:
    """What float32 arithmetic may add: some roundings per element, and those of the sum over a row: torch's own on the CPU was
    seen to err by 1.6 times the square root of the length."""
    return (32 + 2 * cols**0.5) * F32_ROUNDING * exact.abs()


def half_unit(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance between neighbours of `dtype` at each value: what one rounding costs at most."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact)
    spacing = torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)
    return spacing.clamp(min=info.smallest_normal * info.eps) / 2


def assert_rounded_once(ours: torch.Tensor, exact: torch.Tensor, cols: int) -> None:
    """Every element is within one rounding of the exact value, but for float32 arithmetic."""
    _assert_within(ours, exact, half_unit(exact, ours.dtype) + arithmetic_floor(exact, cols))


def assert_as_good_as_eager(ours: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, cols: int) -> None:
    """Every element's error is at most twice the largest of eager PyTorch in the same dtype, plus the arithmetic floor."""
    error = (eager.double() - exact).abs()
    worst = error[torch.isfinite(error)].amax() if torch.isfinite(error).any() else 0.0
    _assert_within(ours, exact, 2 * worst + arithmetic_floor(exact, cols))


def _assert_within(ours: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    assert ours.shape == exact.shape
    assert ours.dtype in DTYPES
    expected = exact.to(ours.dtype)  # overflows to inf where the dtype does
    finite = torch.isfinite(expected) & torch.isfinite(ours)
    same = (ours == expected) | (torch.isnan(ours) & torch.isnan(expected))
    good = torch.where(finite, (ours.double() - exact).abs() <= bound, same)
    if not good.all():
        where = tuple(torch.nonzero(~good)[0].tolist())
        found, wanted = ours[where].item(), exact[where].item()
        count = f"{int((~good).sum())} of {good.numel()} elements are off"
        raise AssertionError(f"{count}; the first, {list(where)}: {found}, exactly {wanted}")


def check(op: str, x: torch.Tensor, *args: Any, run: Any = None, **kwargs: Any) -> torch.Tensor:
    """Runs tileops.<op> (or `run`) and holds the result against both rules, and its strides and dtype against the contract."""
    import tileops

    ours = (run or getattr(tileops, op))(x, *args, **kwargs)
    dtype = kwargs.get("dtype") or x.dtype
    assert ours.dtype == dtype and ours.device == x.device
    assert ours.stride() == torch.empty_like(x, dtype=dtype).stride()
    dim = kwargs.get("dim", args[0] if op == "softmax" and args else -1)
    cols = x.shape[dim] if x.dim() else 1
    exact = EXACT[op](x, *args, **kwargs)
    if not kwargs.get("round_before_weight"):  # which sits on a rounding that float32 and float64 may take differently
        assert_rounded_once(ours, exact, cols)
    assert_as_good_as_eager(ours, exact, EAGER[op](x, *args, **kwargs), cols)
    return ours


def gemm_floor(a, b, bias=None, *, residual=None, **options):
    """What float32 arithmetic may add: roundings of a sum of K products, relative to their sizes and not to what is left of
    them; an activation stretches by 1.13 at most."""
    sizes = torch.matmul(a.double().abs(), b.double().abs())
    sizes = sum((t.double().abs() for t in (bias, residual) if t is not None), sizes)
    return (32 + 2 * a.shape[-1] ** 0.5) * F32_ROUNDING * sizes


def check_gemm(a, b, *args: Any, run: Any = None, by_kernel: bool = False, **kwargs: Any) -> torch.Tensor:
    """As check, for tileops.gemm, whose result is contiguous. by_kernel: `run` is known to take one."""
    import tileops

    ours = (run or tileops.gemm)(a, b, *args, **kwargs)
    exact, floor = exact_gemm(a, b, *args, **kwargs), gemm_floor(a, b, *args, **kwargs)
    assert ours.dtype == (kwargs.get("out_dtype") or a.dtype) and ours.device == a.device
    assert ours.is_contiguous() or run
    torchs_own = a.is_cuda and not by_kernel and tileops.explain("gemm", a, b, *args, **kwargs).path == "eager"
    if not torchs_own:  # which may reduce in the result's dtype
        _assert_within(ours, exact, half_unit(exact, ours.dtype) + floor)
    error = (eager_gemm(a, b, *args, **kwargs).double() - exact).abs()
    worst = error[torch.isfinite(error)].amax() if torch.isfinite(error).any() else 0.0
    _assert_within(ours, exact, 2 * worst + floor)
    return ours


def normal(*shape: int, dtype=torch.float32, device: Any = "cpu", seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(device, dtype)


@functools.cache
def has_gpu() -> bool:
    return torch.cuda.is_available()
