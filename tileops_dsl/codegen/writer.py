"""The text of a kernel with roles while it is written."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType

from tileops_dsl import ir, plan
from tileops_dsl.codegen.arithmetic import arithmetic
from tileops_dsl.codegen.cuda import Emitter, terms
from tileops_dsl.codegen.expressions import CTYPES
from tileops_dsl.instruction_layouts import WgmmaAccumulator
from tileops_dsl.schedule import At, Barrier, Ring, Role, Signal, op_of


@dataclass
class Writer(Emitter):
    """A number has a name from where its loop variables have a value: another one where they have another (At)."""

    role: Role | None = None  # whose body is being written
    quoted: ir.Location | None = None
    conditions: list[ir.Expr] = field(default_factory=list)  # that hold here
    largest: dict[ir.Buffer, str] = field(default_factory=dict)  # of each row of a tile, that T.any_above has found
    fragments: ModuleType | None = None  # group_fragments or portable_fragments: how fragments lie
    statements: dict | None = None  # how each kind of statement is written
    bound: set[ir.Var] = field(default_factory=set)  # loop variables that have a value
    flying: tuple[ir.Gemm, ...] = ()  # products of T.ws that may be unfinished
    following: ir.Stmt | None = None  # in T.ws, behind the one that is being written
    issuing: bool = False  # in T.ws, whether the statement before is a product, so that no register has been touched since

    def quote(self, location: ir.Location) -> None:
        """The program's line above its block; once where several blocks follow each other."""
        if location != self.quoted:
            self.line(f"// {location}: {location.text}")
        self.quoted = location

    def number(self, expr: ir.Expr, outer: int = -1) -> str:
        return arithmetic(self.kernel, self.named(expr), outer)

    def named(self, expr: ir.Expr) -> ir.Expr:
        return ir.replaced(expr, self.declared)

    @cached_property
    def names(self) -> dict[ir.Expr, str]:
        """Of numbers that are computed once: elements of tensors, what the author named, and of standard programs how often
        loops run and quotients of run-time numbers, which take long. Each behind those that it is made of.
        """
        body, given = list(ir.walk(self.kernel.body)), self.kernel.named
        names = {e: "box_row" for s in body for e in ir.subexprs(s) if isinstance(e, ir.BoxRow)} | self.elements | given
        if plan.feeds_itself(self.kernel):
            return dict(sorted(names.items(), key=lambda item: len(list(ir.subexprs(item[0])))))
        steps = [s.extent for s in body if isinstance(s, ir.Pipelined) and not isinstance(s.extent, ir.Const)]
        own = {var for s in body if isinstance(s, ir.Parallel) for var in s.vars}  # of elements, not of the tile
        quotients = [q for s in body for e in ir.exprs_of(s) for q in _quotients(e, given)]
        quotients = [q for q in quotients if not own.intersection(ir.subexprs(q))]
        for name, found in (("steps", steps), ("quotient", quotients)):
            new = (expr for expr in dict.fromkeys(found) if expr not in given)
            names |= {expr: f"{name}_{n}" if n > 1 else name for n, expr in enumerate(new, 1)}
        return names

    def name_numbers(self, stmts) -> None:
        """Those that the statements and what stands in them use, as far as their variables have a value."""
        loops = [s for s in ir.walk(self.kernel.body) if isinstance(s, ir.Pipelined | ir.Persistent)]
        variables = {var for s in loops for var in (s.vars if isinstance(s, ir.Persistent) else [s.var])}
        if not self.kernel.barriers:  # each copy says of which row
            variables |= {e for e in self.names if isinstance(e, ir.BoxRow)}
        used = _used(stmts)
        for expr, name in self.names.items():
            if expr not in used or expr in self.declared or not variables.intersection(ir.subexprs(expr)) <= self.bound:
                continue
            if isinstance(expr, ir.BoxRow):  # a box for each thread, of warps by turns
                self.line(f"const int {name} = (thread_index() % 32 * 4 + warp_index() % 4) * {self.number(expr.rows, 3)};")
                self.declared[expr] = ir.Var(expr.dtype, name)
            else:
                self.name_number(expr, name)

    def name_number(self, expr: ir.Expr, name: str) -> None:
        if isinstance(expr, ir.Element):
            self.load_element(expr, name, self.offset(expr.tensor, expr.indices))
        else:
            self.line(f"const {CTYPES[expr.dtype]} {name} = {self.number(expr)};")
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

    def span(self, columns: int) -> int:
        """Registers of so many columns of a fragment, in one block of its rows."""
        layout = next(la for b, la in self.kernel.layouts.items() if b.scope == "fragment" and len(b.shape) == 2)
        blocks = layout.rows // 64 if isinstance(layout, WgmmaAccumulator) else 1
        return layout.registers * columns // layout.columns // blocks

    blocks = property(lambda self: plan.blocks(self.kernel))

    def part(self, size: int) -> str:
        """How far behind the first group's part, each of `size`, this group's lies where groups divide the columns."""
        return f" + (group - {self.role.groups[0]}) * {size}" if plan.parts(self.kernel) > 1 else ""

    @property
    def late(self) -> bool:
        """Whether the role hands back a stage one iteration later."""
        return any(isinstance(s, Signal) and s.which == "before" for s in ir.walk(self.role.body))

    def of_blocks(self, blocks: int = 0):
        """A loop over the blocks h of rows, where there is more than one."""
        return self.loop("h", blocks or self.blocks) if (blocks or self.blocks) > 1 else nullcontext()

    def allocation(self, buffer: ir.Buffer) -> ir.Location:
        return next(s.location for s in ir.walk(self.kernel.body) if isinstance(s, ir.Alloc) and s.buffer == buffer)

    def declare_fragment(self, buffer: ir.Buffer) -> None:
        self.quote(self.allocation(buffer))
        self.line(f"Fragment<{CTYPES[buffer.dtype]}, {plan.registers(self.kernel, buffer)}> {buffer.name};")

    def phase(self, ring: Ring) -> str:
        """A register of the role, as many bits as the ring has phases at a time."""
        return f"{ring.prefix}phase"

    def index(self, ring: Ring) -> str:
        """The present stage of a ring: a register, too, if all groups go round it."""
        if not plan.is_common(self.kernel, ring.buffers[0]):
            return f"{ring.var} % {ring.stages}"
        return f"{ring.prefix}stage"

    def at_stage(self, buffer: ir.Buffer) -> str:
        """The address of a tile's present stage."""
        ring, elements = plan.ring_of(self.kernel, buffer), self.kernel.layouts[buffer].elements
        return buffer.name if ring is None or ring.stages == 1 else f"{buffer.name} + {self.index(ring)} * {elements}"

    def start(self, tile: ir.Tile) -> str:
        """The address of a tile, of a view its first box."""
        layout, column = self.kernel.layouts[ir.buffer_of(tile)], tile.origin[1].value if isinstance(tile, ir.View) else 0
        first = column // layout.box_columns * layout.box_bytes // layout.element_bytes if column else 0
        return self.at_stage(ir.buffer_of(tile)) + f" + {first}" * (first > 0)

    def declare_row(self, tile: ir.Tile, columns: int) -> str:
        """Where the thread's row of chunk q of a tile lies; returns the number of the chunk in its box."""
        name, layout = ir.buffer_of(tile).name, self.kernel.layouts[ir.buffer_of(tile)]
        in_box, q = layout.box_columns // columns, "q"
        if ir.buffer_of(tile).common:
            q = "chunk"
            self.line(f"const int chunk = q{self.part(plan.own_columns(self.kernel, tile.shape[1]) // columns)};")
        several = plan.tile_layout(self.kernel, tile).columns > layout.box_columns
        box = f" + {q} / {in_box} * {layout.box_bytes // layout.element_bytes}" if several else ""
        q = f"{q} % {in_box}" if box else q
        box += f" + h * {64 * layout.box_columns}" * (self.blocks > 1)
        self.line(f"const auto {name}_row = {self.start(tile)}{box} + {name}_offset{self.fragments.place(self, layout, q)};")
        return q

    def slot(self, barrier: Barrier) -> str:
        """The barrier of the present stage."""
        return barrier.name if barrier.ring.stages == 1 else f"{barrier.name} + {self.index(barrier.ring)}"


def _used(stmts) -> set[ir.Expr]:
    """Expressions, but those that are made of a variable which has another value where they stand."""
    found: set[ir.Expr] = set()
    for stmt in stmts:
        inner = _used(getattr(stmt, "body", ()))
        found |= {e for e in inner if stmt.var not in ir.subexprs(e)} if isinstance(stmt, At) else inner
        found |= {e for x in ir.exprs_of(op_of(stmt)) for e in ir.subexprs(x)}
    return found


def _quotients(expr: ir.Expr, given: dict):
    """Outermost ones, but in what has a name."""
    if isinstance(expr, ir.Call) and expr.op == "floordiv" and not isinstance(expr.args[1], ir.Const):
        yield expr
    elif expr not in given:
        for child in expr.children:
            yield from _quotients(child, given)
