"""What a body does, statement by statement, for small numbers: the common ground of the checks of roles, schedule and barriers.

Both the recorded program and a role's body run here. Extents that only the run time knows become `steps`, tiles become `tiles`.
"""

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

from tileops_dsl import ir
from tileops_dsl.schedule import Alone, Issue, Unrolled

Values = dict[str, int]


@dataclass(frozen=True)
class Run:
    """One way to run a kernel."""

    parameters: Values  # that conditions ask for
    steps: int = 3  # iterations of a loop of unknown length
    tiles: int = 2
    cta: int = 0  # of the cluster
    ctas: int = 1
    group: int = 0  # of those that alternate
    groups: int = 1
    enter: tuple[type, ...] = ()  # statements with a body that are handed out as a whole


@dataclass(frozen=True)
class Event:
    stmt: ir.Stmt
    values: Values = field(hash=False)

    @property
    def op(self) -> ir.Stmt:
        return self.stmt.op if isinstance(self.stmt, Issue) else self.stmt


def ways(kernel: ir.Kernel) -> list[Values]:
    """All ways that the program's conditions tell apart: each parameter as the constants that it is compared with, 0 and 1."""
    constants: dict[str, set[int]] = {}
    parameters = {v.name for v in kernel.scalars} | {t.flag for t in kernel.tensors}
    for stmt in ir.walk(kernel.body):
        for e in ir.subexprs(stmt.condition) if isinstance(stmt, ir.If) else ():
            for name in (a.name for a in e.children if isinstance(a, ir.Var) and a.name in parameters):
                constants.setdefault(name, {0, 1}).update(a.value for a in e.children if isinstance(a, ir.Const))
    return [dict(zip(constants, values, strict=True)) for values in itertools.product(*map(sorted, constants.values()))]


def events(body, run: Run, values: Values | None = None) -> Iterator[Event]:
    """The statements without a body (and those of `run.enter`) in order."""
    values = values or dict(run.parameters)
    for stmt in body:
        if isinstance(stmt, ir.If):
            if number(stmt.condition, values):
                yield from events(stmt.body, run, values)
        elif isinstance(stmt, ir.Persistent):
            for tile in range(run.group, run.tiles, run.groups) if stmt.alternate else range(run.tiles):
                *items, row, column = stmt.vars
                place = {row.name: tile * run.ctas + run.cta, column.name: tile + 1, **{item.name: tile + 2 for item in items}}
                yield from events(stmt.body, run, values | place)
        elif isinstance(stmt, Alone):
            if run.group == (run.tiles % run.groups if stmt.which == "next" else run.groups - 1):
                yield from events(stmt.body, run, values)
        elif isinstance(stmt, ir.Pipelined | ir.Serial | Unrolled):
            for i in range(length(stmt.extent, run)):
                yield from events(stmt.body, run, {**values, stmt.var.name: i})
        elif isinstance(stmt, run.enter) or not hasattr(stmt, "body") or isinstance(stmt, ir.Parallel):
            yield Event(stmt, values)
        else:
            yield from events(stmt.body, run, values)


def length(extent: int | ir.Expr, run: Run) -> int:
    return extent if isinstance(extent, int) else getattr(extent, "value", run.steps)


def number(expr: ir.Expr, values: Values) -> int:
    """An integer or a condition."""
    if isinstance(expr, ir.Const):
        return expr.value
    if isinstance(expr, ir.Var):
        return values[expr.name]
    return getattr(operator, expr.op)(*(number(arg, values) for arg in expr.args))


def meaning(event: Event) -> tuple:
    """What the event does, whoever does it and in whatever form: the line, and the numbers that distinguish its runs."""
    op, values = event.op, event.values
    places: list = []
    for end in vars(op).values():
        if isinstance(end, ir.Region):
            places.append((end.tensor.name, *(number(o, values) for o in end.origin)))
        elif isinstance(end, ir.Buffer):
            places.append(end.name)
    if isinstance(op, ir.Gemm):
        places.append(number(op.clear, values))
    if isinstance(op, ir.Parallel):
        places += [(view.buffer.name, number(view.origin[1], values), view.shape) for view in views_of(op)]
    return type(op).__name__, op.location, *places


def views_of(loop: ir.Parallel) -> Iterator[ir.View]:
    for store in loop.body:
        yield from (e.buffer for e in (store, *ir.loads(store.value)) if isinstance(e.buffer, ir.View))
