"""What a body does, statement by statement, for small numbers: the common ground of the checks of roles, schedule and barriers.

Both the recorded program and a role's body run here. Extents that only the run time knows become `steps`, tiles become `tiles`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from tileops_dsl import ir
from tileops_dsl.schedule import Issue, Rotating, Unrolled

Values = dict[str, int]


@dataclass(frozen=True)
class Run:
    """One way to run a kernel."""

    parameters: Values  # that conditions ask for
    steps: int = 3  # iterations of a loop of unknown length
    tiles: int = 2
    cta: int = 0  # of the cluster
    ctas: int = 1
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
    parameters = {v.name for v in kernel.scalars}
    parameters |= {name for t in kernel.tensors for name in (f"{t.name}_dtype", f"has_{t.name}")}
    for stmt in ir.walk(kernel.body):
        for e in ir.subexprs(stmt.condition) if isinstance(stmt, ir.If) else ():
            names = [a.name for a in getattr(e, "args", ()) if isinstance(a, ir.Var) and a.name in parameters]
            for name in names:
                constants.setdefault(name, {0, 1}).update(a.value for a in e.args if isinstance(a, ir.Const))
    return [dict(zip(constants, values, strict=True)) for values in itertools.product(*map(sorted, constants.values()))]


def events(body, run: Run, values: Values | None = None) -> Iterator[Event]:
    """The statements without a body (and those of `run.enter`) in order."""
    values = values or dict(run.parameters)
    for stmt in body:
        if isinstance(stmt, ir.If):
            if number(stmt.condition, values):
                yield from events(stmt.body, run, values)
        elif isinstance(stmt, ir.Persistent):
            for tile in range(run.tiles):
                row, column = stmt.vars
                yield from events(stmt.body, run, {**values, row.name: tile * run.ctas + run.cta, column.name: tile + 1})
        elif isinstance(stmt, ir.Pipelined | ir.Serial | Unrolled | Rotating):
            extent = stmt.extent if isinstance(stmt.extent, int) else getattr(stmt.extent, "value", run.steps)
            for i in range(extent):
                turned = {stmt.tile.name: i * stmt.columns} if isinstance(stmt, Rotating) else {}
                yield from events(stmt.body, run, {**values, stmt.var.name: i, **turned})
        elif isinstance(stmt, run.enter) or not hasattr(stmt, "body") or isinstance(stmt, ir.Parallel):
            yield Event(stmt, values)
        else:
            yield from events(stmt.body, run, values)


def number(expr: ir.Expr, values: Values) -> int:
    """An integer or a condition."""
    if isinstance(expr, ir.Const):
        return expr.value
    if isinstance(expr, ir.Var):
        return values[expr.name]
    a, b = (number(arg, values) for arg in expr.args)
    apply = {"add": a + b, "sub": a - b, "mul": a * b, "eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b}
    return apply[expr.op]


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
        places += [(view.buffer.name, first_column(view, values), view.shape) for view in views_of(op)]
    return type(op).__name__, op.location, *places


def first_column(view: ir.View, values: Values) -> int:
    """In the fragment as it was before rotations."""
    return number(view.origin[1], values) + values.get(view.buffer.name, 0)


def views_of(loop: ir.Parallel) -> Iterator[ir.View]:
    for store in loop.body:
        loads = [e.buffer for e in ir.subexprs(store.value) if isinstance(e, ir.Load)]
        yield from (tile for tile in (store.buffer, *loads) if isinstance(tile, ir.View))
