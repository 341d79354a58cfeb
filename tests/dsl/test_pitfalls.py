"""Python that a tile program cannot mean."""

import sys

from rejected import error_of, neighbour, programs_of, rejected, untested

import tileops_dsl.language as T
from tileops_dsl.layouts import VectorisedRows

inner = T.dynamic("inner")
cols = T.dynamic("cols", "int32")
X = T.Tensor((inner, cols), "float32", vector=4)
N = T.Scalar("int32")
NOW = "known only at run time; Python's if, while, and, or and chained comparisons need it now"
INSTEAD_OF_NOW = "T.if_then_else(condition, a, b) for a value, `with T.If(condition):` for statements"
BOUND = "{} is bound before {} and again inside it; the body is recorded once"
JUMP = "in T.If takes effect while recording, whatever the condition"
SIZE = "known only at run time; range() and sizes need a Python integer"


def tiles():
    return VectorisedRows(4, 128, threads=128, threads_per_row=32, vector=4)


# ---- Python's control flow


@rejected(f"lt(0.0, tile[i, j]) is {NOW}", INSTEAD_OF_NOW)
def test_python_if():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        for i, j in T.Parallel(4, 128):
            if tile[i, j] > 0:  # here
                tile[i, j] = 1.0


@rejected(f"lt(0.0, tile[i, j]) is {NOW}", INSTEAD_OF_NOW)
def test_python_and():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        for i, j in T.Parallel(4, 128):
            tile[i, j] = T.if_then_else(tile[i, j] > 0.0 and tile[i, j] < 1.0, 0.0, 1.0)  # here


@rejected(f"lt(0, n) is {NOW}", INSTEAD_OF_NOW)
def test_chained_comparison(n: N):
    with T.Kernel(1, threads=128), T.If(0 < n < 5):  # here
        pass


@rejected(f"cols is {SIZE}", "for k in T.serial(extent): ...")
def test_python_range(x: X):
    with T.Kernel(1, threads=128):
        for _ in range(cols):  # here
            pass


@rejected(f"cols is {SIZE}", "for k in T.serial(extent): ...")
def test_parallel_over_a_run_time_extent(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        for i, j in T.Parallel(4, cols):  # here
            tile[i, j] = 0.0


@rejected(f"cols is {SIZE}", "for k in T.serial(extent): ...")
def test_fragment_of_a_run_time_size(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, cols), "float32")  # here
        T.fill(tile, 0.0)


@rejected("a loop was left by break or return", "T.If in the loop")  # here
def test_break():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        for _ in T.serial(3):
            T.fill(tile, 0.0)
            break


@rejected("return " + JUMP, "T.If around the statements that it shall skip")
def test_return_in_if(n: N):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        with T.If(n > 0):
            return  # here
        T.fill(tile, 0.0)


@rejected("continue " + JUMP, "T.If around the statements that it shall skip")
def test_continue_in_if(n: N):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        for k in T.serial(3):
            with T.If(k > n):
                continue  # here
            T.fill(tile, 0.0)


# ---- names


@rejected(BOUND.format("total", "T.serial"), "a fragment for what changes at run time")
def test_rebinding_in_a_loop():
    with T.Kernel(1, threads=128):
        total = 0
        for k in T.serial(3):
            total += k  # here


@rejected(BOUND.format("v", "T.Parallel"), "a fragment for what changes at run time")
def test_rebinding_in_an_inner_block():
    with T.Kernel(1, threads=128):
        v = 0.0
        for _ in T.Parallel(4):
            for _ in range(2):
                v = v + 1.0  # here


@rejected(BOUND.format("v", "T.If"), "a fragment for what changes at run time")
def test_rebinding_in_if(n: N):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        v = 1.0
        with T.If(n > 0):
            v = 2.0  # here
        T.fill(tile, v)


@rejected(BOUND.format("column", "T.serial"), "a fragment for what changes at run time")
def test_a_name_of_an_earlier_loop(x: X):
    """Harmless here; the check does not follow whether it is read afterwards."""
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        for k in T.serial(T.ceildiv(cols, 128)):
            column = k * 128
            T.copy(x[0, column], tile, fill=0.0)
        for k in T.serial(2):
            column = k + 1  # here
            T.copy(tile, x[0, column])


@rejected("k is used outside its loop", "the loop's values inside the loop")
def test_loop_variable_after_its_loop(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.annotate_layout({tile: tiles()})
        for k in T.serial(3):
            T.copy(tile, x[0, k])
        T.copy(tile, x[0, k])  # here


@rejected("tile is not allocated here", "T.alloc_fragment before its first use")
def test_fragment_after_its_loop():
    with T.Kernel(1, threads=128):
        for _ in T.serial(3):
            tile = T.alloc_fragment((4, 128), "float32")
        T.fill(tile, 0.0)  # here


@rejected("tile is not allocated here", "T.alloc_fragment before its first use")
def test_fragment_after_its_condition(n: N):
    with T.Kernel(1, threads=128):
        with T.If(n > 0):
            tile = T.alloc_fragment((4, 128), "float32")
        T.fill(tile, 0.0)  # here


@rejected("z is no parameter of the program", "its own T.Tensor")
def test_tensor_of_another_program():
    stolen = []

    @T.prim_func
    def other(z: X):
        with T.Kernel(1, threads=128):
            stolen.append(z)

    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.copy(tile, stolen[0][0, 0])  # here


@rejected("x is cut in another way than some of its rows", "x[a, b : b + n, c]")
def test_a_slice_without_an_end(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.copy(tile, x[0:, 0])  # here


@rejected("x[0, 0] up to 4 is read as a number", "an index for each dimension")
def test_rows_are_no_number(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.fill(tile, x[0:4, 0])  # here


@rejected("x is cut where that means nothing", "T.copy(fragment, x[a, b : b + n, c]), its rows")
def test_rows_of_a_load(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.copy(x[0:4, 0], tile)  # here


def test_every_error_of_the_language_has_a_test():
    words, others = neighbour("test_errors"), map(neighbour, ("test_role_errors", "test_ws", "test_down_rows"))
    programs = [p for module in (words, *others, sys.modules[__name__]) for p in programs_of(module)]
    assert untested("language", [*map(error_of, programs), words.outside_a_program()]) == set()
