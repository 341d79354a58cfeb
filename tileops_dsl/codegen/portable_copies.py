"""The text of copies between global and shared memory by all threads, 16 bytes or an element at a time."""

from contextlib import nullcontext

from tileops_dsl import ir, plan
from tileops_dsl.codegen.expressions import CTYPES
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.instruction_layouts import SharedTile
from tileops_dsl.layouts import VectorisedRows
from tileops_dsl.schedule import Issue, Land


def declare_lines(w: Writer, tile: ir.Buffer) -> None:
    """The thread's first row and column in what it copies of a tile, the place of that, and registers on the way."""
    copies = [s for s in ir.walk(w.kernel.body) if (plan.is_load(s) or plan.is_store(s)) and s.tile == tile]
    if not copies:
        return
    t, layout, name = plan.lines(w.kernel, copies[0]), w.kernel.layouts[tile], tile.name
    per = 16 // layout.element_bytes
    column = f"thread % {t.threads_per_row}" + f" * {t.vector}" * (t.vector > 1)
    w.line(f"const int {name}_line = thread / {t.threads_per_row}, {name}_column = {column};")
    within = f" + {name}_column % {per}" * (t.vector == 1)
    w.line(f"const int {name}_place = {place_of(layout, f'{name}_line', f'{name}_column / {per}')}{within};")
    if any(plan.is_load(copy) and not plan.asynchronous(copy) for copy in copies):
        w.line(f"Fragment<{CTYPES[tile.dtype]}, {t.registers}> {name}_moving;")


def place_of(layout: SharedTile, row: str, piece: str) -> str:
    """Elements to 16 bytes of a row of a tile (SharedTile.offset)."""
    pieces = layout.swizzle.row_bytes // 16
    turn = f"{row} % 8" if pieces == 8 else f"{row} / {8 // pieces} % {pieces}"
    box = ""
    if layout.columns > layout.box_columns:
        box, piece = f"({piece}) / {pieces} * {layout.rows * layout.box_columns} + ", f"({piece}) % {pieces}"
    return f"{box}{row} * {layout.box_columns} + (({piece}) ^ {turn}) * {16 // layout.element_bytes}"


def _place(w: Writer, tile: ir.Buffer, t: VectorisedRows) -> str:
    """Of the thread's row x: `slots` rows on, which changes the swizzle where that is no multiple of 8 (Swizzle.permute)."""
    layout = w.kernel.layouts[tile]
    pieces, per = layout.swizzle.row_bytes // 16, 16 // layout.element_bytes
    turned = f"({tile.name}_place ^ x * {t.slots} / {8 // pieces} % {pieces} * {per})"
    return f"{f'{tile.name}_place' if t.slots % 8 == 0 else turned} + x * {t.slots * layout.box_columns}"


def _begin(w: Writer, copy: ir.Copy) -> tuple[str, str, str, str]:
    """Declares where a copy begins in its tensor: a row, a column, and a pointer to walk down.

    Gives the pointer, whether row x is inside the tensor, the columns that a row still has, and the step to the next row.
    """
    tensor, name, slots = copy.region.tensor, copy.region.tensor.name, plan.lines(w.kernel, copy).slots
    *_, row, _ = copy.region.origin
    w.line(f"const int {name}_row = {w.number(row)} + {copy.tile.name}_line;")
    columns = _first_column(w, copy)
    _point(w, copy)
    inside = f"{name}_row + x * {slots} < {w.number(tensor.dims[-2])}"
    return f"{name}_first", inside, columns, f"{name}_first += {slots} * p.{name}_stride[{len(tensor.dims) - 2}];"


def _first_column(w: Writer, copy: ir.Copy) -> str:
    """Declares it; gives the columns that a row has from there on."""
    tensor, column = copy.region.tensor, copy.region.origin[-1]
    start = f"{w.number(column)} + " * (column != ir.ZERO)
    w.line(f"const int {tensor.name}_column = {start}{copy.tile.name}_column;")
    return f"{w.number(tensor.dims[-1])} - {tensor.name}_column"


def _point(w: Writer, copy: ir.Copy) -> None:
    """Declares a pointer to the row and column that are declared."""
    tensor, name = copy.region.tensor, copy.region.tensor.name
    *outer, row, _ = copy.region.origin
    items = [f"{w.number(o, 3)} * p.{name}_stride[{d}]" for d, o in enumerate(outer)]
    ends = [f"{name}_row * p.{name}_stride[{len(outer)}]", f"{name}_column"]
    moving = ir.Var("int32", "ahead"), *(ring.var for ring in w.kernel.rings)
    terms = items + (ends[::-1] if any(e in moving for e in ir.subexprs(row)) else ends)  # what changes comes last
    w.line(f"auto {name}_first = global<{CTYPES[tensor.dtype]}>(p.{name}) + ({' + '.join(terms)});")


def _find_row(w: Writer, stmt: Issue) -> tuple[str, str]:
    """Declares the place of row x of a tile whose boxes of rows lie apart: each row is looked up by itself.

    Gives the pointer to it, and whether it is inside the tensor.
    """
    copy, tensor, t = stmt.op, stmt.op.src.tensor, plan.lines(w.kernel, stmt.op)
    w.line(f"const int box_row = {copy.tile.name}_line + x * {t.slots};")
    w.declared |= {copy.box_row: ir.Var("int32", "box_row")}
    used = set(ir.subexprs(copy))
    for expr, name in w.names.items():
        there = ir.replaced(expr, {plan.ring_of(w.kernel, copy.tile).var: stmt.index})
        if copy.box_row in ir.subexprs(expr) and there in used - w.declared.keys():
            w.name_number(there, name)
    *outer, row, _ = copy.src.origin
    w.line(f"const int {tensor.name}_row = {w.number(row)};")
    _point(w, copy)
    known = [f"{w.number(o, 1)} >= 0" for o in outer if copy.box_row in ir.subexprs(o)]
    return f"{tensor.name}_first", " && ".join([*known, f"{tensor.name}_row < {w.number(tensor.dims[-2])}"])


def _stage(w: Writer, tile: ir.Buffer, index: ir.Expr) -> str:
    """A ring's stage: `ahead` of the first copies; of the loop's that of the iteration before, which has been read."""
    ring, size = plan.ring_of(w.kernel, tile), w.kernel.layouts[tile].elements
    if plan.chained(w.kernel):
        match index:
            case ir.Const(value=iteration):
                return tile.name + f" + {iteration % ring.stages * size}" * (iteration % ring.stages > 0)
        return tile.name + f" + {w.number(index, 3)} % {ring.stages} * {size}" * (ring.stages > 1)
    if isinstance(index, ir.Call):
        return f"{tile.name} + (stage == 0 ? {ring.stages - 1} : stage - 1) * {size}"
    return f"{tile.name} + {index} * {size}" if index.name == "ahead" else w.at_stage(tile)


def issue(w: Writer, stmt: Issue) -> None:
    """What lies outside the tensor becomes zeros. 16 bytes lie inside or outside of it: the host takes no other tensor, but of
    products that follow each other, whose depth may be any."""
    copy, tile, t = stmt.op, stmt.op.tile, plan.lines(w.kernel, stmt.op)
    with w.block(""):
        if copy.box_row:
            w.line(f"const int inside = {_first_column(w, copy)};")
            w.line(f"const auto to = {_stage(w, tile, stmt.index)};")
            with w.loop("x", t.passes), w.scope():
                _parts(w, stmt, *_find_row(w, stmt))
            return
        pointer, row_inside, columns, next_row = _begin(w, copy)
        if plan.chained(w.kernel):
            w.line(f"const int inside = {columns};")
            w.line(f"const auto to = {_stage(w, tile, stmt.index)};")
            with w.loop("x", t.passes):
                _parts(w, stmt, pointer, row_inside)
                w.line(next_row)
            return
        w.line(f"const bool inside = 0 < {columns};")
        if plan.asynchronous(copy):
            w.line(f"const auto to = {_stage(w, tile, stmt.index)};")
        with w.loop("x", t.passes):
            guard = f"inside && {row_inside}"
            if plan.asynchronous(copy):
                w.line(f"copy_async<{t.vector}>(to, {_place(w, tile, t)}, {pointer}, 0, {guard}, {w.site(stmt)});")
            else:
                w.line(f"if ({guard}) load_global<1>({tile.name}_moving, x, {pointer}, 0, {w.site(stmt)});")
                w.line(f"else fill<1>({tile.name}_moving, x, from_float<{CTYPES[tile.dtype]}>(0.0f));")
            w.line(next_row)


def _parts(w: Writer, stmt: Issue, pointer: str, row_inside: str) -> None:
    """Of row x: the boxes that the thread takes part in, one part of the row behind the other."""
    tile, t = stmt.op.tile, plan.lines(w.kernel, stmt.op)
    part, several = t.threads_per_row * t.vector, t.chunks > 1
    place, first = _place(w, tile, t), f"c * {part}" if several else "0"
    place += f" + c * {part * w.kernel.layouts[tile].rows}" * several
    count = f"{row_inside} ? inside{f' - {first}' * several} : 0"
    with w.loop("c", t.chunks) if several else nullcontext():
        w.line(f"copy_async_part<{t.vector}>(to, {place}, {pointer}, {first}, {count}, {w.site(stmt)});")


def land(w: Writer, stmt: Land) -> None:
    tile, t = stmt.op.tile, plan.lines(w.kernel, stmt.op)
    with w.loop("x", t.passes):
        ends = f"{_stage(w, tile, stmt.index)}, {_place(w, tile, t)}, {tile.name}_moving, x"
        w.line(f"store_shared<1>({ends}, {w.site(stmt)});")


def store(w: Writer, copy: ir.Copy) -> None:
    """Where the tensor ends inside 16 bytes, an element at a time."""
    tile, t = copy.tile, plan.lines(w.kernel, copy)
    v, place = t.vector, _place(w, tile, t)
    with w.block(""):
        pointer, row_inside, columns, next_row = _begin(w, copy)
        w.line(f"const auto from = {w.at_stage(tile)};")
        w.line(f"const int inside = {columns};")
        w.line(f"Fragment<{CTYPES[tile.dtype]}, {v}> line;")
        with w.loop("x", t.passes):
            w.line(f"if (inside >= {v} && {row_inside}) {{")
            w.line(f"  load_shared<{v}>(line, 0, from, {place}, {w.site(copy)});")
            w.line(f"  store_global<{v}>({pointer}, 0, line, 0, {w.site(copy)});")
            if v > 1:
                w.line(f"}} else if ({row_inside}) {{")
                w.line("  TILEOPS_NO_UNROLL")
                w.line("  for (int edge = 0; edge < inside; ++edge) {")
                w.line(f"    load_shared<1>(line, 0, from, {place} + edge, {w.site(copy)});")
                w.line(f"    store_global<1>({pointer}, edge, line, 0, {w.site(copy)});")
                w.line("  }")
            w.line("}")
            w.line(next_row)
