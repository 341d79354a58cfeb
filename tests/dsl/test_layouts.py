"""The layouts against tables that are written out, and what must hold for any parameters."""

import itertools
from collections import Counter

import pytest

from tileops_dsl.layouts import PerColumn, PerRow, VectorisedRows


def table(text: str):
    """Rows of "thread.register" words."""
    return [[tuple(map(int, word.split("."))) for word in line.split()] for line in text.strip().splitlines()]


def placed(layout):
    """The same of a layout of tiles: where one thread holds each element."""
    found = [[layout.place((i, j)) for j in range(layout.cols)] for i in range(layout.rows)]
    return [[(*threads, register) for threads, register in row] for row in found]


# 8 threads, 4 a row; 2 chunks of 2 elements.
BY_COLUMNS = VectorisedRows(rows=2, cols=16, threads=8, threads_per_row=4, vector=2)
BY_COLUMNS_TABLE = """
0.0 0.1 1.0 1.1 2.0 2.1 3.0 3.1 0.2 0.3 1.2 1.3 2.2 2.3 3.2 3.3
4.0 4.1 5.0 5.1 6.0 6.1 7.0 7.1 4.2 4.3 5.2 5.3 6.2 6.3 7.2 7.3
"""
# 4 threads, 2 a row; each thread takes part in 3 rows.
IN_PASSES = VectorisedRows(rows=6, cols=4, threads=4, threads_per_row=2, vector=2)
IN_PASSES_TABLE = """
0.0 0.1 1.0 1.1
2.0 2.1 3.0 3.1
0.2 0.3 1.2 1.3
2.2 2.3 3.2 3.3
0.4 0.5 1.4 1.5
2.4 2.5 3.4 3.5
"""
# 8 threads, 2 a row: threads 0 to 3 are the first ones of rows 0 to 3.
BY_ROWS = VectorisedRows(rows=4, cols=6, threads=8, threads_per_row=2, vector=1, lanes_on_rows=True)
BY_ROWS_TABLE = """
0.0 4.0 0.1 4.1 0.2 4.2
1.0 5.0 1.1 5.1 1.2 5.2
2.0 6.0 2.1 6.1 2.2 6.2
3.0 7.0 3.1 7.1 3.2 7.2
"""
# 8 threads, 2 a row, 2 rows a thread: threads 0 and 1 are the first ones of rows 0, 1 and 2, 3.
ACROSS = VectorisedRows(rows=8, cols=4, threads=8, threads_per_row=2, vector=2, lanes_on_rows=True)
ACROSS_TABLE = """
0.0 4.0 0.2 4.2
0.1 4.1 0.3 4.3
1.0 5.0 1.2 5.2
1.1 5.1 1.3 5.3
2.0 6.0 2.2 6.2
2.1 6.1 2.3 6.3
3.0 7.0 3.2 7.2
3.1 7.1 3.3 7.3
"""
# The tile of BY_COLUMNS, with a fifth register for the edge column.
SHIFTED = VectorisedRows(rows=2, cols=16, threads=8, threads_per_row=4, vector=2, shifted=True)


@pytest.mark.parametrize("layout, text", [
    (BY_COLUMNS, BY_COLUMNS_TABLE), (IN_PASSES, IN_PASSES_TABLE), (BY_ROWS, BY_ROWS_TABLE), (ACROSS, ACROSS_TABLE),
    (SHIFTED, BY_COLUMNS_TABLE),
])  # fmt: skip
def test_tiles(layout, text):
    assert placed(layout) == table(text)


@pytest.mark.parametrize("layout, slots, passes, chunks, row_registers, registers, warps_per_row", [
    (BY_COLUMNS, 2, 1, 2, 4, 4, 1),
    (IN_PASSES, 2, 3, 1, 2, 6, 1),
    (BY_ROWS, 4, 1, 3, 3, 3, 2),
    (SHIFTED, 2, 1, 2, 5, 5, 1),
    (VectorisedRows(2, 1024, 256, 128, 4), 2, 1, 2, 8, 8, 4),
])  # fmt: skip
def test_counts(layout, slots, passes, chunks, row_registers, registers, warps_per_row):
    assert (layout.slots, layout.passes, layout.chunks) == (slots, passes, chunks)
    assert (layout.row_registers, layout.registers, layout.warps_per_row) == (row_registers, registers, warps_per_row)


@pytest.mark.parametrize("layout, expected", [
    (BY_COLUMNS, [({0, 1, 2, 3}, 0), ({4, 5, 6, 7}, 0)]),
    (IN_PASSES, [({0, 1}, 0), ({2, 3}, 0), ({0, 1}, 1), ({2, 3}, 1), ({0, 1}, 2), ({2, 3}, 2)]),
    (BY_ROWS, [({0, 4}, 0), ({1, 5}, 0), ({2, 6}, 0), ({3, 7}, 0)]),
])  # fmt: skip
def test_a_value_per_row(layout, expected):
    assert [PerRow(layout).place((i,)) for i in range(layout.rows)] == expected
    assert PerRow(layout).registers == layout.passes


@pytest.mark.parametrize("layout, expected", [
    (BY_COLUMNS, "04.0 04.1 15.0 15.1 26.0 26.1 37.0 37.1 04.2 04.3 15.2 15.3 26.2 26.3 37.2 37.3"),
    (IN_PASSES, "02.0 02.1 13.0 13.1"),
    (BY_ROWS, "0123.0 4567.0 0123.1 4567.1 0123.2 4567.2"),
    (SHIFTED, "04.0 04.1 15.0 15.1 26.0 26.1 37.0 37.1 04.2 04.3 15.2 15.3 26.2 26.3 37.2 37.3"),
])  # fmt: skip
def test_a_value_per_column(layout, expected):
    words = [word.split(".") for word in expected.split()]
    assert [PerColumn(layout).place((j,)) for j in range(layout.cols)] == [(set(map(int, t)), int(r)) for t, r in words]
    assert PerColumn(layout).registers == layout.row_registers


def tiles():
    """All that are small, legal and different enough."""
    for per_row, vector, chunks, slots, passes, flag in itertools.product(
        (1, 2, 8, 32, 64), (1, 2, 4), (1, 3), (1, 2, 4), (1, 2), ("", "lanes_on_rows", "shifted")
    ):
        if flag == "lanes_on_rows":
            yield VectorisedRows(vector * slots, per_row * chunks, slots * per_row, per_row, vector, lanes_on_rows=True)
        elif not flag or (passes == 1 and per_row >= 2 * vector):
            flags = {flag: True} if flag else {}
            yield VectorisedRows(passes * slots, per_row * chunks * vector, slots * per_row, per_row, vector, **flags)


@pytest.mark.parametrize("kind", [lambda tile: tile, PerRow, PerColumn])
def test_each_register_of_each_thread_holds_one_element(kind):
    for tile in tiles():
        layout = kind(tile)
        shape = {PerRow: (tile.rows,), PerColumn: (tile.cols,)}.get(kind, (tile.rows, tile.cols))
        held = Counter()
        for index in itertools.product(*map(range, shape)):
            threads, register = layout.place(index)
            held.update((thread, register) for thread in threads)
        edge = tile.shifted and kind is not PerRow  # the edge register, the last one, belongs to no index
        assert held == Counter(itertools.product(range(tile.threads), range(layout.registers - edge))), layout


def test_a_vector_lies_in_neighbouring_registers_of_one_thread():
    for tile in tiles():
        down, along = (tile.vector, 1) if tile.lanes_on_rows else (1, tile.vector)
        for i, j in itertools.product(range(0, tile.rows, down), range(0, tile.cols, along)):
            (thread,), register = tile.place((i, j))
            assert tile.shifted or register % tile.vector == 0
            for k in range(tile.vector):
                at = (i + k, j) if tile.lanes_on_rows else (i, j + k)
                assert tile.place(at) == ({thread}, register + k), tile


def test_neighbouring_threads_hold_neighbouring_vectors_or_rows():
    for tile in tiles():
        for i, j in itertools.product(range(tile.rows), range(0, tile.cols, tile.column_vector)):
            (thread,), register = tile.place((i, j))
            if tile.lanes_on_rows and i + tile.vector < tile.rows:
                assert tile.place((i + tile.vector, j)) == ({thread + 1}, register)
            if not tile.lanes_on_rows and j // tile.vector % tile.threads_per_row + 1 < tile.threads_per_row:
                assert tile.place((i, j + tile.vector)) == ({thread + 1}, register)


@pytest.mark.parametrize("arguments, problem", [
    ((4, 64, 96, 64, 1), "rows must be a multiple of threads / threads_per_row"),
    ((1, 64, 32, 64, 1), "rows must be a multiple of threads / threads_per_row"),
    ((3, 32, 64, 32, 1), "rows must be a multiple of threads / threads_per_row"),
    ((8, 64, 128, 32, 2, False, True), "shifted rows need one row for each thread, along 2 * vector lanes or more"),
    ((4, 64, 128, 32, 2, True, True), "shifted rows need one row for each thread, along 2 * vector lanes or more"),
    ((4, 96, 128, 32, 32, False, True), "shifted rows need one row for each thread, along 2 * vector lanes or more"),
    ((4, 48, 96, 24, 1), "threads_per_row must divide a warp or be whole warps"),
    ((4, 48, 192, 48, 1), "threads_per_row must divide a warp or be whole warps"),
    ((4, 65, 128, 32, 1), "cols must be a multiple of vector * threads_per_row"),
    ((4, 32, 128, 32, 2), "cols must be a multiple of vector * threads_per_row"),
])  # fmt: skip
def test_refused(arguments, problem):
    with pytest.raises(ValueError) as caught:
        VectorisedRows(*arguments)
    assert str(caught.value).startswith("VectorisedRows(rows=") and str(caught.value).endswith(f"): {problem}")
