"""Kernels with T.ws: roles, layouts, shared memory, and the edges that follow from the program's sequential meaning."""

import functools
import itertools
from dataclasses import replace

import pytest
from rejected import neighbour, rejected

import tileops_dsl.language as T
from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.passes import edges, groups, run_passes
from tileops_dsl.passes.meaning import ways
from tileops_dsl.passes.roles import assign_roles
from tileops_dsl.passes.shared_memory import derive_barriers, plan_shared_memory
from tileops_dsl.passes.simulate import Fault, Machine, simulate
from tileops_dsl.passes.tiles import infer_tiles
from tileops_dsl.passes.verify import verify
from tileops_dsl.plan import accesses, flying, live_words
from tileops_dsl.schedule import At, Await, Fence, Issue, Meet, Retire, Sync
from tileops_dsl.targets import TARGETS

TARGET = TARGETS["sm_90a"]
n, m = T.dynamic("n, m", "int32")
X = T.Tensor((n, m), "bfloat16", vector=8)


@functools.cache
def planned() -> ir.Kernel:
    """mla_decode as far as the passes go."""
    kernel = neighbour("test_ws").recorded()
    for run, checks in (
        (assign_roles, ("roles", "aliases")),
        (infer_tiles, ("layouts",)),
        (plan_shared_memory, ("shared_memory",)),
    ):
        kernel = run(kernel, TARGET)
        verify(kernel, TARGET, checks)
    return kernel


@pytest.fixture
def kernel() -> ir.Kernel:
    return planned()


@pytest.fixture(scope="module")
def found() -> edges.Edges:
    return edges.find(planned())


def line(stmt: ir.Stmt) -> int:
    """Of the program, not of a macro."""
    return (stmt.location.caller or stmt.location).line


def test_each_group_has_its_statements(kernel):
    roles = [(role.name, role.groups, role.warp, role.loads) for role in kernel.roles]
    assert roles == [(f"group {n}", (n,), None, n == 2) for n in range(3)]
    assert not [s for role in kernel.roles for s in ir.walk(role.body) if isinstance(s, ir.On | ir.Alloc)]


def test_tiles_lie_behind_each_other(kernel):
    offsets = {buffer.name: offset for buffer, offset in kernel.shared.items()}
    box = 64 * 128
    expected = {"q_tile": 0, "k0": 9 * box, "k1": 18 * box, "p0": 27 * box, "p1": 8 * box, "o_tile": 0, "peak0": 28 * box}
    assert {name: offsets[name] for name in expected} == expected


def test_groups_tell_each_other(found):
    """The maximum of block 0, P0, the maximum of block 1, P1, and both ways at the end."""
    ready = [(line(r.first), line(r.second), r.groups, r.both) for r in found.ready]
    first = [(78, 91, (0, 1), False), (81, 96, (0, 1), False), (99, 111, (1, 0), False), (103, 116, (1, 0), False)]
    assert ready == [*first, (120, 125, (1, 0), True)]


@pytest.mark.parametrize(
    "tile, columns, group, at, text, ahead",
    [
        ("k0", 512, 0, 75, "T.wait(done)", "i"),
        ("k1", 512, 1, 89, "T.wait(done)", "i"),
        ("k0", 0, 0, 113, "T.wait(own0)", "i"),
        ("k0", 256, 1, 102, "T.wait(cross1)", "i"),
        ("k1", 256, 1, 89, "T.wait(first, pending=2)", None),
        ("k1", 384, 1, 89, "T.wait(first, pending=1)", None),
        ("k1", 0, 0, 75, "T.wait(first, pending=1)", None),
    ],
)
def test_who_read_a_box_last_tells_the_group_that_loads(found, tile, columns, group, at, text, ahead):
    loads = [r for r in found.refills if r.load.dst.buffer.name == tile and r.load.dst.origin[1].value == columns]
    first, inside, after = loads
    assert first.at is None and all(refill.told for refill in loads)
    assert (line(inside.at), inside.ahead) == (at, ahead) and inside.at.location.text.startswith(text)
    assert line(after.at) in (119, 126) and after.ahead == "request"  # behind the loop, for the next request
    assert inside.group == after.group == group


def test_queries_wait_for_what_is_stored_over_them(found):
    """Those of o_tile's boxes are loaded where they stand; the last box, which held P, is free with the last product."""
    places = {r.load.dst.origin[1].value: [] for r in found.refills if r.load.dst.buffer.name == "q_tile"}
    for refill in found.refills:
        if refill.load.dst.buffer.name == "q_tile":
            places[refill.load.dst.origin[1].value].append(refill.at is refill.load or (refill.at and line(refill.at)))
    assert places == {0: [True], 256: [True], 512: [None, 126]}


def test_products_are_waited_for(found):
    assert [(line(stmt), pending) for stmt, (pending, _) in found.retires.items()] == [
        (75, 0), (89, 0), (102, 0), (113, 0), (75, 1), (89, 2), (89, 1), (126, 0), (126, 0),
    ]  # fmt: skip


def test_what_threads_write_is_fenced(found):
    assert [line(stmt) for stmt in found.fences] == [85, 81, 95, 106, 103, 115, 129, 129]
    assert [line(stmt) for stmt in found.exchanges] == [85, 106, 129, 129]  # behind 95 and 115 both groups meet


def test_only_the_first_reader_of_a_load_waits(found):
    """Each group for the boxes that it reads; by then the other group's reads are known. For Q once, in front of the loop."""
    waits = {
        (load.dst.buffer.name, load.dst.origin[1].value): sorted({line(s) for s in stmts}) for load, stmts in found.full.items()
    }
    keys = {("k0", n): [75] for n in (512, 0, 256)} | {("k1", n): [89] for n in (512, 384, 256, 0)}
    assert waits == {**keys, ("q_tile", 512): [64], ("q_tile", 0): [67], ("q_tile", 256): [67]}


# ---- the schedule


@functools.cache
def scheduled() -> ir.Kernel:
    kernel = derive_barriers(groups.schedule(planned(), TARGET), TARGET)
    verify(kernel, TARGET, ("roles", "schedule"))
    return kernel


def fails(kernel: ir.Kernel, orders: int) -> bool:
    try:
        for order in range(orders):
            simulate(kernel, ways(kernel)[0], order)
    except Fault:
        return True
    return False


def test_the_groups_do_what_the_program_says():
    assert not fails(scheduled(), 12)


@pytest.mark.parametrize("way", list(itertools.product((True, False), repeat=3)))
def test_whichever_way_the_conditions_go(way):
    """Those around what happens in shared memory: the tails of both pages, and whether the request is whole."""
    kernel = scheduled()
    switches = dict.fromkeys(s.condition for s in ir.walk(kernel.body) if isinstance(s, ir.If) and touches_shared(s))
    for order in range(3):
        machine = Machine(kernel, ways(kernel)[0], 3, order)
        machine.runs = [replace(run, switches=dict(zip(switches, way, strict=True))) for run in machine.runs]
        machine.expected = [machine.sequential(run) for run in machine.runs]
        machine.run()


def touches_shared(switch: ir.If) -> bool:
    return any(tile.scope == "shared" for stmt in switch.body for tiles in accesses(stmt) for tile in tiles)


def without(body: tuple, left_out: ir.Stmt) -> tuple:
    kept = (stmt for stmt in body if stmt is not left_out)
    return tuple(replace(stmt, body=without(stmt.body, left_out)) if hasattr(stmt, "body") else stmt for stmt in kept)


def not_missed(kernel: ir.Kernel, kind: type) -> list:
    """Statements of the kind without which nothing fails; of the waits for boxes the first one of each load is tried.

    A load that does not wait is seldom early: it takes more orders.
    """
    kept, seen = [], set()
    for role in kernel.roles:
        for stmt in (s for s in ir.walk(role.body) if isinstance(s, kind)):
            load = (role.name, line(stmt), stmt.barrier, stmt.index.value // 4) if kind is Await else id(stmt)
            if load not in seen:
                others = [replace(r, body=without(r.body, stmt)) if r is role else r for r in kernel.roles]
                orders = 600 if role.loads else 48
                kept += [] if fails(replace(kernel, roles=tuple(others)), orders) else [(role.name, str(stmt), line(stmt))]
            seen.add(load)
    return kept


@pytest.mark.parametrize("kind", [Meet, Sync, Await])
def test_nothing_can_be_left_out(kind):
    assert not_missed(scheduled(), kind) == []


def test_no_wait_for_a_product_can_be_left_out():
    """But for one of two behind the last iteration, at its end and in front of what needs it; and one for part of a product."""
    missed = [(role, place) for role, _, place in not_missed(scheduled(), Retire)]
    assert missed == [("group 0", 67), ("group 0", 126), ("group 1", 89), ("group 1", 67), ("group 1", 126)]


def test_an_iteration_ends_with_the_next_ones_scores():
    """No product is unfinished between two iterations."""
    for role in scheduled().roles[:2]:
        (outer,) = (s for s in role.body if isinstance(s, ir.Pipelined))
        inner = next(n for n, s in enumerate(outer.body) if isinstance(s, ir.Pipelined))
        before, loop = outer.body[inner - 1 : inner + 1]
        *_, ahead, last = loop.body
        assert [type(s) for s in (before, ahead, last)] == [At, At, Retire] and flying(loop.body, ()) == ()
        (first,), (later,) = before.body, ahead.body
        refills = [s for s in later.body if isinstance(s, ir.If)]  # of the first iteration's boxes there are none
        assert first.body == tuple(s for s in later.body if s not in refills) and len(refills) == 1 + (role.groups == (1,))
        products = [s.op.b.name for s in ir.walk(ahead.body) if isinstance(s, Issue) and isinstance(s.op, ir.Gemm)]
        assert len(products) == 3 and len({name.split("[")[0] for name in products}) == 1


# ---- other programs


def to_and_fro(x: X):
    """A product passes from group to group and back."""
    with T.Kernel(m, threads=256) as block:
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        there = T.alloc_shared((64, 64), "bfloat16")
        back = T.alloc_shared((64, 64), "bfloat16")
        with T.ws(0, 1):
            acc = T.alloc_fragment((64, 64), "float32")
            half = T.alloc_fragment((64, 64), "bfloat16")
        for i in T.Pipelined(1, n, num_stages=1):
            with T.ws(0):
                T.tma_copy(x[block * 64, i * 64], a_tile)
                T.wgmma_gemm(a_tile, a_tile, acc, clear_accum=True)
                for r, j in T.Parallel(64, 64):
                    half[r, j] = acc[r, j]
                T.copy(half, there)
            with T.ws(1):
                T.wgmma_gemm(there, there, acc, clear_accum=True)
                for r, j in T.Parallel(64, 64):
                    half[r, j] = acc[r, j]
                T.copy(half, back)
            with T.ws(0):
                T.copy(back, x[block * 64, i * 64])


def test_to_and_fro():
    compiled = run_passes(T.prim_func(to_and_fro), TARGET)
    found = edges.find(compiled)
    assert [(ready.groups, ready.both) for ready in found.ready] == [((0, 1), False), ((1, 0), False)]
    assert [type(refill.at) for refill in found.refills] == [type(None), ir.Parallel]  # behind the product
    assert [not_missed(compiled, kind) for kind in (Await, Fence, Meet, Retire, Sync)] == [[]] * 5


def alone(x: X):
    """A group that writes what it multiplies."""
    with T.Kernel(m, threads=128) as block, T.ws(0):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        there = T.alloc_shared((64, 64), "bfloat16")
        acc = T.alloc_fragment((64, 64), "float32")
        half = T.alloc_fragment((64, 64), "bfloat16")
        for i in T.Pipelined(n, num_stages=1):
            T.tma_copy(x[block * 64, i * 64], a_tile)
            T.copy(a_tile, half)
            for r, j in T.Parallel(64, 64):
                half[r, j] = T.relu(half[r, j])
            T.copy(half, there)
            T.wgmma_gemm(there, there, acc, clear_accum=i == 0)


def test_an_operand_is_not_overwritten_early():
    compiled = run_passes(T.prim_func(alone), TARGET)
    (role,) = compiled.roles
    first, ahead, last = (s.location.text for s in ir.walk(role.body) if isinstance(s, Retire))
    assert first == ahead == "T.copy(half, there)" and last.startswith("for i in T.Pipelined")


@rejected(
    "test_edges.py:{line} overwrites what group 1 may still read, or reads it too late",
    "T.wait behind the product, or a second tile",
)
def test_nothing_told_back(x: X):
    with T.Kernel(1, threads=256):
        there = T.alloc_shared((64, 64), "bfloat16")
        with T.ws(0, 1):
            half = T.alloc_fragment((64, 64), "bfloat16")
            T.fill(half, 0.0)
        for _i in T.Pipelined(m, num_stages=1):
            with T.ws(0):
                T.copy(half, there)  # there
            with T.ws(1):
                T.copy(there, half)  # here


# ---- wrong programs


@rejected("which groups do this is not said", "with T.ws(0, 1):")
def test_a_statement_of_nobody(x: X):
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((64, 64), "bfloat16")
        T.copy(x[0, 0], tile)  # here
        with T.ws(0, 1):
            half = T.alloc_fragment((64, 64), "bfloat16")
            T.copy(tile, half)


@rejected(
    "T.ws in 2 groups of sm_90a, 1 of them without work", "T.Kernel(blocks, threads=256) on sm_90a, and work for each group"
)
def test_a_group_without_work(x: X):
    with T.Kernel(1, threads=256):  # here
        tile = T.alloc_shared((64, 64), "bfloat16")
        with T.ws(1):
            T.tma_copy(x[0, 0], tile)


@rejected(
    "group 1 reads half, which it never writes: each group has fragments of its own",
    "T.alloc_shared, and T.copy into it and out of it",
)
def test_a_fragment_of_another_group(x: X):
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((64, 64), "bfloat16")
        other = T.alloc_shared((64, 64), "bfloat16")
        with T.ws(0):
            half = T.alloc_fragment((64, 64), "bfloat16")
            T.tma_copy(x[0, 0], tile)
            T.copy(tile, half)
        with T.ws(1):
            T.copy(half, other)  # here


@rejected(
    "tile[0:+64, 0:+64] is read where over may have been written over it", "a tile of its own, or the copy into it once more"
)
def test_a_tile_under_another(x: X):
    with T.Kernel(1, threads=128), T.ws(0):
        tile = T.alloc_shared((64, 128), "bfloat16", box=64)
        over = T.alloc_shared((64, 64), "bfloat16", alias=tile[:, 0:64])
        half = T.alloc_fragment((64, 64), "bfloat16")
        T.tma_copy(x[0, 0], tile)
        for _i in T.Pipelined(4, num_stages=1):
            T.copy(tile[:, 0:64], half)  # here
            T.copy(half, over)


@rejected(
    "test_edges.py:{line} overwrites what group 0 may still read, or reads it too late",
    "T.wait behind the product, or a second tile",
)
def test_a_product_that_nobody_waits_for(x: X):
    with T.Kernel(1, threads=256):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        with T.ws(0):
            acc = T.alloc_fragment((64, 64), "float32")
            T.tma_copy(x[0, 0], a_tile)
            T.wgmma_gemm(a_tile, a_tile, acc, clear_accum=True)  # here
        with T.ws(1):
            half = T.alloc_fragment((64, 64), "bfloat16")
            T.fill(half, 0.0)
            T.copy(half, a_tile)  # there


@rejected("test_edges.py:{line} waits for this, and one of them depends on a condition", "both under one T.If, or none")
def test_an_end_of_an_edge_under_a_condition(x: X):
    with T.Kernel(1, threads=256):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        with T.ws(0):
            T.tma_copy(x[0, 0], a_tile)  # here
        with T.ws(1):
            half = T.alloc_fragment((64, 64), "bfloat16")
            with T.If(n > 1):
                T.copy(a_tile, half)  # there


@rejected("group 0 cannot know when what a_tile holds has been read", "T.wait behind the product that reads it last")
def test_a_load_that_nobody_can_time(x: X):
    with T.Kernel(1, threads=256):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        with T.ws(0, 1):
            half = T.alloc_fragment((64, 64), "bfloat16")
            T.fill(half, 0.0)
        for i in T.Pipelined(m, num_stages=1):
            with T.ws(0):
                T.tma_copy(x[0, i * 64], a_tile)  # here
            with T.ws(1):
                T.copy(a_tile, half)


@rejected("a_tile is loaded in boxes of rows, over what a store of the group reads", "a tile of its own")
def test_boxes_of_rows_behind_a_store(x: X):
    with T.Kernel(1, threads=128), T.ws(0):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        for i in T.Pipelined(m, num_stages=1):
            T.tma_copy(x[i * 64 + T.box_row(n), 0], a_tile)  # here
            T.copy(a_tile, x[i * 64, 0])


@rejected("box is a name of the generated text", "another name, such as box_tile")
def test_a_name_of_the_text():
    with T.Kernel(1, threads=128):
        box = T.alloc_shared((64, 64), "bfloat16")  # here
        T.fill(box, 0.0)


@rejected("tile has boxes of 256 bytes; TMA moves rows of 128, 64 or 32 bytes", "box=64")
def test_boxes_that_tma_does_not_have(x: X):
    with T.Kernel(1, threads=128), T.ws(0):
        tile = T.alloc_shared((64, 256), "bfloat16", box=128)
        T.tma_copy(x[0, 0], tile)  # here


@rejected("stages of a loop with T.ws: a box has one so far", "num_stages=1")
def test_a_ring_of_a_group(x: X):
    with T.Kernel(1, threads=128), T.ws(0):
        a_tile = T.alloc_shared((64, 64), "bfloat16")
        half = T.alloc_fragment((64, 64), "bfloat16")
        for i in T.Pipelined(m, num_stages=2):  # here
            T.tma_copy(x[0, i * 64], a_tile)
            T.copy(a_tile, half)


@rejected("fragments and addresses need 300 registers a thread, which has 255", "a smaller tile")
def test_too_many_fragments_of_a_group(x: X):
    with T.Kernel(1, threads=128):  # here
        a_tile = T.alloc_shared((64, 256), "bfloat16")
        b_tile = T.alloc_shared((64, 64), "bfloat16")
        with T.ws(0):
            acc = T.alloc_fragment((64, 256), "float32")
            other = T.alloc_fragment((64, 256), "float32")
            T.tma_copy(x[0, 0], a_tile)
            T.tma_copy(x[0, 256], b_tile)
            T.wgmma_gemm(b_tile, a_tile, acc, clear_accum=True)
            T.wgmma_gemm(b_tile, a_tile, other, clear_accum=True)


def test_budgets_of_groups():
    compiled = run_passes(neighbour("test_ws").recorded(), TARGET)  # with all checks
    assert live_words(compiled) == 204 and [role.registers for role in compiled.roles] == [240, 240, 24]


def errors_of_corrupted() -> list[TileError]:
    kernel, errors = planned(), []
    moved = replace(kernel, shared={b: 0 if b.name == "p1" else offset for b, offset in kernel.shared.items()})
    for wrong, check, problem in (
        (moved, "shared_memory", "p1 does not lie over"),
        (kernel, "budgets", "registers of 0 in all, 204 in fragments"),  # nobody has set them
    ):
        with pytest.raises(TileError, match=problem) as caught:
            verify(wrong, TARGET, (check,))
        errors.append(caught.value)
    return errors


def test_what_a_wrong_pass_would_do_is_noticed():
    errors_of_corrupted()
