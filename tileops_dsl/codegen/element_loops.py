"""The text of element-wise loops: each thread runs over its own registers of the accumulator's layout."""

from dataclasses import replace

from tileops_dsl import ir, plan
from tileops_dsl.codegen.arithmetic import with_parameters
from tileops_dsl.codegen.expressions import CTYPES, statement
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.schedule import Chunks


def parallel(w: Writer, stmt: ir.Parallel) -> None:
    """Over tiles; or over the rows (or columns) alone, of which each thread has some."""
    if isinstance(stmt.body[0].buffer, ir.Tensor):
        for store in stmt.body:
            _store_elements(w, stmt, store)
        return
    of_tile = len(stmt.extents) == 2
    registers = w.span(_columns(w, stmt)) * _stacked(w, stmt) if of_tile else plan.registers(w.kernel, stmt.body[0].buffer)
    _loop(w, stmt, registers, "")


def _store_elements(w: Writer, stmt: ir.Parallel, store: ir.Store) -> None:
    """By the thread that has the element, of a vector by one of them; what lies outside of the tensor is left out.

    Of a tile, all rows of a column together: their addresses differ by constants.
    """
    tensor, (*rows, kept) = store.buffer, stmt.vars
    source, ctype = ir.loads(store.value)[0].buffer, CTYPES[tensor.dtype]
    ends = [(i, dim) for i, dim in zip(store.indices, tensor.dims, strict=True) if kept in ir.subexprs(i)]
    inside = " && ".join(f"{w.number(index, 1)} < {w.number(dim)}" for index, dim in ends) or "true"
    pointer, at = f"global<{ctype}>(p.{tensor.name})", w.offset(tensor, store.indices)

    def store_one(guard: str, to: str) -> None:
        w.line(f"Fragment<{ctype}, 1> value;")
        w.line(f"value[0] = {element(w, store.value, '', '', stmt)};")
        w.line(f"{guard}store_global<1>({to}, value, 0, {w.site(stmt)});")

    if not rows:
        group = f"group == {w.role.groups[0]} && " * (plan.parts(w.kernel) > 1)
        with w.block(f"if ({group}{w.fragments.keeper(w)})"), w.loop("x", plan.registers(w.kernel, source)):
            w.line(f"const int {kept} = {w.fragments.kept(w, 'x')};")
            store_one(f"if ({inside}) ", f"{pointer}, {at}")
        return
    with w.loop("y", source.shape[1] // 4):
        w.line(f"const int {kept} = {w.fragments.kept(w, 'y')};")
        with w.block(f"if ({inside})"):
            own = w.offset(tensor, (*store.indices[:-1], ir.Var("int32", "own_row")))
            w.line(f"const auto first = {pointer} + ({own});")
            with w.loop("z", source.shape[0] // 32):
                w.line(f"const int x = z / 2 * {w.span(source.shape[1])} + y / 2 * 4 + z % 2 * 2 + y % 2;")
                store_one("", "first, z / 2 * 64 + z % 2 * 8")


def _stacked(w: Writer, stmt: ir.Parallel) -> int:
    """Blocks of 64 rows over whose registers x runs, one block behind the other: where all have their columns alike."""
    return stmt.extents[0] // 64 if plan.down_rows(w.kernel) and len(stmt.extents) == 2 else 1


def _in_block(w: Writer, stmt: ir.Parallel, x: str) -> str:
    return f"({x} % {w.span(stmt.extents[1])})" if _stacked(w, stmt) > 1 else x


def _tile_row(w: Writer, stmt: ir.Parallel, x: str) -> str:
    """Of register x of a tile."""
    below = f" + {x} / {w.span(stmt.extents[1])} * 64" if _stacked(w, stmt) > 1 else ""
    return w.fragments.row(w, w.fragments.row_register(w, x)) + below


def _columns(w: Writer, stmt: ir.Parallel) -> int:
    """Of a loop over a tile, those of the group."""
    return plan.own_columns(w.kernel, stmt.extents[1])


def reduce(w: Writer, stmt: ir.Reduce) -> None:
    """Each thread its registers of a row, of which two of every four neighbours are; then the row's four lanes.

    A partial sum is added to in the order of columns, so that each addition follows its exponential. Or what each group has
    made of its columns, in the order of groups. Down the rows: each thread its registers of a column, two in each block of
    rows; then the column's eight lanes; or what each warp has made of its rows.
    """
    op, src, dst, value = stmt.op.title(), stmt.src, f"{stmt.dst.name}[x]", "own"
    if stmt.partial and stmt.dim != 0 and not plan.feeds_itself(w.kernel):  # mla_decode would spill its sums
        with w.of_blocks():
            row = f"{stmt.dst.name}[{w.fragments.row_register(w, 'x')}]"
            own = f"{ir.buffer_of(src).name}[{_register(w, src, '', '', stmt)}]"
            w.each(f"{row} = {op}::combine({row}, {own});", "x", w.span(plan.own_columns(w.kernel, src.shape[1])))
        return
    with w.loop("x", plan.registers(w.kernel, stmt.dst)):
        if src.scope == "shared":
            row, rows = w.fragments.kept(w, "x"), stmt.dst.shape[0]
            for group in range(src.shape[0] // rows):
                loaded = f"load_shared({src.name}, {row}{f' + {group * rows}' if group else ''}, {w.site(stmt)})"
                w.line(f"{dst} = {f'{op}::combine({dst}, {loaded})' if group or not stmt.clear else loaded};")
            return
        if stmt.dim == 0:
            span, first = w.span(src.shape[1]), "x / 2 * 4 + x % 2"
            parts = (
                f"reduce_registers<{op}, {src.shape[0] // 64}, {span}>({src.name}, {first}{below})" for below in ("", " + 2")
            )
            w.line(f"{'const ' * stmt.partial}float own = {op}::combine({', '.join(parts)});")
        elif src in w.largest:
            value = f"{w.largest[src]}[x]"
        elif len(src.shape) == 2:
            span = w.span(plan.own_columns(w.kernel, src.shape[1]))
            first = f"x / 2 * {span} + x % 2 * 2" if w.blocks > 1 else "2 * x"
            parts = (f"reduce_registers<{op}, {span // 4}, 4>({src.name}, {first}{odd})" for odd in ("", " + 1"))
            w.line(f"const float own = {op}::combine({', '.join(parts)});")
        else:  # what a partial one left in each thread
            value = f"{src.name}[x]"
        if plan.down_rows(w.kernel):
            value = _down_lanes(w, stmt, op, value)
        else:
            value = value if stmt.partial else f"reduce_lanes<{op}, 4>({value}, {w.site(stmt)})"
        w.line(f"{dst} = {value if stmt.clear else f'{op}::combine({dst}, {value})'};")


def largest(w: Writer, tile: ir.Buffer, limit: ir.Buffer) -> str:
    """Of what the thread has of each row, where that is above the limit."""
    name, span = f"{tile.name}_largest", w.span(plan.own_columns(w.kernel, tile.shape[1]))
    w.line(f"Fragment<float, {plan.registers(w.kernel, limit)}> {name};")
    w.line(f"largest_of_rows<{span}>({name}, {limit.name}, {tile.name});")
    return name


def _down_lanes(w: Writer, stmt: ir.Reduce, op: str, value: str) -> str:
    """The lanes that have a column lie 4 apart."""
    if not stmt.partial:
        if value != "own":
            w.line(f"float own = {value};")
        combined = f"own = {op}::combine(own, shuffle_xor(own, lanes, {w.site(stmt)}));"
        w.line("TILEOPS_UNROLL")
        w.line(f"for (int lanes = 16; lanes >= 4; lanes /= 2) {combined}")
        return "own"
    return value


def chunks(w: Writer, stmt: Chunks) -> None:
    """`columns` at a time, through shared memory."""
    *work, last = stmt.body
    tile, per = ir.buffer_of(last.dst), stmt.columns
    with w.loop("q", plan.own_columns(w.kernel, last.dst.shape[1]) // per), w.of_blocks():
        q = w.declare_row(last.dst, per)
        for inner in work:
            _chunk(w, inner, tile, per, q)
        w.quote(last.location)
        short = plan.columns_held(w.kernel, last.src) == per and (w.blocks == 1 or last.src.shape[1] > per)
        first = "0" if short else _register(w, last.src, f"q * {w.span(per)}", None, stmt)
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
        target, at = ir.buffer_of(store.buffer).name, _register(w, store.buffer, start, "", stmt)
        shared = [] if w.blocks > 1 and not start and len(stmt.vars) == 2 else None
        values = [element(w, value, start, odd, stmt, shared) for odd in (("", " + 1") if pairs else ("",))]
        assignment = f"round_pair({target}, {at}, {', '.join(values)});" if pairs else f"{target}[{at}] = {values[0]};"
        if shared is None:
            w.each(assignment, "x", registers, step=1 + pairs)
            continue
        with w.loop("x", registers, step=1 + pairs):
            for number, word in enumerate(shared):
                w.line(f"const float element_{number} = {word};")
            w.each(assignment, "h", w.blocks)


def _register(w: Writer, tile: ir.Tile, start: str, odd: str | None, stmt: ir.Stmt) -> str:
    """Where register x of a tile lies in its fragment; without `odd`, where x is counted from. Of a row vector, its row's."""
    buffer = ir.buffer_of(tile)
    if len(buffer.shape) == 1 and plan.down_rows(w.kernel) and len(stmt.vars) == 2:
        x = f"({start} + x)" if start else _in_block(w, stmt, "x")
        return w.fragments.column_register(x, odd or "")
    if len(buffer.shape) == 1:
        return "x" if len(stmt.vars) == 1 else w.fragments.row_register(w, "x")
    columns = plan.own_columns(w.kernel, buffer.shape[1])
    whole = plan.columns_held(w.kernel, buffer) == columns
    terms = [f"h * {w.span(columns)}"] if whole and w.blocks > 1 else []
    if isinstance(tile, ir.View):
        origin = tile.origin[1]
        match origin:
            case ir.Const(value=first):
                terms += [str(w.span(first))] * (first > 0)
            case ir.Call(op="mul", args=(var, ir.Const(value=columns))):
                terms.append(f"{w.number(var, 3)} * {w.span(columns)}")
            case _:
                terms.append(f"{w.number(origin, 3)} * {w.span(8)} / 8")
    terms += [start] if start and whole else []
    return " + ".join(terms if odd is None else [*terms, f"x{odd}"])


def element(w: Writer, value: ir.Expr, start: str, odd: str, stmt: ir.Parallel, shared: list | None = None) -> str:
    """The expression; words that read shared memory for all blocks of rows go to `shared`."""
    table = {}
    for load in {load for load in ir.loads(value) if load.buffer.scope == "shared"}:
        if len(load.indices) == 1:
            column = w.fragments.column(w, f"({start} + x)" if start else "x") + w.part(_columns(w, stmt))
            word = f"load_shared({load.buffer.name}, {column}{odd}, {w.site(stmt)})"  # x is even where pairs are taken
            if shared is not None:
                shared.append(word)
                word = f"element_{len(shared) - 1}"
            table[load] = ir.Var(load.dtype, word)  # a word stands for the element
        else:
            part = ir.Buffer(f"{load.buffer.name}_part", "fragment", load.buffer.shape, load.dtype)
            table[load] = replace(load, buffer=part)
    value = with_parameters(w.kernel, w.named(ir.replaced(value, table | _numbers(w, start, odd, stmt))))

    def register(tile: ir.Tile) -> str:
        loaded_here = tile not in w.kernel.layouts and isinstance(tile, ir.Buffer)
        return f"x{odd}" if loaded_here else _register(w, tile, start, odd, stmt)

    return statement(value, register)


def _numbers(w: Writer, start: str, odd: str, stmt: ir.Parallel) -> dict[ir.Expr, ir.Expr]:
    """The loop's indices, where they are numbers, as those of the tile's row and column.

    A comparison of key + column becomes one of the register's part of the column with what is the same for all registers of
    the row: one instruction each, and no register for each column.
    """
    (row, *columns), x = stmt.vars, f"({start} + x{odd})" if start else f"x{odd}"
    used, table = {e for store in stmt.body for e in ir.as_numbers(store.value)}, {}
    if row in used:
        table[row] = replace(row, name=f"({_tile_row(w, stmt, 'x') if columns else w.fragments.kept(w, 'x')})")
    for column in used.intersection(columns):
        at = w.fragments.column(w, _in_block(w, stmt, x))
        table[column] = replace(column, name=f"({at}{w.part(_columns(w, stmt))})")
    for expr in used:
        match expr:
            case ir.Call(op="lt", args=(ir.Call(dtype=dtype, op="add", args=(a, b)), limit)) if [b] == columns:
                if b not in {*ir.subexprs(a), *ir.subexprs(limit)}:
                    for load in ir.loads(limit):  # of its row
                        table[load] = ir.Var(dtype, f"{load.buffer.name}[{_register(w, load.buffer, start, odd, stmt)}]")
                    own, others = w.fragments.column_parts(w, x)
                    others = f"({others}{w.part(_columns(w, stmt))})" if plan.parts(w.kernel) > 1 else others
                    bound = ir.Call(dtype, "sub", (ir.Call(dtype, "sub", (limit, a)), ir.Var(dtype, others)))
                    table[expr] = ir.Var("bool", f"{own} < {w.number(ir.replaced(bound, table))}")
    return table
