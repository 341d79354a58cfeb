"""The text of copies: TMA's, and those of a group between global memory, registers and shared memory."""

from contextlib import contextmanager

from tileops_dsl import ir, plan
from tileops_dsl.codegen.cuda import terms
from tileops_dsl.codegen.expressions import CODES, CTYPES, statement
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.instruction_layouts import AccumulatorRows
from tileops_dsl.schedule import Issue

HINTS = {"evict_first": "kEvictFirst", "evict_last": "kEvictLast"}


def issue_copy(w: Writer, stmt: Issue) -> None:
    """By one thread: a box after the other."""
    op, kernel = stmt.op, w.kernel
    tile, tensor, loads = op.tile, op.region.tensor, plan.is_load(op)
    layout = kernel.layouts[tile]
    columns, rows = plan.box(kernel, op)
    for number in range(layout.columns // columns):
        start = w.at_stage(tile)
        start += f" + {number * layout.box_bytes // layout.element_bytes}" if number else ""
        start += f" + rank * {rows * columns}" if op.multicast else ""
        start += f" + {box_of_rows(w, op)} * {columns}" if op.box_row else ""
        at = coordinates(w, op, number * columns, rows)
        if not loads:
            w.line(f"tma_store(p.{tensor.name}, {at}, {start}, {w.site(stmt)});")
            continue
        barrier = w.slot(plan.barrier_of(kernel, plan.ring_of(kernel, tile), "full"))
        word, ctas = ("tma_load_multicast", f", {2**kernel.ctas - 1}") if op.multicast else ("tma_load", "")
        w.line(f"{word}{hint(op)}({start}, p.{tensor.name}, {at}, {barrier}{ctas}, {w.site(stmt)});")
    if not loads:
        w.line(f"store_commit({w.site(stmt)});")


def box_of_rows(w: Writer, op: ir.Copy) -> str:
    """The first row of a warp's box n: warps take them by turns."""
    return f"(n * 4 + warp) * {w.number(op.box_row.rows, 4)}"


@contextmanager
def each_box_of_rows(w: Writer, op: ir.Copy):
    """A loop over the boxes of rows that the warp loads, of which each lane knows the place of one."""
    places = dict.fromkeys(o for o in op.src.origin if op.box_row in ir.subexprs(o))
    w.line("TILEOPS_NO_UNROLL")
    with w.block(f"for (int n = 0; {box_of_rows(w, op)} < {op.dst.shape[0]}; ++n)"), w.scope():
        for number, place in enumerate(places):
            w.line(f"const int place_{number} = shuffle({w.number(place)}, n, {w.site(op)});")
        w.declared |= {place: ir.Var(place.dtype, f"place_{number}") for number, place in enumerate(places)}
        with w.block(f"if (elect_one({w.site(op)}))"):
            yield


def hint(op: ir.Copy) -> str:
    return f"<L2::{HINTS[op.eviction]}>" if op.eviction else ""


def coordinates(w: Writer, op: ir.Copy, column: int | str, rows: int) -> str:
    """Innermost first; a group's own tile and a CTA's part of a tile begin further down."""
    *outer, row, first = (w.number(o) for o in op.region.origin)
    of_group = not plan.is_common(w.kernel, ir.buffer_of(op.tile))
    if of_group and plan.divides_rows(w.kernel):
        row += f" + (group - {w.role.groups[0]}) * {rows}"
    if op.multicast:
        row += f" + rank * {rows}"
    first = str(column) if first == "0" else first + (f" + {column}" if column else "")
    first += w.part(plan.own_columns(w.kernel, op.tile.shape[1])) if of_group else ""
    return f"at({', '.join([first, row, *reversed(outer)])})"


def copy(w: Writer, stmt: ir.Copy) -> None:
    """Of a vector, whose elements are spread over the group's threads; or of one with a value for each row."""
    if isinstance(stmt.dst, ir.Region):
        (_store_rows if len(stmt.src.shape) == 1 else store_pairs)(w, stmt)
        return
    if len(stmt.dst.shape) == 2:
        load_tile(w, stmt)
        w.line(f"sync_warp({w.site(stmt)});")  # before one of its threads hands the tile back
        return
    if stmt.dst.common:  # the group's or the warp's part, by one of the lanes that have the element
        with w.block(f"if ({w.fragments.keeper(w, True)})"), w.loop("x", plan.registers(w.kernel, stmt.src)):
            size = stmt.src.shape[0]
            part = f" + thread / 32 * {size}" if plan.down_rows(w.kernel) else w.part(size)
            at = f"{w.fragments.kept(w, 'x')}{part}"
            w.line(f"store_shared({stmt.dst.name}, {at}, {stmt.src.name}[x], {w.site(stmt)});")
        return
    layout = w.kernel.layouts[stmt.dst]
    with w.loop("x", layout.registers):
        if isinstance(stmt.src, ir.Region):
            _load_vector(w, stmt)
        else:
            place = f"thread + x * {layout.threads}"
            guard = f"if ({place} < {layout.extent}) " * (layout.extent % layout.threads > 0)
            w.line(f"{guard}store_shared({stmt.dst.name}, {place}, {stmt.src.name}[x], {w.site(stmt)});")


def load_tile(w: Writer, stmt: ir.Copy) -> None:
    """From shared memory into a fragment."""
    src, dst = stmt.src, stmt.dst
    with w.loop("q", dst.shape[1] // 16):
        chunk = w.declare_row(src, 16)
        w.fragments.move(w, "load", ir.buffer_of(src), dst.name, f"q * {w.span(16)}", chunk, stmt)


def _store_rows(w: Writer, stmt: ir.Copy) -> None:
    """By one of the threads that have the element (of the first group, if all have it), where the tensor has it."""
    tensor, row = stmt.dst.tensor, f"{stmt.dst.tensor.name}_row"
    *outer, first = (w.number(o, 3) for o in stmt.dst.origin)
    with w.loop("x", plan.registers(w.kernel, stmt.src)):
        w.line(f"const int {row} = {first} + {w.fragments.kept(w, 'x')};")
        at = " + ".join(terms(tensor, [*outer, row])) if outer else row
        to = f"global<{CTYPES[tensor.dtype]}>(p.{tensor.name}), {at}"
        inside = f"{row} < {_end(w, stmt)}"
        first = f"group == {w.role.groups[0]} && " * (plan.parts(w.kernel) > 1)
        w.line(f"if ({first}{w.fragments.keeper(w)} && {inside}) store_global<1>({to}, {stmt.src.name}, x, {w.site(stmt)});")


def _end(w: Writer, stmt: ir.Copy) -> str:
    """Behind the last row that is stored: of the tensor, or what the copy says."""
    return w.number(stmt.dst.stop or stmt.dst.tensor.dims[-len(stmt.src.shape)])


def store_pairs(w: Writer, stmt: ir.Copy) -> None:
    """Two neighbouring elements at a time, of the rows and columns that the tensor has."""
    tensor, src = stmt.dst.tensor, stmt.src
    *outer, row, column = stmt.dst.origin
    numbers = [n.value for n in (column, tensor.dims[-1]) if isinstance(n, ir.Const)]
    inside = len(numbers) == 2 and numbers[0] + src.shape[1] <= numbers[1]
    columns = plan.own_columns(w.kernel, src.shape[1])
    own = f"{w.number(column, 2)} + lane % 4 * 2{w.part(columns)}"
    own_row = "row" if plan.feeds_itself(w.kernel) else f"{tensor.name}_row"  # a tile's row may be called so
    with w.of_blocks(), w.loop("y", 2):
        place, first_register = ("y", "") if w.blocks == 1 else ("h * 2 + y", f"h * {w.span(columns)} + ")
        w.line(f"const int {own_row} = {w.number(row)} + {w.fragments.row(w, place)};")
        with w.block(f"if ({own_row} < {_end(w, stmt)})"):
            first = " + ".join([*terms(tensor, [*(w.number(o, 3) for o in outer), own_row]), own])
            w.line(f"const auto first = global<{CTYPES[tensor.dtype]}>(p.{tensor.name}) + ({first});")
            guard = "" if inside else f"if ({own} + x * 2 < {w.number(tensor.dims[-1])}) "
            word = f"store_global<2>(first, x * 2, {src.name}, {first_register}x + y * 2, {w.site(stmt)});"
            w.each(guard + word, "x", w.span(columns), step=4)


def fill_shared(w: Writer, stmt: ir.Fill) -> None:
    """Rows of boxes from one on, 16 bytes at a time, by the group, or by all to which the tile is common."""
    tile, layout = stmt.buffer, plan.tile_layout(w.kernel, stmt.buffer)
    per, row = 16 // layout.element_bytes, w.number(tile.origin[0], 3) if isinstance(tile, ir.View) else "0"
    elements, threads = layout.box_bytes // layout.element_bytes, 128 * len(w.role.groups)
    thread = "thread" if threads == 128 else f"(thread + (group - {w.role.groups[0]}) * 128)"
    with w.block(""):
        w.line(f"Fragment<{CTYPES[tile.dtype]}, {per}> value;")
        w.line(f"fill<{per}>(value, 0, {w.number(stmt.value)});")
        first = f"{row} * {layout.box_columns} + {thread} * {per}"
        rows = w.loop("x", elements, first, threads * per, unrolled=False)
        with rows, w.loop("box", layout.columns // layout.box_columns):
            w.line(f"store_shared<{per}>({w.start(tile)} + box * {elements}, x, value, 0, {w.site(stmt)});")


def _load_vector(w: Writer, stmt: ir.Copy) -> None:
    """An element at a time, by the tensor's dtype."""
    tensor, name, layout = stmt.src.tensor, stmt.dst.name, w.kernel.layouts[stmt.dst]
    *outer, first = (w.number(o, 3) for o in stmt.src.origin)
    of_rows = isinstance(layout, AccumulatorRows)  # all four lanes of a row have its value
    own = w.fragments.row(w, "x") if of_rows else f"thread + x * {layout.threads}"
    w.line(f"const int col = {first} + {own};")
    at = " + ".join(terms(tensor, [*outer, "col"])) if outer else "col"
    w.line(f"if (col >= {w.number(tensor.dims[-1])}) fill<1>({name}, x, {statement(stmt.fill, None)});")
    for dtype, code in CODES.items():
        pointer = f"global<{CTYPES[dtype]}>(p.{tensor.name})"
        word = f"load_global_as_float<1>({name}, x, {pointer}, {at}, {w.site(stmt)})"
        w.line(f"else if (p.{tensor.name}_dtype == {code}) {word};")
    statements = list(ir.walk(w.kernel.body))
    given = [s for s in statements if isinstance(s, ir.If) and s.condition == tensor.given]
    guarded = {id(s) for condition in given for s in ir.walk(condition.body)}
    if any(stmt.dst in _read(s) and id(s) not in guarded for s in statements):  # else absent is never seen
        w.line(f"else fill<1>({name}, x, {statement(stmt.absent, None)});")


def _read(stmt: ir.Stmt) -> list[ir.Tile]:
    loads = [e.buffer for x in ir.exprs_of(stmt) for e in ir.loads(x)]
    return [*loads, stmt.src] if isinstance(stmt, ir.Copy) else loads
