"""The text of a kernel with roles while it is written."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType

from tileops_dsl import ir, plan
from tileops_dsl.codegen.arithmetic import arithmetic
from tileops_dsl.codegen.cuda import Emitter
from tileops_dsl.schedule import Barrier, Ring, Role, Signal, op_of


@dataclass
class Writer(Emitter):
    role: Role | None = None  # whose body is being written
    quoted: ir.Location | None = None
    conditions: list[ir.Expr] = field(default_factory=list)  # that hold here
    fragments: ModuleType | None = None  # group_fragments or portable_fragments: how fragments lie
    statements: dict | None = None  # how each kind of statement is written

    def quote(self, location: ir.Location) -> None:
        """The program's line above its block; once where several blocks follow each other."""
        if location != self.quoted:
            self.line(f"// {location}: {location.text}")
        self.quoted = location

    def number(self, expr: ir.Expr, outer: int = -1) -> str:
        return arithmetic(self.kernel, self.named(expr), outer)

    def named(self, expr: ir.Expr) -> ir.Expr:
        return ir.replaced(expr, self.names)

    @cached_property
    def names(self) -> dict[ir.Expr, ir.Var]:
        """Of numbers that are computed once: how often loops run, and quotients of run-time numbers, which take long. The
        author's names come first, each behind those that it is made of.
        """
        given = {expr: ir.Var(expr.dtype, name) for expr, name in self.kernel.named.items()}
        loops = [s for s in ir.walk(self.kernel.body) if isinstance(s, ir.Pipelined) and s.extent not in given]
        found = {
            "steps": dict.fromkeys(loop.extent for loop in loops if not isinstance(loop.extent, ir.Const)),
            "quotient": dict.fromkeys(q for s in ir.walk(self.kernel.body) for e in ir.exprs_of(s) for q in _quotients(e)),
        }
        named = [(e, f"{name}_{n}" if n > 1 else name) for name, exprs in found.items() for n, e in enumerate(exprs, 1)]
        return given | {expr: ir.Var(expr.dtype, name) for expr, name in named}

    def declare(self, body, of_tile: bool) -> None:
        """The named numbers that statements use, for one tile or for all tiles alike."""
        tiles = set(plan.tile_loop(self.kernel).vars)
        used = {e for s in ir.walk(body) for x in ir.exprs_of(op_of(s)) for e in ir.subexprs(x)}
        earlier: dict[ir.Expr, ir.Var] = {}
        for expr, name in self.names.items():
            if expr in used and of_tile is not tiles.isdisjoint(ir.subexprs(expr)):
                self.line(f"const int {name} = {arithmetic(self.kernel, ir.replaced(expr, earlier))};")
                earlier[expr] = name

    def span(self, columns: int) -> int:
        """Registers of so many columns of a fragment, in one block of its rows."""
        layout = next(la for b, la in self.kernel.layouts.items() if b.scope == "fragment" and len(b.shape) == 2)
        return layout.registers * columns // layout.columns // self.blocks

    blocks = property(lambda self: plan.blocks(self.kernel))

    @property
    def late(self) -> bool:
        """Whether the role hands back a stage one iteration later."""
        return any(isinstance(s, Signal) and s.which == "before" for s in ir.walk(self.role.body))

    def of_blocks(self):
        """A loop over the blocks h of rows, where there is more than one."""
        return self.loop("h", self.blocks) if self.blocks > 1 else nullcontext()

    def allocation(self, buffer: ir.Buffer) -> ir.Location:
        return next(s.location for s in ir.walk(self.kernel.body) if isinstance(s, ir.Alloc) and s.buffer == buffer)

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
        in_box = layout.box_columns // columns
        box = f" + q / {in_box} * {layout.box_bytes // layout.element_bytes}" if tile.shape[1] > layout.box_columns else ""
        q = f"q % {in_box}" if box else "q"
        box += f" + h * {64 * layout.box_columns}" * (self.blocks > 1)
        self.line(f"const auto {name}_row = {self.start(tile)}{box} + {name}_offset{self.fragments.place(self, layout, q)};")
        return q

    def slot(self, barrier: Barrier) -> str:
        """The barrier of the present stage."""
        return barrier.name if barrier.ring.stages == 1 else f"{barrier.name} + {self.index(barrier.ring)}"


def _quotients(expr: ir.Expr):
    """Outermost ones."""
    if isinstance(expr, ir.Call) and expr.op == "floordiv" and not isinstance(expr.args[1], ir.Const):
        yield expr
    else:
        for child in expr.children:
            yield from _quotients(child)
