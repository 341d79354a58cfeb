"""The IR after each pass, and a verifier that notices what a wrong pass would do."""

import importlib
from dataclasses import fields, replace

import pytest
from rejected import error_of, neighbour, programs_of, untested

import tileops_dsl.language as T
from tileops_dsl import ir, passes
from tileops_dsl.errors import TileError
from tileops_dsl.layouts import PerRow, VectorisedRows
from tileops_dsl.passes import run_passes
from tileops_dsl.targets import TARGETS

verify = importlib.import_module("tileops_dsl.passes.verify")  # the package has a function of that name
TARGET = TARGETS["sm_90a"]
inner = T.dynamic("inner")
cols = T.dynamic("cols", "int32")
H = T.Tensor((inner, cols), "float16", vector=2)


@T.prim_func
def centred(x: H, y: H, n: T.Scalar("int32")):
    with T.Kernel(T.ceildiv(inner, 2), threads=128) as block:
        tile = T.alloc_fragment((2, 128), "float16")
        peak = T.alloc_fragment((2,), "float32")
        total = T.alloc_fragment((2,), "float32")
        T.annotate_layout({tile: VectorisedRows(2, 128, threads=128, threads_per_row=64, vector=2)})
        T.fill(total, 0.0)
        for k in T.serial(T.ceildiv(cols, 128)):
            T.copy(x[block * 2, k * 128], tile, fill=0.0)
            T.reduce_sum(tile, total, clear=False)
        T.reduce_max(tile, peak)
        for i, j in T.Parallel(2, 128):
            tile[i, j] = tile[i, j] - total[i] / cols
        with T.If(n > 0):
            T.copy(tile, y[block * 2, 0])


LINE = centred.location.line
RECORDED = f"""\
kernel centred threads 128 min blocks 1 grid add(floordiv(sub(inner, 1), 2), 1)
  tensor x: float16[inner, cols] vector 2
  tensor y: float16[inner, cols] vector 2
  scalar inner: int64
  scalar cols: int32
  scalar n: int32
  alloc tile: fragment float16[2, 128]  // test_passes.py:{LINE + 1}
  alloc peak: fragment float32[2]  // test_passes.py:{LINE + 2}
  alloc total: fragment float32[2]  // test_passes.py:{LINE + 3}
  annotate buffer=tile layout=rows of 64 threads x 1 x 2, 1 passes, lanes on columns  // test_passes.py:{LINE + 4}
  fill buffer=total value=0.0  // test_passes.py:{LINE + 5}
  serial var=k extent=add(floordiv(sub(cols, 1), 128), 1)  // test_passes.py:{LINE + 6}
    copy src=x[mul(block_x, 2), mul(k, 128)] dst=tile fill=float16(0.0)  // test_passes.py:{LINE + 7}
    reduce op=sum src=tile dst=total  // test_passes.py:{LINE + 8}
  reduce op=max src=tile dst=peak clear=True  // test_passes.py:{LINE + 9}
  parallel vars=i,j extents=2,128  // test_passes.py:{LINE + 10}
    tile[i, j] = float16(sub(float32(tile[i, j]), div(total[i], float32(cols))))  // test_passes.py:{LINE + 11}
  if condition=lt(0, n)  // test_passes.py:{LINE + 12}
    copy src=tile dst=y[mul(block_x, 2), 0]  // test_passes.py:{LINE + 13}
"""
LAYOUTS = """\
  layout tile: rows of 64 threads x 1 x 2, 1 passes, lanes on columns
  layout total: one per row of (rows of 64 threads x 1 x 2, 1 passes, lanes on columns)
  layout peak: one per row of (rows of 64 threads x 1 x 2, 1 passes, lanes on columns)
"""
SHARED = """\
  shared 0: sum of tile
  shared 16: max of tile
  shared bytes 32
"""


def test_text_after_each_pass():
    dumped = {}
    run_passes(centred, TARGET, dumped.__setitem__)
    head, body = RECORDED.split("  alloc tile", 1)
    body = "  alloc tile" + body
    assert dumped == {
        "record": RECORDED,
        "infer_layouts": head + LAYOUTS + body,
        "plan_shared_memory": head + LAYOUTS + SHARED + body,
    }


def test_a_pass_that_changes_nothing_is_not_dumped(monkeypatch):
    monkeypatch.setattr(passes, "PIPELINE", [*passes.PIPELINE, ("idle", lambda kernel, target: kernel, ())])
    dumped = {}
    run_passes(centred, TARGET, dumped.__setitem__)
    assert list(dumped) == ["record", "infer_layouts", "plan_shared_memory"]


# ---- corrupted kernels


def finished() -> ir.Kernel:
    return run_passes(centred, TARGET)


def buffer(kernel, name):
    return next(s.buffer for s in kernel.body if isinstance(s, ir.Alloc) and s.buffer.name == name)


def reductions(kernel):
    return [s for s in ir.walk(kernel.body) if isinstance(s, ir.Reduce)]


def with_layout(kernel, name, **changes):
    """A layout with fields that its constructor might refuse."""
    layout, given = object.__new__(VectorisedRows), kernel.layouts[buffer(kernel, "tile")]
    for key in (field.name for field in fields(VectorisedRows)):
        object.__setattr__(layout, key, changes.get(key, getattr(given, key)))
    return replace(kernel, layouts={**kernel.layouts, buffer(kernel, name): layout})


def with_statement(kernel, kind, **changes):
    """The first top-level statement of that kind, changed."""
    at = next(i for i, s in enumerate(kernel.body) if isinstance(s, kind))
    return replace(kernel, body=(*kernel.body[:at], replace(kernel.body[at], **changes), *kernel.body[at + 1 :]))


def without(kernel, name):
    return replace(kernel, body=tuple(s for s in kernel.body if not (isinstance(s, ir.Alloc) and s.buffer.name == name)))


def with_value(kernel, value):
    loop = next(s for s in kernel.body if isinstance(s, ir.Parallel))
    return with_statement(kernel, ir.Parallel, body=(replace(loop.body[0], value=value),))


def with_store_to(kernel, tensor):
    stored = next(s for s in kernel.body if isinstance(s, ir.If)).body[0]
    return with_statement(kernel, ir.If, body=(replace(stored, dst=replace(stored.dst, tensor=tensor)),))


def promising(kernel, vector):
    return replace(kernel.tensors[1], vector=vector)


def first_element(kernel):
    zero = ir.Const("int32", 0)
    return ir.Load("float16", buffer(kernel, "tile"), (zero, zero))


CORRUPTED = {
    "no allocation": (lambda k: without(k, "total"), "total is not allocated here"),
    "no allocation of what is only read": (
        lambda k: with_value(k, ir.Load("float32", ir.Buffer("other", "fragment", (2,), "float32"), (ir.Var("int32", "i"),))),
        "other is not allocated here",
    ),
    "two allocations": (lambda k: replace(k, body=(k.body[0], *k.body)), "tile is allocated twice"),
    "a variable of another loop": (lambda k: with_value(k, ir.Var("int32", "k")), "k is used outside its loop"),
    "a loop variable in its own extent": (
        lambda k: with_statement(k, ir.Serial, extent=ir.Var("int32", "k")),
        "k is used outside its loop",
    ),
    "an element as a scalar": (lambda k: with_statement(k, ir.Fill, value=first_element(k)), r"tile\[0, 0\] is read outside"),
    "an operand is missing": (
        lambda k: with_value(k, ir.Call("float32", "add", (ir.Const("float32", 1.0),))),
        "add with 1 operands",
    ),
    "a longer loop": (lambda k: with_statement(k, ir.Parallel, extents=(2, 256)), "the loop runs over 256 and tile has 128"),
    "another program's tensor": (
        lambda k: with_store_to(k, replace(k.tensors[1], name="z")),
        "z is no parameter of the program",
    ),
    "no layout": (
        lambda k: replace(k, layouts={b: la for b, la in k.layouts.items() if b.name != "total"}),
        "total has no layout",
    ),
    "a layout of fewer rows": (lambda k: with_layout(k, "tile", rows=1), r"tile is \[2, 128\] and its layout \[1, 128\]"),
    "a layout of a vector": (lambda k: with_layout(k, "total"), r"total is \[2\] and its layout \[2, 128\]"),
    "a layout of other threads": (
        lambda k: with_layout(k, "tile", threads=256, threads_per_row=128, vector=1),
        "the layout of tile has 256 threads of 128",
    ),
    "a layout with holes": (lambda k: with_layout(k, "tile", vector=3), "the layout of tile leaves registers or threads out"),
    "two distributions": (
        lambda k: replace(k, layouts={**k.layouts, buffer(k, "peak"): PerRow(VectorisedRows(2, 128, 128, 64, 1))}),
        "a second distribution of rows",
    ),
    "a tensor that promises less": (
        lambda k: with_store_to(replace(k, tensors=(k.tensors[0], promising(k, 1))), promising(k, 1)),
        "tile is accessed 2 elements at a time, y promises 1",
    ),
    "no exchange buffer": (lambda k: replace(k, shared={}), "the reduction of tile has no buffer"),
    "overlapping buffers": (
        lambda k: replace(k, shared={r: 12 * i for i, r in enumerate(reductions(k))}),
        rf"shared memory of 32 bytes of {TARGET.shared_bytes}, planned as \[\(0, 16\), \(12, 28\)\]",
    ),
    "one buffer for both": (lambda k: replace(k, shared=dict.fromkeys(reductions(k), 0)), r"planned as .*\(0, 16\), \(0, 16\)"),
    "too few bytes": (lambda k: replace(k, shared_bytes=28), "shared memory of 28 bytes"),
    "more bytes than there are": (lambda k: replace(k, shared_bytes=TARGET.shared_bytes + 1), "of 232449 bytes of 232448"),
}  # fmt: skip


def error_of_corrupted(name) -> TileError:
    corrupt, message = CORRUPTED[name]
    with pytest.raises(TileError, match=message) as caught:
        verify.verify(corrupt(finished()), TARGET, tuple(verify.CHECKS))
    return caught.value


@pytest.mark.parametrize("name", CORRUPTED)
def test_corrupted(name):
    error_of_corrupted(name)


@pytest.fixture
def fresh_placements():
    verify._placement_problem.cache_clear()
    yield
    verify._placement_problem.cache_clear()


@pytest.mark.parametrize("move, problem", [
    (lambda threads, register: (threads, 0), "puts two elements into register 0 of thread 0"),
    (lambda threads, register: (threads - {5}, register), "leaves registers or threads out"),
    (lambda threads, register: (threads, register + (threads == {5})), "leaves registers or threads out"),
])  # fmt: skip
def test_layouts_are_checked_by_enumeration(monkeypatch, fresh_placements, move, problem):
    """Not by what they say of themselves."""
    kernel, place = finished(), VectorisedRows.place
    monkeypatch.setattr(VectorisedRows, "place", lambda self, index: move(*place(self, index)))
    verify._placement_problem.cache_clear()
    with pytest.raises(TileError, match=f"the layout of tile {problem}"):
        verify.verify(kernel, TARGET, ("layouts",))


def test_too_many_registers():
    kernel = finished()
    with pytest.raises(TileError, match="a fragment needs 1 registers of 0"):
        verify.verify(kernel, replace(TARGET, registers_per_thread=0), ("layouts",))


def test_every_error_of_the_passes_has_a_test():
    rows, words, roles = map(neighbour, ("test_layout_errors", "test_role_errors", "test_roles"))
    errors = [*map(error_of, programs_of(rows)), rows.too_many(), *map(error_of_corrupted, CORRUPTED)]
    errors += [*map(error_of, programs_of(words)), words.too_many_stages()]
    groups, edges, columns, down = map(neighbour, ("test_ws", "test_edges", "test_exchange", "test_down_rows"))
    errors += [*map(error_of, [*programs_of(groups), *programs_of(edges)]), *edges.errors_of_corrupted()]
    errors += [*map(error_of, [*programs_of(columns), *programs_of(down)]), *map(down.error_on_portable, down.ON_PORTABLE)]
    errors += [*map(roles.error_of_corrupted, roles.CORRUPTED), *neighbour("test_portable_gemm").errors()]
    errors += neighbour("test_portable_attention").errors()
    assert untested("passes", errors) == set()


# ---- the runner


@pytest.mark.parametrize("at, corrupt, message", [
    (1, "no allocation", "total is not allocated here"),
    (5, "a layout with holes", "leaves registers or threads out"),
    (5, "no allocation", "total is not allocated here"),
    (6, "overlapping buffers", "shared memory of 32 bytes"),
    (6, "two distributions", "a second distribution of rows"),
    (6, "two allocations", "tile is allocated twice"),
])  # fmt: skip
def test_the_verifier_runs_after_each_pass(monkeypatch, at, corrupt, message):
    """A pass that breaks the kernel is stopped before the next one sees it."""
    name, run, properties = passes.PIPELINE[at - 1]
    broken = (name, lambda kernel, target: CORRUPTED[corrupt][0](run(kernel, target)), properties)

    def unreachable(kernel, target):
        raise AssertionError("the next pass has run")

    monkeypatch.setattr(passes, "PIPELINE", [*passes.PIPELINE[: at - 1], broken, ("next", unreachable, ())])
    with pytest.raises(TileError, match=message):
        run_passes(centred, TARGET)


def test_what_holds_after_a_pass_holds_after_the_next():
    for (_, _, before), (_, _, after) in zip(passes.PIPELINE, passes.PIPELINE[1:], strict=False):
        assert set(before) <= set(after)
    assert set(passes.PIPELINE[-1][2]) == set(verify.CHECKS)


# ---- names


def test_loops_keep_the_authors_names():
    """A name that a fragment, the text or an earlier loop has gets a number."""

    @T.prim_func
    def program(x: H):
        with T.Kernel(1, threads=128):
            i = T.alloc_fragment((2, 128), "float16")
            T.annotate_layout({i: VectorisedRows(2, 128, threads=128, threads_per_row=64, vector=2)})
            T.fill(i, 0.0)
            for block in T.serial(2):
                T.copy(x[0, block * 128], i, fill=0.0)
            for block in T.serial(3):
                T.copy(x[0, block * 128], i, fill=0.0)
            for row, lane in T.Parallel(2, 128):
                i[row, lane] = i[row, lane] * 2.0

    loops = [stmt for stmt in ir.walk(program.body) if isinstance(stmt, ir.Serial | ir.Parallel)]
    names = [var.name for loop in loops for var in ([loop.var] if isinstance(loop, ir.Serial) else loop.vars)]
    assert names == ["block", "block_2", "row_2", "lane_2"]
