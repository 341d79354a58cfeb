"""The text of each statement of a role, in device words."""

from contextlib import nullcontext
from itertools import takewhile

from tileops_dsl import ir, plan
from tileops_dsl.codegen.arithmetic import with_parameters
from tileops_dsl.codegen.cuda import fill, printed
from tileops_dsl.codegen.element_loops import chunks, largest, parallel, reduce
from tileops_dsl.codegen.expressions import statement
from tileops_dsl.codegen.moves import copy, each_box_of_rows, fill_shared, issue_copy
from tileops_dsl.codegen.products import product, settle
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.schedule import Advance, Alone, At, Await, Chunks, Fence, Issue, Meet, One, Retire, Signal, Sync, Unrolled


def body(w: Writer, stmts, spaced: bool = False) -> None:
    """What a group computed for products, up to the next wait, is in its registers before the first of them."""
    stmts, flying = list(_unfolded(stmts)), False
    while stmts:
        run = _alternatives(stmts)
        if spaced and len(w.lines[-1]) and not w.lines[-1].endswith("{") and isinstance(stmts[0], ir.If | Unrolled):
            w.line()
        w.quote(stmts[0].location)
        if _is_product(stmts[0]) and not flying:
            begun = [s.op for s in takewhile(lambda s: not _lands(s), stmts) if _is_product(s)]
            settle(w, [gemm for gemm in begun if gemm.a.scope == "fragment"])
        flying = _is_product(stmts[0]) or (flying and not _lands(stmts[0]))
        if isinstance(stmts[0], ir.If):
            alternatives(w, run)
        else:
            w.statements[type(stmts[0])](w, stmts[0])
        del stmts[: len(run)]


def _unfolded(stmts):
    """With the loop variable's value for it, where that is another."""
    for stmt in stmts:
        if isinstance(stmt, At):
            yield from _unfolded(ir.replaced(stmt.body, {stmt.var: stmt.value}))
        else:
            yield stmt


def _is_product(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, Issue) and isinstance(stmt.op, ir.Gemm)


def _lands(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, Retire) and stmt.kind == "product"


def _alternatives(stmts: list[ir.Stmt]) -> list[ir.Stmt]:
    """The first statement; with it, conditions that exclude each other: one number compared with different constants."""

    def excludes(stmt: ir.Stmt) -> bool:
        conditions = [s.condition for s in (stmts[0], stmt) if isinstance(s, ir.If) and isinstance(s.condition, ir.Call)]
        return len(conditions) == 2 and all(c.op == "eq" for c in conditions) and conditions[0].args[0] == conditions[1].args[0]

    run = list(takewhile(excludes, stmts))
    constants = [s.condition.args[1] for s in run]
    return run if len(set(constants)) == len(run) > 1 and all(isinstance(c, ir.Const) for c in constants) else stmts[:1]


def alternatives(w: Writer, run: list[ir.If]) -> None:
    """A switch; without the last comparison where only one value is left: its registers would be copied for none of them."""
    for number, stmt in enumerate(run):
        rest = number and stmt is run[-1] and _exhausts(w, run)
        w.largest = {}
        condition = ir.replaced(stmt.condition, _any_of(w, stmt))
        text = w.number(condition)
        if stmt.name:
            w.line(f"const bool {stmt.name} = {text};")
        w.line("} else {" if rest else f"{'} else ' if number else ''}if ({stmt.name or text}) {{")
        w.depth += 1
        w.conditions.append(stmt.condition)
        with w.scope():
            w.name_numbers(stmt.body)
            w.body(w, stmt.body)
        w.conditions.pop()
        w.largest = {}
        w.depth -= 1
    w.line("}")


def _any_of(w: Writer, stmt: ir.If) -> dict[ir.Expr, ir.Expr]:
    """Words for what the condition asks of the thread's elements, and so of its warp's."""
    words = {}
    for any_of in (e for e in ir.subexprs(stmt.condition) if isinstance(e, ir.AnyOf)):
        if isinstance(any_of.test, ir.Var):  # asked before
            words[any_of] = any_of.test
            continue
        own, *tile = (load.buffer for load in ir.loads(any_of.test))
        registers = plan.registers(w.kernel, own)
        if tile:  # any_above, of limits and a tile
            w.largest = {tile[0]: largest(w, *tile, own)}  # for a maximum under the condition
            held = [f"{own.name}[{x}] < {w.largest[tile[0]]}[{x}]" for x in range(registers)]
        else:
            test = with_parameters(w.kernel, any_of.test)
            held = [statement(test, lambda tile, x=x: str(x)) for x in range(registers)]
        words[any_of] = ir.Var("bool", f"any_of_warp({' || '.join(held)}, {w.site(stmt)})")
    return words


def _exhausts(w: Writer, run: list[ir.If]) -> bool:
    """Whether the conditions and those around them leave no value of what they compare."""
    compared = run[0].condition.args[0]
    below = w.kernel.below.get(compared.name, 0) if isinstance(compared, ir.Var) else 0
    around = [c for c in w.conditions if isinstance(c, ir.Call) and c.op == "ne" and c.args[0] == compared]
    values = {c.args[1].value for c in (*around, *(stmt.condition for stmt in run)) if isinstance(c.args[1], ir.Const)}
    return below > 0 and set(range(below)) <= values


def _persistent(w: Writer, stmt: ir.Persistent) -> None:
    """Down the rows of a section of `group_size` (of clusters), then to the next column; item by item."""
    if stmt.start:
        (item,), (end,) = stmt.vars, stmt.extents
        with w.loop(str(item), w.number(end), w.number(stmt.start), unrolled=False), w.scope(item):
            w.name_numbers(stmt.body)
            body(w, stmt.body, spaced=True)
        return
    *items, row, column = stmt.vars
    ctas, size = w.kernel.cluster[0], stmt.group_size
    head, step = "int tile = first", "clusters"
    if stmt.alternate:  # `tile` is asked for behind the loop
        w.line(f"int tile = first + (group - {w.role.groups[0]}) * clusters;")
        head, step = "", f"{len(w.role.groups)} * clusters"
    if stmt.zigzag:  # no pairs where each CTA has a tile at most
        w.line("const int pair = tiles > clusters ? 2 : 1;")
        head, step = "int tile = first * pair", "(tile + 1) % pair ? 1 : pair * (clusters - 1) + 1"
    w.line("TILEOPS_NO_UNROLL")
    with w.block(f"for ({head}; tile < tiles; tile += {step})"):
        if stmt.section is not None:
            _longest_first(w, stmt)
        elif size == ctas == 1:  # few numbers are kept: a producer has few registers
            for item in items:
                w.line(f"const int {item} = tile / columns / rows;")
            w.line(f"const int {row} = tile / columns{' % rows' * len(items)};")
            if stmt.zigzag:
                w.line("const int place = tile % columns;")
            of_place = "place % 2 ? place / 2 : columns - 1 - place / 2" if stmt.zigzag else "tile % columns"
            w.line(f"const int {column} = {of_place};")
        else:
            _sections(w, stmt)
        with w.scope(*stmt.vars):
            w.name_numbers(stmt.body)
            body(w, stmt.body, spaced=True)


def _longest_first(w: Writer, stmt: ir.Persistent) -> None:
    *items, row, column = stmt.vars
    size = w.number(stmt.section, 3)
    w.line(f"const int section = tile / ({size} * columns);")
    w.line(f"const int height = min({size}, tiles / columns - section * {size});")
    w.line(f"const int place = tile - section * {size} * columns;")
    w.line(f"const int rest = section * {size} + place % height;")
    w.line(f"const int {column} = columns - 1 - place / height;")
    for item in items:
        w.line(f"const int {item} = rest / rows;")
    w.line(f"const int {row} = rest{' % rows' * len(items)};")


def _sections(w: Writer, stmt: ir.Persistent) -> None:
    *items, row, column = stmt.vars
    ctas, size = w.kernel.cluster[0], stmt.group_size
    place = "place" if items else "tile"
    for item in items:
        w.line(f"const int {item} = tile / (rows * columns);")
        w.line("const int place = tile % (rows * columns);")
    w.line(f"const int section = {place} / ({size} * columns);")
    w.line(f"const int height = min(rows - section * {size}, {size});")
    w.line(f"const int rest = {place} - section * {size} * columns;")
    index = f"section * {size} + rest % height"
    w.line(f"const int {row} = {f'({index}) * {ctas} + rank' if ctas > 1 else index};")
    w.line(f"const int {column} = rest / height;")


def pipelined(w: Writer, stmt: ir.Pipelined) -> None:
    if w.late:
        w.line("int before = 0;")
    start, end = w.number(stmt.start), w.number(stmt.extent)
    with w.loop(stmt.var, end, start, stmt.step, unrolled=False), w.scope(stmt.var):
        w.name_numbers(stmt.body)
        w.body(w, stmt.body)


def _alone(w: Writer, stmt: Alone) -> None:
    """The next tile is the group's if there was one before it, or none at all."""
    group = w.role.groups[0 if stmt.which == "first" else -1]
    with w.block("if (tile - clusters < tiles)" if stmt.which == "next" else f"if (group == {group})"):
        body(w, stmt.body)


def _meet(w: Writer, stmt: Meet) -> None:
    number = w.number(stmt.number) if isinstance(stmt.number, ir.Expr) else stmt.number
    w.line(f"named_barrier_{'sync' if stmt.waits else 'arrive'}({number}, 256, {w.site(stmt)});")


def _advance(w: Writer, stmt: Advance) -> None:
    stages, stage = stmt.ring.stages, w.index(stmt.ring)
    phase = w.phase(stmt.ring)
    if stmt.steps:
        w.line(f"{stage} += {w.number(stmt.steps)};")
        w.line(f"{phase} ^= {stage} / {stages} & 1;")
        w.line(f"{stage} %= {stages};")
        return
    if w.late:
        w.line(f"before = {stage};")
    w.line(f"if (++{stage} == {stages}) {{ {stage} = 0; {phase} ^= 1; }}" if stages > 1 else f"{phase} ^= 1;")


def _unrolled(w: Writer, stmt: Unrolled) -> None:
    with w.loop(str(stmt.var), stmt.extent):
        body(w, stmt.body)


def _one(w: Writer, stmt: One) -> None:
    with w.block("if (thread == 0)"):
        body(w, stmt.body)


def retire(w: Writer, stmt: Retire) -> None:
    """What was computed since the products began is done by then."""
    word = {"product": "wgmma_wait", "read": "store_wait_read", "store": "store_wait"}[stmt.kind]
    if stmt.after:  # the word wants a number that is never negative
        elements = [f"{vector.name}[{x}]" for vector in stmt.after for x in range(plan.registers(w.kernel, vector))]
        w.line(f"before_wait({' + '.join(f'{e} * {e}' for e in elements)}, {w.site(stmt)});")
    w.line(f"{word}<{stmt.pending}>({w.site(stmt)});")
    settle(w, stmt.of)


def _await(w: Writer, stmt: Await) -> None:
    """A writer's first waits pass: it takes the other parity.

    Of several warps that load, only that waits which loads: the phases of the others' tiles are bound to nothing that they do.
    """
    barrier = plan.barrier_named(w.kernel, stmt.barrier)
    phase, stage = w.phase(barrier.ring), w.index(barrier.ring)
    if barrier.common:
        alone = plan.of_rows(w.role) and not any(load.box_row for load in plan.loads_of(w.kernel, barrier.ring))
        guard, parity = "if (warp == 0) " * bool(alone), " ^ 1" * (barrier.kind == "empty")
        w.line(f"{guard}wait({w.slot(barrier)}, {phase}{parity}, {w.site(stmt)});")
    else:  # a bit for each stage: a tile need not go round all of them
        w.line(f"wait({w.slot(barrier)}, ({phase} >> {stage}) & 1, {w.site(stmt)});")
        w.line(f"{phase} ^= 1 << {stage};")


def _signal(w: Writer, stmt: Signal) -> None:
    barrier = plan.barrier_named(w.kernel, stmt.barrier)
    if barrier.kind == "full":
        w.line(f"{_by_first(w, stmt)}arrive_expect_bytes({w.slot(barrier)}, {barrier.bytes}, {w.site(stmt)});")
        return
    peers = plan.peers(w.kernel, barrier.ring)
    slot = w.slot(barrier) if stmt.which == "this" else f"{barrier.name} + before"
    guard = f"{barrier.ring.var} > 0 && " if stmt.which == "before" else ""
    if peers > 1:
        w.line(f"if ({guard}thread < {peers}) arrive_at_rank({slot}, thread, {w.site(stmt)});")
    else:
        w.line(f"if ({guard}lane == 0) arrive({slot}, {w.site(stmt)});")


def _by_first(w: Writer, stmt: ir.Stmt) -> str:
    """A condition, where the producer has several threads."""
    return f"if (warp == 0 && elect_one({w.site(stmt)})) " if plan.of_rows(w.role) else ""


def _issue(w: Writer, stmt: Issue) -> None:
    """A box of rows may arrive before its barrier is told of it."""
    if isinstance(stmt.op, ir.Gemm):
        product(w, stmt)
        return
    by_rows, first = getattr(stmt.op, "box_row", None), _by_first(w, stmt)[:-1]
    with each_box_of_rows(w, stmt.op) if by_rows else w.block(first) if first else nullcontext():
        issue_copy(w, stmt)


def _sync(w: Writer, stmt: Sync) -> None:
    groups = w.role.groups
    which = f"{groups[-1] + 1}, {plan.GROUP * len(groups)}" if stmt.all_groups else f"group, {plan.GROUP}"
    w.line(f"named_barrier_sync({which}, {w.site(stmt)});")


def _print(w: Writer, stmt: ir.Print) -> None:
    """Groups that alternate, and threads without groups, print for themselves."""
    printed(w, stmt, w.role.groups[0] if plan.readers(w.kernel) > 1 else None)


STATEMENTS = {
    Advance: _advance,
    Alone: _alone,
    Await: _await,
    Chunks: chunks,
    Fence: lambda w, stmt: w.line(f"fence_async_shared({w.site(stmt)});"),
    Issue: _issue,
    Meet: _meet,
    One: _one,
    Retire: retire,
    Signal: _signal,
    Sync: _sync,
    Unrolled: _unrolled,
    ir.Copy: copy,
    ir.Fill: lambda w, stmt: (fill if stmt.buffer.scope == "fragment" else fill_shared)(w, stmt),
    ir.Parallel: parallel,
    ir.Persistent: _persistent,
    ir.Pipelined: pipelined,
    ir.Print: _print,
    ir.Reduce: reduce,
}
