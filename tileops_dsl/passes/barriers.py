"""Barriers: the mbarriers with their arrivals and bytes, and the ends of every edge within a group.

Between the producer and the consumers each ring has `full` (its copies have arrived) and `empty` (its products have read), with
the ends that `pipeline` has placed; for loads that a group issues itself, `full` only. Within a group, what hazards.py finds.
Groups that alternate take turns at the ring: a group that waited for a stage while the other still waits for the round before
would take that one's phase for its own.
"""

from dataclasses import replace
from itertools import groupby

from tileops_dsl import ir
from tileops_dsl.passes import hazards
from tileops_dsl.plan import boxes, consumers, feeds_itself, is_common, is_store, loads_of, peers, ring_of, sharing
from tileops_dsl.schedule import Alone, Await, Barrier, Fence, Issue, One, Retire, Role, Sync, Turn
from tileops_dsl.targets import Target


def derive_barriers(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    barriers, offset = [], kernel.shared_bytes
    for barrier in _barriers(kernel):
        barriers.append(replace(barrier, offset=offset))
        offset += 8 * barrier.count
    kernel = replace(kernel, barriers=tuple(barriers), shared_bytes=offset)
    own = not feeds_itself(kernel)  # whose edges are placed already
    roles = tuple(_group(kernel, role) if own and role.warp is None else role for role in kernel.roles)
    return replace(kernel, roles=roles)


def _barriers(kernel: ir.Kernel):
    for ring in kernel.rings:
        groups = len(consumers(kernel).groups)
        loads = loads_of(kernel, ring)
        if not loads:
            continue
        common = is_common(kernel, ring.buffers[0])
        if feeds_itself(kernel):  # a barrier for each box
            (tile,), count = ring.buffers, len(boxes(ring.buffers[0]))
            yield Barrier(f"{ring.prefix}full", "full", ring, True, count, 1, kernel.layouts[tile].bytes // count)
            continue
        expected = sum(kernel.layouts[load.dst].bytes for load in loads)
        yield Barrier(f"{ring.prefix}full", "full", ring, common, 1 if common else groups, 1, expected)
        if common:
            yield Barrier(f"{ring.prefix}empty", "empty", ring, True, 1, releases(kernel, ring), 0)


def releases(kernel: ir.Kernel, ring) -> int:
    """Arrivals that hand back a stage: a thread of each group of each peer; without peers each warp."""
    groups = sharing(kernel)
    return groups * (peers(kernel, ring) if peers(kernel, ring) > 1 else 4)


def _group(kernel: ir.Kernel, role: Role) -> Role:
    body = _in_turns(_Group(kernel, *hazards.find(kernel, role.body)).body(role.body))
    stores = [s.location for s in ir.walk(role.body) if isinstance(s, Issue) and is_store(s.op)]
    if stores:  # shared memory stays until it has been read
        body = (*body, One(stores[-1], (Retire(stores[-1], "store", 0),)))
    return replace(role, body=body)


def _in_turns(body: tuple[ir.Stmt, ...]) -> tuple[ir.Stmt, ...]:
    """The product loops of groups that alternate, one behind the other; the last group gives the first its first turn."""
    *late, tiles = body
    if not late:
        return body
    where = tiles.location
    take, give = Turn(where, True), Turn(where, False)
    inner = [s for stmt in tiles.body for s in ((take, stmt, give) if isinstance(stmt, ir.Pipelined) else (stmt,))]
    first = replace(late[0], body=(give, *late[0].body))
    return first, replace(tiles, body=tuple(inner)), Alone(where, "next", (take,))


class _Group:
    """Rewrites the consumers' body."""

    def __init__(self, kernel: ir.Kernel, needs, ways, conditions):
        self.kernel, self.needs, self.ways, self.conditions = kernel, needs, ways, conditions

    def body(self, stmts) -> tuple[ir.Stmt, ...]:
        out: list[ir.Stmt] = []
        for stmt in stmts:
            if isinstance(stmt, One):
                out += self.group_before(stmt) + [replace(stmt, body=self.one(stmt.body))]
            elif id(stmt) in self.needs:
                out += [*self.before(stmt), stmt]
            else:
                compound = hasattr(stmt, "body") and not isinstance(stmt, ir.Parallel)
                out.append(replace(stmt, body=self.body(stmt.body)) if compound else stmt)
        return tuple(_merged(out))

    def before(self, stmt: ir.Stmt) -> list[ir.Stmt]:
        """What a statement of the whole group needs; a barrier stands outside every condition, so that lanes meet there."""
        need, where = self.needs[id(stmt)], stmt.location
        out: list[ir.Stmt] = []
        if need.reads is not None:
            out.append(One(where, self.guarded((Retire(where, "read", need.reads),), need.reads_in, where)))
        if need.sync:
            out.append(Sync(where))
        for buffer, ways in need.arrive.items():
            ring = ring_of(self.kernel, buffer)
            out += self.guarded((Await(where, f"{ring.prefix}full", ring.var),), ways, where)
        return out

    def guarded(self, stmts: tuple, ways: set, where) -> tuple[ir.Stmt, ...]:
        """Under the switch that tells the ways in which they are needed from the others."""
        if ways == set(self.ways):
            return stmts
        for i, condition in enumerate(self.conditions):
            for value in (True, False):
                if ways == {way for way in self.ways if way[i] is value}:
                    return (ir.If(where, condition if value else negated(condition), stmts),)
        raise AssertionError("one switch decides")

    def group_before(self, one: One) -> list[ir.Stmt]:
        needs = [self.needs[id(s)] for s in ir.walk(one.body) if id(s) in self.needs]
        fence = [Fence(one.location)] if any(need.fence for need in needs) else []
        return fence + ([Sync(one.location)] if any(need.sync for need in needs) else [])

    def one(self, stmts) -> tuple[ir.Stmt, ...]:
        """Stores that still read where a load writes are waited for in front of it, under its condition."""
        if isinstance(stmts[0], ir.If):
            return (replace(stmts[0], body=self.one(stmts[0].body)),)
        needs = [self.needs[id(s)] for s in ir.walk(stmts) if id(s) in self.needs]
        waits = [Retire(stmts[0].location, "read", need.reads) for need in needs if need.reads is not None]
        return (*waits, *stmts)


def negated(condition: ir.Expr) -> ir.Expr:
    """Of a comparison with ne or eq."""
    return replace(condition, op={"ne": "eq", "eq": "ne"}[condition.op])


def _merged(stmts: list[ir.Stmt]) -> list[ir.Stmt]:
    """Neighbouring statements of one thread under one branch."""
    out: list[ir.Stmt] = []
    for of_one, run in groupby(stmts, key=lambda stmt: isinstance(stmt, One)):
        run = list(run)
        out += [replace(run[0], body=tuple(s for one in run for s in one.body))] if of_one else run
    return out
