"""Groups that divide columns: what the pass puts in, where the groups meet, that nothing of it is too much, and its errors."""

import functools
import importlib
from dataclasses import replace

import pytest
from rejected import rejected

import tileops_dsl.language as T
from tileops_dsl import ir, plan
from tileops_dsl.codegen import emit_roles
from tileops_dsl.errors import TileError
from tileops_dsl.instruction_layouts import AccumulatorRows, WgmmaAccumulator
from tileops_dsl.kernels import PROGRAMS, configs_of
from tileops_dsl.layouts import Linear
from tileops_dsl.passes import run_passes
from tileops_dsl.passes.exchange import exchange
from tileops_dsl.passes.meaning import ways
from tileops_dsl.passes.simulate import Fault, Machine, simulate
from tileops_dsl.schedule import Advance, Await, Fence, Retire, Signal, Sync, op_of
from tileops_dsl.targets import TARGETS

verify = importlib.import_module("tileops_dsl.passes.verify")  # the package has a function of that name
TARGET = TARGETS["sm_90a"]
COLUMNS = T.GemmWarpPolicy.FullCol
m, n, k = T.dynamic("m, n, k", "int32")
A = T.Tensor((m, k), "bfloat16", vector=8)
B = T.Tensor((n, k), "bfloat16", vector=8)
TURNED = T.Tensor((k, n), "bfloat16", vector=8)
TILES = T.ceildiv(m, 64), T.ceildiv(n, 128)


@functools.cache
def recorded() -> ir.Kernel:
    row = configs_of("mla_decode_standard")[0]
    return PROGRAMS["mla_decode_standard"](replace(row, tile=(64, 64, 192, 128)))


@functools.cache
def finished() -> ir.Kernel:
    return run_passes(recorded(), TARGET)


def texts(body, kinds) -> list[str]:
    return [str(stmt) for stmt in ir.walk(body, kinds)]


def test_what_is_put_in():
    """An operand's copy, and of each reduction the groups' own and that of all; a partial sum stays a thread's."""
    before, after = (texts(kernel.body, ir.Copy | ir.Reduce | ir.Gemm) for kernel in (recorded(), exchange(recorded(), TARGET)))
    new = [text for text in after if text not in before]
    assert new == [
        "copy src=top dst=top_all",
        "reduce op=max src=top_all dst=top clear=True",
        "copy src=p_half dst=p_half_all",
        "gemm a=p_half_all b=k_tile[0:+64, 0:+128] c=o policy=full_col clear=eq(i, 0)",
        "copy src=total dst=total_all",
        "reduce op=sum src=total_all dst=total clear=True",
    ]


def test_layouts_are_of_a_group():
    found = {buffer.name: layout for buffer, layout in finished().layouts.items()}
    assert found["s"] == WgmmaAccumulator(32) and found["o"] == WgmmaAccumulator(64) and found["top"] == AccumulatorRows()
    assert found["top_all"] == Linear(128, 128) and found["p_half_all"].shape == (64, 64) and found["k_tile"].shape == (64, 192)
    shared = {buffer.name: plan.copies(finished(), buffer) * plan.stages(finished(), buffer) for buffer in finished().shared}
    assert shared == {"q_tile": 1, "k_tile": 2, "top_all": 1, "p_half_all": 1, "total_all": 1}


def test_where_the_groups_meet():
    """In an iteration when the maxima are there, and when P and the zeros behind the length are; once behind the loop."""
    consumer = plan.consumers(finished())
    (loop,) = (s for s in ir.walk(consumer.body) if isinstance(s, ir.Pipelined))
    meets = [(s, behind) for s, behind in zip(loop.body, loop.body[1:], strict=False) if isinstance(s, Sync)]
    assert all(s.all_groups for s in ir.walk(consumer.body, Sync)) and len(list(ir.walk(consumer.body, Sync))) == 3
    assert [type(op_of(behind)) for _, behind in meets] == [ir.Reduce, ir.Gemm]
    assert [op_of(s).location.text.split("(")[0] for s, _ in meets] == ["T.reduce_max", "T.gemm"]


def without(kernel: ir.Kernel, target: ir.Stmt) -> ir.Kernel:
    def body(stmts):
        kept = (stmt for stmt in stmts if stmt is not target)
        return tuple(replace(s, body=body(s.body)) if hasattr(s, "body") else s for s in kept)

    return replace(kernel, roles=tuple(replace(role, body=body(role.body)) for role in kernel.roles))


def fails(kernel: ir.Kernel, orders=12) -> bool:
    try:
        for order in range(orders):
            simulate(kernel, ways(kernel)[0], order)
    except Fault:
        return True
    return False


@pytest.mark.parametrize("role", [0, 1])
def test_nothing_that_orders_is_too_much(role):
    kernel = finished()
    assert not fails(kernel)
    orders = [s for s in ir.walk(kernel.roles[role].body) if isinstance(s, Advance | Await | Fence | Retire | Signal | Sync)]
    assert [f"{s.location} {s}" for s in orders if not fails(without(kernel, s), 48)] == []


@pytest.mark.parametrize("holds", [True, False])
def test_whether_a_page_has_a_tail_or_not(holds):
    kernel = finished()
    switches = {s.condition: holds for s in ir.walk(kernel.body, ir.If) if any(ir.walk(s.body, ir.Fill))}
    for order in range(6):
        machine = Machine(kernel, ways(kernel)[0], 5, order)
        machine.runs = [replace(run, switches=switches) for run in machine.runs]
        machine.expected = [machine.sequential(run) for run in machine.runs]
        machine.run()


def test_an_element_is_printed_by_the_group_that_has_it():
    def program(a: A, b: B):
        with T.Kernel(threads=256):
            a_tile = T.alloc_shared((64, 64), "bfloat16")
            b_tile = T.alloc_shared((128, 64), "bfloat16")
            acc = T.alloc_fragment((64, 128), "float32")
            for row, column in T.Persistent(TILES):
                product(a, b, a_tile, b_tile, acc, row, column)
                T.print(acc[3, 100])

    text = emit_roles(run_passes(T.prim_func(program), TARGET), "program", "params")[0]
    threads, register = WgmmaAccumulator(64).place((3, 36))
    assert f"if (thread == {min(threads)} && group == 2) print(" in text and f"acc[{register}]" in text


# ---- errors


def product(a, b, a_tile, b_tile, acc, row, column, **more):
    for i in T.Pipelined(T.ceildiv(k, 64), num_stages=2):
        T.copy(a[row * 64, i * 64], a_tile)
        T.copy(b[column * 128, i * 64], b_tile)
        T.gemm(a_tile, b_tile, acc, clear_accum=i == 0, **{"transpose_B": True, "policy": COLUMNS} | more)


@rejected(
    "the product into other divides its rows", "one policy for all products: FullRow, or FullCol of groups that share tiles"
)
def test_two_policies(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((64, 128), "float32")
        other = T.alloc_fragment((64, 128), "float32")
        for row, column in T.Persistent(TILES):
            for i in T.Pipelined(T.ceildiv(k, 64), num_stages=2):
                T.copy(a[row * 64, i * 64], a_tile)
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True, policy=COLUMNS)  # here
                T.gemm(a_tile, b_tile, other, transpose_B=True)


@rejected(
    "groups that alternate have whole tiles, and no columns to divide",
    "one policy for all products: FullRow, or FullCol of groups that share tiles",
)
def test_columns_of_groups_that_alternate(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((64, 128), "float32")
        for row, column in T.Persistent(TILES, alternate=True):
            for i in T.Pipelined(T.ceildiv(k, 64), num_stages=2):
                T.copy(a[row * 64, i * 64], a_tile)
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True, policy=COLUMNS)  # here


@rejected("a reduction of more than a warp stands under T.any_of", "GemmWarpPolicy.FullRow, or the reduction in front of it")
def test_a_maximum_of_some_warps(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc, top = T.alloc_fragment((64, 128), "float32"), T.alloc_fragment((64,), "float32")
        for row, column in T.Persistent(TILES):
            T.fill(top, 0.0)
            for i in T.Pipelined(T.ceildiv(k, 64), num_stages=2):
                T.copy(a[row * 64, i * 64], a_tile)
                T.copy(b[column * 128, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True, policy=COLUMNS)
            with T.If(T.any_above(acc, top)):  # here
                T.reduce_max(acc, top)


def test_columns_of_threads_that_do_the_same():
    kernel = PROGRAMS["gemm_few_rows"](configs_of("gemm_few_rows")[0])
    with pytest.raises(TileError, match="portable has no warp groups to divide columns"):
        run_passes(kernel, TARGETS["portable"])


@rejected("acc has 136 columns for 2 groups, of a b stored [N, K]", "a multiple of 16 columns for each group")
def test_columns_that_groups_cannot_divide(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        b_tile = T.alloc_shared((136, 64), "bfloat16")
        acc = T.alloc_fragment((64, 136), "float32")
        for row, column in T.Persistent(TILES):
            for i in T.Pipelined(T.ceildiv(k, 64), num_stages=2):
                T.copy(a[row * 64, i * 64], a_tile)
                T.copy(b[column * 136, i * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, transpose_B=True, policy=COLUMNS)  # here


@rejected("acc has 64 columns for 2 groups, of a b stored [K, N]", "a multiple of 64 columns for each group")
def test_a_group_that_begins_inside_a_box(a: A, b: TURNED):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        b_tile = T.alloc_shared((64, 64), "bfloat16")
        acc = T.alloc_fragment((64, 64), "float32")
        for row, column in T.Persistent(TILES):
            for i in T.Pipelined(T.ceildiv(k, 64), num_stages=2):
                T.copy(a[row * 64, i * 64], a_tile)
                T.copy(b[i * 64, column * 64], b_tile)
                T.gemm(a_tile, b_tile, acc, policy=COLUMNS)  # here


@rejected(
    "acc[0:+64, 64:+64] is a part of what 2 groups divide by columns", "the whole fragment, and a tile in shared memory as wide"
)
def test_a_part_of_columns(a: A, b: B):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((64, 128), "float32")
        for row, column in T.Persistent(TILES):
            product(a, b, a_tile, b_tile, acc, row, column)
            piece = acc[:, 64:128]
            for r, j in T.Parallel(64, 64):  # here
                piece[r, j] = 0.0


@rejected("what is stored into lengths is no element of a fragment", "x[i] = vector[i]")
def test_a_store_of_what_no_thread_has(a: A, b: B, lengths: T.Tensor((m,), "int32")):
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        b_tile = T.alloc_shared((128, 64), "bfloat16")
        acc = T.alloc_fragment((64, 128), "float32")
        for row, column in T.Persistent(TILES):
            product(a, b, a_tile, b_tile, acc, row, column)
            for r in T.Parallel(64):
                lengths[row * 64 + r] = 1  # here
