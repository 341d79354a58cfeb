"""What a body does, statement by statement, for small numbers: the common ground of the checks of roles, schedule and barriers.

Both the recorded program and a role's body run here. What only the run time knows gets a small number (`numbers`).
"""

import functools
import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

from tileops_dsl import ir
from tileops_dsl.schedule import Alone, At, Unrolled, op_of

Values = dict[str, int]
CHOICES = {"min": min, "max": max, "select": lambda condition, a, b: a if condition else b}


@dataclass(frozen=True)
class Run:
    """One way to run a kernel."""

    parameters: Values  # of the kernel, and other numbers
    tiles: int = 2
    cta: int = 0  # of the cluster
    ctas: int = 1
    group: int = 0  # of those that alternate
    groups: int = 1
    whole: tuple[type, ...] = ()  # statements with a body that are handed out as one
    switches: dict[ir.Expr, bool] = field(default_factory=dict)  # conditions that are decided beforehand


@dataclass(frozen=True)
class Event:
    stmt: ir.Stmt
    values: Values = field(hash=False)
    op = property(lambda self: op_of(self.stmt))


def ways(kernel: ir.Kernel) -> list[Values]:
    """All ways that the program's conditions tell apart: each parameter as the constants that it is compared with, 0 and 1.

    A divisor is no switch.
    """
    constants: dict[str, set[int]] = {}
    parameters = {v.name for v in kernel.scalars} | {t.flag for t in kernel.tensors}
    for stmt in ir.walk(kernel.body, ir.If):
        for e in ir.subexprs(stmt.condition):
            operands = [*e.children][: 1 if getattr(e, "op", "") == "floordiv" else None]
            for name in (a.name for a in operands if isinstance(a, ir.Var) and a.name in parameters):
                constants.setdefault(name, {0, 1}).update(a.value for a in e.children if isinstance(a, ir.Const))
    return [dict(zip(constants, values, strict=True)) for values in itertools.product(*map(sorted, constants.values()))]


def numbers(kernel: ir.Kernel, parameters: Values, steps: int) -> Values:
    """With these parameters: the extent of each loop of unknown length, by its text, is `steps`; sizes vary with it."""
    values = {number.name: 1 + 64 * steps for number in (*kernel.dims, *kernel.scalars)} | {b.name: 0 for b in kernel.blocks}
    values |= {number.name: n for n, number in enumerate(ir.Deal.RESULTS)}
    for loop in ir.walk(kernel.body, ir.Pipelined | ir.Serial):
        extent, start = loop.extent, getattr(loop, "start", ir.ZERO)
        values |= {} if isinstance(start, ir.Const) else {str(start): 0}
        match extent:
            case ir.Call(op="max", args=(_, ir.Const(value=least))):
                values[str(extent)] = max(steps, least)
            case ir.Call() | ir.Var():
                values[str(extent)] = steps * getattr(loop, "step", 1)
    return values | parameters


def events(body, run: Run, values: Values | None = None) -> Iterator[Event]:
    """The statements without a body (and those of `run.whole`) in order."""
    values = values or dict(run.parameters)
    for stmt in body:
        if not hasattr(stmt, "body") or isinstance(stmt, (ir.Parallel, *run.whole)):
            yield Event(stmt, values)
        else:
            for own in _rounds(stmt, run, values):
                yield from events(stmt.body, run, values | own)


def _rounds(stmt: ir.Stmt, run: Run, values: Values) -> list[Values]:
    """For each time that the statement's body runs, its own variables."""
    match stmt:
        case ir.If(condition=condition):
            holds = run.switches[condition] if condition in run.switches else number(condition, values, True)
            return [{}] if holds else []
        case ir.Persistent(vars=(item,)):
            return [{item.name: t} for t in range(run.tiles)]
        case ir.Persistent(vars=(*items, row, column)):
            tiles = range(run.group, run.tiles, run.groups) if stmt.alternate else range(run.tiles)
            batch = [item.name for item in items]
            return [{row.name: t * run.ctas + run.cta, column.name: t + 1, **dict.fromkeys(batch, t + 2)} for t in tiles]
        case Alone(which=which):
            group = {"first": 0, "last": run.groups - 1, "next": run.tiles % run.groups}[which]
            return [{}] if run.group == group else []
        case At():
            value = number(stmt.value, values, True)
            return [{stmt.var.name: value}] if value >= 0 else []  # before the first iteration there is none
        case Unrolled():
            return [{stmt.var.name: i} for i in range(stmt.extent)]
        case ir.Pipelined() | ir.Serial():
            start, step = (number(stmt.start, values, True), stmt.step) if isinstance(stmt, ir.Pipelined) else (0, 1)
            return [{stmt.var.name: i} for i in range(start, number(stmt.extent, values, True), step)]
    return [{}]


def number(expr: ir.Expr, values: Values, lengths: bool = False) -> int:
    """An integer or a condition; with `lengths`, parts of it that are a loop's extent are what `values` says."""
    if isinstance(expr, ir.Const):
        return expr.value
    if isinstance(expr, ir.Var):
        return values[expr.name]
    if lengths and str(expr) in values:
        return values[str(expr)]
    if isinstance(expr, ir.Cast):
        return number(expr.value, values, lengths)
    if isinstance(expr, ir.AnyOf):
        return True
    if isinstance(expr, ir.BoxRow):  # a load is taken as a whole
        return 0
    if isinstance(expr, ir.Element):  # any number; another one elsewhere
        return functools.reduce(lambda before, index: 8 * before + number(index, values), expr.indices, 0)
    function = CHOICES.get(expr.op) or getattr(operator, expr.op)
    return function(*[number(arg, values, lengths) for arg in expr.args])


def meaning(event: Event) -> tuple:
    """What the event does, whoever does it and in whatever form: the line, and the numbers that distinguish its runs."""
    what, distinguishing = _places(event.op)
    return *what, *[number(expr, event.values, lengths) for expr, lengths in distinguishing]


@functools.lru_cache(1 << 14)
def _places(op: ir.Stmt) -> tuple[tuple, tuple[tuple[ir.Expr, bool], ...]]:
    """What is the same whenever the statement runs, and the expressions that tell its runs apart, of origins with `lengths`."""
    ends = [end for end in vars(op).values() if isinstance(end, ir.Region | ir.Tile)]
    names = [end.tensor.name if isinstance(end, ir.Region) else end.name for end in ends]
    exprs = [(origin, True) for end in ends if isinstance(end, ir.Region) for origin in end.origin]
    exprs += [(op.clear, False)] if isinstance(op, ir.Gemm) else []
    views = list(views_of(op)) if isinstance(op, ir.Parallel) else []
    shapes = [(view.buffer.name, view.shape) for view in views]
    return (type(op).__name__, op.location, *names, *shapes), (*exprs, *((view.origin[1], False) for view in views))


def views_of(loop: ir.Parallel) -> Iterator[ir.View]:
    for store in loop.body:
        yield from (e.buffer for e in (store, *ir.loads(store.value)) if isinstance(e.buffer, ir.View))
