"""The schedule of T.ws: each group's statements with the ends of the edges that edges.py finds, and loads where they fit."""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import require
from tileops_dsl.passes import edges
from tileops_dsl.passes.stores import chunked, last_wait
from tileops_dsl.plan import boxes, flying, is_load, is_store
from tileops_dsl.schedule import At, Await, Fence, Issue, Meet, One, Release, Retire, Ring, Role, Sync
from tileops_dsl.targets import Target


def schedule(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    found = edges.find(kernel)
    tiles = dict.fromkeys(root for load in found.full for root, _ in boxes(load.dst))
    loops = list(ir.walk(kernel.body, ir.Pipelined))
    var = loops[-1].var if loops else ir.EACH  # of one stage, so any will do
    rings = tuple(Ring(f"ring {n}", (tile,), 1, var, f"{tile.name}_") for n, tile in enumerate(tiles))
    return replace(kernel, rings=rings, roles=tuple(_Group(found, role).role() for role in kernel.roles))


class _Group:
    def __init__(self, found: edges.Edges, before: Role):
        self.found, self.before_role = found, before
        (self.group,) = before.groups
        self.refills = [refill for refill in found.refills if refill.group == self.group]

    def role(self) -> Role:
        first = [self.refill(refill) for refill in self.refills if refill.at is None and not refill.told]
        body = self.body(self.before_role.body)
        stores = [stmt for stmt in ir.walk(self.before_role.body) if is_store(stmt) and stmt not in self.found.stored]
        return replace(self.before_role, body=(*first, *body, *last_wait(stores)))

    def body(self, stmts) -> tuple[ir.Stmt, ...]:
        out: list[ir.Stmt] = []
        for stmt in stmts:
            where = stmt.location
            out += self.in_front(stmt)
            if isinstance(stmt, ir.Gemm):
                out.append(Issue(where, stmt, ir.ZERO))
            elif is_store(stmt) or (is_load(stmt) and self.before_role.loads):
                out.append(One(where, (Issue(where, stmt, ir.ZERO),)))
            elif hasattr(stmt, "body") and not isinstance(stmt, ir.Parallel):
                inner = replace(stmt, body=self.body(stmt.body))
                out += _rotated(inner) if isinstance(stmt, ir.Pipelined) else [inner]
            elif not (is_load(stmt) or isinstance(stmt, ir.Wait)):
                out.append(stmt)
            out += self.behind(stmt)
        return tuple(chunked(out))

    def in_front(self, stmt: ir.Stmt) -> list[ir.Stmt]:
        where, ready = stmt.location, enumerate(self.found.ready, 1)
        if self.before_role.loads:
            return [Await(where, *_free(stmt))] if is_load(stmt) else []
        out = [Meet(where, number, True) for number, r in ready if same(r.second, stmt) and r.groups[1] == self.group]
        retires = (retire for waits, retire in self.found.retires.items() if same(waits, stmt))
        out += [Retire(where, "product", pending, (), tuple(of)) for pending, of in retires]
        out += [self.refill(refill) for refill in self.refills if refill.at and same(refill.at, stmt)]
        loads = [load for load, waiting in self.found.full.items() if any(same(one, stmt) for one in waiting)]
        landed = sorted((f"{root.name}_full", n) for load in loads for root, n in boxes(load.dst))
        return out + [Await(where, barrier, ir.Const("int32", n)) for barrier, n in landed]

    def behind(self, stmt: ir.Stmt) -> list[ir.Stmt]:
        where, ready = stmt.location, enumerate(self.found.ready, 1)
        out: list[ir.Stmt] = [Fence(where)] if any(same(one, stmt) for one in self.found.fences) else []
        out += [One(where, (Retire(where, "read", 0),))] * any(same(one, stmt) for one in self.found.stored)
        out += [Sync(where)] if any(same(one, stmt) for one in self.found.exchanges) else []
        return out + [Meet(where, number, r.both) for number, r in ready if same(r.first, stmt) and r.groups[0] == self.group]

    def refill(self, refill: edges.Refill) -> ir.Stmt:
        """By one thread, if there is such an iteration: the load, or word to the group that loads."""
        load, where = refill.load, refill.load.location
        own_place = refill.at is load
        problem = f"{load.dst.name} is loaded in boxes of rows, over what a store of the group reads"
        require(not (load.box_row and refill.stored), problem, "a tile of its own", where)
        reads = [Retire(where, "read", 0)] if refill.stored else []
        what = Release(where, *_free(load)) if refill.told else Issue(where, load, ir.ZERO)
        out: ir.Stmt = One(where, (*reads, what))
        around = [outer for outer in self.found.around.get(load, ()) if isinstance(outer, ir.Pipelined)]
        names = [loop.var.name for loop in around]
        if refill.at is not None and refill.ahead is None:
            return out if own_place else ir.If(where, ir.call("lt", around[-1].start, around[-1].var), (out,))
        first = names.index(refill.ahead) if refill.ahead else 0
        for n, loop in reversed(list(enumerate(around))[first:]):
            value = ir.call("add", loop.var, loop.step) if refill.ahead and n == first else loop.start
            out = At(where, loop.var, value, (ir.If(where, ir.call("lt", loop.var, loop.extent), (out,)),))
        return out


def _free(load: ir.Copy) -> tuple[str, ir.Const]:
    """The barrier at which the group that loads waits for all of the load's boxes: the first one's."""
    root, first = boxes(load.dst)[0]
    return f"{root.name}_free", ir.Const("int32", first)


def _rotated(loop: ir.Pipelined) -> list[ir.Stmt]:
    """No product is unfinished between two iterations, or ptxas serialises all (C7514).

    What an iteration does until it has waited for those of the one before stands at the end of that one.
    """
    crossing, count = flying(loop.body, ()), 0
    left = crossing
    while left and count < len(loop.body):
        left, count = flying(loop.body[count : count + 1], left), count + 1
    if not crossing or left:
        return [loop]
    where, following = loop.location, ir.call("add", loop.var, loop.step)
    ahead = ir.If(where, ir.call("lt", loop.var, loop.extent), loop.body[:count])
    later = ir.call("lt", loop.start, loop.var)
    first = replace(ahead, body=tuple(s for s in ahead.body if not (isinstance(s, ir.If) and s.condition == later)))
    rest = *loop.body[count:], At(where, loop.var, following, (ahead,)), Retire(where, "product", 0, (), crossing)
    return [At(where, loop.var, loop.start, (first,)), replace(loop, body=rest)]


def same(a: ir.Stmt, b: ir.Stmt) -> bool:
    """A loop or a condition that holds a part of the other's body is the same one."""
    return a is b or (type(a) is type(b) and isinstance(a, ir.Pipelined | ir.If) and a.location == b.location)
