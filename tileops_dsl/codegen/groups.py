"""The text of T.ws: a frame without a producer, and the statements of groups that load, wait and meet by themselves."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby

from tileops_dsl import ir, plan
from tileops_dsl.codegen import role_statements as roles
from tileops_dsl.codegen.moves import coordinates, copy, hint, load_tile, store_pairs
from tileops_dsl.codegen.products import box_index, each_box, product, settle, turn_phase, wait_for_box
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.schedule import At, Await, Issue, Meet, One, Release, Retire, Sync


def declare(w: Writer) -> None:
    """What is the same for all groups."""
    w.grid_dependency("wait")
    for block in w.kernel.blocks:
        w.line(f"const int {block.name} = static_cast<int>(block_index_{block.name[-1]}());")
    w.name_numbers([stmt for role in w.kernel.roles for stmt in role.body])
    if w.kernel.deal:
        _deal(w, w.kernel.deal)
    w.line()


def _deal(w: Writer, deal: ir.Deal) -> None:
    maps = plan.tma_tensors(w.kernel) if w.kernel.barriers else ()
    with w.block("if (thread_index() == 0)") if maps else nullcontext():
        for tensor in maps:  # on their way while the CTA finds its part
            w.line(f"prefetch_tensor_map(p.{tensor.name}, {w.site(deal)});")
    w.quote(deal.location)
    requests, overhead = deal.lengths.dims[0], ir.Const("int32", deal.overhead)
    numbers = [w.number(x) for x in (requests, deal.heads, deal.parts, deal.seen, overhead, deal.most_pieces)]
    lengths, pieces = (f"global<int>(p.{tensor.name})" for tensor in (deal.lengths, deal.pieces))
    rest = f"{w.number(deal.part)}, {lengths}, {pieces}, {w.number(deal.notes)}, dealt, {w.site(deal)}"
    w.line(f"const auto dealt = shared<int>({deal.offset});")
    w.line(f"deal_part<{plan.threads(w.kernel)}, {deal.block}>({{{', '.join(numbers)}}}, {rest});")
    for result, place in zip(deal.RESULTS, deal.PLACES, strict=True):
        w.line(f"const int {result} = load_shared(dealt, {place}, {w.site(deal)});")


def body(w: Writer, stmts) -> None:
    """Waits for all boxes of a product's operand stand in its loop."""
    waits: list[Await] = []
    stmts = _joined(stmts)
    for before, stmt, w.following in zip([None, *stmts], stmts, [*stmts[1:], None]):
        w.issuing = isinstance(before, Issue) and isinstance(before.op, ir.Gemm)
        w.quote(stmt.location.caller or stmt.location)
        into = isinstance(stmt, Issue) and isinstance(stmt.op, ir.Gemm) and len(waits) == len(plan.boxes(stmt.op.b)) > 1
        if waits and not into and not (isinstance(stmt, Await) and _follows(stmt, waits[-1])):
            with each_box(w, len(waits)) as box:
                wait_for_box(w, waits[0], box)
            turn_phase(w, waits)
            waits = []
        if isinstance(stmt, Await):
            waits.append(stmt)
        elif into:
            _product(w, stmt, waits)
            waits = []
        else:
            w.statements[type(stmt)](w, stmt)


def _follows(stmt: Await, before: Await) -> bool:
    return stmt.barrier == before.barrier and stmt.index.value == before.index.value + 1


def _joined(stmts) -> list[ir.Stmt]:
    """Neighbours that are one thread's, or another iteration's, under one head."""
    out: list[ir.Stmt] = []
    for stmt in stmts:
        joins = isinstance(stmt, At | One) or (isinstance(stmt, ir.If) and isinstance(stmt.body[0], At | One))
        if out and joins and _head(stmt) == _head(out[-1]):
            out[-1] = replace(out[-1], body=(*out[-1].body, *stmt.body))
        else:
            out.append(stmt)
    return out


def _head(stmt: ir.Stmt) -> tuple:
    return type(stmt), *(getattr(stmt, name, None) for name in ("var", "value", "condition"))


def _at(w: Writer, stmt: At) -> None:
    with w.block(""):
        value = w.number(stmt.value)
        if stmt.var in ir.subexprs(stmt.value):
            w.line(f"const int next = {value};")
            value = "next"
        w.line(f"const int {stmt.var} = {value};")
        with w.scope(stmt.var):
            w.name_numbers([replace(inner, body=()) for inner in stmt.body])
            body(w, stmt.body)


def _if(w: Writer, stmt: ir.If) -> None:
    before = w.flying
    roles.alternatives(w, [stmt])
    w.flying = tuple(dict.fromkeys((*before, *w.flying)))


def _pipelined(w: Writer, stmt: ir.Pipelined) -> None:
    """Products that are unfinished at the end are so at the beginning, too."""
    w.flying = plan.flying(stmt.body, w.flying)
    roles.pipelined(w, stmt)


def _retire(w: Writer, stmt: Retire) -> None:
    """Where none is unfinished, there is nothing to wait for."""
    if not stmt.of or set(w.flying).intersection(stmt.of):
        w.flying = plan.flying((stmt,), w.flying)
        roles.retire(w, stmt)


def _issue(w: Writer, stmt: Issue) -> None:
    (_product if isinstance(stmt.op, ir.Gemm) else _load if plan.is_load(stmt.op) else _store)(w, stmt)


def _product(w: Writer, stmt: Issue, waits: list[Await] = ()) -> None:
    """What the group computed is in its registers before."""
    settle(w, [stmt.op])
    product(w, stmt, waits)
    w.flying = (*w.flying, stmt.op)


def _store(w: Writer, stmt: Issue) -> None:
    with _boxes(w, stmt.op) as (_, place, at):
        w.line(f"tma_store(p.{stmt.op.dst.tensor.name}, {at}, {place}, {w.site(stmt)});")
    w.line(f"store_commit({w.site(stmt)});")


def _load(w: Writer, stmt: Issue) -> None:
    """The barrier of each box is told its bytes; of a tile without boxes once, whatever TMA makes of it."""
    boxed, full = _full(w, stmt.op), plan.barrier_named(w.kernel, f"{plan.boxes(stmt.op.dst)[0][0].name}_full")
    expect = f"arrive_expect_bytes(%s, {full.bytes}, {w.site(stmt)});"
    if not ir.buffer_of(stmt.op.dst).box:
        w.line(expect % boxed(""))
    with _boxes(w, stmt.op) as (box, place, at):
        if ir.buffer_of(stmt.op.dst).box:
            w.line(expect % boxed(box))
        if not stmt.op.box_row:
            _fetch(w, stmt, place, at, boxed(box))


def _load_rows(w: Writer, loads: list[Issue]) -> None:
    """Boxes of rows: each warp goes through its own, of which each lane knows the place of one.

    They may arrive before their barrier is told of them.
    """
    places = dict.fromkeys(o for load in loads for o in load.op.src.origin if load.op.box_row in ir.subexprs(o))
    row, where = f"(x * 4 + warp) * {w.number(loads[0].op.box_row.rows, 4)}", loads[0]
    w.line("TILEOPS_UNROLL_BY(4)")  # of one row each, boxes take what finding their places takes
    with w.block(f"for (int x = 0; {row} < {where.op.dst.shape[0]}; ++x)"), w.scope():
        for number, place in enumerate(places):
            w.line(f"const int place_{number} = shuffle({w.number(place)}, x, {w.site(where)});")
        w.declared |= {place: ir.Var(place.dtype, f"place_{number}") for number, place in enumerate(places)}
        with w.block(f"if (elect_one({w.site(where)}))"):
            for stmt in loads:
                boxed, columns = _full(w, stmt.op), w.kernel.layouts[ir.buffer_of(stmt.op.dst)].box_columns
                with _boxes(w, stmt.op) as (box, place, at):
                    _fetch(w, stmt, f"{place} + {row} * {columns}", at, boxed(box))


def _full(w: Writer, op: ir.Copy):
    """The barrier of a box, by its number."""
    root, first = plan.boxes(op.dst)[0]
    return lambda box: f"{root.name}_full + {box_index(first, box) if root.box else 0}"


def _fetch(w: Writer, stmt: Issue, place: str, at: str, barrier: str) -> None:
    w.line(f"tma_load{hint(stmt.op)}({place}, p.{stmt.op.src.tensor.name}, {at}, {barrier}, {w.site(stmt)});")


@contextmanager
def _boxes(w: Writer, op: ir.Copy):
    """Where each box lies in shared memory and in the tensor."""
    layout = w.kernel.layouts[ir.buffer_of(op.tile)]
    with each_box(w, op.tile.shape[1] // layout.box_columns) as box:
        place = w.start(op.tile) + f" + box * {layout.box_bytes // layout.element_bytes}" * bool(box)
        yield box, place, coordinates(w, op, f"box * {layout.box_columns}" if box else 0, layout.rows)


def _sync(w: Writer, stmt: ir.Stmt) -> None:
    """A barrier behind those of two groups."""
    meets = [s.number for role in w.kernel.roles for s in ir.walk(role.body) if isinstance(s, Meet)]
    w.line(f"named_barrier_sync({max(meets, default=0) + 1 + w.role.groups[0]}, 128, {w.site(stmt)});")


def _copy(w: Writer, stmt: ir.Copy) -> None:
    """Between a fragment and a tile in shared memory, or of a fragment into a tensor."""
    src, dst = stmt.src, stmt.dst
    if isinstance(src, ir.Region) or (isinstance(dst, ir.Region) and len(src.shape) == 1):
        copy(w, stmt)
    elif isinstance(dst, ir.Region):
        store_pairs(w, stmt)
    elif len(dst.shape) == 2:  # from shared memory
        load_tile(w, stmt)
    elif dst.scope == "fragment":
        with w.loop("x", plan.registers(w.kernel, dst)):
            w.line(f"{dst.name}[x] = load_shared({src.name}, {w.fragments.row(w, 'x')}, {w.site(stmt)});")
    else:  # by one of the four lanes that have the row
        with w.block("if (lane % 4 == 0)"), w.loop("x", plan.registers(w.kernel, src)):
            w.line(f"store_shared({dst.name}, {w.fragments.row(w, 'x')}, {src.name}[x], {w.site(stmt)});")
        if not _meets(w.following):
            w.line(f"sync_warp({w.site(stmt)});")


def _meets(stmt: ir.Stmt | None) -> bool:
    """Whether the lanes of a warp meet there, or behind it: at a barrier, or another copy of rows."""
    if isinstance(stmt, ir.Copy) and isinstance(stmt.dst, ir.Buffer):
        return stmt.dst.scope == "shared" and len(stmt.dst.shape) == 1
    return isinstance(stmt, Meet) and stmt.waits


def _one(w: Writer, stmt: One) -> None:
    """Always the same thread; ptxas knows that it is one, and that whole warps go the same way."""
    with w.block(f"if (warp == 0 && elect_one({w.site(stmt)}))"):
        body(w, stmt.body)
    of_rows = [inner for inner in stmt.body if isinstance(inner, Issue) and inner.op.box_row]
    for _, loads in groupby(of_rows, key=lambda load: load.op.dst.shape[0]):
        _load_rows(w, list(loads))


def _release(w: Writer, stmt: Release) -> None:
    w.line(f"arrive({stmt.barrier} + {stmt.index.value}, {w.site(stmt)});")


STATEMENTS = roles.STATEMENTS | {
    At: _at,
    Issue: _issue,
    One: _one,
    Release: _release,
    Retire: _retire,
    ir.Copy: _copy,
    ir.If: _if,
    ir.Pipelined: _pipelined,
    Sync: _sync,
}
