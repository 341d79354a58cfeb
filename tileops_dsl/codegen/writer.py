"""The text of a kernel with roles while it is written."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType

from tileops_dsl import ir, plan
from tileops_dsl.codegen.arithmetic import arithmetic
from tileops_dsl.codegen.cuda import Emitter
from tileops_dsl.schedule import Barrier, Role


@dataclass
class Writer(Emitter):
    role: Role | None = None  # whose body is being written
    late: bool = False  # a stage is handed back one iteration later
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
        return arithmetic(self.kernel, expr, outer)

    def span(self, columns: int) -> int:
        """Registers of so many columns of a fragment, in one block of its rows."""
        layout = next(la for b, la in self.kernel.layouts.items() if b.scope == "fragment" and len(b.shape) == 2)
        return layout.registers * columns // layout.columns // self.blocks

    @property
    def blocks(self) -> int:
        return plan.blocks(self.kernel)

    def of_blocks(self):
        """A loop over the blocks h of rows, where there is more than one."""
        return self.loop("h", self.blocks) if self.blocks > 1 else nullcontext()

    def allocation(self, buffer: ir.Buffer) -> ir.Location:
        return next(s.location for s in self.kernel.body if isinstance(s, ir.Alloc) and s.buffer == buffer)

    def steps(self, loop: ir.Pipelined) -> str:
        """The name of a loop's number of iterations."""
        loops = [s.var for s in ir.walk(self.kernel.body) if isinstance(s, ir.Pipelined) and not isinstance(s.extent, ir.Const)]
        return f"steps_{loops.index(loop.var) + 1}" if loops.index(loop.var) else "steps"

    def phase(self, barrier: Barrier) -> str:
        return "phase" if barrier.common else f"{barrier.name.removesuffix('_full')}_phase"

    def stage(self, buffer: ir.Buffer, scale: int) -> str:
        """What to add to a tile's address for the present stage, `scale` elements each."""
        ring = plan.ring_of(self.kernel, buffer)
        if ring is None or ring.stages == 1:
            return ""
        return f" + {f'stage * {scale}' if plan.is_common(self.kernel, buffer) else f'{ring.var} % {ring.stages} * {scale}'}"

    def slot(self, barrier: Barrier) -> str:
        """The barrier of the present stage."""
        ring = barrier.ring
        return f"{barrier.name} + " + ("stage" if barrier.common else f"{ring.var} % {ring.stages}")
