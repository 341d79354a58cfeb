"""Every kernel of configs/ on the emulator, against float64: each row at its own tile, and each schedule at small tiles and
shapes that reach every edge, for several seeds. There is more of row-wise schedules in test_kernels.py.
"""

import functools
import itertools

import library
import mutants
import pytest

from tileops_dsl import output
from tileops_dsl.kernels import LIBRARY, configs_of

TABLE = mutants.scores()
ROWS = {op: configs_of(op) for op in library.OPS}
TILED = ("gemm", "flash_attention", *library.MLA)
SCHEDULES = [name for name in library.all_schedules() if name.startswith(TILED)]
FILES = sorted({(row.op, row.file) for op in ROWS if op not in TILED for row in ROWS[op]})


@functools.cache
def words_of_schedule(name):
    return library.words(output.compile_config(library.all_schedules()[name]).text)


def test_each_operator_is_here():
    """Of those that the library is built of: test_columns.py has the others of configs/."""
    assert set(ROWS) == set(LIBRARY), "OPS and edges() of library.py are to name each operator of the library"


def is_shown(row):
    """Of attention without warp groups, whose kernels take long here, one kernel of float16 shows how it differs: by a type."""
    return row.op != "flash_attention" or row.target != "portable" or row.x == "bfloat16" or row.tile[2] == 32


@pytest.mark.parametrize("row", [row for op in TILED for row in ROWS[op] if is_shown(row)], ids=lambda row: row.name)
def test_row(row):
    """Ragged tiles, with all that a call may switch on; and its text has the words of its schedule's."""
    kernel = library.Kernel(row)
    if row.op == "gemm":
        (bm, bn, bk), odd = row.tile, 1 if row.vector == 1 else 8
        shape = 1, bm * row.cluster + odd, bn - odd, (row.stages + 1) * bk + odd
        problem = library.gemm_problem(row, *shape, bias="bfloat16", activation=4, residual=True)
    elif row.op == "mla_decode":
        problem = library.mla_problem(row, [300, 5, 0, 130], 40, 2, parts=3, spread=8.0)
    elif row.op == "mla_decode_few":
        page = 48 if row.unit else 64
        problem = library.mla_problem(row, [300, 5, 0, 130], row.tile[0] // 2 - 1, 2, parts=3, spread=8.0, page=page)
    elif row.lengths:
        problem = library.lengths_edges(row)[0]
    else:
        problem = library.attention_problem(row, 1, 150, 400, 4, 2, ctas=4, **library.options_of(row, 4, left=170))
    for seed in range(2 if row.op == "flash_attention" and row.target == "sm_90a" else 1):
        kernel.check(problem, seed)
    assert library.words(kernel.made.text) == words_of_schedule(library.schedule(row))


@pytest.mark.parametrize("op, file", FILES)
def test_rows_of_a_file(op, file):
    """Each of some problems, so that the rows together have all edges of shapes, strides and arguments."""
    made = [output.compile_config(row) for row in ROWS[op] if row.file == file]
    path = library.write(made, file)
    for number, kernel in enumerate(made):
        row = kernel.config
        problems = library.edges(row)
        for problem in problems[number % 3 :: max(len(problems) // 5, 1)]:
            library.Kernel(row, kernel, path).check(problem, seed=number)
        assert library.words(kernel.text) == words_of_schedule(library.schedule(row)), row.name


@pytest.mark.parametrize("name", SCHEDULES)
def test_edges(name):
    row = library.all_schedules()[name]
    kernel = library.Kernel(row)
    for problem, seed in itertools.product(library.edges(row), range(2)):
        kernel.check(problem, seed)
    assert len(mutants.of_kernel(kernel)) == mutants.scores()[name]["mutants"], (
        "python tests/emulator/mutants.py is to run again"
    )
