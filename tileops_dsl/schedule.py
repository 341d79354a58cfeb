"""Who does what and when: the nodes that passes add to the IR.

Role    = (name, groups, warp | None, body)             warp: one thread of it does all; otherwise each group, on its rows
Ring    = (name, buffers, stages, var, prefix)          the stages that the copies of a loop go round; prefix: of names in text
Barrier = (name, kind, stages, copies, arrivals, bytes) mbarriers, for each stage and copy (a copy for each group)

Stmt   += Issue(op, index)                              an asynchronous copy or product begins; index: its iteration
        | Retire(kind, pending, after, of)              until at most so many are unfinished; not before `after` was computed
        | Await(barrier, index) | Signal(barrier, which) the ends of an edge between roles
        | Release(barrier, index)                       the same as Signal, of a box: it may be loaded anew
        | Sync(all_groups) | Fence                      exchange in the group, or of all; before what TMA or a product reads
        | Advance(ring, steps)                          the next stage, or past those of another group's tile
        | Meet(number, waits)                           a named barrier of two groups: arrives, or waits for both
        | Alone(which, body)                            of groups that alternate: one of them
        | Unrolled(var, extent, body)                   a loop over views of a fragment
        | At(var, value, body)                          one iteration of a loop, beside the loop or late in it
        | Chunks(columns, body)                         element-wise work and its copy, so many columns at a time
        | One(body)                                     by the first thread of the group
        | Commit | Land(op, index)                      copies of all threads: a group of asynchronous ones; from registers on
        | Operands(op, step, index) | Multiply(op, step) a step of K: its fragments come from shared memory; its products
"""

from __future__ import annotations

from dataclasses import dataclass

from tileops_dsl import ir


@dataclass(frozen=True)
class Role:
    name: str
    groups: tuple[int, ...]
    warp: int | None
    body: tuple[ir.Stmt, ...]
    registers: int = 0  # budget of a thread
    loads: bool = False  # of T.ws: a group that does nothing else

    def __str__(self) -> str:
        warp = "" if self.warp is None else f", warp {self.warp}"
        registers = f", {self.registers} registers" if self.registers else ""
        return f"role {self.name}: groups {', '.join(map(str, self.groups))}{warp}{registers}"


@dataclass(frozen=True)
class Ring:
    name: str
    buffers: tuple[ir.Buffer, ...]
    stages: int
    var: ir.Var  # of the loop
    # Of the names of its barriers, stage and phase: k_full, k_stage; none where one ring is common to all groups.
    prefix: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(b.name for b in self.buffers)} x {self.stages}, along {self.var}"


@dataclass(frozen=True)
class Barrier:
    name: str
    kind: str  # "full" or "empty"
    ring: Ring
    common: bool  # for all groups; otherwise each has its own
    copies: int
    arrivals: int
    bytes: int
    offset: int = 0  # in shared memory

    count = property(lambda self: self.ring.stages * self.copies)

    def __str__(self) -> str:
        copies = f" x {self.copies} groups" if self.copies > 1 else ""
        return f"barrier {self.offset}: {self.name} x {self.ring.stages}{copies}, arrivals {self.arrivals}, bytes {self.bytes}"


class Issue(ir.Stmt):
    op: ir.Copy | ir.Gemm
    index: ir.Expr


class Retire(ir.Stmt):
    kind: str  # "product", "read" (stores: their shared memory has been read), "store" or "copy"
    pending: int
    after: tuple[ir.Buffer, ...] = ()  # fragments of which the wait must not run ahead: what is to overlap with a product
    of: tuple[ir.Gemm, ...] = ()  # the products that are finished by it

    def __str__(self) -> str:
        after = f", after {', '.join(b.name for b in self.after)}" if self.after else ""
        return f"retire {self.kind} pending {self.pending}{after}"


class Await(ir.Stmt):
    barrier: str
    index: ir.Expr


class Signal(ir.Stmt):
    barrier: str
    which: str  # "this" stage, the one "before" it, or the "last" one behind the loop


class Release(ir.Stmt):
    barrier: str
    index: ir.Expr


class Sync(ir.Stmt):
    """The threads of a group meet, or those of all groups that hold fragments."""

    all_groups: bool = False


class Fence(ir.Stmt):
    """What was written to shared memory becomes visible to TMA and to products."""


class Advance(ir.Stmt):
    ring: Ring
    steps: ir.Expr | None = None


class Meet(ir.Stmt):
    number: int | ir.Expr  # an expression in `group` where each group has another one
    waits: bool


class Alone(ir.Stmt):
    which: str  # the "first" or the "last" group, or the one whose tile would be the "next"
    body: tuple[ir.Stmt, ...]


class Unrolled(ir.Stmt):
    var: ir.Var
    extent: int
    body: tuple[ir.Stmt, ...]


class At(ir.Stmt):
    var: ir.Var
    value: ir.Expr  # for which the variable stands in the body
    body: tuple[ir.Stmt, ...]


class Chunks(ir.Stmt):
    columns: int
    body: tuple[ir.Stmt, ...]


class One(ir.Stmt):
    body: tuple[ir.Stmt, ...]


class Commit(ir.Stmt):
    """The copies since the last one become a group, which Retire("copy", n) counts."""


class Land(ir.Stmt):
    """What a copy that is not asynchronous loaded into registers goes to shared memory."""

    op: ir.Copy
    index: ir.Expr


class Operands(ir.Stmt):
    op: ir.Gemm
    step: int
    index: ir.Expr | None  # without: zeros


class Multiply(ir.Stmt):
    op: ir.Gemm
    step: int


def op_of(stmt: ir.Stmt) -> ir.Stmt:
    """The program's statement of which this one is a part, or which it is."""
    return stmt.op if isinstance(stmt, Issue | Land | Operands | Multiply) else stmt
