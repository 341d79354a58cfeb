"""The text of element-wise loops: each thread runs over its own registers of the accumulator's layout."""

from dataclasses import replace

from tileops_dsl import ir, plan
from tileops_dsl.codegen.arithmetic import with_parameters
from tileops_dsl.codegen.expressions import CTYPES, statement
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.schedule import Chunks


def parallel(w: Writer, stmt: ir.Parallel) -> None:
    _loop(w, stmt, w.span(stmt.extents[1]), "")


def chunks(w: Writer, stmt: Chunks) -> None:
    """`columns` at a time, through shared memory."""
    *work, last = stmt.body
    tile, layout, per = last.dst, w.kernel.layouts[last.dst], stmt.columns
    with w.loop("q", tile.shape[1] // per), w.of_blocks():
        size, in_box = layout.bytes // layout.element_bytes, layout.box_columns // per
        box = f" + q / {in_box} * {layout.box_bytes // layout.element_bytes}" if tile.shape[1] > layout.box_columns else ""
        q = f"q % {in_box}" if box else "q"
        box += f" + h * {64 * layout.box_columns}" * (w.blocks > 1)
        row = f"{tile.name}{w.stage(tile, size)}{box} + {tile.name}_offset{w.fragments.place(w, layout, q)}"
        w.line(f"const auto {tile.name}_row = {row};")
        for inner in work:
            _chunk(w, inner, tile, per, q)
        w.quote(last.location)
        short = plan.columns_held(w.kernel, last.src) == per and (w.blocks == 1 or last.src.shape[1] > per)
        first = "0" if short else _register(w, last.src, f"q * {w.span(per)}", None)
        w.fragments.move(w, "store", tile, last.src.name, first, q, last)


def _chunk(w: Writer, stmt: ir.Stmt, tile: ir.Buffer, columns: int, q: str) -> None:
    w.quote(stmt.location)
    if isinstance(stmt, ir.If):
        with w.block(f"if ({w.number(stmt.condition)})"):
            for inner in stmt.body:
                _chunk(w, inner, tile, columns, q)
        return
    if any(load.buffer == tile for store in stmt.body for load in ir.loads(store.value)):
        w.line(f"Fragment<{CTYPES[tile.dtype]}, {w.span(columns)}> {tile.name}_part;")
        w.fragments.move(w, "load", tile, f"{tile.name}_part", "0", q, stmt)
    _loop(w, stmt, w.span(columns), f"q * {w.span(columns)}")


def _loop(w: Writer, stmt: ir.Parallel, registers: int, start: str) -> None:
    """Over registers x, of a view from its first on, of a chunk from `start` on; blocks of rows share a column's element."""
    for store in stmt.body:
        w.quote(store.location)
        pairs = isinstance(store.value, ir.Cast) and ir.DTYPES[store.value.dtype] == 2
        value = store.value.value if pairs else store.value
        target, at = ir.buffer_of(store.buffer).name, _register(w, store.buffer, start, "")
        shared = [] if w.blocks > 1 and not start else None
        values = [_value(w, value, start, odd, stmt, shared) for odd in (("", " + 1") if pairs else ("",))]
        head = f"for (int x = 0; x < {registers}; {'x += 2' if pairs else '++x'})"
        assignment = f"round_pair({target}, {at}, {', '.join(values)});" if pairs else f"{target}[{at}] = {values[0]};"
        w.line("TILEOPS_UNROLL")
        if shared is None:
            w.line(f"{head} {assignment}")
            continue
        with w.block(head):
            for number, word in enumerate(shared):
                w.line(f"const float element_{number} = {word};")
            w.line("TILEOPS_UNROLL")
            w.line(f"for (int h = 0; h < {w.blocks}; ++h) {assignment}")


def _register(w: Writer, tile: ir.Tile, start: str, odd: str | None) -> str:
    """Where register x of a tile lies in its fragment; without `odd`, where x is counted from."""
    buffer = ir.buffer_of(tile)
    whole = plan.columns_held(w.kernel, buffer) == buffer.shape[1]
    terms = [f"h * {w.span(buffer.shape[1])}"] if whole and w.blocks > 1 else []
    if isinstance(tile, ir.View):
        origin = tile.origin[1]
        match origin:
            case ir.Const(value=0):
                pass
            case ir.Call(op="mul", args=(var, ir.Const(value=columns))):
                terms.append(f"{w.number(var, 3)} * {w.span(columns)}")
            case _:
                terms.append(f"{w.number(origin, 3)} * {w.span(8)} / 8")
    terms += [start] if start and whole else []
    return " + ".join(terms if odd is None else [*terms, f"x{odd}"])


def _value(w: Writer, value: ir.Expr, start: str, odd: str, stmt: ir.Parallel, shared: list | None) -> str:
    """The expression; words that read shared memory for all blocks of rows go to `shared`."""
    table = {}
    for load in {load for load in ir.loads(value) if load.buffer.scope == "shared"}:
        if len(load.indices) == 1:
            column = w.fragments.column(w, f"({start} + x)" if start else "x")
            word = f"load_shared({load.buffer.name}, {column}{odd}, {w.site(stmt)})"  # x is even where pairs are taken
            if shared is not None:
                shared.append(word)
                word = f"element_{len(shared) - 1}"
            table[load] = ir.Var(load.dtype, word)  # a word stands for the element
        else:
            part = ir.Buffer(f"{load.buffer.name}_part", "fragment", load.buffer.shape, load.dtype)
            table[load] = replace(load, buffer=part)
    value = with_parameters(w.kernel, ir.replaced(value, table))

    def register(tile: ir.Tile) -> str:
        return f"x{odd}" if tile not in w.kernel.layouts and isinstance(tile, ir.Buffer) else _register(w, tile, start, odd)

    return statement(value, register)
