"""Which thread holds which element of the fragments that the tests of the words use, besides those of instruction_layouts.

Sources: PTX ISA, "Matrix Fragments" of mma.m16n8k16 and of wgmma.m64nNk16 and .m64nNk32, "ldmatrix".
"""

from dataclasses import dataclass
from functools import partial

from tileops_dsl.instruction_layouts import WARP, WARP_GROUP, WarpAccumulators, WgmmaAccumulator, fragment_thread


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


MmaAccumulator = partial(WarpAccumulators, 16, 8, down=1, across=1)  # C and D of mma.m16n8k16 (float32): index (row, column)
FragmentLayout = WgmmaAccumulator | WgmmaA | MmaA | MmaB | WarpAccumulators | Matrices
