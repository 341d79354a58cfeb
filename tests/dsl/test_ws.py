"""The words of expert programs: what they record, and each error that they raise. The program is mla_decode."""

import pytest
from rejected import rejected

import tileops_dsl.language as T
from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.kernels import PROGRAMS, configs_of
from tileops_dsl.passes.verify import verify
from tileops_dsl.targets import TARGETS

n, m = T.dynamic("n, m", "int32")
X = T.Tensor((n, m), "bfloat16", vector=8)
F = T.Tensor((n, m), "float32")
TABLE = T.Tensor((n, m), "int32")


def recorded() -> ir.Kernel:
    return PROGRAMS["mla_decode"](configs_of("mla_decode")[0])


@pytest.fixture(scope="module")
def mla() -> ir.Kernel:
    return recorded()


def test_mla_decode_is_well_formed(mla):
    verify(mla, TARGETS["sm_90a"], ("well_formed",))


def test_boxes_and_aliases(mla):
    tiles = {s.buffer.name: s.buffer for s in ir.walk(mla.body) if isinstance(s, ir.Alloc)}
    assert list(tiles)[:6] == ["q_tile", "k0", "k1", "p0", "p1", "o_tile"]
    assert tiles["k0"].box == tiles["p1"].box == 64 and tiles["p0"].box is None
    assert tiles["p1"].alias == ir.View(tiles["q_tile"], (ir.Const("int32", 0), ir.Const("int32", 512)), (64, 64))
    assert tiles["limit"].dtype == "int32"


def test_a_macro_keeps_the_line_of_its_call(mla):
    scores = next(s.location for s in ir.walk(mla.body) if isinstance(s, ir.Gemm))
    assert scores.file == "attention.py" and scores.text.startswith("first = T.wgmma_gemm(q_rope")
    assert scores.caller.file == "mla_decode.py" and scores.caller.text.startswith("steps.scores(q_tile, q_rope, k0")


def test_a_loop_from_a_start_in_steps(mla):
    outer, inner = (s for s in ir.walk(mla.body) if isinstance(s, ir.Pipelined))
    assert outer.start == ir.Deal.RESULTS[0] and outer.step == 1 and inner.step == 2


def test_a_token_is_its_operation(mla):
    products = {id(s) for s in ir.walk(mla.body) if isinstance(s, ir.Gemm)}
    waits = [s for s in ir.walk(mla.body) if isinstance(s, ir.Wait)]
    assert [w.pending for w in waits] == [2, 1, 0, 2, 1, 0, 0, 0] and {id(w.of) for w in waits} <= products


# ---- errors of the words


@rejected("T.ws(2,) of 2 groups", "T.ws(0), T.ws(0, 1), ...: groups of 128 threads, one T.ws beside the other")
def test_a_group_that_is_not_there():
    with T.Kernel(1, threads=256), T.ws(2):  # here
        pass


@rejected("T.ws(1,) of 2 groups inside T.ws", "T.ws(0), T.ws(0, 1), ...: groups of 128 threads, one T.ws beside the other")
def test_groups_in_groups():
    with T.Kernel(1, threads=256), T.ws(0), T.ws(1):  # here
        pass


@rejected(
    "a product takes b from shared memory and a from there or from a whole fragment, as it lies",
    "T.alloc_shared tiles and a fragment (which may be b, where T.Kernel has 128 threads and a is shared)",
)
def test_columns_of_an_accumulator_that_no_register_begins_with():
    with T.Kernel(1, threads=128), T.ws(0):
        tile = T.alloc_shared((64, 64), "bfloat16")
        acc = T.alloc_fragment((64, 128), "float32")
        T.wgmma_gemm(tile, tile, acc[:, 4:68])  # here


@rejected("T.tma_copy outside T.ws", "T.copy, or `with T.ws(0):`")
def test_a_copy_of_no_group(x: X):
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((64, 64), "bfloat16")
        T.tma_copy(x[0, 0], tile)  # here


@rejected("no operation of these groups is waited for", "token = T.wgmma_gemm(...); T.wait(token)")
def test_a_wait_for_another_group(x: X):
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((64, 64), "bfloat16")
        with T.ws(0):
            loaded = T.tma_copy(x[0, 0], tile)
        with T.ws(1):
            T.wait(loaded)  # here


@rejected("T.gemm divides its rows among all groups", "T.wgmma_gemm in T.ws")
def test_a_product_of_all_groups_in_one(x: X):
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((64, 64), "bfloat16")
        acc = T.alloc_fragment((64, 64), "float32")
        with T.ws(0):
            T.gemm(tile, tile, acc)  # here


@rejected("x[0, 1] is float32; only an integer is read as a number that all threads share", "T.copy into a fragment")
def test_an_element_of_floats(x: F):
    with T.Kernel(1, threads=128), T.If(x[0, 1] > 0.0):  # here
        pass


@rejected("tile of [64, 96] has no boxes of 64 columns", "a number that divides its columns")
def test_boxes_that_do_not_divide():
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64, 96), "bfloat16", box=64)  # here
        T.fill(tile, 0.0)


@rejected(
    "tile[0:+64, 32:+64] is no whole boxes of tile",
    "multiples of 64 columns, or T.alloc_shared(shape, dtype, box=n) and those of n",
)
def test_a_view_across_boxes():
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64, 128), "bfloat16", box=64)
        T.fill(tile[:, 32:96], 0.0)  # here


@rejected("over is to lie over what is no view of its shape and dtype", "alias=tile[:, a : a + n]")
def test_an_alias_of_another_shape():
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64, 128), "bfloat16", box=64)
        over = T.alloc_shared((64, 128), "bfloat16", alias=tile[:, 0:64])  # here
        T.fill(over, 0.0)


@rejected("a loop is not over range(stop), (start, stop) or (start, stop, step)", "a constant step >= 1")
def test_a_loop_that_stands():
    with T.Kernel(1, threads=128):
        for _i in T.Pipelined(0, 8, 0, num_stages=1):  # here
            pass


@rejected("T.any_of takes a fragment and a condition", "T.any_of(tile, lambda v: v > 0.0)")
def test_any_of_numbers():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((64,), "float32")
        with T.If(T.any_of(tile, lambda v: v + 1.0)):  # here
            pass


@rejected("T.any_above of [64, 64] and [32]", "float32 fragments: a tile [rows, columns], and a vector [rows]")
def test_any_above_limits_of_other_rows():
    with T.Kernel(1, threads=128):
        tile, limit = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((32,), "float32")
        with T.If(T.any_above(tile, limit)):  # here
            T.fill(tile, 0.0)


@rejected("again is used outside its loop", "the loop's values inside the loop")
def test_a_condition_of_another_loop():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((64,), "float32")
        for _ in T.serial(2):
            with T.If(T.any_of(tile, lambda v: v > 1.0), "again") as again:
                for r in T.Parallel(64):
                    tile[r] = tile[r] + 1.0
        with T.If(again):  # here
            for r in T.Parallel(64):
                tile[r] = 0.0


@rejected("a statement of more than a warp stands under T.any_of", "only T.Parallel and reductions")
def test_a_barrier_of_some_warps():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((64,), "float32")
        with T.If(T.any_of(tile, lambda v: v > 1.0)):
            T.fill(tile, 0.0)  # here


# ---- errors of what is recorded

SHARED = "the groups' work in T.ws, or T.Persistent of tiles that they share"


@rejected("a fragment of int32 in a kernel without T.ws", SHARED)
def test_integers_in_a_row_kernel():
    with T.Kernel(1, threads=128):
        tile = T.alloc_fragment((64,), "int32")  # here
        T.fill(tile, 0)


@rejected("boxes in a kernel without T.ws", "the groups' work in T.ws")
def test_boxes_of_a_producer():
    with T.Kernel(threads=128):
        boxed = T.alloc_shared((64, 128), "bfloat16", box=64)  # here
        T.fill(boxed, 0.0)


@rejected("T.fill of a tile in shared memory in a kernel without T.ws", SHARED)
def test_zeros_in_shared_memory():
    with T.Kernel(threads=128):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        T.fill(a_tile, 0.0)  # here


@rejected("a copy out of shared memory in a kernel without T.ws", "the groups' work in T.ws")
def test_a_copy_into_a_fragment():
    with T.Kernel(threads=128):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        half = T.alloc_fragment((64, 64), "bfloat16")
        T.copy(a_tile, half)  # here


@rejected("over lies over a whole tile in T.ws", "alias=tile[:, a : a + n]")
def test_a_tile_over_another():
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64, 64), "bfloat16")
        over = T.alloc_shared((64, 64), "bfloat16", alias=tile)  # here
        half = T.alloc_fragment((64, 64), "bfloat16")
        with T.ws(0):
            T.copy(over, half)


@rejected("an element of a tensor in a kernel without T.ws", SHARED)
def test_an_element_as_a_number(table: TABLE):
    with T.Kernel(threads=128), T.If(table[0, 0] > 0):  # here
        pass


@rejected("an element of a tensor at an index other than T.Kernel's in a kernel without T.ws", SHARED)
def test_an_element_of_an_iteration(table: TABLE):
    with T.Kernel(1, threads=128):
        for i in T.serial(4):
            with T.If(table[i, 0] > 0):  # here
                pass


@rejected(
    "an element of a tensor in a kernel without T.ws", "the groups' work in T.ws, or T.Persistent of tiles that they share"
)
def test_a_store_of_elements(table: TABLE):
    with T.Kernel(1, threads=128):
        for i in T.Parallel(64):
            table[i, 0] = 1  # here


@rejected("a T.Pipelined loop from another start, or in other steps, in a kernel without T.ws", "the groups' work in T.ws")
def test_a_loop_from_one():
    with T.Kernel(threads=128):
        for _i in T.Pipelined(1, 8, num_stages=1):  # here
            pass


ROWS = "T.box_row is no part of the place from which up to 128 rows of shared memory are loaded"


@rejected(ROWS, "T.tma_copy(x[T.box_row(rows), 0], tile)")
def test_a_box_row_as_a_number():
    with T.Kernel(1, threads=128), T.ws(0), T.If(T.box_row(m) > 1):  # here
        pass


@rejected(ROWS, "T.tma_copy(x[T.box_row(rows), 0], tile)")
def test_more_boxes_of_rows_than_threads(x: X):
    with T.Kernel(1, threads=128), T.ws(0):
        tile = T.alloc_shared((256, 64), "bfloat16")
        T.tma_copy(x[T.box_row(m), 0], tile)  # here


@rejected("box_row(m) and box_row(16) in one kernel", "boxes of as many rows everywhere")
def test_boxes_of_different_rows(x: X):
    with T.Kernel(1, threads=128), T.ws(0):
        tile = T.alloc_shared((64, 64), "bfloat16")
        T.tma_copy(x[T.box_row(m), 0], tile)
        T.tma_copy(x[T.box_row(16), 0], tile)  # here


@rejected("T.any_of is no condition of T.If", "with T.If(T.any_of(...)):")
def test_any_of_as_a_number():
    with T.Kernel(1, threads=128), T.ws(0):
        tile = T.alloc_fragment((64,), "float32")
        T.fill(tile, T.if_then_else(T.any_of(tile, lambda v: v > 0.0), 1.0, 0.0))  # here


def test_an_error_in_a_macro_says_where_it_is_called():
    def cut(tile):
        return tile[0:1, 0:1]

    def program():
        with T.Kernel(1, threads=128):
            tile = T.alloc_fragment((64, 64), "float32")
            cut(tile)

    with pytest.raises(TileError, match=r"^test_ws.py:\d+, called at test_ws.py:\d+: tile is cut in another way"):
        T.prim_func(program)
