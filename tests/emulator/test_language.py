"""What the words of the language mean, where the shipped kernels do not show it: small programs with softmax's parameters."""

import functools
import inspect
import re

import numpy as np
import pytest

import tileops_dsl.language as T
from tileops_dsl import emulate, output
from tileops_dsl.emulate_rows import decode, emulate_row, encode
from tileops_dsl.kernels.row_config import RowConfig
from tileops_dsl.language import scalar


@pytest.fixture
def run(monkeypatch):
    """Runs body(config, x, y, cols, block, batch) on the values x, which are those that its dtype holds; returns y."""

    def launch(config, body, x, **more):
        outer, inner = T.dynamic("outer, inner")
        cols = T.dynamic("cols", "int32")

        def program(
            x: T.Tensor((outer, inner, cols), config.x, vector=config.vector),
            y: T.Tensor((outer, inner, cols), config.y, vector=config.vector),
        ):
            with T.Kernel(T.ceildiv(inner, config.tile[0]), outer, threads=config.threads) as (block, batch):
                body(config, x, y, cols, block, batch)

        monkeypatch.setitem(output.PROGRAMS, "softmax", lambda config: T.prim_func(program))
        y = encode(np.full(x.shape, np.nan), config.y)
        emulate_row(config, encode(x, config.x), y, **more)
        return decode(y, config.y)

    return launch


def config(x="float32", y="float32", vector=4, threads=128, threads_per_row=32, chunks=1, **more):
    return RowConfig("softmax", "sm_90a", x, y, vector, threads, threads_per_row, chunks, **more)


SEVERAL_WARPS = config(threads_per_row=128)
BY_ROWS = config(vector=1, threads_per_row=4, chunks=3, lanes_on_rows=True)


def running_sum(config, x, y, cols, block, batch):
    """y = x plus the sum of its row up to the end of x's block: a reduction in a loop."""
    rows, columns = config.tile
    tile = T.alloc_fragment((rows, columns), "float32")
    total = T.alloc_fragment((rows,), "float32")
    T.annotate_layout({tile: config.layout})
    T.fill(total, 0.0)
    for k in T.serial(T.ceildiv(cols, columns)):
        T.copy(x[batch, block * rows, k * columns], tile, fill=0.0)
        T.reduce_sum(tile, total, clear=False)
        for i, j in T.Parallel(rows, columns):
            tile[i, j] = tile[i, j] + total[i]
        T.copy(tile, y[batch, block * rows, k * columns])


@pytest.mark.parametrize("row", [SEVERAL_WARPS, BY_ROWS, config()], ids=lambda row: row.name)
def test_reduction_in_a_loop(run, row):
    """Both of its barriers are needed: for the exchange, and before the next iteration's."""
    rows, columns = row.tile
    blocks = np.random.default_rng(0).integers(-9, 9, (1, rows, 4, columns))
    expected = blocks + np.cumsum(blocks.sum(-1), -1)[..., None]

    def launch(seed, suppress=()):
        y = run(row, running_sum, blocks.reshape(1, rows, -1), seed=seed, suppress=suppress)
        return (y == expected.reshape(y.shape)).all()

    assert all(launch(seed) for seed in range(4))
    barriers = [n for n in range(1, 6) if is_noticed(functools.partial(launch, suppress=(n,)))]
    assert len(barriers) == (0 if row.layout.warps_per_row == 1 else 2)


def is_noticed(launch):
    for seed in range(8):
        try:
            if not launch(seed):
                return True
        except emulate.EmulatorError as fault:
            assert fault.kind in ("race", "unwritten_shared")
            return True
    return False


def indices(config, x, y, cols, block, batch):
    """The numbers of a loop's variables: rows and columns of the tile."""
    rows, columns = config.tile
    tile = T.alloc_fragment((rows, columns), "float32")
    of_row = T.alloc_fragment((rows,), "float32")
    of_column = T.alloc_fragment((columns,), "float32")
    T.annotate_layout({tile: config.layout})
    for i in T.Parallel(rows):
        of_row[i] = i
    for j in T.Parallel(columns):
        of_column[j] = j
    for i, j in T.Parallel(rows, columns):
        tile[i, j] = (of_row[i] * 1000 + of_column[j]) * T.if_then_else(of_row[i] == i, 1, 0) + j
    T.copy(tile, y[batch, block * rows, 0])


@pytest.mark.parametrize("row", [
    SEVERAL_WARPS, BY_ROWS, config(threads_per_row=8, chunks=2, passes=3), config(threads_per_row=1, vector=2, chunks=2),
], ids=lambda row: row.name)  # fmt: skip
def test_indices_are_those_of_the_tile(run, row):
    rows, columns = row.tile
    i, j = np.arange(rows)[:, None], np.arange(columns)
    y = run(row, indices, np.zeros((1, rows, columns)))
    assert (y[0] == i * 1000 + 2 * j).all()


def values_of_rows(config, x, y, cols, block, batch):
    """One value a row: the first row of x, as a column; and back into the first row of y."""
    rows, columns = config.tile
    tile = T.alloc_fragment((rows, columns), "float32")
    of_row = T.alloc_fragment((rows,), "float32")
    T.annotate_layout({tile: config.layout})
    T.copy(x[batch, 0, block * rows], of_row, fill=-1.0)
    for i, j in T.Parallel(rows, columns):
        tile[i, j] = of_row[i]
    T.copy(tile, y[batch, block * rows + config.vector, 0])
    T.copy(of_row, y[batch, 0, block * rows])


@pytest.mark.parametrize("row", [
    config(), BY_ROWS, SEVERAL_WARPS,
    config(vector=1, threads_per_row=8, chunks=5, passes=3),
], ids=lambda row: row.name)  # fmt: skip
def test_values_of_rows(run, row):
    rows, columns = row.tile
    x = np.random.default_rng(0).integers(0, 99, (2, rows, columns)).astype(float)
    y = run(row, values_of_rows, x)
    there = min(rows, columns)  # what lies in the tensor
    assert (y[:, 0, :there] == x[:, 0, :there]).all() and np.isnan(y[:, 0, there:]).all()
    expected = np.full((2, rows), -1.0)
    expected[:, :there] = x[:, 0, :there]
    assert (y[:, row.vector :] == expected[:, : rows - row.vector, None]).all()


VALUES = np.array([-7.5, -2.0, -1.0, -0.25, 0.0, 0.5, 1.0, 3.0])


@pytest.mark.parametrize("name, formula, expected", [
    ("arithmetic", lambda v: 1 - (2 * v + 3 - v * v) / 4, lambda v: 1 - (2 * v + 3 - v * v) / 4),
    ("negation", lambda v: -(-v) - -v + -(v - 1.0), lambda v: v + v - (v - 1)),  # noqa: B002
    ("negative numbers", lambda v: v * -1.0 - -2.0 + T.cast(-3, "float32") * v, lambda v: -v + 2 - 3 * v),
    ("max and min", lambda v: T.max(v, 0.25) - T.min(v, -1.0), lambda v: np.maximum(v, 0.25) - np.minimum(v, -1)),
    ("less", lambda v: T.if_then_else(v < 0.5, v, 9), lambda v: np.where(v < 0.5, v, 9)),
    ("at most", lambda v: T.if_then_else(v <= 0.5, 9.0, v), lambda v: np.where(v <= 0.5, 9, v)),
    ("greater", lambda v: T.if_then_else(v > 0.5, 1, -1), lambda v: np.where(v > 0.5, 1, -1)),
    ("at least", lambda v: T.if_then_else(v >= 0.5, 1, -1), lambda v: np.where(v >= 0.5, 1, -1)),
    ("equal", lambda v: T.if_then_else(v == 0.5, 1, 2), lambda v: np.where(v == 0.5, 1, 2)),
    ("different", lambda v: T.if_then_else(v != 0.5, 1, 2), lambda v: np.where(v != 0.5, 1, 2)),
    ("// truncates", lambda v: T.cast(T.cast(v, "int32") // 2 + 5, "float32"), lambda v: np.trunc(np.trunc(v) / 2) + 5),
    ("infinity", lambda v: T.if_then_else(v == 0, -T.infinity(), 1.0), lambda v: np.where(v == 0, -np.inf, 1)),
    ("exp2", lambda v: T.exp2(v), np.exp2),
    ("tanh", lambda v: T.tanh(v), np.tanh),
    ("log2", lambda v: T.log2(v * v + 1), lambda v: np.log2(v * v + 1)),
    ("log2 of 0", lambda v: T.log2(v * 0), lambda v: np.full(v.shape, -np.inf)),
    ("rsqrt", lambda v: T.rsqrt(v * v + 1), lambda v: 1 / np.sqrt(v * v + 1)),
    ("reciprocal", lambda v: T.reciprocal(v + 10), lambda v: 1 / (v + 10)),
    ("large numbers", lambda v: v * 0 + T.cast(2**40 + T.cast(v * 0, "int64"), "float32"), lambda v: v * 0 + 2.0**40),
    ("rounding", lambda v: T.cast(T.cast(v / 3, "float16"), "float32"), lambda v: decode(encode(v / 3, "float16"), "float16")),
])  # fmt: skip
def test_expressions(run, name, formula, expected):
    def body(config, x, y, cols, block, batch):
        tile = T.alloc_fragment(config.tile, "float32")
        T.annotate_layout({tile: config.layout})
        T.copy(x[batch, block * config.tile[0], 0], tile, fill=0.0)
        for i, j in T.Parallel(*config.tile):
            tile[i, j] = formula(tile[i, j])
        T.copy(tile, y[batch, block * config.tile[0], 0])

    y = run(config(), body, VALUES.reshape(1, 1, -1))
    np.testing.assert_allclose(y.reshape(-1), expected(VALUES), rtol=2**-22)


@pytest.mark.parametrize("word", re.findall(r'^\w+ = _function\("(\w+)"', inspect.getsource(scalar), re.MULTILINE))
def test_a_function_is_ours_on_device_and_emulator(word):
    """Of a name that the C library has, its function would be called where ours is missing, and the test above pass."""

    def has(file):
        return f"TILEOPS_WORD float {word}(" in (emulate.ROOT / "csrc" / file).read_text()

    files = "include/tileops/math.h", "emulator/include/tileops/math.h"
    missing = [f"csrc/{file}" for file in files if not has(file)]
    assert not missing or has("include/tileops/activation.h"), f"TILEOPS_WORD float {word}(float v) is missing in {missing}"


@pytest.mark.parametrize("x", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("y", ["float32", "float16", "bfloat16"])
def test_conversions(run, x, y):
    """An assignment rounds to the fragment's dtype; whole numbers fill any."""

    def body(config, x, y, cols, block, batch):
        x_tile = T.alloc_fragment(config.tile, config.x)
        y_tile = T.alloc_fragment(config.tile, config.y)
        ones = T.alloc_fragment(config.tile, config.y)
        T.annotate_layout({x_tile: config.layout})
        T.copy(x[batch, block * config.tile[0], 0], x_tile, fill=0)
        T.fill(ones, 1)
        for i, j in T.Parallel(*config.tile):
            y_tile[i, j] = x_tile[i, j]
        for i, j in T.Parallel(*config.tile):
            y_tile[i, j] = T.if_then_else(ones[i, j] == 1, y_tile[i, j], 0)
        T.copy(y_tile, y[batch, block * config.tile[0], 0])

    values = np.random.default_rng(0).standard_normal((1, 4, 128))
    stored = decode(encode(values, x), x)
    assert (run(config(x, y), body, values) == decode(encode(stored, y), y)).all()


def test_if_on_a_dimension(run):
    def body(config, x, y, cols, block, batch):
        tile = T.alloc_fragment(config.tile, "float32")
        T.annotate_layout({tile: config.layout})
        T.fill(tile, 1.0)
        with T.If(cols > 64):
            T.fill(tile, 2.0)
        T.copy(tile, y[batch, block * config.tile[0], 0])

    assert (run(config(), body, np.zeros((1, 4, 64))) == 1).all()
    assert (run(config(), body, np.zeros((1, 4, 68))) == 2).all()
