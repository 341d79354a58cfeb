"""The text of T.ws: a frame without a producer, and the statements of groups that load, wait and meet by themselves."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

from tileops_dsl import ir, plan
from tileops_dsl.codegen import role_statements as roles
from tileops_dsl.codegen.arithmetic import with_parameters
from tileops_dsl.codegen.cuda import fill, terms
from tileops_dsl.codegen.element_loops import element, parallel
from tileops_dsl.codegen.expressions import CTYPES, statement
from tileops_dsl.codegen.moves import coordinates, copy, hint
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.instruction_layouts import Operand
from tileops_dsl.schedule import At, Await, Issue, Meet, One, Retire, Sync, op_of


@dataclass
class GroupWriter(Writer):
    """A number has a name from where its loop variables have a value: another one where they have another (At)."""

    declared: dict[ir.Expr, ir.Var] = field(default_factory=dict)  # with the text that stands for each
    bound: set[ir.Var] = field(default_factory=set)  # loop variables that have a value
    flying: tuple[ir.Gemm, ...] = ()  # products that may be unfinished
    following: ir.Stmt | None = None  # behind the one that is being written

    def named(self, expr: ir.Expr) -> ir.Expr:
        return ir.replaced(expr, self.declared)

    @cached_property
    def names(self) -> dict[ir.Expr, str]:
        """Of elements of tensors, and what the author gave to numbers; each behind those that it is made of."""
        found = {e for s in ir.walk(self.kernel.body) for x in ir.exprs_of(s) for e in ir.subexprs(x)}
        names: dict[ir.Expr, str] = {}
        for expr in sorted((e for e in found if isinstance(e, ir.Element) and e not in self.kernel.named), key=str):
            name = "_".join([expr.tensor.name, *(str(i) for i in expr.indices if isinstance(i, ir.Const))])
            names[expr] = name + f"_{len(names)}" * (name in names.values())
        return dict(sorted((names | self.kernel.named).items(), key=lambda item: len(list(ir.subexprs(item[0])))))

    def name_numbers(self, stmts) -> None:
        """Those that the statements and what stands in them use, as far as their variables have a value."""
        used, loops = _used(stmts), {s.var for s in ir.walk(self.kernel.body) if isinstance(s, ir.Pipelined)}
        for expr, name in self.names.items():
            if expr not in used or expr in self.declared or not loops.intersection(ir.subexprs(expr)) <= self.bound:
                continue
            ctype = CTYPES[expr.dtype]
            if isinstance(expr, ir.Element):
                pointer, at = f"global<{ctype}>(p.{expr.tensor.name})", self.offset(expr.tensor, expr.indices)
                self.line(f"Fragment<{ctype}, 1> {name};")
                self.line(f"load_global<1>({name}, 0, {pointer}, {at}, {self.site_at(self.kernel.location)});")
                name = f"{name}[0]"
            else:
                self.line(f"const {ctype} {name} = {self.number(expr)};")
            self.declared[expr] = ir.Var(expr.dtype, name)

    def offset(self, tensor: ir.Tensor, indices) -> str:
        """The last dimension has unit stride."""
        *outer, last = (self.number(i, 3) for i in indices)
        return " + ".join([*terms(tensor, outer), *[last] * (last != "0" or not outer)])

    @contextmanager
    def scope(self, *variables: ir.Var):
        """Names that are made here end here; the variables have a value of their own, and what is made of them another one."""
        outside = self.declared, self.bound
        self.declared = {e: name for e, name in self.declared.items() if not {*variables} & {*ir.subexprs(e)}}
        self.bound = self.bound | {*variables}
        yield
        self.declared, self.bound = outside


def _used(stmts) -> set[ir.Expr]:
    """Expressions, but those that are made of a variable which has another value where they stand."""
    found: set[ir.Expr] = set()
    for stmt in stmts:
        inner = _used(getattr(stmt, "body", ()))
        found |= {e for e in inner if stmt.var not in ir.subexprs(e)} if isinstance(stmt, At) else inner
        found |= {e for x in ir.exprs_of(op_of(stmt)) for e in ir.subexprs(x)}
    return found


def declare(w: GroupWriter) -> None:
    """What is the same for all groups."""
    for block in w.kernel.blocks:
        w.line(f"const int {block.name} = static_cast<int>(block_index_{block.name[-1]}());")
    w.name_numbers([stmt for role in w.kernel.roles for stmt in role.body])
    w.line()


def body(w: GroupWriter, stmts) -> None:
    """Waits for all boxes of a product's operand stand in its loop."""
    waits: list[Await] = []
    stmts = _joined(stmts)
    for stmt, w.following in zip(stmts, [*stmts[1:], None], strict=True):
        w.quote(stmt.location.caller or stmt.location)
        into = isinstance(stmt, Issue) and isinstance(stmt.op, ir.Gemm) and len(waits) == len(plan.boxes(stmt.op.b)) > 1
        if waits and not into and not (isinstance(stmt, Await) and _follows(stmt, waits[-1])):
            _await(w, waits)
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


def _at(w: GroupWriter, stmt: At) -> None:
    with w.block(""):
        value = w.number(stmt.value)
        if stmt.var in ir.subexprs(stmt.value):
            w.line(f"const int next = {value};")
            value = "next"
        w.line(f"const int {stmt.var} = {value};")
        with w.scope(stmt.var):
            w.name_numbers([replace(inner, body=()) for inner in stmt.body])
            body(w, stmt.body)


def _if(w: GroupWriter, stmt: ir.If) -> None:
    tests = {e for e in ir.subexprs(stmt.condition) if isinstance(e, ir.AnyOf)}
    words = {test: ir.Var("bool", f"any_of_warp({_any(w, test.test)}, {w.site(stmt)})") for test in tests}
    with w.block(f"if ({w.number(ir.replaced(stmt.condition, words))})"), w.scope():
        w.name_numbers(stmt.body)
        before = w.flying
        body(w, stmt.body)
    w.flying = tuple(dict.fromkeys((*before, *w.flying)))


def _any(w: GroupWriter, test: ir.Expr) -> str:
    """Of the thread's elements."""
    registers = plan.registers(w.kernel, ir.loads(test)[0].buffer)
    return " || ".join(statement(with_parameters(w.kernel, test), lambda tile, x=x: str(x)) for x in range(registers))


def _pipelined(w: GroupWriter, stmt: ir.Pipelined) -> None:
    """Products that are unfinished at the end are so at the beginning, too."""
    w.flying = plan.flying(stmt.body, w.flying)
    step = f"{stmt.var} += {stmt.step}" if stmt.step > 1 else f"++{stmt.var}"
    w.line("TILEOPS_NO_UNROLL")
    head = f"for (int {stmt.var} = {w.number(stmt.start)}; {stmt.var} < {w.number(stmt.extent)}; {step})"
    with w.block(head), w.scope(stmt.var):
        w.name_numbers(stmt.body)
        body(w, stmt.body)


def _registers(gemm: ir.Gemm) -> list[ir.Tile]:
    return [tile for tile in (gemm.c, gemm.a) if tile.scope == "fragment"]


def _retire(w: GroupWriter, stmt: Retire) -> None:
    """Registers of products that are still unfinished are not touched; where none is, there is nothing to wait for."""
    if stmt.of and not set(w.flying).intersection(stmt.of):
        return
    w.flying = plan.flying((stmt,), w.flying)
    roles.wait(w, stmt)
    held = [tile for gemm in w.flying for tile in _registers(gemm)]
    for tile in dict.fromkeys(tile for gemm in stmt.of for tile in _registers(gemm) if tile not in held):
        w.line(f"fence_operand({tile.name});")


def _await(w: GroupWriter, waits: list[Await]) -> None:
    """Of neighbouring boxes."""
    with _each(w, len(waits)) as box:
        _wait(w, waits[0], box)
    _turn_phase(w, waits)


def _wait(w: GroupWriter, first: Await, box: str) -> None:
    phase, index = w.phase(plan.barrier_named(w.kernel, first.barrier).ring), _index(first.index.value, box)
    w.line(f"wait({first.barrier} + {index}, {phase} >> {f'({index})' if ' ' in index else index} & 1, {w.site(first)});")


def _turn_phase(w: GroupWriter, waits: list[Await]) -> None:
    """A bit for each box."""
    phase = w.phase(plan.barrier_named(w.kernel, waits[0].barrier).ring)
    w.line(f"{phase} ^= {sum(1 << wait.index.value for wait in waits)};")


def _index(first: int, box: str) -> str:
    return box if box and not first else f"{first} + {box}" if box else str(first)


@contextmanager
def _each(w: GroupWriter, count: int):
    """A loop over boxes, if there are several, and its variable."""
    with w.loop("box", count) if count > 1 else nullcontext():
        yield "box" if count > 1 else ""


def _issue(w: GroupWriter, stmt: Issue) -> None:
    (_product if isinstance(stmt.op, ir.Gemm) else _load if plan.is_load(stmt.op) else _store)(w, stmt)


def _store(w: GroupWriter, stmt: Issue) -> None:
    with _boxes(w, stmt.op) as (_, place, at):
        w.line(f"tma_store(p.{stmt.op.dst.tensor.name}, {at}, {place}, {w.site(stmt)});")
    w.line(f"store_commit({w.site(stmt)});")


def _load(w: GroupWriter, stmt: Issue) -> None:
    """The barrier of each box is told its bytes; of a tile without boxes once, whatever TMA makes of it."""
    op, (root, first) = stmt.op, plan.boxes(stmt.op.dst)[0]
    barrier = plan.barrier_named(w.kernel, f"{root.name}_full")
    expect = f"arrive_expect_bytes({barrier.name} + %s, {barrier.bytes}, {w.site(stmt)});"
    if not root.box:
        w.line(expect % 0)
    with _boxes(w, op) as (box, place, at):
        index = _index(first, box) if root.box else "0"
        if root.box:
            w.line(expect % index)
        w.line(f"tma_load{hint(op)}({place}, p.{op.src.tensor.name}, {at}, {barrier.name} + {index}, {w.site(stmt)});")


@contextmanager
def _boxes(w: GroupWriter, op: ir.Copy):
    """Where each box lies in shared memory and in the tensor."""
    layout = w.kernel.layouts[ir.buffer_of(op.tile)]
    with _each(w, op.tile.shape[1] // layout.box_columns) as box:
        place = w.start(op.tile) + f" + box * {layout.box_bytes // layout.element_bytes}" * bool(box)
        yield box, place, coordinates(w, op, f"box * {layout.box_columns}" if box else 0, layout.rows)


def _product(w: GroupWriter, stmt: Issue, waits: list[Await] = ()) -> None:
    """What the group computed is in its registers before. A box is waited for in front of the instructions that read it."""
    gemm, held = stmt.op, [tile for flying in w.flying for tile in _registers(flying)]
    for tile in (tile for tile in _registers(gemm) if tile not in held):
        w.line(f"fence_operand({tile.name});")
    with w.block(""):
        operands = roles.operand_a(w, gemm)
        b = Operand(plan.tile_layout(w.kernel, gemm.b), not gemm.transpose_b)
        roles.matrix(w, "b", gemm.b, b, "")
        word = f"wgmma<{gemm.c.shape[1]}>({gemm.c.name}, 0, {operands}, b + {roles.step(b)}, {roles.accumulate(w, gemm.clear)}"
        count = b.steps // max(len(waits), 1)
        with _each(w, len(waits)) as box:
            if waits:
                _wait(w, waits[0], box)
            w.line(f"wgmma_fence({w.site(stmt)});")
            w.line("TILEOPS_UNROLL")
            first, end = (f"box * {count}", f"box * {count} + {count}") if box else (0, count)
            w.line(f"for (int q = {first}; q < {end}; ++q) {word}, {w.site(stmt)});")
        if waits:
            _turn_phase(w, waits)
        w.line(f"wgmma_commit({w.site(stmt)});")
    w.flying = (*w.flying, gemm)


def _meet(w: GroupWriter, stmt: Meet) -> None:
    w.line(f"named_barrier_{'sync' if stmt.waits else 'arrive'}({stmt.number}, 256, {w.site(stmt)});")


def _sync(w: GroupWriter, stmt: ir.Stmt) -> None:
    """A barrier behind those of two groups."""
    meets = [s.number for role in w.kernel.roles for s in ir.walk(role.body) if isinstance(s, Meet)]
    w.line(f"named_barrier_sync({max(meets, default=0) + 1 + w.role.groups[0]}, 128, {w.site(stmt)});")


def _copy(w: GroupWriter, stmt: ir.Copy) -> None:
    """Between a fragment and a tile in shared memory, or of a fragment into a tensor."""
    src, dst = stmt.src, stmt.dst
    if isinstance(src, ir.Region) or (isinstance(dst, ir.Region) and len(src.shape) == 1):
        copy(w, stmt)
    elif isinstance(dst, ir.Region):
        _store_pairs(w, stmt)
    elif len(dst.shape) == 2:  # from shared memory
        with w.loop("q", dst.shape[1] // 16):
            chunk = w.declare_row(src, 16)
            w.fragments.move(w, "load", ir.buffer_of(src), dst.name, f"q * {w.span(16)}", chunk, stmt)
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


def _store_pairs(w: GroupWriter, stmt: ir.Copy) -> None:
    """Two neighbouring elements at a time, of the rows and columns that the tensor has."""
    tensor, src = stmt.dst.tensor, stmt.src
    *outer, row, column = stmt.dst.origin
    numbers = [n.value for n in (column, tensor.dims[-1]) if isinstance(n, ir.Const)]
    inside = len(numbers) == 2 and numbers[0] + src.shape[1] <= numbers[1]
    own = f"{w.number(column, 2)} + lane % 4 * 2"
    with w.loop("y", 2):
        w.line(f"const int row = {w.number(row)} + {w.fragments.row(w, 'y')};")
        with w.block(f"if (row < {w.number(tensor.dims[-2])})"):
            first = " + ".join([*terms(tensor, [*(w.number(o, 3) for o in outer), "row"]), own])
            w.line(f"const auto first = global<{CTYPES[tensor.dtype]}>(p.{tensor.name}) + ({first});")
            w.line("TILEOPS_UNROLL")
            guard = "" if inside else f"if ({own} + x * 2 < {w.number(tensor.dims[-1])}) "
            word = f"store_global<2>(first, x * 2, {src.name}, x + y * 2, {w.site(stmt)});"
            w.line(f"for (int x = 0; x < {plan.registers(w.kernel, src)}; x += 4) {guard}{word}")


def _fill(w: GroupWriter, stmt: ir.Fill) -> None:
    """A fragment; or rows of boxes from one on, 16 bytes at a time."""
    if stmt.buffer.scope == "fragment":
        fill(w, stmt)
        return
    tile, layout = stmt.buffer, plan.tile_layout(w.kernel, stmt.buffer)
    per, row = 16 // layout.element_bytes, w.number(tile.origin[0], 3) if isinstance(tile, ir.View) else "0"
    elements = layout.box_bytes // layout.element_bytes
    with w.block(""):
        w.line(f"Fragment<{CTYPES[tile.dtype]}, {per}> value;")
        w.line(f"fill<{per}>(value, 0, {w.number(stmt.value)});")
        w.line("TILEOPS_NO_UNROLL")
        first = f"{row} * {layout.box_columns} + thread * {per}"
        with (
            w.block(f"for (int x = {first}; x < {elements}; x += {128 * per})"),
            w.loop("box", layout.columns // layout.box_columns),
        ):
            w.line(f"store_shared<{per}>({w.start(tile)} + box * {elements}, x, value, 0, {w.site(stmt)});")


def _parallel(w: GroupWriter, stmt: ir.Parallel) -> None:
    if isinstance(stmt.body[0].buffer, ir.Tensor):
        for store in stmt.body:
            _store_elements(w, stmt, store)
    else:
        parallel(w, stmt)


def _store_elements(w: GroupWriter, stmt: ir.Parallel, store: ir.Store) -> None:
    """For each row, by one of its four lanes; what lies outside of the tensor is left out."""
    tensor, (row,) = store.buffer, stmt.vars
    ends = [(i, dim) for i, dim in zip(store.indices, tensor.dims, strict=True) if row in ir.subexprs(i)]
    inside = [f"{w.number(index, 1)} < {w.number(dim)}" for index, dim in ends]
    with w.block("if (lane % 4 == 0)"), w.loop("x", plan.registers(w.kernel, ir.loads(store.value)[0].buffer)):
        w.line(f"const int {row} = {w.fragments.row(w, 'x')};")
        w.line(f"Fragment<{CTYPES[tensor.dtype]}, 1> value;")
        w.line(f"value[0] = {element(w, store.value, '', '', stmt)};")
        to = f"global<{CTYPES[tensor.dtype]}>(p.{tensor.name}), {w.offset(tensor, store.indices)}"
        w.line(f"if ({' && '.join(inside) or 'true'}) store_global<1>({to}, value, 0, {w.site(stmt)});")


def _one(w: GroupWriter, stmt: One) -> None:
    """Always the same thread; ptxas knows that it is one, and that whole warps go the same way."""
    with w.block(f"if (warp == 0 && elect_one({w.site(stmt)}))"):
        body(w, stmt.body)


STATEMENTS = roles.STATEMENTS | {
    At: _at,
    Issue: _issue,
    Meet: _meet,
    One: _one,
    Retire: _retire,
    ir.Copy: _copy,
    ir.Fill: _fill,
    ir.If: _if,
    ir.Parallel: _parallel,
    ir.Pipelined: _pipelined,
    Sync: _sync,
}
