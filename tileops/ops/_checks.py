"""What every operator asks of its arguments. csrc/check.cpp asks the same on the native path, in the same order and words."""
from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EXPECTED_DTYPES = "torch.float32, torch.float16 or torch.bfloat16"


def check_x(op: str, x: Tensor) -> None:
    check_dtype(op, "x", x.dtype)


def check_dtype(op: str, argument: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{op}: {argument} has dtype {dtype}; expected {EXPECTED_DTYPES}")


def check_dim(op: str, x: Tensor, dim: int) -> None:
    rank = max(x.dim(), 1)  # a tensor without dimensions is a row of one, as for torch.softmax
    if not -rank <= dim < rank:
        raise IndexError(f"{op}: dim is {dim}; expected a value from {-rank} to {rank - 1} for x of shape {list(x.shape)}")


def row_length(x: Tensor, dim: int) -> int:
    return x.shape[dim] if x.dim() else 1


def check_weight(op: str, x: Tensor, weight: Tensor | None, dim: int) -> None:
    if weight is None:
        return
    check_dtype(op, "weight", weight.dtype)
    cols = row_length(x, dim)
    if weight.dim() != 1 or weight.shape[0] != cols:
        raise ValueError(f"{op}: weight has shape {list(weight.shape)}; expected [{cols}], the size of x along dim {dim}")
    check_device(op, "weight", weight, x)


def check_device(op: str, argument: str, tensor: Tensor, x: Tensor, first: str = "x") -> None:
    if tensor.device != x.device:
        raise ValueError(f"{op}: {argument} is on {tensor.device}; expected {x.device}, where {first} is")


def check_out(
    op: str, x: Tensor, first: str, shape: Sequence[int], dtype: torch.dtype, out: Tensor, name: str = "out"
) -> None:
    """All that can be told without memory addresses, so that it holds under FakeTensor too. `first` is the name of x, `name`
    that of the argument that takes the result."""
    if out.dtype != dtype:
        raise ValueError(f"{op}: {name} has dtype {out.dtype}; expected {dtype}")
    if out.shape != tuple(shape):
        raise ValueError(f"{op}: {name} has shape {list(out.shape)}; expected {list(shape)}")
    check_device(op, name, out, x, first)


def check_overlap(op: str, out: Tensor, inputs: dict[str, Tensor], name: str = "out") -> None:
    """A kernel reads rows while others are written, so `out` must share no memory with what is read, nor with itself."""
    if out.numel() and any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride())):
        raise ValueError(f"{op}: {name} overlaps itself (a stride is 0); give it storage of its own")
    for other, tensor in inputs.items():
        if may_overlap(out, tensor):
            raise ValueError(f"{op}: {name} overlaps {other} in memory; give it storage of its own")


def may_overlap(a: Tensor, b: Tensor) -> bool:
    """False only if no byte is in both. Interleaved views are told apart where a common stride separates them (two slices of
    one buffer); beyond that, views whose address ranges meet count as overlapping. The same rule as csrc/row_problem.cpp."""
    if not a.numel() or not b.numel():
        return False
    start_a, start_b = a.data_ptr(), b.data_ptr()
    if start_a >= start_b + _span(b) or start_b >= start_a + _span(a):
        return False
    return not any(_separated_by(a, b, step) for tensor in (a, b) for _, step in _extents(tensor))


def _extents(tensor: Tensor) -> list[tuple[int, int]]:
    """(size, stride in bytes) of the dimensions that move."""
    item = tensor.element_size()
    return [(size, stride * item) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]


def _span(tensor: Tensor, below: int | None = None) -> int:
    """Bytes from the first element to the end of the last, over the strides under `below` (torch has no negative ones)."""
    reach = sum((size - 1) * step for size, step in _extents(tensor) if below is None or step < below)
    return reach + tensor.element_size()


def _separated_by(a: Tensor, b: Tensor, period: int) -> bool:
    """Modulo `period` each view is one interval, and the two intervals do not meet."""
    if period <= 0 or any(step >= period and step % period for _, step in (*_extents(a), *_extents(b))):
        return False
    span_a, span_b = _span(a, below=period), _span(b, below=period)
    gap = (b.data_ptr() - a.data_ptr()) % period  # from the start of a to the start of b, going round
    return span_a <= period and span_b <= period and span_a <= gap <= period - span_b
