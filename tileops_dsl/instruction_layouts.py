"""The closed set of layouts that instructions fix: accumulators in registers, swizzled tiles in shared memory.

A fragment's `place(index)` gives the threads that hold an element and the register in each, counted in elements as a
Fragment of the device words is: neighbouring registers share a 32-bit word. Sources: PTX ISA, "Matrix Fragments" of
mma.m16n8k16 and of wgmma.m64nNk16 and .m64nNk32, "ldmatrix", "Swizzling modes" and "Matrix descriptor" of wgmma.
tests/words proves each by what the hardware computes.
"""

from dataclasses import dataclass
from enum import Enum

WARP, WARP_GROUP = 32, 128


def fragment_thread(row: int, word: int) -> int:
    """Of 8 rows of 4 words, one a lane; each 16 rows are one warp's, rows 8 to 15 in further registers."""
    return row // 16 * WARP + row % 8 * 4 + word


class _Accumulators:
    """A tile [rows, columns] of which each thread has as many elements."""

    shape = property(lambda self: (self.rows, self.columns))
    registers = property(lambda self: self.rows * self.columns // self.threads)
    ragged = False


@dataclass(frozen=True)
class WgmmaAccumulator(_Accumulators):
    """D of wgmma.m64nNkK: float32, one warp group; every 8 columns take 4 registers. 64 rows more are another instruction's.

    D of mma.m16n8k16 lies in the same way, if four warps have 16 of the 64 rows each.
    """

    columns: int
    rows: int = 64
    threads = WARP_GROUP

    def __post_init__(self):
        if self.columns % 8 or not 8 <= self.columns <= 256 or self.rows % 64:
            raise ValueError(f"{self!r}: columns must be a multiple of 8 in 8..256, rows of 64")

    def place(self, index: tuple[int, int]) -> tuple[set[int], int]:
        (block, row), column = divmod(index[0], 64), index[1]
        register = column // 8 * 4 + row // 8 % 2 * 2 + column % 2
        return {fragment_thread(row, column % 8 // 2)}, block * self.columns // 2 + register

    def __str__(self) -> str:
        return f"wgmma accumulator {self.rows} x {self.columns}"


@dataclass(frozen=True)
class AccumulatorRows:
    """A value for each row of a WgmmaAccumulator, in the four lanes that hold the row."""

    rows: int = 64
    threads = WARP_GROUP
    shape = property(lambda self: (self.rows,))
    ragged = False
    registers = property(lambda self: self.rows // 32)

    def place(self, index: tuple[int]) -> tuple[set[int], int]:
        block, row = divmod(index[0], 64)
        return {fragment_thread(row, word) for word in range(4)}, block * 2 + row // 8 % 2

    def __str__(self) -> str:
        return f"rows of a wgmma accumulator, {self.rows}"


@dataclass(frozen=True)
class AccumulatorColumns:
    """A value for each column of a WgmmaAccumulator, in the eight lanes of each warp that hold the column."""

    columns: int
    threads = WARP_GROUP
    shape = property(lambda self: (self.columns,))
    ragged = False
    registers = property(lambda self: self.columns // 4)

    def place(self, index: tuple[int]) -> tuple[set[int], int]:
        eight, column = divmod(index[0], 8)
        return {t for t in range(WARP_GROUP) if t % 4 == column // 2}, eight * 2 + column % 2

    def __str__(self) -> str:
        return f"columns of a wgmma accumulator, {self.columns}"


@dataclass(frozen=True)
class WarpAccumulators(_Accumulators):
    """C (float32) of a whole CTA in blocks of 16 x 8, one of mma.m16n8k16 each, of warps [down, across].

    A warp has neighbouring rows. Blocks of 8 columns go round the warps beside each other, so that some neighbouring columns
    are spread over all warps, and lie in neighbouring registers.
    """

    rows: int
    columns: int
    down: int
    across: int

    def __post_init__(self):
        if self.rows % (16 * self.down) or self.columns % (8 * self.across):
            raise ValueError(f"{self!r}: each warp needs blocks of 16 rows and 8 columns")

    threads = property(lambda self: WARP * self.down * self.across)
    # Of a warp: 16 rows, 8 columns each.
    blocks = property(lambda self: (self.rows // self.down // 16, self.columns // self.across // 8))

    def place(self, index: tuple[int, int]) -> tuple[set[int], int]:
        row, column = index
        (warp_row, below), (block, warp_column) = divmod(row, self.rows // self.down), divmod(column // 8, self.across)
        lane = fragment_thread(below % 16, column % 8 // 2)
        number = block * self.blocks[0] + below // 16
        register = number * 4 + below // 8 % 2 * 2 + column % 2
        return {(warp_row * self.across + warp_column) * WARP + lane}, register

    def __str__(self) -> str:
        return f"mma accumulators {self.rows} x {self.columns} of {self.down} x {self.across} warps"


class Swizzle(Enum):
    """How 16-byte pieces are permuted; the value is the bytes of a row that TMA writes and wgmma reads as one.

    Without a swizzle wgmma reads rows of 16 bytes.
    """

    NONE = 16
    B32 = 32
    B64 = 64
    B128 = 128

    row_bytes = property(lambda self: self.value)
    # Bytes of 8 rows, and what a tile must be aligned to, so that the address decides as the offset does.
    alignment = property(lambda self: 8 * self.value)

    def permute(self, offset: int) -> int:
        """A byte offset: bits 4, 4..5 or 4..6 are xored with as many bits from bit 7 on (which number 128-byte lines)."""
        return offset ^ (offset >> 3 & self.value - 16)


@dataclass(frozen=True)
class SharedTile:
    """A tile in shared memory whose columns are cut into boxes as wide as the swizzle, one box behind the other."""

    rows: int
    columns: int
    element_bytes: int
    swizzle: Swizzle

    def __post_init__(self):
        if self.rows % 8 or self.columns % self.box_columns:
            raise ValueError(f"{self!r}: rows must be a multiple of 8 and columns of {self.box_columns}")

    shape = property(lambda self: (self.rows, self.columns))
    box_columns = property(lambda self: self.swizzle.row_bytes // self.element_bytes)
    box_bytes = property(lambda self: self.rows * self.swizzle.row_bytes)
    elements = property(lambda self: self.rows * self.columns)
    bytes = property(lambda self: self.elements * self.element_bytes)

    def offset(self, row: int, column: int) -> int:
        """The byte where an element starts."""
        box, within = divmod(column, self.box_columns)
        return box * self.box_bytes + self.swizzle.permute(row * self.swizzle.row_bytes + within * self.element_bytes)

    def __str__(self) -> str:
        kind = "no swizzle" if self.swizzle is Swizzle.NONE else f"swizzle of {self.swizzle.row_bytes} bytes"
        return f"shared {self.rows} x {self.columns}, {kind}"


@dataclass(frozen=True)
class Operand:
    """A tile as wgmma reads it. K-major: rows of M or N, columns of K. MN-major: rows of K, columns of M or N (16-bit only)."""

    tile: SharedTile
    mn_major: bool = False

    def __post_init__(self):
        if self.mn_major and self.tile.element_bytes != 2:
            raise ValueError(f"{self!r}: 8-bit operands are K-major")
        if self.k * self.tile.element_bytes % 32:
            raise ValueError(f"{self!r}: the extent of K must be a multiple of 32 bytes")

    bare = property(lambda self: self.tile.swizzle is Swizzle.NONE)
    k = property(lambda self: self.tile.rows if self.mn_major else self.tile.columns)
    steps = property(lambda self: self.k * self.tile.element_bytes // 32)  # instructions, each of which takes 32 bytes of K

    @property
    def stride(self) -> int:
        """Bytes between groups of 8 rows; MN-major without a swizzle: between groups of 8 columns."""
        return self.tile.box_bytes if self.mn_major and self.bare else self.tile.swizzle.alignment

    @property
    def leading(self) -> int:
        """MN-major: bytes between boxes, without a swizzle between 8 rows. K-major: between boxes, with a swizzle unused."""
        if self.mn_major:
            return self.tile.swizzle.alignment if self.bare else self.tile.box_bytes
        return self.tile.box_bytes if self.bare else 16

    # Bytes from the 64 rows of M that one warp group multiplies to those of the next.
    group_bytes = property(lambda self: self.skip(64))

    def skip(self, count: int) -> int:
        """Bytes to the count-th row of M or N: a multiple of 8, MN-major of whole boxes."""
        if self.mn_major:
            return count // self.tile.box_columns * self.tile.box_bytes
        return count * self.tile.swizzle.row_bytes

    def advance(self, step: int) -> int:
        """Bytes from the start of the tile to the operand of the step-th instruction."""
        row_bytes = self.tile.swizzle.row_bytes
        if self.mn_major:
            return step * 16 * row_bytes
        box, within = divmod(step * 32, row_bytes)
        return box * self.tile.box_bytes + within

    def __str__(self) -> str:
        return f"{'MN' if self.mn_major else 'K'}-major operand, {self.tile}"
