"""What the words of products and pipelines, and the passes behind them, refuse."""

from dataclasses import replace

import pytest
from rejected import rejected

import tileops_dsl.language as T
from tileops_dsl.errors import TileError
from tileops_dsl.kernels.gemm import gemm
from tileops_dsl.kernels.gemm_config import GemmConfig
from tileops_dsl.passes import run_passes
from tileops_dsl.targets import TARGETS

m, n, k = T.dynamic("m, n, k", "int32")
A = T.Tensor((m, k), "bfloat16", vector=8)
B = T.Tensor((n, k), "bfloat16", vector=8)
C = T.Tensor((m, n), "bfloat16", vector=8)
ODD = T.Tensor((m, n), "bfloat16")
OPTIONAL = T.Tensor((m, n), "bfloat16", vector=8, optional=True)
W = T.Tensor((n,), "any")
FLAG = T.Scalar("int32")
TILES = T.ceildiv(m, 128), T.ceildiv(n, 128)
STEPS = T.ceildiv(k, 64)


def main_loop(a, b, a_tile, b_tile, acc, row, column, **more):
    for i in T.Pipelined(STEPS, num_stages=2):
        T.copy(a[row * 128, i * 64], a_tile)
        T.copy(b[column * 128, i * 64], b_tile, **more)
        T.gemm(a_tile, b_tile, acc, transpose_B=True, clear_accum=i == 0)


# ---- words


@rejected("a cluster of (2, 2)", "cluster=(n, 1) with n <= 8, in a kernel without a grid")
def test_cluster_of_columns():
    with T.Kernel(threads=256, cluster=(2, 2)):  # here
        pass


@rejected("a cluster of (2, 1)", "cluster=(n, 1) with n <= 8, in a kernel without a grid")
def test_cluster_of_a_grid():
    with T.Kernel(1, threads=256, cluster=(2, 1)):  # here
        pass


@rejected("the tile gets its name from the line that allocates it", "name = T.alloc_shared(...)")
def test_shared_tile_without_a_name():
    with T.Kernel(threads=256):
        tiles = [T.alloc_shared((128, 64), "bfloat16")]  # here
        assert tiles


@rejected("acc is cut in another way than some columns, a constant number of them", "tile[:, a : a + 64]")
def test_view_of_rows():
    with T.Kernel(threads=256):
        acc = T.alloc_fragment((128, 128), "float32")
        assert acc[0:64, 0:64]  # here


@rejected("acc is cut in another way than some columns, a constant number of them", "tile[:, a : a + 64]")
def test_view_of_a_run_time_width(flag: FLAG):
    with T.Kernel(threads=256):
        acc = T.alloc_fragment((128, 128), "float32")
        assert acc[:, 0:flag]  # here


@rejected("a copy has a tensor's tile on one side and a fragment on the other", "T.copy(x[i, j], tile)")
def test_copy_of_a_view(c: C):
    with T.Kernel(threads=256):
        acc = T.alloc_fragment((128, 128), "bfloat16")
        T.copy(acc[:, 0:64], c[0, 0])  # here


@rejected("only a load into shared memory is multicast", "the copy without multicast")
def test_multicast_store(c: C):
    with T.Kernel(threads=256):
        c_tile = T.alloc_shared((128, 64), "bfloat16")
        T.copy(c_tile, c[0, 0], multicast=True)  # here


@rejected("out is bfloat16[128, 64] and c_tile bfloat16[128, 128]", "two tiles of one shape and dtype")
def test_copy_between_shapes():
    with T.Kernel(threads=256):
        c_tile = T.alloc_shared((128, 128), "bfloat16")
        out = T.alloc_fragment((128, 64), "bfloat16")
        T.copy(out, c_tile)  # here


@rejected("a store of shared memory has no eviction_policy", "the copy without it")
def test_eviction_policy_of_a_shared_tile(a: A):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        T.copy(a_tile, a[0, 0], eviction_policy="evict_first")  # here


@rejected("what lies outside the tensor is 0 in shared memory", "the copy without fill")
def test_fill_of_a_shared_tile(a: A):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        T.copy(a[0, 0], a_tile, fill=0.0)  # here


@rejected("a product of [128, 64] and [128, 64] into [128, 128]", "a [M, K], b [K, N] (or transposed) and c [M, N]")
def test_product_of_other_shapes():
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        T.gemm(a_tile, a_tile, acc)  # here


@rejected(
    "a product takes b from shared memory and a from there or from a whole fragment, as it lies",
    "T.alloc_shared tiles and a fragment (which may be b, where T.Kernel has 128 threads and a is shared)",
)
def test_product_with_b_in_registers():
    with T.Kernel(threads=256):
        a_part = T.alloc_fragment((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        T.gemm(a_part, a_part, acc, transpose_B=True)  # here


@rejected("a product of stage 2", "stage=0, or stage=1 for one that runs an iteration later")
def test_product_of_a_later_stage():
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        T.gemm(a_tile, a_tile, acc, transpose_B=True, stage=2)  # here


@rejected(
    "a product of bfloat16 and bfloat16 into fragment bfloat16", "two tiles of bfloat16 or of float16, and a float32 fragment"
)
def test_product_into_bfloat16():
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "bfloat16")
        T.gemm(a_tile, a_tile, acc, transpose_B=True)  # here


@rejected("clear_accum is 1, not a condition", "True, False or a comparison, such as i == 0")
def test_clear_by_a_number():
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        T.gemm(a_tile, a_tile, acc, transpose_B=True, clear_accum=1)  # here


@rejected("1 stages with 1 products unfinished", "at least one stage, pending=1 with two or more, or pending=0")
def test_a_stage_too_few():
    with T.Kernel(threads=256):
        for _ in T.Pipelined(STEPS, num_stages=1, pending=1):  # here
            pass


@rejected("1 extents in groups of 8", "rows and columns, perhaps a batch before them, groups of 1 or more")
def test_persistent_over_one_extent():
    with T.Kernel(threads=256):
        for _ in T.Persistent((T.ceildiv(m, 128),), group_size=8):  # here
            pass


ALONE = "T.Persistent(extents, zigzag=..) alone, in a kernel without clusters"


@rejected("zigzag with alternate, a group_size or a cluster", ALONE)
def test_zigzag_in_groups_of_rows():
    with T.Kernel(threads=256):
        for _ in T.Persistent(TILES, group_size=8, zigzag=True):  # here
            pass


@rejected("zigzag with longest_first", ALONE)
def test_two_orders():
    with T.Kernel(threads=256):
        for _ in T.Persistent(TILES, longest_first=8, zigzag=True):  # here
            pass


LANGUAGE = [test for name, test in list(globals().items()) if name.startswith("test_")]


# ---- roles


@rejected(
    "a kernel with T.gemm has 256 threads and a grid",
    "T.Kernel(threads=256), or another one to four groups of 128, and no grid",
)
def test_shared_tile_in_a_grid():
    with T.Kernel(1, threads=256):  # here
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        assert a_tile


@rejected("a kernel without a grid is one T.Persistent loop", "all statements in the loop")
def test_statements_beside_the_loop(a: A):
    with T.Kernel(threads=256):  # here
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        T.copy(a[0, 0], a_tile)


@rejected("a tile is loaded into shared memory outside T.Pipelined", "the copy in the loop")
def test_load_outside_the_pipeline(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        part = T.alloc_fragment((128, 64), "bfloat16")
        for row, _column in T.Persistent(TILES):
            T.copy(part, a_tile)
            T.copy(a[row, 0], a_tile)  # here


@rejected("no T.Pipelined loop copies tiles for T.gemm", "T.copy(a[i, k], a_tile) in the loop")
def test_nothing_to_load(a: A, b: B):
    with T.Kernel(threads=256):  # here
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for _row, _column in T.Persistent(TILES):
            T.gemm(a_tile, a_tile, acc, transpose_B=True)


# ---- pipelines


@rejected("a_tile is not loaded by this loop, or used outside it", "a tile of the loop's own, loaded by T.copy in it")
def test_operand_of_another_loop(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for _row, column in T.Persistent(TILES):
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)  # here


@rejected("a load of the loop's tiles depends on a condition", "the copy outside T.If")
def test_load_under_a_condition(a: A, b: B, flag: FLAG):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(a[row * 128, i * 64], a_tile)
                with T.If(flag != 0):  # here
                    T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)


@rejected(
    "the loop has more than one product and the copies of its operands",
    "one T.gemm in T.Pipelined, everything else behind it; or no pending, no alternate",
)
def test_work_between_products_of_groups_that_alternate(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES, alternate=True):
            for i in T.Pipelined(STEPS, num_stages=2):  # here
                T.copy(a[row * 128, i * 64], a_tile)
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)
                for r, j in T.Parallel(128, 128):
                    acc[r, j] = acc[r, j] * 2.0


@rejected("1 groups are to take turns", "threads=256 or more; or no turns")
def test_turns_of_one_group(a: A, b: B):
    with T.Kernel(threads=128):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((64, 128), "float32")
        for row, column in T.Persistent(TILES):
            for i in T.Pipelined(STEPS, num_stages=2, turns=True):  # here
                T.copy(a[row * 64, i * 64], a_tile)
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)


@rejected("2 groups are to take turns and to alternate", "threads=256 or more; or no turns")
def test_turns_of_groups_that_alternate(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES, alternate=True):
            for i in T.Pipelined(STEPS, num_stages=2, turns=True):  # here
                T.copy(a[row * 128, i * 64], a_tile)
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)


@rejected("over of 65536 bytes lies over a_tile of 16384", "fewer stages")
def test_a_tile_over_a_smaller_one(a: A, b: B, c: C):
    with T.Kernel(threads=256):  # here
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        over = T.alloc_shared((128, 128), "bfloat16", alias=a_tile)
        half = T.alloc_fragment((128, 128), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            T.copy(a[row * 128, 0], a_tile)
            for i in T.Pipelined(T.max(STEPS, 1), num_stages=2):
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True, clear_accum=i == 0)
            for _ in T.Pipelined(2, num_stages=2):
                for r, j in T.Parallel(128, 128):
                    half[r, j] = acc[r, j]
                T.copy(half, over)
                T.copy(over, c[row * 128, column * 128])


@rejected("over lies over a_tile, which is not loaded once for the tile and read by products alone", "a tile of its own")
def test_a_tile_over_one_of_the_loop(a: A, b: B, c: C):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        over = T.alloc_shared((128, 64), "bfloat16", alias=a_tile)  # here
        half = T.alloc_fragment((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            for e in T.Pipelined(2, num_stages=2):
                piece = acc[:, e * 64 : e * 64 + 64]
                for r, j in T.Parallel(128, 64):
                    half[r, j] = piece[r, j]
                T.copy(half, over)
                T.copy(over, c[row * 128, column * 128 + e * 64])


@rejected("the loop may have no iteration, and the first one of i has work of its own", "T.max(n, 1) iterations")
def test_a_tile_for_a_loop_that_may_be_empty(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            T.copy(a[row * 128, 0], a_tile)
            for i in T.Pipelined(STEPS, num_stages=2):  # here
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True, clear_accum=i == 0)


@rejected("a tile is loaded behind the loop whose product reads it", "the copy in the loop, or in front of it")
def test_a_load_behind_the_loop(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        spare = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            T.copy(a[row * 128, 0], spare)  # here


@rejected(
    "a product of stage 1 stands before other statements of the loop, or shares a fragment with another product",
    "it at the end of the loop, and fragments of its own",
)
def test_work_behind_a_late_product(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(a[row * 128, i * 64], a_tile)
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True, stage=1)  # here
                for r, j in T.Parallel(128, 128):
                    acc[r, j] = acc[r, j] * 2.0


@rejected("a loop without T.gemm runs flag times", "a constant number of iterations, over views of a fragment")
def test_loop_of_a_run_time_length(a: A, b: B, flag: FLAG):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            for _ in T.Pipelined(flag, num_stages=2):  # here
                for r, j in T.Parallel(128, 128):
                    acc[r, j] = acc[r, j] * 2.0


@rejected("T.serial has no meaning in T.Persistent yet", "T.Parallel, T.gemm, T.copy")
def test_serial_in_persistent(a: A, b: B):
    with T.Kernel(threads=256):
        for _row, _column in T.Persistent(TILES):
            for _ in T.serial(2):  # here
                pass


@rejected("384 threads of sm_90a are to alternate", "T.Kernel(threads=256), two warp groups; or no alternate")
def test_three_groups_that_alternate(a: A, b: B):
    with T.Kernel(threads=384):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        for row, _column in T.Persistent(TILES, alternate=True):  # here
            T.copy(a[row * 128, 0], a_tile)


@rejected("a loop or a copy of a tile stands under T.If", "T.If around what is neither")
def test_store_under_a_condition(a: A, b: B, c: C, flag: FLAG):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        c_tile = T.alloc_shared((128, 128), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            with T.If(flag != 0):
                T.copy(c_tile, c[row * 128, column * 128])  # here


@rejected("more than one loop loads tiles that the consumers only read", "one T.Pipelined loop with T.gemm")
def test_two_loops_of_products(a: A, b: B):
    with T.Kernel(threads=256):  # here
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        a_late = T.alloc_shared((128, 64), "bfloat16")
        b_late = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            main_loop(a, b, a_late, b_late, acc, row, column)


@rejected(
    "c_tile is read where no copy of a fragment into it follows", "T.Parallel over the tile's shape, then T.copy(out, tile)"
)
def test_elements_of_a_tile_that_is_not_written(a: A, b: B, c: C):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        c_tile = T.alloc_shared((128, 128), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        out = T.alloc_fragment((128, 128), "bfloat16")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            for r, j in T.Parallel(128, 128):
                out[r, j] = acc[r, j]
            T.copy(out, c_tile)
            T.copy(c_tile, c[row * 128, column * 128])
            for r, j in T.Parallel(128, 128):  # here
                acc[r, j] = acc[r, j] + c_tile[r, j]


# ---- layouts


@rejected("spare has no layout: nothing ties it to a tile that has one", "a tile that T.gemm, T.copy or T.Parallel uses")
def test_tile_without_a_use(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        spare = T.alloc_fragment((128, 128), "float32")  # here
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            assert spare


@rejected(
    "acc has 128 x 128 elements for 3 groups of 64 rows", "64 rows for each 128 threads, and a multiple of 8 columns up to 256"
)
def test_too_many_threads_for_the_rows(a: A, b: B):
    with T.Kernel(threads=384):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(a[row * 128, i * 64], a_tile)
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)  # here


@rejected("a_tile is [128, 8]; TMA and wgmma move rows of 32 bytes, 8 to 256 of them", "a tile [rows, columns] of such sizes")
def test_rows_of_16_bytes(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 8), "bfloat16")
        b_tile = T.alloc_shared((128, 8), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(a[row * 128, i * 8], a_tile)
                T.copy(b[column * 128, i * 8], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)  # here


@rejected(
    "b_tile has 128 rows, of which each of 1 CTAs loads a part",
    "a cluster whose CTAs load 8 rows each, or more; or no multicast",
)
def test_multicast_without_a_cluster(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(a[row * 128, i * 64], a_tile)
                T.copy(b[column * 128, i * 64], b_tile, multicast=True)  # here
                T.gemm(a_tile, b_tile, acc, transpose_B=True)


@rejected("the CTAs of the cluster differ in row, so a_tile is not the same for all", "the copy without multicast")
def test_multicast_of_what_differs(a: A, b: B):
    with T.Kernel(threads=256, cluster=(2, 1)):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(a[row * 128, i * 64], a_tile, multicast=True)  # here
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)


@rejected(
    "c is copied between global memory and a fragment",
    'a tile in shared memory in between (a vector of dtype "any", or a store to a tensor of vector=2, needs none)',
)
def test_store_of_a_fragment(a: A, b: B, c: ODD):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        out = T.alloc_fragment((128, 128), "bfloat16")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            for r, j in T.Parallel(128, 128):
                out[r, j] = acc[r, j]
            T.copy(out, c[row * 128, column * 128])  # here


@rejected(
    "acc[j, r] is not the loop's own element", "tile[i, j], rows[i] of a fragment, or row[j] of a vector in shared memory"
)
def test_transposed_element(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            for r, j in T.Parallel(128, 128):
                acc[r, j] = acc[j, r]  # here


@rejected("an index of the loop is used as a number", "only elements of tiles")
def test_index_as_a_number(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            piece = acc[:, 64:128]
            for r, j in T.Parallel(128, 64):
                piece[r, j] = piece[r, j] + j  # here


@rejected(
    "sums is the sum of each thread's own columns", "sums[i] = sums[i] * factor, and T.reduce_sum(sums, total) before its use"
)
def test_a_partial_sum_as_a_total(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        sums = T.alloc_fragment((128,), "float32")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            T.fill(sums, 0.0)
            T.reduce_sum(acc, sums, clear=False, partial=True)
            for r, j in T.Parallel(128, 128):
                acc[r, j] = acc[r, j] * sums[r]  # here


@rejected("sums has no sums of each thread's own columns", "T.reduce_sum(tile, sums, partial=True) before")
def test_a_total_as_a_partial_sum(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        sums = T.alloc_fragment((128,), "float32")
        total = T.alloc_fragment((128,), "float32")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            T.reduce_sum(acc, sums)
            T.reduce_sum(sums, total)  # here


@rejected("half is [64, 128] for 2 groups of 64 rows", "the rows of the accumulator and a multiple of 16 columns")
def test_fragment_of_fewer_rows(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        half = T.alloc_fragment((64, 128), "float32")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            for r, j in T.Parallel(64, 128):
                half[r, j] = 0.0  # here


@rejected("acc[:, 4 : 36] is no groups of 8 of the 128 columns", "multiples of 8 columns, inside the fragment")
def test_view_between_registers(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent(TILES):
            main_loop(a, b, a_tile, b_tile, acc, row, column)
            piece = acc[:, 4:36]
            for r, j in T.Parallel(128, 32):  # here
                piece[r, j] = 0.0


@rejected("residual may be missing here", "with T.If(residual.given): around it")
def test_optional_tensor_without_a_condition(a: A, b: B, residual: OPTIONAL):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        for row, _column in T.Persistent(TILES):
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(residual[row, i], a_tile)  # here


@rejected("fragments and addresses need 300 registers a thread, and 240 are left", "a smaller tile")
def test_too_many_fragments(a: A, b: B):
    with T.Kernel(threads=256):  # here
        a_tile = T.alloc_shared((128, 64), "bfloat16")
        b_tile = T.alloc_shared((256, 64), "bfloat16")
        acc = T.alloc_fragment((128, 256), "float32")
        other = T.alloc_fragment((128, 256), "float32")
        for row, column in T.Persistent(TILES):
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(a[row * 128, i * 64], a_tile)
                T.copy(b[column * 256, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)
            for r, j in T.Parallel(128, 256):
                other[r, j] = acc[r, j]


@rejected("a product of 224 columns, and each thread starts with 128 registers", "at most 204 columns, or fewer threads")
def test_a_product_too_wide_for_four_groups(a: A, b: B):
    with T.Kernel(threads=384):  # here
        a_tile = T.alloc_shared((192, 64), "bfloat16")
        b_tile = T.alloc_shared((224, 64), "bfloat16")
        acc = T.alloc_fragment((192, 224), "float32")
        for row, column in T.Persistent(TILES):
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(a[row * 192, i * 64], a_tile)
                T.copy(b[column * 224, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True)


# ---- configurations


def of_config(**changes) -> TileError:
    golden = GemmConfig("gemm", "sm_90a", "bfloat16", "bfloat16", (128, 256, 64), 4, 2, 8, 64)
    row = replace(golden, **changes)
    with pytest.raises(TileError) as caught:
        run_passes(gemm(row), TARGETS[row.target])
    return caught.value


def too_many_stages() -> TileError:
    return of_config(stages=5)


def test_too_much_shared_memory():
    assert "shared memory of 280576 bytes of 232448" in str(too_many_stages())


def test_too_many_columns_for_groups_that_alternate():
    """Compiled all the same, 128 x 192 kept 24 bytes in local memory."""
    problem = str(of_config(tile=(128, 192, 64), stages=4, alternate=True))
    assert "fragments and addresses need 240 registers a thread, and 232 are left" in problem
