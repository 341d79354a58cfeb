"""What a consumer group must order within itself: found by running its statements over the state of its shared tiles.

The run takes the tile loop twice, each unrolled iteration by itself, and once for each way the program's switches can stand
(conditions that no loop changes). It notes at each statement what must have happened before: `Need`.
"""

import itertools
from dataclasses import dataclass, field

from tileops_dsl import ir
from tileops_dsl.layouts import Linear
from tileops_dsl.passes.pipeline import shared_buffers
from tileops_dsl.plan import is_common, is_load, is_store, ring_of
from tileops_dsl.schedule import Chunks, Issue, Unrolled


@dataclass
class Need:
    """Before one statement. Sets hold the ways (tuples of switch values) in which it is needed."""

    sync: bool = False  # a barrier of the group
    fence: bool = False  # before that, for what TMA reads
    reads: int | None = None  # stores that may still be reading shared memory
    reads_in: set = field(default_factory=set)
    arrive: dict[ir.Buffer, set] = field(default_factory=dict)  # the load of that tile has arrived


@dataclass
class State:
    """Of a run: accesses since the last barrier of the group, loads on their way, stores that still read."""

    generic: list = field(default_factory=list)  # ((buffer, stage), "read" | "write", how elements lie in threads)
    loading: set = field(default_factory=set)
    storing: list = field(default_factory=list)  # (buffer, stage), oldest first
    waited: set = field(default_factory=set)  # retired by their thread, which the others do not know yet


def switches(kernel: ir.Kernel, body) -> list[ir.Expr]:
    """Conditions on parameters, around accesses of shared memory."""
    found = {}
    for stmt in ir.walk(body):
        inner = (access for s in ir.walk(getattr(stmt, "body", ())) for access in _accesses(kernel, s))
        if isinstance(stmt, ir.If) and not _of_loops(stmt.condition, kernel) and any(True for _ in inner):
            found[stmt.condition] = None
    return list(found)


def _of_loops(condition: ir.Expr, kernel: ir.Kernel) -> bool:
    parameters = {v.name for v in (*kernel.dims, *kernel.scalars)}
    parameters |= {name for t in kernel.tensors for name in (f"{t.name}_dtype", f"has_{t.name}")}
    return any(isinstance(e, ir.Var) and e.name not in parameters for e in ir.subexprs(condition))


def find(kernel: ir.Kernel, body) -> tuple[dict[int, Need], list[tuple], list[ir.Expr]]:
    """Needs by the id of a statement, all ways the switches can stand, the switches."""
    conditions = switches(kernel, body)
    ways = list(itertools.product((True, False), repeat=len(conditions)))
    needs: dict[int, Need] = {}
    for way in ways:
        _Run(kernel, dict(zip(conditions, way, strict=True)), way, needs).body(body, {})
    return needs, ways, conditions


def _accesses(kernel: ir.Kernel, stmt: ir.Stmt):
    """(buffer, kind, how elements lie in threads) of the tiles that each group has for itself, reads first."""
    op = stmt.op if isinstance(stmt, Issue) else stmt
    if isinstance(op, ir.Gemm):
        return
    for buffer in dict.fromkeys(shared_buffers(op)):
        if is_common(kernel, buffer):
            continue
        if isinstance(op, ir.Copy):
            kind = "load" if is_load(op) else "store" if is_store(op) else "write"
        else:
            kind = "read"
        # A vector is written in the order of threads and read by columns; a tile is read and written as matrices.
        by_columns = isinstance(kernel.layouts[buffer], Linear) and kind == "read"
        yield buffer, kind, "columns" if by_columns else "own"


class _Run:
    def __init__(self, kernel: ir.Kernel, switch: dict, way: tuple, needs: dict[int, Need]):
        self.kernel, self.switch, self.way, self.needs, self.state = kernel, switch, way, needs, State()

    def body(self, body, env: dict[ir.Var, int]) -> None:
        for stmt in body:
            if isinstance(stmt, Unrolled):
                for value in range(stmt.extent):
                    self.body(stmt.body, {**env, stmt.var: value})
            elif isinstance(stmt, ir.If):
                if self.holds(stmt.condition, env):
                    self.body(stmt.body, env)
            elif isinstance(stmt, ir.Persistent):
                for _ in range(2):
                    self.body(stmt.body, env)
            elif isinstance(stmt, Chunks):
                self.leaf(stmt, [a for s in self.running(stmt.body) for a in _accesses(self.kernel, s)], env)
            elif hasattr(stmt, "body") and not isinstance(stmt, ir.Parallel):
                self.body(stmt.body, env)
            else:
                inner = ir.walk((stmt,))
                self.leaf(stmt, [a for s in inner for a in _accesses(self.kernel, s)], env)

    def holds(self, condition: ir.Expr, env: dict[ir.Var, int]) -> bool:
        """Switches stand one way; conditions of an unrolled loop are known; others (accesses do not depend on them) hold."""
        if condition in self.switch:
            return self.switch[condition]
        if isinstance(condition, ir.Call) and condition.op == "lt" and condition.args[0] in env:
            return env[condition.args[0]] < condition.args[1].value
        return True

    def running(self, body):
        for stmt in body:
            if not isinstance(stmt, ir.If):
                yield from ir.walk((stmt,))
            elif self.holds(stmt.condition, {}):
                yield from self.running(stmt.body)

    def stage(self, buffer: ir.Buffer, env: dict[ir.Var, int]) -> int:
        ring = ring_of(self.kernel, buffer)
        return env[ring.var] % ring.stages if ring else 0

    def leaf(self, stmt: ir.Stmt, accesses: list, env: dict[ir.Var, int]) -> None:
        for buffer, kind, how in accesses:
            place = (buffer, self.stage(buffer, env))
            getattr(self, f"on_{kind}")(stmt, place, how)

    def need(self, stmt: ir.Stmt) -> Need:
        return self.needs.setdefault(id(stmt), Need())

    def sync(self, stmt: ir.Stmt) -> None:
        self.need(stmt).sync = True
        self.state.generic.clear()
        self.state.waited.clear()

    def conflicts(self, place, how: str, kinds: tuple[str, ...]) -> bool:
        """Whether another thread may have accessed the place since the last barrier."""
        return any(p == place and kind in kinds and other != how for p, kind, other in self.state.generic)

    def retire_reads(self, stmt: ir.Stmt, place) -> None:
        if place in self.state.storing:
            last = len(self.state.storing) - 1 - self.state.storing[::-1].index(place)
            younger = len(self.state.storing) - 1 - last
            need = self.need(stmt)
            need.reads = younger if need.reads is None else min(need.reads, younger)
            need.reads_in.add(self.way)
            self.state.waited |= set(self.state.storing[: last + 1])
            del self.state.storing[: last + 1]

    def on_read(self, stmt, place, how) -> None:
        if place in self.state.loading:
            self.need(stmt).arrive.setdefault(place[0], set()).add(self.way)
            self.state.loading.discard(place)
            self.state.waited.discard(place)  # the load came after the wait for the stores
        if self.conflicts(place, how, ("write",)):
            self.sync(stmt)
        self.state.generic.append((place, "read", how))

    def on_write(self, stmt, place, how) -> None:
        self.retire_reads(stmt, place)
        if place in self.state.waited or self.conflicts(place, how, ("read", "write")):
            self.sync(stmt)
        self.state.generic.append((place, "write", how))

    def on_load(self, stmt, place, how) -> None:
        self.retire_reads(stmt, place)
        if self.conflicts(place, "", ("read", "write")):
            self.sync(stmt)
        self.state.loading.add(place)

    def on_store(self, stmt, place, how) -> None:
        if self.conflicts(place, "", ("write",)):
            self.need(stmt).fence = True
            self.sync(stmt)
        self.state.storing.append(place)
