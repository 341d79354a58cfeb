"""The closed set of layouts that instructions fix: fragments in registers, swizzled tiles in shared memory, matrix descriptors.

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


@dataclass(frozen=True)
class WgmmaAccumulator:
    """D of wgmma.m64nNkK: float32, one warp group; every 8 columns take 4 registers."""

    columns: int
    rows, threads = 64, WARP_GROUP

    def __post_init__(self):
        if self.columns % 8 or not 8 <= self.columns <= 256:
            raise ValueError(f"{self!r}: columns must be a multiple of 8 in 8..256")

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def registers(self) -> int:
        return self.columns // 2

    def place(self, index: tuple[int, int]) -> tuple[set[int], int]:
        row, column = index
        return {fragment_thread(row, column % 8 // 2)}, column // 8 * 4 + row // 8 % 2 * 2 + column % 2

    def __str__(self) -> str:
        return f"wgmma accumulator 64 x {self.columns}"


@dataclass(frozen=True)
class WgmmaA:
    """A of wgmma in registers: 64 rows of 32 bytes of K; word 0 of a thread is in the first 16 bytes, rows 0 to 7 of its 16."""

    element_bytes: int
    rows, threads = 64, WARP_GROUP

    def __post_init__(self):
        if self.element_bytes not in (1, 2):
            raise ValueError(f"{self!r}: elements have 1 or 2 bytes")

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, 32 // self.element_bytes

    @property
    def registers(self) -> int:
        return 16 // self.element_bytes

    def place(self, index: tuple[int, int]) -> tuple[set[int], int]:
        row, k = index
        per_word = 4 // self.element_bytes
        half, rest = divmod(k, 4 * per_word)  # 16 bytes
        word = half * 2 + row // 8 % 2
        return {fragment_thread(row, rest // per_word)}, word * per_word + rest % per_word

    def __str__(self) -> str:
        return f"wgmma A 64 x {self.shape[1]}"


@dataclass(frozen=True)
class MmaA:
    """A of mma.m16n8k16 (16-bit): index (row, k)."""

    shape, threads, registers = (16, 16), WARP, 8

    def place(self, index: tuple[int, int]) -> tuple[set[int], int]:
        row, k = index
        return {fragment_thread(row, k % 8 // 2)}, k // 8 * 4 + row // 8 * 2 + k % 2

    def __str__(self) -> str:
        return "mma A 16 x 16"


@dataclass(frozen=True)
class MmaB:
    """B of mma.m16n8k16 (16-bit): index (k, column)."""

    shape, threads, registers = (16, 8), WARP, 4

    def place(self, index: tuple[int, int]) -> tuple[set[int], int]:
        k, column = index
        return {column * 4 + k % 8 // 2}, k // 8 * 2 + k % 2

    def __str__(self) -> str:
        return "mma B 16 x 8"


@dataclass(frozen=True)
class MmaAccumulator:
    """C and D of mma.m16n8k16 (float32): index (row, column)."""

    shape, threads, registers = (16, 8), WARP, 4

    def place(self, index: tuple[int, int]) -> tuple[set[int], int]:
        row, column = index
        return {fragment_thread(row, column // 2)}, row // 8 * 2 + column % 2

    def __str__(self) -> str:
        return "mma accumulator 16 x 8"


@dataclass(frozen=True)
class Matrices:
    """`count` 8x8 matrices of 16-bit elements as ldmatrix reads and stmatrix writes them: index (matrix, row, column).

    Rows are as they lie in shared memory, 16 bytes each, where `address_lane` points.
    """

    count: int
    transposed: bool = False
    threads = WARP

    def __post_init__(self):
        if self.count not in (1, 2, 4):
            raise ValueError(f"{self!r}: the instructions move 1, 2 or 4 matrices")

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.count, 8, 8

    @property
    def registers(self) -> int:
        return 2 * self.count

    def place(self, index: tuple[int, int, int]) -> tuple[set[int], int]:
        matrix, row, column = index
        if self.transposed:
            row, column = column, row
        return {row * 4 + column // 2}, matrix * 2 + column % 2

    def address_lane(self, matrix: int, row: int) -> int:
        return matrix * 8 + row

    def __str__(self) -> str:
        return f"{self.count} matrices 8 x 8{', transposed' * self.transposed}"


FragmentLayout = WgmmaAccumulator | WgmmaA | MmaA | MmaB | MmaAccumulator | Matrices


class Swizzle(Enum):
    """How 16-byte pieces are permuted; the value is the bytes of a row that TMA writes and wgmma reads as one.

    Without a swizzle wgmma reads rows of 16 bytes.
    """

    NONE = 16
    B32 = 32
    B64 = 64
    B128 = 128

    @property
    def row_bytes(self) -> int:
        return self.value

    @property
    def alignment(self) -> int:
        """Bytes of 8 rows, and what a tile must be aligned to, so that the address decides as the offset does."""
        return 8 * self.value

    @property
    def descriptor_code(self) -> int:
        return {Swizzle.NONE: 0, Swizzle.B128: 1, Swizzle.B64: 2, Swizzle.B32: 3}[self]

    @property
    def tensor_map_code(self) -> int:
        """CUtensorMapSwizzle."""
        return {Swizzle.NONE: 0, Swizzle.B32: 1, Swizzle.B64: 2, Swizzle.B128: 3}[self]

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

    @property
    def box_columns(self) -> int:
        return self.swizzle.row_bytes // self.element_bytes

    @property
    def box_bytes(self) -> int:
        return self.rows * self.swizzle.row_bytes

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * self.element_bytes

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
        k = self.tile.rows if self.mn_major else self.tile.columns
        if self.mn_major and self.tile.element_bytes != 2:
            raise ValueError(f"{self!r}: 8-bit operands are K-major")
        if k * self.tile.element_bytes % 32:
            raise ValueError(f"{self!r}: the extent of K must be a multiple of 32 bytes")

    @property
    def _bare(self) -> bool:
        return self.tile.swizzle is Swizzle.NONE

    @property
    def stride(self) -> int:
        """Bytes between groups of 8 rows; MN-major without a swizzle: between groups of 8 columns."""
        return self.tile.box_bytes if self.mn_major and self._bare else self.tile.swizzle.alignment

    @property
    def leading(self) -> int:
        """MN-major: bytes between boxes, without a swizzle between 8 rows. K-major: between boxes, with a swizzle unused."""
        if self.mn_major:
            return self.tile.swizzle.alignment if self._bare else self.tile.box_bytes
        return self.tile.box_bytes if self._bare else 16

    def advance(self, step: int) -> int:
        """Bytes from the start of the tile to the operand of the step-th instruction, each of which takes 32 bytes of K."""
        row_bytes = self.tile.swizzle.row_bytes
        if self.mn_major:
            return step * 16 * row_bytes
        box, within = divmod(step * 32, row_bytes)
        return box * self.tile.box_bytes + within

    def descriptor(self, address: int, step: int = 0) -> int:
        low = descriptor_low(address + self.advance(step), self.leading)
        return descriptor_high(self.stride, self.tile.swizzle) << 32 | low

    def __str__(self) -> str:
        return f"{'MN' if self.mn_major else 'K'}-major operand, {self.tile}"


def descriptor_low(address: int, leading_bytes: int) -> int:
    """Bits 0 to 31, as descriptor_low of csrc/include/tileops/wgmma.h."""
    return (address & 0x3FFFF) >> 4 | (leading_bytes >> 4 & 0x3FFF) << 16


def descriptor_high(stride_bytes: int, swizzle: Swizzle) -> int:
    """Bits 32 to 63. The base offset is 0: the tile is aligned to its swizzle."""
    return stride_bytes >> 4 & 0x3FFF | swizzle.descriptor_code << 30
