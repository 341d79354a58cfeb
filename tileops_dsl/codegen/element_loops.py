"""The text of element-wise loops: each thread runs over its own registers of the accumulator's layout."""

from dataclasses import replace

from tileops_dsl import ir, plan
from tileops_dsl.codegen.arithmetic import with_parameters
from tileops_dsl.codegen.expressions import CTYPES, statement
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.schedule import Chunks

COLUMN = "x / 4 * 8 + lane % 4 * 2 + x % 2"  # of register x (WgmmaAccumulator.place)


def parallel(w: Writer, stmt: ir.Parallel) -> None:
    _loop(w, stmt, stmt.extents[1] // 2, "")


def chunks(w: Writer, stmt: Chunks) -> None:
    """`columns` at a time: two matrices side by side, which the words read and write as four."""
    *work, last = stmt.body
    tile, layout, per = last.dst, w.kernel.layouts[last.dst], stmt.columns
    with w.loop("q", tile.shape[1] // per):
        size, pieces = layout.bytes // layout.element_bytes, layout.swizzle.row_bytes // 16
        in_box = layout.box_columns // per
        box = f" + q / {in_box} * {layout.box_bytes // layout.element_bytes}" if tile.shape[1] > layout.box_columns else ""
        q = f"q % {in_box}" if box else "q"
        turn = f"lane / {8 // pieces} % {pieces}" if pieces < 8 else "lane % 8"  # Swizzle.permute, of rows lane % 16
        start = f"{tile.name}{w.stage(tile, size)}{box} + {tile.name}_offset"
        w.line(f"const auto {tile.name}_row = {start} + (({q} * 2 + lane / 16) ^ {turn}) * 8;")
        for inner in work:
            _chunk(w, inner, tile, per)
        w.quote(last.location)
        first = "0" if plan.columns_held(w.kernel, last.src) == per else f"q * {per // 2}"
        w.line(f"store_matrix<4>({tile.name}_row, {last.src.name}, {first}, {w.site(last)});")


def _chunk(w: Writer, stmt: ir.Stmt, tile: ir.Buffer, columns: int) -> None:
    w.quote(stmt.location)
    if isinstance(stmt, ir.If):
        with w.block(f"if ({w.number(stmt.condition)})"):
            for inner in stmt.body:
                _chunk(w, inner, tile, columns)
        return
    if any(e.buffer == tile for s in stmt.body for e in ir.subexprs(s.value) if isinstance(e, ir.Load)):
        w.line(f"Fragment<{CTYPES[tile.dtype]}, {columns // 2}> {tile.name}_part;")
        w.line(f"load_matrix<4>({tile.name}_part, 0, {tile.name}_row, {w.site(stmt)});")
    _loop(w, stmt, columns // 2, f"q * {columns // 2}")


def _loop(w: Writer, stmt: ir.Parallel, registers: int, start: str) -> None:
    """Over registers x, of a view from its first on, of a chunk from `start` on."""
    for store in stmt.body:
        w.quote(store.location)
        pairs = isinstance(store.value, ir.Cast) and ir.DTYPES[store.value.dtype] == 2
        value = store.value.value if pairs else store.value
        w.line("TILEOPS_UNROLL")
        target = ir.buffer_of(store.buffer).name
        if pairs:
            head, at = f"for (int x = 0; x < {registers}; x += 2)", _register(w, store.buffer, start, "")
            values = ", ".join(_value(w, value, start, odd, stmt) for odd in ("", " + 1"))
            w.line(f"{head} round_pair({target}, {at}, {values});")
        else:
            head, at = f"for (int x = 0; x < {registers}; ++x)", _register(w, store.buffer, start, "")
            w.line(f"{head} {target}[{at}] = {_value(w, value, start, '', stmt)};")


def _register(w: Writer, tile: ir.Tile, start: str, odd: str) -> str:
    """Where register x of a tile lies in its fragment: 8 columns take 4 registers."""
    buffer = ir.buffer_of(tile)
    whole = plan.columns_held(w.kernel, buffer) == buffer.shape[1]
    terms = []
    if isinstance(tile, ir.View):
        origin = tile.origin[1]
        match origin:
            case ir.Const(value=0):
                pass
            case ir.Call(op="mul", args=(var, ir.Const(value=columns))):
                terms.append(f"{w.number(var, 3)} * {columns // 2}")
            case _:
                terms.append(f"{w.number(origin, 3)} / 2")
    terms += [start] if start and whole else []
    return " + ".join([*terms, f"x{odd}"])


def _value(w: Writer, value: ir.Expr, start: str, odd: str, stmt: ir.Parallel) -> str:
    table = {}
    for load in {e for e in ir.subexprs(value) if isinstance(e, ir.Load) and e.buffer.scope == "shared"}:
        if len(load.indices) == 1:
            column = (f"{start} * 2 + " if start else "") + COLUMN + odd  # x is even where pairs are taken
            word = f"load_shared({load.buffer.name}, {column}, {w.site(stmt)})"
            table[load] = ir.Var(load.dtype, word)  # a word stands for the element
        else:
            part = ir.Buffer(f"{load.buffer.name}_part", "fragment", load.buffer.shape, load.dtype)
            table[load] = replace(load, buffer=part)
    value = with_parameters(w.kernel, ir.replaced(value, table))

    def register(tile: ir.Tile) -> str:
        return f"x{odd}" if tile not in w.kernel.layouts and isinstance(tile, ir.Buffer) else _register(w, tile, start, odd)

    return statement(value, register)
