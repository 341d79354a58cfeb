"""The passes of flash_attention: what each role does and when, and that the checks notice what is missing."""

import functools
from dataclasses import replace

import pytest
from rejected import neighbour

import tileops_dsl.language as T
from tileops_dsl import ir, output, plan
from tileops_dsl.errors import TileError
from tileops_dsl.instruction_layouts import AccumulatorRows, WgmmaAccumulator
from tileops_dsl.kernels.flash_attention import flash_attention, within_window
from tileops_dsl.kernels.flash_attention_config import AttentionConfig
from tileops_dsl.passes import run_passes
from tileops_dsl.passes.meaning import Run, events, numbers
from tileops_dsl.passes.simulate import Machine
from tileops_dsl.schedule import Alone, At, Await, Issue, Meet, Retire, Signal
from tileops_dsl.targets import TARGETS

roles = neighbour("test_roles")
TARGET = TARGETS["sm_90a"]
DTYPES = "bfloat16", "bfloat16"
WITH_ALL = ("window", "sinks", "softcap")


@functools.cache
def kernel(causal: bool = False, tile: tuple[int, int, int] = (128, 128, 128), **more) -> ir.Kernel:
    config = AttentionConfig("flash_attention", "sm_90a", *DTYPES, tile, 2, causal, **more)
    return run_passes(flash_attention(config), TARGET)


def buffer(name: str) -> ir.Buffer:
    return next(b for b in kernel().layouts if b.name == name)


def done(role: int, causal: bool, steps: int) -> list[str]:
    """What the role does for one tile, with the iteration: gemm s 0, copy k 0, ..."""
    run = Run(numbers(kernel(causal), {}, steps), tiles=1)
    return [f"{_word(e)} {e.values.get('i', '')}".strip() for e in events(kernel(causal).roles[role].body, run) if _word(e)]


def _word(event) -> str:
    stmt = event.stmt
    match stmt:
        case Await():
            return f"await {stmt.barrier}"
        case Signal():
            return f"signal {stmt.barrier}"
        case Issue(op=ir.Gemm() as gemm):
            return f"product {gemm.c.name}"
        case Issue(op=ir.Copy() as copy):
            return f"load {copy.src.tensor.name}" if plan.is_load(copy) else f"store {copy.dst.tensor.name}"
        case Retire(kind="product"):
            return f"wait {stmt.pending}"
        case ir.Reduce(op="max"):
            return "softmax"
        case ir.Parallel(body=(ir.Store(buffer=to), *_)) if ir.buffer_of(to).name in ("p_half", "o"):
            return f"write {ir.buffer_of(to).name}"
    return ""


def test_order_of_the_producer():
    """Q behind the first K, whose stage the tile before hands back earlier; V when it is used, behind the next K."""
    loads = [word for word in done(0, False, 3) if word.startswith("load")]
    assert loads == ["load k 0", "load q 0", "load k 1", "load v 0", "load k 2", "load v 1", "load v 2"]
    assert done(0, False, 1)[:6] == [
        "await k_empty 0", "signal k_full 0", "load k 0", "await q_empty 0", "signal q_full 0", "load q 0",
    ]  # fmt: skip


def test_order_of_the_consumers():
    """The product of an iteration's P and V runs beside the softmax of the next one's scores, up to its first columns."""
    assert done(1, False, 2) == [
        "await q_full", "signal q_empty", "await k_full 0", "product s 0", "wait 0 0", "signal k_empty 0", "softmax 0",
        "write p_half 0", "write p_half 0",
        "await k_full 1", "product s 1", "await v_full 0", "product o 0", "wait 1 1", "signal k_empty 1", "softmax 1",
        "wait 0 1", "signal v_empty 1", "write o 1", "write p_half 1", "write p_half 1",
        "await v_full 1", "product o 1", "wait 0", "signal v_empty", "store out", "store out",
    ]  # fmt: skip


def test_order_of_consumers_whose_output_lies_over_the_queries():
    """All groups meet behind their last products; Q is handed back when the stores have read what lies over it."""
    wide = kernel(tile=(128, 80, 256))
    assert wide.shared[next(b for b in wide.shared if b.name == "o_tile")] == wide.shared[next(iter(wide.shared))] == 0
    run = Run(numbers(wide, {}, 2), tiles=1)
    happened = list(events(wide.roles[1].body, run))
    words = [_word(event) or type(event.stmt).__name__.lower() for event in happened]
    meeting = next(n for n, event in enumerate(happened) if getattr(event.stmt, "all_groups", False))
    assert meeting > max(n for n, word in enumerate(words) if word == "product o")
    assert meeting < words.index("store out") < words.index("signal q_empty") and words.count("sync") > 1


def test_only_the_warp_that_loads_the_queries_waits_for_their_tile():
    """Four warps load boxes of rows; the queries, handed back early, may have gone two phases on before the others come."""
    config = AttentionConfig("flash_attention", "sm_90a", *DTYPES, (128, 64, 64), 2, True, options=("lengths", "paged"))
    text = output.source_text([output.compile_config(config)])
    waits = [line.strip() for line in text.splitlines() if "wait(" in line and "_empty" in line]
    assert len(waits) == 3 and [line.startswith("if (warp == 0) ") for line in waits] == [False, True, False]
    assert "q_empty" in waits[1]


def test_groups_take_turns():
    """Three groups: each waits before its products of an iteration and lets the next one go behind them; the first begins."""
    three = kernel(tile=(192, 128, 64))
    meets = [s for s in ir.walk(three.roles[1].body) if isinstance(s, Meet)]
    assert [(str(s.number), s.waits) for s in meets] == [
        ("add(mod(group, 3), 5)", False),
        ("add(group, 4)", True), ("add(mod(group, 3), 5)", False),
        ("add(group, 4)", True),
    ]  # fmt: skip
    assert [s.which for s in ir.walk(three.roles[1].body) if isinstance(s, Alone)] == ["last", "first"]
    another = ir.call("add", ir.Var("int32", "group"), 5)
    assert is_noticed(roles.edited(three, lambda s: replace(s, number=another) if isinstance(s, Meet) else s))


def test_one_block_of_keys():
    assert [word for word in done(1, True, 0) if word[:7] in ("product", "softmax")] == [
        "product s 0",
        "softmax 0",
        "product o 0",
    ]


@pytest.mark.parametrize("causal, expected", [(False, [("1", False)]), (True, [("1", True), ("max", False)])])
def test_loops(causal, expected):
    """Without a mask only the first block can be masked: one loop. Causal: one for blocks with a mask, one for the others."""
    loops = [s for s in ir.walk(kernel(causal).roles[1].body) if isinstance(s, ir.Pipelined)]
    assert [(getattr(loop.start, "op", str(loop.start)), _masks(loop)) for loop in loops] == expected
    assert {_of_warps(s) for loop in loops for s in ir.walk(loop.body, ir.If)} == {True}


def _of_warps(stmt: ir.If) -> bool:
    """A warp that has a row whose maximum grows, or whose output is to be rescaled."""
    return isinstance(stmt.condition, ir.AnyOf)


def _masks(loop: ir.Pipelined) -> bool:
    return any("-inf" in str(s) for s in ir.walk(loop.body) if isinstance(s, ir.Store) and s.buffer.name == "s")


def test_loops_of_a_window():
    """Blocks that a mask cuts, at either end, come first: one loop for them, one for the others."""
    loops = [s for s in ir.walk(kernel(options=WITH_ALL).roles[1].body) if isinstance(s, ir.Pipelined)]
    assert [_masks(loop) for loop in loops] == [True, False]
    assert {_of_warps(s) for loop in loops for s in ir.walk(loop.body, ir.If)} == {True}


@pytest.mark.parametrize("sq, sk", [(1, 300), (300, 300), (300, 40), (129, 333)])
@pytest.mark.parametrize("left, right", [(0, 0), (40, 0), (129, 0), (64, 400), (400, 70), (31, 100)])
def test_blocks_of_a_window(on_integers, sq, sk, left, right):
    """Each block with a key that a row sees is visited once, and those that no row's window cuts have no mask."""
    bm, bn = 128, 64
    for row in range(0, sq, bm):
        steps, masked, place = within_window(row, bm, bn, sq, sk, min(left, sk), min(right, sq))
        found = [place(i) for i in range(steps)]
        low, high = (lambda r: max(r + sk - sq - left, 0)), (lambda r: min(r + sk - sq + right + 1, sk))
        rows = range(row, min(row + bm, sq))
        seen = {key // bn for r in rows for key in range(low(r), high(r))}
        assert seen <= set(found) and len(set(found)) == steps and len(found) - len(seen) <= (not seen)
        for block in found[max(masked, 0) :]:
            assert all(low(r) <= block * bn and (block + 1) * bn <= high(r) for r in rows)


@pytest.fixture
def on_integers(monkeypatch):
    """The words that within_window uses, of Python's integers."""
    words = {"max": max, "min": min, "let": lambda name, value: value, "if_then_else": lambda c, a, b: a if c else b}
    for name, word in words.items():
        monkeypatch.setattr(T, name, word)


def test_waits_stand_behind_what_overlaps():
    """The row sums of a block's first columns come before the wait for P V."""
    waits = [s for s in ir.walk(kernel().roles[1].body) if isinstance(s, Retire) and s.kind == "product"]
    found = [(s.pending, [b.name for b in s.after], [g.c.name for g in s.of]) for s in waits]
    assert found == [(0, [], ["s"]), (1, [], ["s"]), (0, ["sums"], ["o"]), (0, [], ["o"])]


def test_plan():
    """Of the largest tile: 3 KB of shared memory and 4 registers are left."""
    full = kernel(tile=(128, 160, 128))
    assert {b.name: offset for b, offset in full.shared.items()} == {
        "q_tile": 0,
        "k_tile": 32768,
        "v_tile": 114688,
        "o_tile": 196608,
    }
    assert full.shared_bytes == 229456 and plan.live_words(full) == 192
    assert [role.registers for role in full.roles] == [24, 240]
    layouts = {b.name: layout for b, layout in full.layouts.items()}
    assert layouts["p_half"] == layouts["s"] == WgmmaAccumulator(160, 64) and layouts["sums"] == AccumulatorRows(64)
    assert [(b.name, b.count, b.arrivals, b.bytes) for b in full.barriers] == [
        ("k_full", 2, 1, 40960), ("k_empty", 2, 8, 0), ("v_full", 2, 1, 40960), ("v_empty", 2, 8, 0),
        ("q_full", 1, 1, 32768), ("q_empty", 1, 8, 0),
    ]  # fmt: skip


def test_a_tile_with_too_many_registers():
    with pytest.raises(TileError, match="fragments and addresses need 256 registers a thread, and 240 are left"):
        kernel(tile=(128, 256, 64))


@pytest.mark.parametrize("role", [0, 1])
def test_nothing_that_orders_is_too_much(role):
    """Without any one of them, some order fails."""
    for found in (kernel(False), kernel(True), kernel(options=WITH_ALL)):
        unnoticed = [
            f"{stmt.location} {stmt}"
            for stmt in ir.walk(found.roles[role].body)
            if isinstance(stmt, roles.ORDERING) and not is_noticed(roles.without(found, stmt))
        ]
        assert unnoticed == []


def is_noticed(changed: ir.Kernel) -> bool:
    """In tiles of several blocks of keys, or of one, where the next tile's queries come soon."""
    for seed in range(24):
        try:
            roles.simulate(changed, {}, seed)
            Machine(changed, {}, 1, seed).run()
        except roles.Fault:
            return True
    return False


def test_wrong_counts_are_noticed():
    for name, change in (("q_full", {"bytes": 16384}), ("k_empty", {"arrivals": 4}), ("v_full", {"arrivals": 2})):
        barriers = tuple(replace(b, **change) if b.name == name else b for b in kernel().barriers)
        assert is_noticed(replace(kernel(), barriers=barriers))


# ---- corrupted kernels


def changed(change) -> ir.Kernel:
    return roles.edited(kernel(True), change)


def one_iteration_late(stmt: ir.Stmt) -> ir.Stmt:
    """The loops begin at 2."""
    return replace(stmt, start=ir.Const("int32", 2)) if isinstance(stmt, ir.Pipelined) and str(stmt.start) == "1" else stmt


def of_the_same_iteration(stmt: ir.Stmt) -> ir.Stmt:
    """P V of an iteration, which is issued with the next one's S, said to be that one's."""
    return replace(stmt, value=stmt.var) if isinstance(stmt, At) and str(stmt.value) == "sub(i, 1)" else stmt


def without_the_last_product(stmt: ir.Stmt) -> ir.Stmt | None:
    return None if isinstance(stmt, At) and str(stmt.value).startswith("sub(max") else stmt


def without_a_fill(stmt: ir.Stmt) -> ir.Stmt | None:
    return None if isinstance(stmt, ir.Fill) and stmt.buffer.name == "sums" else stmt


def with_a_mask_less(stmt: ir.Stmt) -> ir.Stmt:
    """The loop without masks begins one block too early."""
    early = isinstance(stmt, ir.Pipelined) and isinstance(stmt.start, ir.Call)
    return replace(stmt, start=ir.Call("int32", "sub", (stmt.start, ir.Const("int32", 1)))) if early else stmt


@pytest.mark.parametrize("change", [
    one_iteration_late, of_the_same_iteration, without_the_last_product, without_a_fill, with_a_mask_less,
])  # fmt: skip
def test_a_wrong_schedule_is_noticed(change):
    with pytest.raises(TileError, match="the roles do not do what the program does"):
        roles.verify.verify(changed(change), TARGET, ("schedule",))


def test_registers_that_a_wait_does_not_name():
    """The text makes the compiler read what a wait finishes again only if the wait says so."""
    wrong = changed(lambda s: replace(s, of=()) if isinstance(s, Retire) and s.pending == 1 else s)
    line = next(s.location.line for s in ir.walk(kernel().body) if isinstance(s, ir.If)) + 1
    with pytest.raises(TileError, match=rf"flash_attention\.py:{line} touches registers of a product that is not finished"):
        roles.verify.verify(wrong, TARGET, ("barriers",))


# ---- other forms


def body_with(kernel: ir.Kernel, change) -> ir.Kernel:
    def body(stmts):
        return tuple(replace(new, body=body(new.body)) if hasattr(new, "body") else new for new in map(change, stmts))

    return replace(kernel, body=body(kernel.body))


def test_without_overlap():
    """P V in its own iteration: nothing is peeled, and it is waited for at the end of the iteration."""
    config = AttentionConfig("flash_attention", "sm_90a", *DTYPES, (128, 128, 128), 2, True)
    at_once = body_with(flash_attention(config), lambda s: replace(s, stage=0) if isinstance(s, ir.Gemm) else s)
    found = run_passes(at_once, TARGET)
    consumer = list(ir.walk(found.roles[1].body))
    assert not any(isinstance(s, At) for s in consumer)
    assert [s.pending for s in consumer if isinstance(s, Retire) and s.kind == "product"] == [0, 0, 0, 0]
    unnoticed = [s for s in consumer if isinstance(s, roles.ORDERING) and not is_noticed(roles.without(found, s))]
    assert unnoticed == []


@pytest.mark.parametrize("tile, stages", [((64, 64, 64), 3), ((192, 80, 64), 2), ((128, 32, 256), 2), ((64, 128, 128), 2)])
def test_tiles(tile, stages):
    """One to three groups; all checks hold."""
    found = run_passes(flash_attention(AttentionConfig("flash_attention", "sm_90a", *2 * ("float16",), tile, stages)), TARGET)
    assert len(plan.consumers(found).groups) == tile[0] // 64
    assert [ring.stages for ring in found.rings] == [stages, stages, 2, 1]
