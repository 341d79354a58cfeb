"""What the tests of the words share: tiles as registers and in shared memory, by instruction_layouts and fragments."""

import itertools
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from fragments import FragmentLayout

from tileops_dsl.instruction_layouts import Operand, SharedTile, Swizzle

HERE = Path(__file__).resolve().parent
SWIZZLES = {"kNone": Swizzle.NONE, "k32": Swizzle.B32, "k64": Swizzle.B64, "k128": Swizzle.B128}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same as integers, which can be indexed and compared whatever the dtype."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@lru_cache
def places(layout: FragmentLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Thread and register of each element, each in the shape of the tile."""
    found = [layout.place(index) for index in itertools.product(*map(range, layout.shape))]
    threads = torch.tensor([min(threads) for threads, _ in found]).reshape(layout.shape)
    return threads, torch.tensor([register for _, register in found]).reshape(layout.shape)


def to_registers(layout: FragmentLayout, tile: torch.Tensor) -> torch.Tensor:
    """[threads, registers]"""
    registers = bits(torch.zeros(layout.threads, layout.registers, dtype=tile.dtype))
    registers[places(layout)] = bits(tile)
    return registers.view(tile.dtype)


def from_registers(layout: FragmentLayout, registers: torch.Tensor) -> torch.Tensor:
    return bits(registers.cpu())[places(layout)].view(registers.dtype)


@lru_cache
def offsets(tile: SharedTile) -> torch.Tensor:
    """Of each element, in elements."""
    found = [tile.offset(i, j) // tile.element_bytes for i in range(tile.rows) for j in range(tile.columns)]
    return torch.tensor(found).reshape(tile.rows, tile.columns)


def to_shared(layout: SharedTile, tile: torch.Tensor) -> torch.Tensor:
    """The elements in the order of their addresses."""
    shared = bits(torch.zeros(tile.numel(), dtype=tile.dtype))
    shared[offsets(layout)] = bits(tile)
    return shared.view(tile.dtype)


def from_shared(layout: SharedTile, shared: torch.Tensor) -> torch.Tensor:
    return bits(shared.cpu())[offsets(layout)].view(shared.dtype)


@dataclass(frozen=True)
class Stamp:
    """A kernel of words_wgmma.cu; `a` is None where A is in registers. Strides are those in the text."""

    name: str
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    columns: int
    a: Operand | None
    b: Operand
    strides: tuple[int, ...]


def operand(extent: int, dtype: torch.dtype, swizzle: str, major: str) -> Operand:
    """128 bytes of K; the other extent is rounded up to whole boxes."""
    k, swizzle = 128 // dtype.itemsize, SWIZZLES[swizzle]
    if major == "kK":
        return Operand(SharedTile(extent, k, dtype.itemsize, swizzle))
    box = swizzle.row_bytes // dtype.itemsize
    return Operand(SharedTile(k, -(-extent // box) * box, dtype.itemsize, swizzle), mn_major=True)


def stamps() -> list[Stamp]:
    found = []
    for form, arguments in re.findall(r"^(SS|RS)\((.+)\)$", (HERE / "words_wgmma.cu").read_text(), re.MULTILINE):
        name, a_dtype, b_dtype, columns, *operands = arguments.split(", ")
        a_dtype, b_dtype, columns = DTYPES[a_dtype], DTYPES[b_dtype], int(columns)
        a = operand(64, a_dtype, *operands[:2]) if form == "SS" else None
        b = operand(columns, b_dtype, *operands[-4:-2])
        strides = tuple(int(word) for word in operands if word.isdigit())
        found.append(Stamp(name, a_dtype, b_dtype, columns, a, b, strides))
    return found
