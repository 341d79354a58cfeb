"""Barriers: the ends of every edge in the roles' bodies, and the mbarriers with their arrivals and bytes.

Between the producer and the consumers each ring has `full` (its copies have arrived) and `empty` (its products have read); for
loads that a group issues itself, `full` only. Within a group, what hazards.py finds. Groups that alternate take turns at the
ring: a group that waited for a stage while the other still waits for the round before would take that one's phase for its own.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.passes import hazards
from tileops_dsl.plan import barrier_of, consumers, is_common, is_load, is_store, loads_of, peers, ring_of, sharing
from tileops_dsl.schedule import Alone, Await, Barrier, Fence, Issue, One, Retire, Role, Signal, Sync, Turn, Unrolled
from tileops_dsl.targets import Target


def derive_barriers(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    if not kernel.roles:
        return kernel
    barriers, offset = [], kernel.shared_bytes
    for barrier in _barriers(kernel):
        barriers.append(replace(barrier, offset=offset))
        offset += 8 * barrier.count
    kernel = replace(kernel, barriers=tuple(barriers), shared_bytes=offset)
    return replace(kernel, roles=tuple(_producer(kernel, r) if r.warp is not None else _group(kernel, r) for r in kernel.roles))


def _barriers(kernel: ir.Kernel):
    for ring in kernel.rings:
        groups = len(consumers(kernel).groups)
        loads = loads_of(kernel, ring)
        if not loads:
            continue
        common = is_common(kernel, ring.buffers[0])
        expected = sum(kernel.layouts[load.dst].bytes for load in loads)
        name = "full" if common else f"{loads[0].src.tensor.name}_full"
        yield Barrier(name, "full", ring, common, 1 if common else groups, 1, expected)
        if common:
            yield Barrier("empty", "empty", ring, True, 1, releases(kernel, ring), 0)


def releases(kernel: ir.Kernel, ring) -> int:
    """Arrivals that hand back a stage: a thread of each group of each peer; without peers each warp."""
    groups = sharing(kernel)
    return groups * (peers(kernel, ring) if peers(kernel, ring) > 1 else 4)


# ---- the producer


def _producer(kernel: ir.Kernel, role: Role) -> Role:
    def body(stmts, index=None):
        out, first = [], True
        for stmt in stmts:
            if isinstance(stmt, Issue) and first:
                ring = ring_of(kernel, stmt.op.dst)
                out.append(Await(stmt.location, barrier_of(kernel, ring, "empty").name, stmt.index))
                out.append(Signal(stmt.location, barrier_of(kernel, ring, "full").name, "this"))
                first = False
            out.append(replace(stmt, body=body(stmt.body)) if hasattr(stmt, "body") else stmt)
        return tuple(out)

    return replace(role, body=body(role.body))


# ---- the consumers


def _group(kernel: ir.Kernel, role: Role) -> Role:
    needs, ways, conditions = hazards.find(kernel, role.body)
    body = _in_turns(_Group(kernel, needs, ways, conditions).body(role.body))
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
        self.ring = None  # whose product is being issued

    def body(self, stmts) -> tuple[ir.Stmt, ...]:
        out: list[ir.Stmt] = []
        for stmt in stmts:
            if isinstance(stmt, One):
                out += self.group_before(stmt) + [replace(stmt, body=self.one(stmt.body))]
            elif isinstance(stmt, Issue):
                out += self.product(stmt)
            elif isinstance(stmt, Retire):
                out += [stmt, *self.release(stmt)]
            elif id(stmt) in self.needs:
                out += self.before(stmt)
                out.append(stmt)
            else:
                compound = hasattr(stmt, "body") and not isinstance(stmt, ir.Parallel)
                out.append(replace(stmt, body=self.body(stmt.body)) if compound else stmt)
        return tuple(_merged(out))

    def product(self, stmt: Issue) -> list[ir.Stmt]:
        self.ring = ring_of(self.kernel, stmt.op.a)
        return [Await(stmt.location, barrier_of(self.kernel, self.ring, "full").name, stmt.index), stmt]

    def release(self, stmt: Retire) -> list[ir.Stmt]:
        """With a product unfinished, the stage before is read; behind the loop the last one."""
        late = next(s for s in ir.walk(self.kernel.body) if isinstance(s, ir.Pipelined) and s.var == self.ring.var).pending
        which = "before" if stmt.pending else "last" if late else "this"
        return [Signal(stmt.location, barrier_of(self.kernel, self.ring, "empty").name, which)]

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
            out += self.guarded((Await(where, barrier_of(self.kernel, ring, "full").name, ring.var),), ways, where)
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
        out = []
        for stmt in stmts:
            need = next((self.needs[id(s)] for s in ir.walk((stmt,)) if id(s) in self.needs), None)
            if need and need.reads is not None and isinstance(stmt, Unrolled | Issue):
                out.append(Retire(stmt.location, "read", need.reads))
            out.append(replace(stmt, body=self.expected(stmt.body)) if isinstance(stmt, Unrolled) else stmt)
            if isinstance(stmt, ir.If):
                out[-1] = replace(stmt, body=self.one(stmt.body))
            elif isinstance(stmt, Issue):
                out[-1:] = self.expected((stmt,))
        return tuple(out)

    def expected(self, stmts) -> tuple[ir.Stmt, ...]:
        """Loads announce their bytes."""
        out = []
        for stmt in stmts:
            if is_load(stmt.op):
                ring = ring_of(self.kernel, stmt.op.dst)
                out.append(Signal(stmt.location, barrier_of(self.kernel, ring, "full").name, "this"))
            out.append(stmt)
        return tuple(out)


def negated(condition: ir.Expr) -> ir.Expr:
    """Of a comparison with ne or eq."""
    return replace(condition, op={"ne": "eq", "eq": "ne"}[condition.op])


def _merged(stmts: list[ir.Stmt]) -> list[ir.Stmt]:
    """Neighbouring statements of one thread under one branch."""
    out: list[ir.Stmt] = []
    for stmt in stmts:
        if isinstance(stmt, One) and out and isinstance(out[-1], One):
            out[-1] = replace(out[-1], body=(*out[-1].body, *stmt.body))
        else:
            out.append(stmt)
    return out
