"""The layouts that instructions fix against tables that are written out, and what must hold for all sizes."""

import itertools
import runpy
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from fragments import Matrices, MmaA, MmaAccumulator, MmaB, WgmmaA

from build_backend import toolkit
from build_backend.errors import BuildError
from tileops_dsl.instruction_layouts import AccumulatorColumns, AccumulatorRows, Operand, SharedTile, Swizzle, WgmmaAccumulator

INCLUDE = Path(__file__).resolve().parents[2] / "csrc" / "include"


def table(text: str):
    """Rows of "thread.register" words."""
    return [[tuple(map(int, word.split("."))) for word in line.split()] for line in text.strip().splitlines()]


def placed(layout, rows, columns, *before):
    found = [[layout.place((*before, i, j)) for j in columns] for i in rows]
    return [[(*threads, register) for threads, register in row] for row in found]


MMA_ACCUMULATOR = """
 0.0  0.1  1.0  1.1  2.0  2.1  3.0  3.1
 4.0  4.1  5.0  5.1  6.0  6.1  7.0  7.1
 8.0  8.1  9.0  9.1 10.0 10.1 11.0 11.1
12.0 12.1 13.0 13.1 14.0 14.1 15.0 15.1
16.0 16.1 17.0 17.1 18.0 18.1 19.0 19.1
20.0 20.1 21.0 21.1 22.0 22.1 23.0 23.1
24.0 24.1 25.0 25.1 26.0 26.1 27.0 27.1
28.0 28.1 29.0 29.1 30.0 30.1 31.0 31.1
 0.2  0.3  1.2  1.3  2.2  2.3  3.2  3.3
 4.2  4.3  5.2  5.3  6.2  6.3  7.2  7.3
 8.2  8.3  9.2  9.3 10.2 10.3 11.2 11.3
12.2 12.3 13.2 13.3 14.2 14.3 15.2 15.3
16.2 16.3 17.2 17.3 18.2 18.3 19.2 19.3
20.2 20.3 21.2 21.3 22.2 22.3 23.2 23.3
24.2 24.3 25.2 25.3 26.2 26.3 27.2 27.3
28.2 28.3 29.2 29.3 30.2 30.3 31.2 31.3
"""
MMA_B = """
0.0 4.0  8.0 12.0 16.0 20.0 24.0 28.0
0.1 4.1  8.1 12.1 16.1 20.1 24.1 28.1
1.0 5.0  9.0 13.0 17.0 21.0 25.0 29.0
1.1 5.1  9.1 13.1 17.1 21.1 25.1 29.1
2.0 6.0 10.0 14.0 18.0 22.0 26.0 30.0
2.1 6.1 10.1 14.1 18.1 22.1 26.1 30.1
3.0 7.0 11.0 15.0 19.0 23.0 27.0 31.0
3.1 7.1 11.1 15.1 19.1 23.1 27.1 31.1
0.2 4.2  8.2 12.2 16.2 20.2 24.2 28.2
0.3 4.3  8.3 12.3 16.3 20.3 24.3 28.3
1.2 5.2  9.2 13.2 17.2 21.2 25.2 29.2
1.3 5.3  9.3 13.3 17.3 21.3 25.3 29.3
2.2 6.2 10.2 14.2 18.2 22.2 26.2 30.2
2.3 6.3 10.3 14.3 18.3 22.3 26.3 30.3
3.2 7.2 11.2 15.2 19.2 23.2 27.2 31.2
3.3 7.3 11.3 15.3 19.3 23.3 27.3 31.3
"""
# Rows 0, 7, 8 and 15.
MMA_A = """
 0.0  0.1  1.0  1.1  2.0  2.1  3.0  3.1  0.4  0.5  1.4  1.5  2.4  2.5  3.4  3.5
28.0 28.1 29.0 29.1 30.0 30.1 31.0 31.1 28.4 28.5 29.4 29.5 30.4 30.5 31.4 31.5
 0.2  0.3  1.2  1.3  2.2  2.3  3.2  3.3  0.6  0.7  1.6  1.7  2.6  2.7  3.6  3.7
28.2 28.3 29.2 29.3 30.2 30.3 31.2 31.3 28.6 28.7 29.6 29.7 30.6 30.7 31.6 31.7
"""
# Rows 0, 8, 16 and 63.
WGMMA_A_16_BIT = """
  0.0   0.1   1.0   1.1   2.0   2.1   3.0   3.1   0.4   0.5   1.4   1.5   2.4   2.5   3.4   3.5
  0.2   0.3   1.2   1.3   2.2   2.3   3.2   3.3   0.6   0.7   1.6   1.7   2.6   2.7   3.6   3.7
 32.0  32.1  33.0  33.1  34.0  34.1  35.0  35.1  32.4  32.5  33.4  33.5  34.4  34.5  35.4  35.5
124.2 124.3 125.2 125.3 126.2 126.3 127.2 127.3 124.6 124.7 125.6 125.7 126.6 126.7 127.6 127.7
"""
# Rows 0, 8 and 63; K 0..7 and 16..23.
WGMMA_A_8_BIT = """
  0.0   0.1   0.2   0.3   1.0   1.1   1.2   1.3   0.8   0.9   0.10   0.11   1.8   1.9   1.10   1.11
  0.4   0.5   0.6   0.7   1.4   1.5   1.6   1.7   0.12  0.13  0.14   0.15   1.12  1.13  1.14   1.15
124.4 124.5 124.6 124.7 125.4 125.5 125.6 125.7 124.12 124.13 124.14 124.15 125.12 125.13 125.14 125.15
"""
# Rows 0, 8, 17 and 63; the last 16 of 24 columns.
WGMMA_ACCUMULATOR = """
  0.4   0.5   1.4   1.5   2.4   2.5   3.4   3.5   0.8   0.9   1.8   1.9   2.8   2.9   3.8   3.9
  0.6   0.7   1.6   1.7   2.6   2.7   3.6   3.7   0.10  0.11  1.10  1.11  2.10  2.11  3.10  3.11
 36.4  36.5  37.4  37.5  38.4  38.5  39.4  39.5  36.8  36.9  37.8  37.9  38.8  38.9  39.8  39.9
124.6 124.7 125.6 125.7 126.6 126.7 127.6 127.7 124.10 124.11 125.10 125.11 126.10 126.11 127.10 127.11
"""
# Matrix 3 as ldmatrix.x4.trans reads it.
TRANSPOSED = """
0.6 4.6  8.6 12.6 16.6 20.6 24.6 28.6
0.7 4.7  8.7 12.7 16.7 20.7 24.7 28.7
1.6 5.6  9.6 13.6 17.6 21.6 25.6 29.6
1.7 5.7  9.7 13.7 17.7 21.7 25.7 29.7
2.6 6.6 10.6 14.6 18.6 22.6 26.6 30.6
2.7 6.7 10.7 14.7 18.7 22.7 26.7 30.7
3.6 7.6 11.6 15.6 19.6 23.6 27.6 31.6
3.7 7.7 11.7 15.7 19.7 23.7 27.7 31.7
"""


# Columns 0, 1, 7, 8 and 30 of the vector: its threads of the first warp, and the register.
COLUMNS = """
0 4 8 12 16 20 24 28  0
0 4 8 12 16 20 24 28  1
3 7 11 15 19 23 27 31  1
0 4 8 12 16 20 24 28  2
3 7 11 15 19 23 27 31  6
"""


@pytest.mark.parametrize("layout, rows, columns, text", [
    (MmaAccumulator(), range(16), range(8), MMA_ACCUMULATOR),
    (MmaB(), range(16), range(8), MMA_B),
    (MmaA(), (0, 7, 8, 15), range(16), MMA_A),
    (WgmmaA(2), (0, 8, 16, 63), range(16), WGMMA_A_16_BIT),
    (WgmmaA(1), (0, 8, 63), (*range(8), *range(16, 24)), WGMMA_A_8_BIT),
    (WgmmaAccumulator(24), (0, 8, 17, 63), range(8, 24), WGMMA_ACCUMULATOR),
], ids=str)  # fmt: skip
def test_fragments(layout, rows, columns, text):
    assert placed(layout, rows, columns) == table(text)


@pytest.mark.parametrize("rows", [64, 128])
def test_rows_lie_with_their_accumulator(rows):
    """Each value in the threads that hold its row; the register that numbers their rows."""
    layout, tile = AccumulatorRows(rows), WgmmaAccumulator(32, rows)
    for row in range(rows):
        places = [tile.place((row, column)) for column in range(32)]
        threads, register = layout.place((row,))
        assert threads == set().union(*(holders for holders, _ in places))
        assert {r // 16 * 2 + r // 2 % 2 for _, r in places} == {register}
    assert layout.registers == rows // 32


def test_columns_lie_as_written():
    lines = [list(map(int, line.split())) for line in COLUMNS.strip().splitlines()]
    for column, (*lanes, register) in zip((0, 1, 7, 8, 30), lines, strict=True):
        everywhere = {warp * 32 + lane for warp in range(4) for lane in lanes}
        assert AccumulatorColumns(32).place((column,)) == (everywhere, register)


@pytest.mark.parametrize("columns, rows", [(16, 64), (32, 512)])
def test_columns_lie_with_their_accumulator(columns, rows):
    """Each value in the threads that hold its column; the register is the column's first pair in a block of rows, halved."""
    layout, tile = AccumulatorColumns(columns), WgmmaAccumulator(columns, rows)
    for column in range(columns):
        places = [tile.place((row, column)) for row in range(rows)]
        threads, register = layout.place((column,))
        assert threads == set().union(*(holders for holders, _ in places))
        assert {r % (columns // 2) // 4 * 2 + r % 2 for _, r in places} == {register}
    assert layout.registers == columns // 4 and layout.shape == (columns,)


def test_matrices():
    first = "\n".join(MMA_ACCUMULATOR.strip().splitlines()[:8])  # one matrix is a quarter of a fragment
    assert placed(Matrices(1), range(8), range(8), 0) == table(first)
    assert placed(Matrices(4, transposed=True), range(8), range(8), 3) == table(TRANSPOSED)
    assert [Matrices(4).address_lane(m, row) for m, row in ((0, 0), (0, 7), (1, 0), (3, 7))] == [0, 7, 8, 31]


FRAGMENTS = [MmaA(), MmaB(), MmaAccumulator(), WgmmaA(1), WgmmaA(2)]
FRAGMENTS += [*(WgmmaAccumulator(n) for n in range(8, 257, 8)), WgmmaAccumulator(96, 128)]
FRAGMENTS += [Matrices(count, transposed) for count in (1, 2, 4) for transposed in (False, True)]


@pytest.mark.parametrize("layout", FRAGMENTS, ids=str)
def test_each_register_of_each_thread_holds_one_element(layout):
    held = Counter()
    for index in itertools.product(*map(range, layout.shape)):
        threads, register = layout.place(index)
        held.update((thread, register) for thread in threads)
    assert held == Counter(itertools.product(range(layout.threads), range(layout.registers)))


@pytest.mark.parametrize("columns", [16, 64, 256])
def test_an_accumulator_is_the_next_a_operand(columns):
    """Registers 8j..8j+7, rounded in pairs, are A of the j-th 16 of K: P needs no exchange between threads."""
    accumulator, a = WgmmaAccumulator(columns), WgmmaA(2)
    for row, column in itertools.product(range(64), range(columns)):
        threads, register = a.place((row, column % 16))
        assert accumulator.place((row, column)) == (threads, column // 16 * 8 + register)


def test_two_mma_accumulators_are_the_next_a_operand():
    for row, column in itertools.product(range(16), range(16)):
        threads, register = MmaAccumulator().place((row, column % 8))
        assert MmaA().place((row, column)) == (threads, column // 8 * 4 + register)


@pytest.mark.parametrize("chunk", range(4))
def test_stmatrix_writes_an_accumulator_where_it_belongs(chunk):
    """x4 of registers 8j.. from rounded pairs: lane l points at row l % 16 of its warp, column 16 j + 8 (l / 16)."""
    accumulator, matrices = WgmmaAccumulator(64), Matrices(4)
    held = {}
    for index in itertools.product(range(64), range(64)):
        (thread,), register = accumulator.place(index)
        held[thread, register] = index
    for warp, m, row, column in itertools.product(range(4), range(4), range(8), range(8)):
        lane = matrices.address_lane(m, row)
        target = warp * 16 + lane % 16, 16 * chunk + lane // 16 * 8 + column
        (thread,), register = matrices.place((m, row, column))
        assert held[warp * 32 + thread, chunk * 8 + register] == target


def test_ldmatrix_reads_the_operands_of_mma():
    """A: x4, lane l at row l % 16, K 8 (l / 16). B from rows of columns (K-major): x2; from rows of K: x2, transposed."""
    for m, row, j in itertools.product(range(4), range(8), range(8)):
        lane = Matrices(4).address_lane(m, row)
        assert Matrices(4).place((m, row, j)) == MmaA().place((lane % 16, lane // 16 * 8 + j))
    for m, row, j in itertools.product(range(2), range(8), range(8)):
        assert Matrices(2).place((m, row, j)) == MmaB().place((8 * m + j, row))
        assert Matrices(2, transposed=True).place((m, row, j)) == MmaB().place((8 * m + row, j))


# Which 16-byte piece of the row lies in each place of 8 lines of 128 bytes: "row.piece".
ATOMS = {
    Swizzle.B128: """
        0.0 0.1 0.2 0.3 0.4 0.5 0.6 0.7
        1.1 1.0 1.3 1.2 1.5 1.4 1.7 1.6
        2.2 2.3 2.0 2.1 2.6 2.7 2.4 2.5
        3.3 3.2 3.1 3.0 3.7 3.6 3.5 3.4
        4.4 4.5 4.6 4.7 4.0 4.1 4.2 4.3
        5.5 5.4 5.7 5.6 5.1 5.0 5.3 5.2
        6.6 6.7 6.4 6.5 6.2 6.3 6.0 6.1
        7.7 7.6 7.5 7.4 7.3 7.2 7.1 7.0""",
    Swizzle.B64: """
        0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3
        2.1 2.0 2.3 2.2 3.1 3.0 3.3 3.2
        4.2 4.3 4.0 4.1 5.2 5.3 5.0 5.1
        6.3 6.2 6.1 6.0 7.3 7.2 7.1 7.0""",
    Swizzle.B32: """
        0.0 0.1 1.0 1.1 2.0 2.1 3.0 3.1
        4.1 4.0 5.1 5.0 6.1 6.0 7.1 7.0""",
    Swizzle.NONE: """
        0.0 1.0 2.0 3.0 4.0 5.0 6.0 7.0""",
}


@pytest.mark.parametrize("swizzle", Swizzle)
def test_swizzles(swizzle):
    tile = SharedTile(16, swizzle.row_bytes, 1, swizzle)  # two atoms
    expected = {piece: place for place, piece in enumerate(itertools.chain(*table(ATOMS[swizzle])))}
    assert len(expected) * 16 == swizzle.alignment
    for row, column in itertools.product(range(16), range(tile.columns)):
        place = expected[row % 8, column // 16]
        assert tile.offset(row, column) == row // 8 * swizzle.alignment + place * 16 + column % 16


@pytest.mark.parametrize("swizzle", Swizzle)
def test_a_swizzle_is_its_own_inverse_within_its_atom(swizzle):
    for offset in range(4 * swizzle.alignment):
        assert swizzle.permute(swizzle.permute(offset)) == offset
        assert swizzle.permute(offset) // swizzle.alignment == offset // swizzle.alignment
        assert swizzle.permute(offset) % 16 == offset % 16


@pytest.mark.parametrize("swizzle", Swizzle)
def test_eight_rows_at_one_piece_meet_no_bank_twice(swizzle):
    tile = SharedTile(64, 64, 2, swizzle)
    for row, piece in itertools.product(range(0, 64, 8), range(8)):
        assert {tile.offset(row + i, piece * 8) % 128 // 16 for i in range(8)} == set(range(8))


TILES = [SharedTile(*sizes, s) for s in Swizzle for sizes in ((8, 128, 2), (64, 64, 2), (96, 256, 1), (24, 32, 4))]


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile} x {tile.element_bytes}")
def test_each_element_of_a_tile_has_its_bytes(tile):
    found = sorted(tile.offset(*index) for index in itertools.product(range(tile.rows), range(tile.columns)))
    assert found == list(range(0, tile.bytes, tile.element_bytes))


# A tile of 64 x 64 of bf16: stride, leading, and where the second, third and fourth 16 of K begin.
OPERANDS = [
    (False, Swizzle.B128, 1024, 16, (32, 64, 96)),
    (False, Swizzle.B64, 512, 16, (32, 4096, 4128)),
    (False, Swizzle.B32, 256, 16, (2048, 4096, 6144)),
    (False, Swizzle.NONE, 128, 1024, (2048, 4096, 6144)),
    (True, Swizzle.B128, 1024, 8192, (2048, 4096, 6144)),
    (True, Swizzle.B64, 512, 4096, (1024, 2048, 3072)),
    (True, Swizzle.B32, 256, 2048, (512, 1024, 1536)),
    (True, Swizzle.NONE, 1024, 128, (256, 512, 768)),
]


@pytest.mark.parametrize("mn_major, swizzle, stride, leading, steps", OPERANDS)
def test_operands(mn_major, swizzle, stride, leading, steps):
    operand = Operand(SharedTile(64, 64, 2, swizzle), mn_major)
    assert (operand.stride, operand.leading) == (stride, leading)
    assert (operand.advance(0), *map(operand.advance, (1, 2, 3))) == (0, *steps)


@pytest.mark.parametrize("swizzle", Swizzle)
@pytest.mark.parametrize("mn_major", [False, True])
def test_an_operand_leads_to_the_elements_of_its_tile(mn_major, swizzle):
    """From stride, leading and advance alone, as the canonical layouts of the PTX ISA read them."""
    tile = SharedTile(64, 128, 2, swizzle)
    operand, pieces = Operand(tile, mn_major), swizzle.row_bytes // 16
    for row, column in itertools.product(range(64), range(128)):
        step, k = divmod(row if mn_major else column, 16)
        piece, within = divmod(column if mn_major else k, 8)
        if mn_major:  # 8 rows of K, boxes of MN
            box, piece = divmod(piece, pieces)
            rows, boxes = (operand.leading, operand.stride) if swizzle is Swizzle.NONE else (operand.stride, operand.leading)
            logical = k // 8 * rows + k % 8 * swizzle.row_bytes + box * boxes + piece * 16
        else:
            along = operand.leading if swizzle is Swizzle.NONE else 16
            logical = row // 8 * operand.stride + row % 8 * swizzle.row_bytes + piece * along
        assert tile.offset(row, column) == swizzle.permute(operand.advance(step) + logical + within * 2)


@pytest.mark.parametrize("swizzle", Swizzle)
def test_the_rows_of_the_next_group(swizzle):
    """64 of M further: rows of a K-major tile, columns of an MN-major one."""
    tall, wide = SharedTile(128, 64, 2, swizzle), SharedTile(64, 128, 2, swizzle)
    assert (Operand(tall).group_bytes, Operand(wide, mn_major=True).group_bytes) == (tall.offset(64, 0), wide.offset(0, 64))
    assert Operand(tall).steps == Operand(wide, mn_major=True).steps == 4


# Address, leading, stride, swizzle; bits 0..31 and 32..63 of the descriptor, as "Matrix descriptor" of the PTX ISA has them.
DESCRIPTORS = [
    (0x00400, 16, 1024, Swizzle.B128, 0x00010040, 0x40000040),
    (0x12C20, 16, 512, Swizzle.B64, 0x000112C2, 0x80000020),
    (0x38000, 2048, 256, Swizzle.B32, 0x00803800, 0xC0000010),
    (0x00010, 128, 1024, Swizzle.NONE, 0x00080001, 0x00000040),
    (0x39FF0, 262128, 262128, Swizzle.B128, 0x3FFF39FF, 0x40003FFF),
    (0x40000, 0, 0, Swizzle.NONE, 0x00000000, 0x00000000),
]


def test_the_device_makes_these_descriptors(tmp_path):
    try:
        nvcc = toolkit.find().nvcc
    except BuildError as error:
        pytest.skip(f"needs nvcc: {error}")
    names = {Swizzle.NONE: "kNone", Swizzle.B32: "k32", Swizzle.B64: "k64", Swizzle.B128: "k128"}
    lines = ['#include "tileops/wgmma.h"', "using namespace tileops;"]
    for address, leading, stride, swizzle, low, high in DESCRIPTORS:
        lines += [f"static_assert(descriptor_low({address}, {leading}) == {low}u);"]
        lines += [f"static_assert(descriptor_high({stride}, Swizzle::{names[swizzle]}) == {high}u);"]
    source = tmp_path / "descriptors.cu"
    source.write_text("\n".join(lines) + "\n")
    command = [nvcc, "-std=c++17", "-arch=sm_90a", f"-I{INCLUDE}", "-cubin", "-o", tmp_path / "descriptors.cubin", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_wgmma_instructions_are_those_of_the_generator():
    generator = INCLUDE / "tileops" / "wgmma_shapes.py"
    assert generator.with_suffix(".h").read_text() == runpy.run_path(str(generator))["header"]()


@pytest.mark.parametrize("make, problem", [
    (lambda: WgmmaAccumulator(12), "columns must be a multiple of 8 in 8..256, rows of 64"),
    (lambda: WgmmaAccumulator(264), "columns must be a multiple of 8 in 8..256, rows of 64"),
    (lambda: WgmmaAccumulator(64, 96), "columns must be a multiple of 8 in 8..256, rows of 64"),
    (lambda: WgmmaA(4), "elements have 1 or 2 bytes"),
    (lambda: Matrices(3), "the instructions move 1, 2 or 4 matrices"),
    (lambda: SharedTile(12, 64, 2, Swizzle.B128), "rows must be a multiple of 8 and columns of 64"),
    (lambda: SharedTile(64, 96, 2, Swizzle.B128), "rows must be a multiple of 8 and columns of 64"),
    (lambda: Operand(SharedTile(64, 128, 1, Swizzle.B128), mn_major=True), "8-bit operands are K-major"),
    (lambda: Operand(SharedTile(8, 64, 2, Swizzle.B64), mn_major=True), "the extent of K must be a multiple of 32 bytes"),
    (lambda: Operand(SharedTile(64, 24, 2, Swizzle.NONE)), "the extent of K must be a multiple of 32 bytes"),
])  # fmt: skip
def test_refused(make, problem):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).endswith(f": {problem}")
