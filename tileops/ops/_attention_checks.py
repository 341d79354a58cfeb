"""What the attention operators ask of their arguments; csrc/attention_check.cpp has the same order and words."""
import math

import torch
from torch import Tensor

from ._checks import check_device, check_dtype

INDEX_DTYPES = (torch.int32, torch.int64)
UNLIMITED = -1  # of a window


def refuse_scales(op: str, *descales: Tensor | None) -> None:
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), descales):
        if descale is not None:
            raise NotImplementedError(f"{op}: {name} was given; scaled operands do not work yet, expected None")


def check_rank(op: str, name: str, tensor: Tensor, expected: str) -> None:
    """`expected` is a shape in words: [B, Sq, H, D]."""
    if tensor.dim() != expected.count(",") + 1:
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}; expected {expected}")


def check_keys(op: str, q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str], k_form: str, v_form: str) -> None:
    """k and v against q and each other, all of which have the rank of their form; heads and head dims are the last two."""
    for name, tensor, form in ((names[0], k, k_form), (names[1], v, v_form)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{op}: {name} has dtype {tensor.dtype}; expected {q.dtype}, that of q")
        check_rank(op, name, tensor, form)
        check_device(op, name, tensor, q, "q")
    if q.shape[-1] < 1:
        raise ValueError(f"{op}: q has shape {list(q.shape)}; expected a head dim of 1 or more")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{op}: {names[0]} has shape {list(k.shape)}; expected the head dim of q, {q.shape[-1]}, as its last dimension"
        )
    if v.shape[:-1] != k.shape[:-1] or v.shape[-1] < 1:
        expected = ", ".join(map(str, k.shape[:-1]))
        raise ValueError(
            f"{op}: {names[1]} has shape {list(v.shape)}; expected [{expected}, Dv] for {names[0]} of shape {list(k.shape)}"
        )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"{op}: q has {heads} heads and {names[0]} has {kv_heads}; expected a multiple of the heads of {names[0]}"
        )


def check_options(
    op: str, q: Tensor, scale: float | None, window_left: int, window_right: int, softcap: float, sinks: Tensor | None
) -> None:
    check_scale(op, scale, "a finite number or None")
    for name, window in (("window_left", window_left), ("window_right", window_right)):
        if window < UNLIMITED:
            raise ValueError(f"{op}: {name} is {window}; expected -1 (no limit) or more")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"{op}: softcap is {softcap:g}; expected 0 (off) or a positive number")
    if sinks is not None:
        check_dtype(op, "sinks", sinks.dtype)
        heads = q.shape[-2]
        if sinks.dim() != 1 or sinks.shape[0] != heads:
            raise ValueError(f"{op}: sinks has shape {list(sinks.shape)}; expected [{heads}], one for each head of q")
        check_device(op, "sinks", sinks, q, "q")


def check_scale(op: str, scale: float | None, expected: str) -> None:
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{op}: scale is {scale:g}; expected {expected}")


def check_index(op: str, name: str, index: Tensor, shape: tuple[int | str, ...], q: Tensor) -> None:
    """An index tensor; a str in `shape` stands for any size."""
    if index.dtype not in INDEX_DTYPES:
        raise ValueError(f"{op}: {name} has dtype {index.dtype}; expected torch.int32 or torch.int64")
    fits = index.dim() == len(shape) and all(isinstance(want, str) or size == want for size, want in zip(index.shape, shape))
    if not fits:
        raise ValueError(f"{op}: {name} has shape {list(index.shape)}; expected [{', '.join(map(str, shape))}]")
    check_device(op, name, index, q, "q")


def check_offsets(op: str, name: str, offsets: Tensor, q: Tensor) -> int:
    """cu_seqlens: the number of sequences that it bounds."""
    check_index(op, name, offsets, ("B + 1",), q)
    if not offsets.shape[0]:
        raise ValueError(f"{op}: {name} has shape [0]; expected [B + 1]")
    return offsets.shape[0] - 1


def check_count(op: str, name: str, count: int) -> None:
    if count < 0:
        raise ValueError(f"{op}: {name} is {count}; expected 0 or more")
