"""What the passes refuse: elements in other threads, layouts that do not fit; and errors of configurations."""

import pytest
from rejected import error_of, record, rejected

import tileops_dsl.language as T
from tileops_dsl import output
from tileops_dsl.codegen import emit_kernel
from tileops_dsl.errors import TileError
from tileops_dsl.kernels import configs_of
from tileops_dsl.kernels.flash_attention_config import AttentionConfig
from tileops_dsl.kernels.row_config import RowConfig
from tileops_dsl.layouts import VectorisedRows

inner = T.dynamic("inner")
cols = T.dynamic("cols", "int32")
X = T.Tensor((inner, cols), "float32", vector=4)
NARROW = T.Tensor((inner, cols), "float32", vector=2)


def tiles(vector=4, rows=4):
    return VectorisedRows(rows, 128, threads=128, threads_per_row=32, vector=vector)


# ---- elements


@rejected("tile[0, 0] is read outside T.Parallel", "a dimension or a T.Scalar")
def test_element_outside_parallel():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        with T.If(tile[0, 0] > 0.0):  # here
            T.fill(tile, 1.0)


@rejected("b[j, i] is not the loop's own element", "indices from i, j, in order: a tile's element stays in its thread")
def test_wrong_order_of_indices():
    with T.Kernel(1, threads=128):
        a = T.alloc_fragment((128, 128), "float32")
        b = T.alloc_fragment((128, 128), "float32")
        T.annotate_layout({a: tiles(rows=128)})
        for i, j in T.Parallel(128, 128):
            a[i, j] = b[j, i]  # here


@rejected(
    "tile[i, add(j, 1)] is not the loop's own element", "indices from i, j, in order: a tile's element stays in its thread"
)
def test_neighbouring_element():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.annotate_layout({tile: tiles()})
        for i, j in T.Parallel(4, 128):
            tile[i, j] = tile[i, j + 1]  # here


@rejected(
    "total[i] is assigned again and again by the loop, in each thread for itself",
    "a tile assigned at [i, j], and T.reduce_sum or T.reduce_max of it",
)
def test_sum_in_a_parallel_loop():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        total = T.alloc_fragment((4,), "float32")
        T.annotate_layout({tile: tiles()})
        for i, j in T.Parallel(4, 128):
            total[i] = total[i] + tile[i, j]  # here


@rejected("the loop runs over 64 and tile has 128", "T.Parallel over the shape [4, 128]")
def test_mixed_extents():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        for i, j in T.Parallel(4, 64):
            tile[i, j] = 0.0  # here


@rejected("a partial sum in a kernel without T.gemm", "T.reduce_sum(tile, sums)")
def test_partial_sum(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        sums = T.alloc_fragment((4,), "float32")
        T.fill(tile, 0.0)
        T.reduce_sum(tile, sums, partial=True)  # here


@rejected("j is used as a number, but the tile is shifted", "a layout that is not shifted")
def test_number_of_a_shifted_column():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        layout = VectorisedRows(4, 128, threads=128, threads_per_row=32, vector=4, shifted=True)
        T.annotate_layout({tile: layout})
        for i, j in T.Parallel(4, 128):
            tile[i, j] = T.cast(j, "float32")  # here


# ---- layouts


@rejected("tile has no layout: nothing ties it to a tile that has one", "T.annotate_layout({tile: ...})")
def test_no_layout():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")  # here
        T.fill(tile, 0.0)


@rejected(
    "b is laid out as rows of 32 threads x 2 x 2, 1 passes, lanes on columns "
    "and used here as rows of 32 threads x 1 x 4, 1 passes, lanes on columns",
    "a second fragment, or the same tile shape and annotation on both sides",
)
def test_two_layouts_meet():
    with T.Kernel(1, threads=128):
        a = T.alloc_fragment((4, 128), "float32")
        b = T.alloc_fragment((4, 128), "float32")
        T.annotate_layout({a: tiles(), b: tiles(vector=2)})
        for i, j in T.Parallel(4, 128):
            a[i, j] = b[i, j]  # here


@rejected(
    "a second distribution of rows: rows of 32 threads x 2 x 2, 1 passes, lanes on columns "
    "and rows of 32 threads x 1 x 4, 1 passes, lanes on columns",
    "one layout",
)
def test_two_layouts_side_by_side():
    with T.Kernel(1, threads=128):
        a = T.alloc_fragment((4, 128), "float32")
        b = T.alloc_fragment((4, 128), "float32")  # here
        T.annotate_layout({a: tiles(), b: tiles(vector=2)})


@rejected("tile is [4, 64] and its layout [4, 128]: rows of 32 threads x 1 x 4, 1 passes, lanes on columns", "one shape")
def test_layout_of_another_shape():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 64), "float32")  # here
        T.annotate_layout({tile: tiles()})


@rejected("the layout of tile has 128 threads of 256", "T.Kernel's threads")
def test_layout_of_another_number_of_threads():
    with T.Kernel(1, threads=256):
        tile = T.alloc_fragment((4, 128), "float32")  # here
        T.annotate_layout({tile: tiles()})


@rejected(
    "tile is accessed 4 elements at a time, x promises 2",
    "T.Tensor(..., vector=4), or a layout of that vector",
)
def test_wider_accesses_than_promised(x: NARROW):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.annotate_layout({tile: tiles()})
        T.copy(tile, x[0, 0])  # here


def too_many():
    def program():
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment((8, 1024), "float32")
            layout = VectorisedRows(8, 1024, threads=32, threads_per_row=32, vector=4)
            T.annotate_layout({tile: layout})

    return error_of(program)


def test_too_many_registers():
    expected = "a fragment needs 256 registers of 255\n    Instead: fewer passes or chunks, or more threads"
    assert str(too_many()) == expected


# ---- what Python itself reports, and configurations


def test_an_unknown_keyword_is_named():
    def program(x: X):
        with T.Kernel(1, threads=128):
            tile = T.alloc_fragment((4, 128), "float32")
            T.copy(x[0, 0], tile, fill=0.0, eviction="evict_first")

    with pytest.raises(TypeError, match="unexpected keyword argument 'eviction'"):
        record(program)


def test_an_unknown_dtype_of_a_configuration():
    with pytest.raises(TileError) as caught:
        RowConfig("softmax", "sm_90a", "float64", "float32", 4, 128, 32, 1)
    assert str(caught.value) == "configs/softmax.json has dtype 'float64'\n    Instead: one of float32, float16, bfloat16"


@pytest.mark.parametrize(
    ("options", "causal", "found"),
    [
        (["sinks", "window"], False, "['sinks', 'window']"),
        (["alibi"], False, "['alibi']"),
        (["window"], True, "['window'] and causal"),
        (["lengths"], "longest_first", "['lengths'] and longest_first"),
    ],
)
def test_options_of_an_attention_kernel(options, causal, found):
    with pytest.raises(TileError) as caught:
        order = {"longest_first": True} if causal == "longest_first" else {"causal": causal}
        AttentionConfig("flash_attention", "sm_90a", *2 * ("float16",), (128, 64, 64), 2, options=options, **order)
    instead = "some of lengths, paged, window, sinks, softcap, in this order; a window without causal, paged with lengths"
    instead += ", longest_first without"
    assert str(caught.value) == f"configs/flash_attention.json has options {found}\n    Instead: {instead}"


def test_a_grid_that_the_host_would_not_launch(monkeypatch):
    def program(x: X):
        with T.Kernel(T.ceildiv(inner, 8), 2, threads=128):
            tile = T.alloc_fragment((4, 128), "float32")
            T.annotate_layout({tile: tiles()})

    monkeypatch.setitem(output.PROGRAMS, "softmax", lambda config: T.prim_func(program))
    config = next(row for row in configs_of("softmax") if row.target == "sm_90a")
    with pytest.raises(TileError) as caught:
        output.compile_config(config)
    line = program.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"test_layout_errors.py:{line}: the grid of a row-wise program is fixed\n"
        "    with T.Kernel(T.ceildiv(inner, 8), 2, threads=128):\n"
        "    Instead: T.Kernel(T.ceildiv(inner, rows), outer, ...), or (.., outer, batch, ...)"
    )


def test_expressions_that_need_care_in_c():
    """Negated negatives, and conversions between 16-bit floats, are written so that C++ reads them as Python does."""

    def program():
        with T.Kernel(1, threads=128):
            a = T.alloc_fragment((4, 128), "float16")
            b = T.alloc_fragment((4, 128), "bfloat16")
            d = T.alloc_fragment((4, 128), "float32")
            T.annotate_layout({a: tiles()})
            T.fill(a, 1)
            for i, j in T.Parallel(4, 128):
                b[i, j] = a[i, j]
                d[i, j] = -(-d[i, j])  # noqa: B002

    lines = [line.strip() for line in emit_kernel(record(program), "k", "k")[0].splitlines()]
    assert "fill<4>(a, 0, from_float<f16>(1));" in lines
    assert "b[r * 4 + q] = from_float<bf16>(to_float(a, r * 4 + q));" in lines
    assert "d[r * 4 + q] = -(-d[r * 4 + q]);" in lines
