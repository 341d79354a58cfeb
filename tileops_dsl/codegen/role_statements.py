"""The text of each statement of a role, in device words."""

from itertools import takewhile

from tileops_dsl import ir, plan
from tileops_dsl.codegen.element_loops import chunks, parallel
from tileops_dsl.codegen.moves import copy, issue_copy
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.instruction_layouts import Operand, Swizzle
from tileops_dsl.schedule import Advance, Alone, Await, Chunks, Fence, Issue, One, Retire, Signal, Sync, Turn, Unrolled

SWIZZLES = {Swizzle.B128: "k128", Swizzle.B64: "k64", Swizzle.B32: "k32"}


def body(w: Writer, stmts, spaced: bool = False) -> None:
    stmts = list(stmts)
    while stmts:
        run = _alternatives(stmts)
        if spaced and len(w.lines[-1]) and not w.lines[-1].endswith("{") and isinstance(stmts[0], ir.If | Unrolled):
            w.line()
        w.quote(stmts[0].location)
        if isinstance(stmts[0], ir.If):
            _if(w, run)
        else:
            w.statements[type(stmts[0])](w, stmts[0])
        del stmts[: len(run)]


def _alternatives(stmts: list[ir.Stmt]) -> list[ir.Stmt]:
    """The first statement; with it, conditions that exclude each other: one number compared with different constants."""

    def excludes(stmt: ir.Stmt) -> bool:
        conditions = [s.condition for s in (stmts[0], stmt) if isinstance(s, ir.If) and isinstance(s.condition, ir.Call)]
        return len(conditions) == 2 and all(c.op == "eq" for c in conditions) and conditions[0].args[0] == conditions[1].args[0]

    run = list(takewhile(excludes, stmts))
    constants = [s.condition.args[1] for s in run]
    return run if len(set(constants)) == len(run) > 1 and all(isinstance(c, ir.Const) for c in constants) else stmts[:1]


def _if(w: Writer, run: list[ir.If]) -> None:
    """A switch; without the last comparison where only one value is left: its registers would be copied for none of them."""
    for number, stmt in enumerate(run):
        rest = number and stmt is run[-1] and _exhausts(w, run)
        w.line("} else {" if rest else f"{'} else ' if number else ''}if ({w.number(stmt.condition)}) {{")
        w.depth += 1
        w.conditions.append(stmt.condition)
        body(w, stmt.body)
        w.conditions.pop()
        w.depth -= 1
    w.line("}")


def _exhausts(w: Writer, run: list[ir.If]) -> bool:
    """Whether the conditions and those around them leave no value of what they compare."""
    compared = run[0].condition.args[0]
    below = w.kernel.below.get(compared.name, 0) if isinstance(compared, ir.Var) else 0
    around = [c for c in w.conditions if isinstance(c, ir.Call) and c.op == "ne" and c.args[0] == compared]
    values = {c.args[1].value for c in (*around, *(stmt.condition for stmt in run)) if isinstance(c.args[1], ir.Const)}
    return below > 0 and set(range(below)) <= values


def _persistent(w: Writer, stmt: ir.Persistent) -> None:
    """Down the rows of a section of `group_size` (of clusters), then to the next column; item by item."""
    *items, row, column = stmt.vars
    ctas, size = w.kernel.cluster[0], stmt.group_size
    head, step = "int tile = first", "clusters"
    if stmt.alternate:  # `tile` is asked for behind the loop
        w.line(f"int tile = first + (group - {w.role.groups[0]}) * clusters;")
        head, step = "", f"{len(w.role.groups)} * clusters"
    w.line("TILEOPS_NO_UNROLL")
    with w.block(f"for ({head}; tile < tiles; tile += {step})"):
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
        body(w, stmt.body, spaced=True)


def _pipelined(w: Writer, stmt: ir.Pipelined) -> None:
    late = w.role.warp is None and w.late
    if late:
        w.line("int before = 0;")
    w.line("TILEOPS_NO_UNROLL")
    with w.block(f"for (int {stmt.var} = 0; {stmt.var} < {w.steps(stmt)}; ++{stmt.var})"):
        body(w, stmt.body)


def _alone(w: Writer, stmt: Alone) -> None:
    """The next tile is the group's if there was one before it, or none at all."""
    with w.block("if (tile - clusters < tiles)" if stmt.which == "next" else f"if (group == {w.role.groups[-1]})"):
        body(w, stmt.body)


def _turn(w: Writer, stmt: Turn) -> None:
    """Barriers behind the groups' own: a group waits at one of its own, and arrives at the other's."""
    first, last = w.role.groups
    if stmt.takes:
        w.line(f"named_barrier_sync(group + 2, 256, {w.site(stmt)});")
    else:
        w.line(f"named_barrier_arrive({first + last + 2} - group, 256, {w.site(stmt)});")


def _advance(w: Writer, stmt: Advance) -> None:
    if stmt.steps:
        loop = next(s for s in ir.walk(w.kernel.body) if isinstance(s, ir.Pipelined) and s.var == stmt.ring.var)
        w.line(f"stage += {w.steps(loop)};")
        w.line(f"phase ^= stage / {stmt.ring.stages} & 1;")
        w.line(f"stage %= {stmt.ring.stages};")
        return
    if w.role.warp is None and w.late:
        w.line("before = stage;")
    w.line(f"if (++stage == {stmt.ring.stages}) {{ stage = 0; phase ^= 1; }}")


def _unrolled(w: Writer, stmt: Unrolled) -> None:
    with w.loop(str(stmt.var), stmt.extent):
        body(w, stmt.body)


def _one(w: Writer, stmt: One) -> None:
    with w.block("if (thread == 0)"):
        body(w, stmt.body)


def _issue(w: Writer, stmt: Issue) -> None:
    (_product if isinstance(stmt.op, ir.Gemm) else issue_copy)(w, stmt)


def _product(w: Writer, stmt: Issue) -> None:
    gemm, kernel = stmt.op, w.kernel
    a, b = plan.operands(kernel, gemm)
    rows = f" + (group - {w.role.groups[0]}) * {w.blocks * a.group_bytes // a.tile.element_bytes}"
    _matrix(w, "a", gemm.a, a, "" if plan.tile_loop(kernel).alternate else rows)
    _matrix(w, "b", gemm.b, b, "")
    w.line(f"wgmma_fence({w.site(stmt)});")
    block, to = (f" + h * {a.group_bytes}", f"h * {w.span(gemm.c.shape[1])}") if w.blocks > 1 else ("", "0")
    operands = f"a{block} + {_step(a)}, b + {_step(b)}"
    word = f"wgmma<{gemm.c.shape[1]}>({gemm.c.name}, {to}, {operands}, {_accumulate(w, gemm.clear)}, {w.site(stmt)});"
    w.line("TILEOPS_UNROLL")
    if w.blocks == 1:
        w.line(f"for (int q = 0; q < {a.steps}; ++q) {word}")
    else:
        with w.block(f"for (int q = 0; q < {a.steps}; ++q)"), w.of_blocks():
            w.line(word)
    w.line(f"wgmma_commit({w.site(stmt)});")


def _matrix(w: Writer, name: str, buffer: ir.Buffer, operand: Operand, rows: str) -> None:
    layout = operand.tile
    leading = f", {operand.leading}" if operand.mn_major else ""
    template = f"Swizzle::{SWIZZLES[layout.swizzle]}, Major::{'kMN' if operand.mn_major else 'kK'}, {operand.stride}{leading}"
    place = f"{buffer.name}{w.stage(buffer, layout.bytes // layout.element_bytes)}{rows}"
    w.line(f"const auto {name} = matrix_at<{template}>({place});")


def _step(operand: Operand) -> str:
    """Bytes to the operand of instruction q: within a box, then from box to box."""
    if all(operand.advance(q) == q * operand.advance(1) for q in range(operand.steps)):
        return f"q * {operand.advance(1)}"
    in_box = operand.tile.swizzle.row_bytes // 32
    return f"(q / {in_box} * {operand.advance(in_box)} + q % {in_box} * {operand.advance(1)})"


def _accumulate(w: Writer, clear: ir.Expr) -> str:
    match clear:
        case ir.Call(op="eq", args=(ir.Var() as var, ir.Const(value=0))):
            return f"{var} + q > 0"
    return f"q > 0 || !({w.number(clear)})"


def _retire(w: Writer, stmt: Retire) -> None:
    word = {"product": "wgmma_wait", "read": "store_wait_read", "store": "store_wait"}[stmt.kind]
    w.line(f"{word}<{stmt.pending}>({w.site(stmt)});")
    if stmt.kind == "product" and stmt.pending == 0:
        for accumulator in dict.fromkeys(s.c for s in ir.walk(w.kernel.body) if isinstance(s, ir.Gemm)):
            w.line(f"fence_operand({accumulator.name});")


def _await(w: Writer, stmt: Await) -> None:
    """A writer's first waits pass: it takes the other parity."""
    barrier = plan.barrier_named(w.kernel, stmt.barrier)
    phase, stage = w.phase(barrier), f"{barrier.ring.var} % {barrier.ring.stages}"
    if barrier.common:
        w.line(f"wait({w.slot(barrier)}, {phase}{' ^ 1' if barrier.kind == 'empty' else ''}, {w.site(stmt)});")
    else:  # a bit for each stage: a tile need not go round all of them
        w.line(f"wait({w.slot(barrier)}, ({phase} >> {stage}) & 1, {w.site(stmt)});")
        w.line(f"{phase} ^= 1 << {stage};")


def _signal(w: Writer, stmt: Signal) -> None:
    barrier = plan.barrier_named(w.kernel, stmt.barrier)
    if barrier.kind == "full":
        w.line(f"arrive_expect_bytes({w.slot(barrier)}, {barrier.bytes}, {w.site(stmt)});")
        return
    peers = plan.peers(w.kernel, barrier.ring)
    stage = "stage" if stmt.which == "this" else "before"
    guard = f"{barrier.ring.var} > 0 && " if stmt.which == "before" else ""
    if peers > 1:
        w.line(f"if ({guard}thread < {peers}) arrive_at_rank({barrier.name} + {stage}, thread, {w.site(stmt)});")
    else:
        w.line(f"if ({guard}lane == 0) arrive({barrier.name} + {stage}, {w.site(stmt)});")


def _sync(w: Writer, stmt: Sync) -> None:
    w.line(f"named_barrier_sync(group, 128, {w.site(stmt)});")


def _fence(w: Writer, stmt: Fence) -> None:
    w.line(f"fence_async_shared({w.site(stmt)});")


STATEMENTS = {
    Advance: _advance,
    Alone: _alone,
    Await: _await,
    Chunks: chunks,
    Fence: _fence,
    Issue: _issue,
    One: _one,
    Retire: _retire,
    Signal: _signal,
    Sync: _sync,
    Turn: _turn,
    Unrolled: _unrolled,
    ir.Copy: copy,
    ir.Parallel: parallel,
    ir.Persistent: _persistent,
    ir.Pipelined: _pipelined,
}
