"""Each error that the words of the language raise. The Python pitfalls are in test_pitfalls.py."""

import inspect

import pytest
from rejected import rejected

import tileops_dsl.language as T
from tileops_dsl.errors import TileError
from tileops_dsl.layouts import VectorisedRows

inner = T.dynamic("inner")
cols = T.dynamic("cols", "int32")
X = T.Tensor((inner, cols), "float32", vector=4)
H = T.Tensor((inner, cols), "float16", vector=4)
W = T.Tensor((cols,), "any", vector=4)
N = T.Scalar("int32")


def rows_of_a_warp(rows=4):
    return VectorisedRows(rows, 128, threads=128, threads_per_row=32, vector=4)


@rejected("a fragment element is assigned outside T.Parallel", "for i, j in T.Parallel(...): tile[i, j] = value")
def test_store_outside_parallel():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        tile[0, 0] = 1.0  # here


@rejected("T.deal behind something else, or without a grid", "T.deal first in a kernel with a grid")
def test_a_part_after_something_else(lengths: T.Tensor((cols,), "int32"), pieces: T.Tensor((cols, 4), "int32")):
    with T.Kernel(cols, threads=128) as part:
        tile = T.alloc_fragment((1, 128), "float32")
        T.fill(tile, 0.0)
        T.deal(lengths, pieces, part, cols, block=64, overhead=1)  # here


@rejected("rest is not computed once for a tile", "T.let of an expression, in a kernel with T.Persistent or T.ws")
def test_a_named_number_of_a_kernel_with_a_grid(x: X):
    with T.Kernel(T.ceildiv(cols, 4), threads=128):
        T.let("rest", cols - 1)  # here


NO_ELEMENT = "is no element of a fragment at constant indices", "T.print(tile[0, 0]), or a number"


@rejected(f"tile[k, 0] {NO_ELEMENT[0]}", NO_ELEMENT[1])
def test_print_of_an_element_that_the_run_time_chooses():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        for k in T.serial(4):
            T.print(tile[k, 0])  # here


@rejected(f"tile[0, 128] {NO_ELEMENT[0]}", NO_ELEMENT[1])
def test_print_of_an_element_outside_the_fragment():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.print(tile[0, 128])  # here


@rejected(f"add(tile[0, 1], 1.0) {NO_ELEMENT[0]}", NO_ELEMENT[1])
def test_print_of_what_is_made_of_elements():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.print(tile[0, 1] + 1.0)  # here


@rejected("only assignments to fragment elements can stand in T.Parallel", "this statement before or after the loop")
def test_print_in_parallel():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        for i, j in T.Parallel(4, 128):
            tile[i, j] = 1.0
            T.print(tile[0, 0])  # here


@rejected("only assignments to fragment elements can stand in T.Parallel", "this statement before or after the loop")
def test_statement_in_parallel():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        for i, j in T.Parallel(4, 128):
            tile[i, j] = 1.0
            T.fill(tile, 0.0)  # here


@rejected("tile is already the name of what line {line} made", "another name")
def test_one_name_for_two_fragments():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")  # there
        tile = T.alloc_fragment((4, 128), "float32")  # here
        T.fill(tile, 0.0)


@rejected("columns is a name of the generated text", "another name, such as columns_tile")
def test_name_of_the_generated_text():
    with T.Kernel(1, threads=128):
        columns = T.alloc_fragment((4, 128), "float32")  # here
        T.fill(columns, 0.0)


def outside_a_program():
    with pytest.raises(TileError) as caught:
        T.exp2(T.dynamic("n")) + 1  # a scalar needs no program
        T.fill(None, 0.0)  # here
    return caught.value


def test_a_word_outside_a_program():
    lines, first = inspect.getsourcelines(outside_a_program)
    line = next(first + i for i, text in enumerate(lines) if "# here" in text)
    assert str(outside_a_program()) == (
        f"test_errors.py:{line}: a word of the language is used outside a tile program\n"
        "    T.fill(None, 0.0)  # here\n"
        "    Instead: @T.prim_func above the function"
    )


@rejected("x is always given", 'T.Tensor(dims, "any") for an optional tensor')
def test_given_of_a_tensor_that_is_not_optional(x: X):
    with T.Kernel(1, threads=128), T.If(x.given):  # here
        pass


@rejected("x has 2 dimensions and is given 1 indices", "one index for each of inner, cols")
def test_too_few_coordinates(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.copy(x[0], tile, fill=0.0)  # here


@rejected("total has 1 dimensions and is given 2 indices", "one index for each of 4")
def test_too_many_indices():
    with T.Kernel(1, threads=128):
        total = T.alloc_fragment((4,), "float32")
        for i, j in T.Parallel(4, 128):
            total[i, j] = 0.0  # here


@rejected("the fragment gets its name from the line that allocates it", "name = T.alloc_fragment(...)")
def test_fragment_without_a_name():
    with T.Kernel(1, threads=128):
        T.fill(T.alloc_fragment((4, 128), "float32"), 0.0)  # here


@rejected("a fragment of 'int8'", "one of float32, float16, bfloat16, int32")
def test_fragment_of_an_unknown_dtype():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "int8")  # here
        T.fill(tile, 0)


@rejected("eviction_policy is 'evict_last'", "one of evict_first, evict_normal")
def test_unknown_eviction_policy(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.copy(x[0, 0], tile, fill=0.0, eviction_policy="evict_last")  # here


@rejected('w is of dtype "any"; its copy has no eviction_policy', "the copy without it")
def test_eviction_policy_of_a_tensor_of_any_dtype(w: W):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((128,), "float32")
        T.copy(w[0], tile, fill=0.0, eviction_policy="evict_first")  # here


@rejected("w is optional; its copy says what is read where it was not passed", "T.copy(x[i], tile, fill=0.0, absent=1.0)")
def test_copy_of_an_optional_tensor_without_absent(w: W):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((128,), "float32")
        T.copy(w[0], tile, fill=0.0)  # here


@rejected("x is always given", "the copy without absent")
def test_absent_of_a_tensor_that_is_not_optional(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.copy(x[0, 0], tile, fill=0.0, absent=1.0)  # here


@rejected("a copy has a tensor's tile on one side and a fragment on the other", "T.copy(x[i, j], tile)")
def test_copy_between_fragments():
    with T.Kernel(1, threads=128):
        a = T.alloc_fragment((4, 128), "float32")
        b = T.alloc_fragment((4, 128), "float32")
        T.copy(a, b)  # here


@rejected("a copy has a tensor's tile on one side and a fragment on the other", "T.copy(x[i, j], tile)")
def test_copy_of_a_whole_tensor(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.copy(x, tile, fill=0.0)  # here


@rejected(
    "tile is float32 and x is float16; a copy does not convert", "a fragment of the tensor's dtype, and T.cast in T.Parallel"
)
def test_copy_that_would_convert(x: H):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.copy(x[0, 0], tile, fill=0.0)  # here


@rejected(
    "w_tile is float32 and w is any; a copy does not convert", "a fragment of the tensor's dtype, and T.cast in T.Parallel"
)
def test_store_to_an_optional_tensor(w: W):
    with T.Kernel(1, threads=128):
        w_tile = T.alloc_fragment((128,), "float32")
        T.copy(w_tile, w[0])  # here


@rejected("tile has 2 dimensions and w 1", "a fragment of the tensor's last dimensions")
def test_copy_of_fewer_dimensions(w: W):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.copy(w[0], tile, fill=0.0)  # here


@rejected("a copy from global memory says what lies outside the tensor", "T.copy(x[i, j], tile, fill=0.0)")
def test_load_without_fill(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.copy(x[0, 0], tile)  # here


@rejected("a store fills nothing", "the copy without fill")
def test_store_with_fill(x: X):
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.copy(tile, x[0, 0], fill=0.0)  # here


@rejected("a second T.Kernel in one program", "one program for each kernel")
def test_two_kernels():
    with T.Kernel(1, threads=128):
        pass
    with T.Kernel(1, threads=128):  # here
        pass


@rejected("48 threads", "a multiple of 32, at most 1024")
def test_threads_of_no_whole_warps():
    with T.Kernel(1, threads=48):  # here
        pass


@rejected("2048 threads", "a multiple of 32, at most 1024")
def test_too_many_threads():
    with T.Kernel(1, threads=2048):  # here
        pass


@rejected("parameter n is <class 'int'>", "T.Tensor(...) or T.Scalar(...)")  # here
def test_parameter_without_a_specification(x: X, n: int):
    pass


@rejected("the program has no T.Kernel", "with T.Kernel(blocks, threads=n) as block: ...")  # here
def test_no_kernel(x: X):
    pass


@rejected("None is not a number of the kernel", "a Python number, a dimension or a fragment element")
def test_no_number():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        T.fill(tile, None)  # here


@rejected("n is int32, not a condition", "a comparison, such as i < n")
def test_select_by_a_number(n: N):
    with T.Kernel(1, threads=128):
        T.if_then_else(n, 1.0, 2.0)  # here


@rejected("add of a condition", "T.if_then_else(condition, a, b)")
def test_arithmetic_on_a_condition(n: N):
    with T.Kernel(1, threads=128):
        (n > 0) + 1  # here


@rejected("floordiv of a float", "an integer, or / for a quotient")
def test_floor_division_of_floats(n: N):
    with T.Kernel(1, threads=128):
        n // 2.0  # here


@rejected("there is no dtype 'half'", "one of float32, float16, bfloat16, int32, int64")
def test_cast_to_an_unknown_dtype(n: N):
    with T.Kernel(1, threads=128):
        T.cast(n, "half")  # here


@rejected("T.Parallel inside T.Parallel", "one loop with all extents: for i, j in T.Parallel(m, n)")
def test_parallel_in_parallel():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        for i in T.Parallel(4):
            for j in T.Parallel(128):  # here
                tile[i, j] = 0.0


@rejected("n is not a condition", "a comparison, such as n > 0")
def test_if_of_a_number(n: N):
    with T.Kernel(1, threads=128), T.If(n):  # here
        pass


@rejected("reduction of [4, 128] over dim 0 into [4]", "a dimension of a tile [rows, columns], into a fragment of the other")
def test_reduction_over_rows():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        total = T.alloc_fragment((4,), "float32")
        T.reduce_sum(tile, total, 0)  # here


@rejected("reduction of [4, 128] over dim -1 into [128]", "a dimension of a tile [rows, columns], into a fragment of the other")
def test_reduction_into_another_shape():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float32")
        total = T.alloc_fragment((128,), "float32")
        T.reduce_max(tile, total)  # here


@rejected("reduction of [4] over dim -1 into []", "a dimension of a tile [rows, columns], into a fragment of the other")
def test_reduction_of_a_vector():
    with T.Kernel(1, threads=128):
        totals = T.alloc_fragment((4,), "float32")
        total = T.alloc_fragment((), "float32")
        T.reduce_sum(totals, total)  # here


@rejected("total is float16; reductions are done in float32", 'a "float32" fragment')
def test_reduction_in_float16():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((4, 128), "float16")
        total = T.alloc_fragment((4,), "float16")
        T.reduce_sum(tile, total)  # here
