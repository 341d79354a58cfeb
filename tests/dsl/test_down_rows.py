"""Reductions down the rows, b of a product in registers, a CTA's run of tiles: what passes make of them, and their errors."""

import functools
import re
from dataclasses import replace

import pytest
from rejected import neighbour, rejected

import tileops_dsl.language as T
from tileops_dsl import ir, plan
from tileops_dsl.errors import TileError
from tileops_dsl.instruction_layouts import AccumulatorColumns, SharedTile, Swizzle, WgmmaAccumulator
from tileops_dsl.kernels import PROGRAMS, configs_of
from tileops_dsl.passes import run_passes
from tileops_dsl.passes.exchange import exchange
from tileops_dsl.schedule import Advance, Await, Fence, Retire, Signal, Sync
from tileops_dsl.targets import TARGETS

columns = neighbour("test_exchange")
n, m, d = T.dynamic("n, m, d", "int32")
K, Q = T.Tensor((n, 64), "bfloat16", vector=8), T.Tensor((m, 64), "bfloat16", vector=8)
RUNS = T.Tensor((d, 2), "int32")


@functools.cache
def recorded() -> ir.Kernel:
    row = configs_of("mla_decode_few")[0]
    return PROGRAMS["mla_decode_few"](replace(row, tile=(16, 64, 192, 128)))


@functools.cache
def finished() -> ir.Kernel:
    return run_passes(recorded(), TARGETS["sm_90a"])


def test_what_is_put_in():
    """b's copy, and of each reduction each warp's own and that of all; a partial sum stays a thread's."""
    kinds = ir.Copy | ir.Reduce | ir.Gemm
    before = columns.texts(recorded().body, kinds)
    after = columns.texts(exchange(recorded(), TARGETS["sm_90a"]).body, kinds)
    assert [text for text in after if text not in before] == [
        "copy src=top dst=top_all",
        "reduce op=max src=top_all dst=top clear=True",
        "copy src=p_half dst=p_half_all",
        "gemm a=k_tile[0:+64, 0:+128] b=p_half_all c=o transpose_a=True policy=full_row clear=eq(i, 0)",
        "copy src=total dst=total_all",
        "reduce op=sum src=total_all dst=total clear=True",
    ]


def test_layouts():
    found = {buffer.name: layout for buffer, layout in finished().layouts.items()}
    assert found["s"] == WgmmaAccumulator(16) and found["o"] == WgmmaAccumulator(16, 128)
    assert found["top"] == found["limit"] == AccumulatorColumns(16) and found["top_all"].extent == 64
    assert found["p_half_all"] == SharedTile(64, 16, 2, Swizzle.B32) and plan.registers(finished(), recorded_o()) == 16


def recorded_o() -> ir.Buffer:
    return next(s.buffer for s in ir.walk(finished().body, ir.Alloc) if s.buffer.name == "o")


@pytest.mark.parametrize("role", [0, 1])
def test_nothing_that_orders_is_too_much(role):
    kernel = finished()
    assert not columns.fails(kernel)
    orders = [s for s in ir.walk(kernel.roles[role].body) if isinstance(s, Advance | Await | Fence | Retire | Signal | Sync)]
    assert [f"{s.location} {s}" for s in orders if not columns.fails(columns.without(kernel, s), 48)] == []


# ---- errors


def scores(k, q, k_tile, q_tile, s, part=0, threads=128):
    T.copy(q[part * 16, 0], q_tile)
    for i in T.Pipelined(T.max(n // 64, 1), num_stages=2):
        T.copy(k[i * 64, 0], k_tile)
        T.gemm(k_tile, q_tile, s, transpose_B=True, clear_accum=True)


ALIKE = "T.Kernel(.., threads=128) with T.gemm, and dim=0 in all reductions"
SHARED = "T.Persistent((rows, columns), ..) without a grid; with one T.Persistent(begin, end), which has no options"


@rejected("a reduction over dim 0 in a kernel without products of warp groups", ALIKE)
def test_without_products(x: T.Tensor((n, m), "float32")):
    with T.Kernel(1, threads=128):
        tile, top = T.alloc_fragment((64, 16), "float32"), T.alloc_fragment((16,), "float32")
        T.copy(x[0, 0], tile, fill=0.0)
        T.reduce_max(tile, top, dim=0)  # here


@rejected("2 groups divide the rows of a reduction over dim 0", ALIKE)
def test_two_groups(k: K, q: Q):
    with T.Kernel(threads=256):
        k_tile, q_tile = T.alloc_shared((128, 64), "bfloat16"), T.alloc_shared((16, 64), "bfloat16")
        s, top = T.alloc_fragment((128, 16), "float32"), T.alloc_fragment((16,), "float32")
        for _row, _column in T.Persistent((1, 1)):
            scores(k, q, k_tile, q_tile, s)
            T.reduce_max(s, top, dim=0)  # here


@rejected("top has a value for each column, other for each row", ALIKE)
def test_both_ways(k: K, q: Q):
    with T.Kernel(threads=128):
        k_tile, q_tile = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((16, 64), "bfloat16")
        s, top = T.alloc_fragment((64, 16), "float32"), T.alloc_fragment((16,), "float32")
        other = T.alloc_fragment((64,), "float32")
        for _row, _column in T.Persistent((1, 1)):
            scores(k, q, k_tile, q_tile, s)
            T.reduce_max(s, other)
            T.reduce_max(s, top, dim=0)  # here


@rejected(
    "other is [96, 16] where reductions run down the rows", "a multiple of 64 rows and a multiple of 16 columns, at most 256"
)
def test_rows_that_no_instruction_has(k: K, q: Q):
    with T.Kernel(threads=128):
        k_tile, q_tile = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((16, 64), "bfloat16")
        s, top = T.alloc_fragment((64, 16), "float32"), T.alloc_fragment((16,), "float32")
        other = T.alloc_fragment((96, 16), "float32")
        for _row, _column in T.Persistent((1, 1)):
            scores(k, q, k_tile, q_tile, s)
            T.reduce_max(s, top, dim=0)
            for t, r in T.Parallel(96, 16):
                other[t, r] = top[r]  # here


@rejected(
    "top[t] is not the loop's own element",
    "tile[i, j], columns[j] of a fragment, or row[j] of a vector in shared memory",
)
def test_a_vector_of_columns_along_the_rows(k: K, q: Q):
    with T.Kernel(threads=128):
        k_tile, q_tile = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
        s, top = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
        for _row, _column in T.Persistent((1, 1)):
            scores(k, q, k_tile, q_tile, s)
            T.reduce_max(s, top, dim=0)
            for t, r in T.Parallel(64, 64):
                s[t, r] = top[t]  # here


@rejected("wide has more than 64 rows, and reductions run down them", "T.Parallel that stores its elements")
def test_a_copy_of_stacked_rows(k: K, q: Q, x: T.Tensor((n, m), "bfloat16", vector=8)):
    with T.Kernel(threads=128):
        k_tile, q_tile = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((16, 64), "bfloat16")
        s, top = T.alloc_fragment((64, 16), "float32"), T.alloc_fragment((16,), "float32")
        wide = T.alloc_fragment((128, 16), "bfloat16")
        staged = T.alloc_shared((128, 16), "bfloat16")
        for _row, _column in T.Persistent((1, 1)):
            scores(k, q, k_tile, q_tile, s)
            T.reduce_max(s, top, dim=0)
            for t, r in T.Parallel(128, 16):
                wide[t, r] = top[r]
            T.copy(wide, staged)  # here
            T.copy(staged, x[0, 0])


@rejected(
    "elements of a tile are stored into x one by one",
    "T.copy; or, where reductions run down the rows, x[.., j, i] = tile[i, j] for all i of x",
)
def test_elements_that_are_not_transposed(k: K, q: Q, x: T.Tensor((n, 16), "float32")):
    with T.Kernel(threads=128):
        k_tile, q_tile = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((16, 64), "bfloat16")
        s, top = T.alloc_fragment((64, 16), "float32"), T.alloc_fragment((16,), "float32")
        for _row, _column in T.Persistent((1, 1)):
            scores(k, q, k_tile, q_tile, s)
            T.reduce_max(s, top, dim=0)
            for t, r in T.Parallel(64, 16):
                x[t, r] = s[t, r]  # here


@rejected("a run of tiles in a kernel without a grid", SHARED)
def test_a_run_without_a_grid(k: K, q: Q, runs: RUNS):
    with T.Kernel(threads=128):
        for _item in T.Persistent(runs[0, 0], runs[0, 1]):  # here
            pass


@rejected("a share of tiles in a kernel with a grid", SHARED)
def test_a_share_with_a_grid(k: K, q: Q):
    with T.Kernel(4, threads=128):
        for _row, _column in T.Persistent((1, 1)):  # here
            pass


@rejected("a run of tiles in a kernel with a grid", SHARED)
def test_a_run_with_options(k: K, q: Q, runs: RUNS):
    with T.Kernel(4, threads=128) as part:
        for _item in T.Persistent(runs[part, 0], runs[part, 1], zigzag=True):  # here
            pass


def run_of_items(k: K, q: Q, runs: RUNS):
    with T.Kernel(4, threads=128) as part:
        k_tile, q_tile = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((16, 64), "bfloat16")
        s = T.alloc_fragment((64, 16), "float32")
        for item in T.Persistent(runs[part, 0], runs[part, 1]):
            scores(k, q, k_tile, q_tile, s, item)


def b_in_registers(k: K, q: Q):
    with T.Kernel(threads=128):
        k_tile = T.alloc_shared((64, 64), "bfloat16")
        part = T.alloc_fragment((64, 16), "bfloat16")
        o = T.alloc_fragment((64, 16), "float32")
        for _row, _column in T.Persistent((1, 1)):
            for i in T.Pipelined(n // 64, num_stages=3):
                T.copy(k[i * 64, 0], k_tile)
                T.gemm(k_tile, part, o, transpose_A=True)


def stored_elements(k: K, q: Q, x: T.Tensor((m,), "float32")):
    with T.Kernel(threads=128):
        k_tile, q_tile = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((16, 64), "bfloat16")
        s = T.alloc_fragment((64, 16), "float32")
        for _row, _column in T.Persistent((1, 1)):
            scores(k, q, k_tile, q_tile, s)
            for t, r in T.Parallel(64, 16):
                x[t] = s[t, r]


ON_PORTABLE = {
    run_of_items: "T.Persistent of a run on portable",
    b_in_registers: "portable takes b from shared memory, and part lies in registers",
    stored_elements: "elements of a tensor are stored on portable",
}


def error_on_portable(program) -> TileError:
    with pytest.raises(TileError, match=re.escape(ON_PORTABLE[program])) as caught:
        run_passes(T.prim_func(program), TARGETS["portable"])
    return caught.value


@pytest.mark.parametrize("program", ON_PORTABLE)
def test_what_the_portable_target_lacks(program):
    assert "sm_90a" in error_on_portable(program).instead


def test_a_run_on_the_other_target():
    assert run_passes(T.prim_func(run_of_items), TARGETS["sm_90a"]).roles
