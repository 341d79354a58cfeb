"""Products of the consumers: where they are issued and waited for, and where what they read is handed back.

A product is issued where it stands, one of stage 1 behind the products of the next iteration. It is waited for before what
first touches its registers, at the latest at the end of the iteration (`pending`: of the next one); then its stages are handed
back. With products of stage 1 the first iteration stands in front of the loop, without them, and their last ones behind it.
A condition `i < bound` cuts the loop in two.
"""

import math
from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError, require
from tileops_dsl.passes.stores import chunked
from tileops_dsl.plan import consumers, named, operands, ring_of
from tileops_dsl.schedule import Advance, At, Await, Issue, Meet, Retire, Ring, Signal, op_of


class Products:
    """Rewrites the statements of a tile, in order; `flying` are the products that are not waited for yet."""

    def __init__(self, kernel: ir.Kernel):
        self.kernel = kernel
        self.flying: list[ir.Gemm] = []
        self.since: list[ir.Stmt] = []  # the last one was issued
        self.loop: ir.Pipelined | None = None  # the last one with products
        self.body: list[ir.Stmt] = []  # of an iteration of it, without what is known not to run

    def straight(self, stmts) -> list[ir.Stmt]:
        out: list[ir.Stmt] = []
        for stmt in stmts:
            if isinstance(stmt, At):
                out.append(replace(stmt, body=tuple(self.straight(stmt.body))))
            elif isinstance(stmt, ir.Gemm):
                out += [*self.awaited(stmt), Issue(stmt.location, stmt, self.loop.var)]
                self.flying.append(stmt)
                self.since = []
            else:
                touched = set(named(stmt))
                hit = [n for n, product in enumerate(self.flying) if touched.intersection(named(product))]
                out += [*(self.retire(len(self.flying) - 1 - hit[-1]) if hit else ()), *self.awaited(stmt), stmt]
                self.since.append(stmt)
        return out

    def retire(self, pending: int = 0) -> list[ir.Stmt]:
        """All but the last products are waited for."""
        done, self.flying = self.flying[: len(self.flying) - pending], self.flying[len(self.flying) - pending :]
        if not done:
            return []
        wait = Retire(done[-1].location, "product", pending, _results(self.since), tuple(done))
        return [wait, *handed_back(self.rings(done), wait.location)]

    def awaited(self, stmt: ir.Stmt) -> list[ir.Stmt]:
        """Its first user in an iteration waits for what a ring has loaded."""
        return [Await(stmt.location, f"{ring.prefix}full", ring.var) for ring in self.rings((stmt,), user=0)]

    def rings(self, stmts, user: int = -1) -> list[Ring]:
        """Along the loop, whose last user in an iteration (or first, 0) is one of the statements."""
        found = []
        for ring in (r for r in self.kernel.rings if self.loop and r.var == self.loop.var):
            users = [s for s in self.body if set(named(s)) & set(ring.buffers)]
            found += [ring] if users and users[user] in stmts else []
        return found

    def pipelined(self, loop: ir.Pipelined, alternate: bool) -> list[ir.Stmt]:
        """The loop, and what of it stands in front and behind."""
        self.loop, products = loop, [s for s in loop.body if isinstance(s, ir.Gemm)]
        problem = "the loop has more than one product and the copies of its operands"
        instead = "one T.gemm in T.Pipelined, everything else behind it; or no pending, no alternate"
        require(list(loop.body) == products[:1] or not (loop.pending or alternate), problem, instead, loop.location)
        late, where = _late(loop), products[0].location
        early = list(loop.body[: len(loop.body) - len(late)])
        rings = dict.fromkeys(ring_of(self.kernel, tile) for s in products for tile in operands(s) if not tile.common)
        once = [ring for ring in rings if ring.var != loop.var]
        out: list[ir.Stmt] = [Await(where, f"{ring.prefix}full", ring.var) for ring in once]
        if late:
            at_least_once(loop)
            decided = _decided(early, loop.var, (0, 0))
            self.body = [*decided, *late]
            first = [*self.straight(decided), *self.retire()]
            out.append(At(where, loop.var, ir.ZERO, tuple(chunked(first))))
        behind = 1 + max((n for n, s in enumerate(early) if isinstance(s, ir.Gemm)), default=-1)
        of_before = [At(late[0].location, loop.var, ir.call("sub", loop.var, 1), late)] if late else []
        for start, extent, bound, within in _parts(loop, ir.Const("int32", 1) if late else ir.ZERO):
            span = 1 if late else 0, math.inf
            before, after = (_decided(part, loop.var, span, bound, within) for part in (early[:behind], early[behind:]))
            self.body = [*before, *after, *late]
            body = self.straight([*before, *of_before, *after])
            body = _in_order(body, self.kernel) if loop.turns else body
            if loop.pending:  # the stage before is handed back
                body += [Retire(where, "product", loop.pending), *handed_back(self.rings(products), where, "before")]
            else:
                body += self.retire()
            out.append(replace(loop, start=start, extent=extent, body=tuple(chunked(body))))
        out += handed_back([ring for ring in once if not lies_under(self.kernel, ring)], where)
        if late:
            out.append(At(late[0].location, loop.var, ir.call("sub", loop.extent, 1), tuple(self.straight(late))))
        elif loop.pending:
            out += [self.retire()[0], *(Signal(where, f"{ring.prefix}empty", "last") for ring in self.rings(products))]
        return out + [Advance(where, ring, loop.extent) for ring in self.rings(products) if alternate]


def lies_under(kernel: ir.Kernel, ring: Ring) -> list[ir.Buffer]:
    """The tiles that lie over those of a ring, which is handed back behind their last use."""
    return [s.buffer for s in ir.walk(kernel.body, ir.Alloc) if s.buffer.alias in ring.buffers]


def handed_back(rings: list[Ring], where: ir.Location, which: str = "this") -> list[ir.Stmt]:
    return [s for ring in rings for s in (Signal(where, f"{ring.prefix}empty", which), Advance(where, ring))]


def _in_order(body: list[ir.Stmt], kernel: ir.Kernel) -> list[ir.Stmt]:
    """A group waits for its turn, issues its products, and gives the next group its turn."""
    issues = [n for n, s in enumerate(body) if any(isinstance(op_of(inner), ir.Gemm) for inner in ir.walk((s,), Issue))]
    take, give = turns(kernel, body[issues[0]].location)
    return [*body[: issues[0]], take, *body[issues[0] : issues[-1] + 1], give, *body[issues[-1] + 1 :]]


def turns(kernel: ir.Kernel, where: ir.Location) -> tuple[Meet, Meet]:
    """Group n of 1.. waits at the n-th named barrier behind those of each group and of all."""
    group, groups = ir.Var("int32", "group"), len(consumers(kernel).groups)
    following = ir.call("add", ir.call("mod", group, groups), groups + 2)
    return Meet(where, ir.call("add", group, groups + 1), True), Meet(where, following, False)


def _late(loop: ir.Pipelined) -> tuple[ir.Gemm, ...]:
    """The products of stage 1, which end the body; no other product has their registers."""
    products = [s for s in loop.body if isinstance(s, ir.Gemm)]
    late = tuple(s for s in products if s.stage)
    others = {tile for s in products if not s.stage for tile in (s.a, s.c)}
    if late != loop.body[len(loop.body) - len(late) :] or others & {tile for s in late for tile in (s.a, s.c)}:
        problem = "a product of stage 1 stands before other statements of the loop, or shares a fragment with another product"
        raise TileError(problem, "it at the end of the loop, and fragments of its own", late[0].location)
    return late


def runs_once(loop: ir.Pipelined) -> bool:
    match loop.extent:
        case ir.Const(value=n) | ir.Call(op="max", args=(_, ir.Const(value=n))):
            return n >= 1
    return False


def at_least_once(loop: ir.Pipelined) -> None:
    if runs_once(loop):
        return
    problem = f"the loop may have no iteration, and the first one of {loop.var} has work of its own"
    raise TileError(problem, "T.max(n, 1) iterations", loop.location)


def _results(stmts: list[ir.Stmt]) -> tuple[ir.Buffer, ...]:
    """Vectors that the statements reduce tiles to and do not use up: the work on tiles leads to them."""
    found: dict[ir.Buffer, None] = {}
    for stmt in (s for outer in stmts for s in ir.walk((outer,))):
        found = {buffer: None for buffer in found if buffer not in named(stmt)}
        if isinstance(stmt, ir.Reduce) and len(stmt.src.shape) == 2:
            found[stmt.dst] = None
    return tuple(found)


def _decided(stmts, var: ir.Var, span: tuple, bound: ir.Expr | None = None, within: bool = False) -> list[ir.Stmt]:
    """Without the conditions that are known while first <= var <= last, and of which `var < bound` is."""

    def known(condition) -> ir.Expr | bool | None:
        match condition:
            case ir.Call(op="lt", args=(ir.Const(value=c), v)) if v == var and not span[0] <= c < span[1]:
                return c < span[0]
            case ir.Call(op="eq", args=(v, ir.Const(value=c))) if v == var and (c < span[0] or span[0] == span[1]):
                return c == span[0]
            case ir.Call(op="lt", args=(v, limit)) if v == var and limit == bound:
                return within
            case ir.Call(op="or_", args=(a, b)) if isinstance(known(a), bool):
                return known(a) or known(b)
        return condition

    out: list[ir.Stmt] = []
    for stmt in stmts:
        condition = known(getattr(stmt, "condition", None))
        if isinstance(condition, bool):
            out += stmt.body if condition else ()
        else:
            out.append(stmt if condition is None else replace(stmt, condition=condition))
    return out


def _parts(loop: ir.Pipelined, start: ir.Const):
    """(start, extent, bound, whether var < bound): one loop, or one for i < bound and one for the rest."""
    conditions = [s.condition for s in loop.body if isinstance(s, ir.If) and isinstance(s.condition, ir.Call)]
    bounds = list(dict.fromkeys(c.args[1] for c in conditions if c.op == "lt" and c.args[0] == loop.var))
    if len(bounds) != 1:
        return [(start, loop.extent, None, False)]
    match bounds[0]:
        case ir.Call(op="min", args=(_, ir.Const(value=n))) if n <= start.value:
            return [(start, loop.extent, bounds[0], False)]
    first, second = ir.call("min", *bounds, loop.extent), ir.call("max", *bounds, start)
    return [(start, first, bounds[0], True), (second, loop.extent, bounds[0], False)]
