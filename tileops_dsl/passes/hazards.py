"""What a consumer group must order within itself: found by running its statements over the state of its shared tiles.

A run takes the tile loop twice, and one to three iterations of a loop of unknown length. There is one for each way that the
program's switches can stand (conditions that no loop changes). It notes at each statement what must have happened before it:
`Need`.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from tileops_dsl import ir
from tileops_dsl.layouts import Linear
from tileops_dsl.passes.meaning import Run, events, numbers, ways
from tileops_dsl.plan import is_common, is_load, is_store, named, ring_of
from tileops_dsl.schedule import Chunks


@dataclass
class Need:
    """Before one statement. Sets hold the ways (tuples of switch values) in which it is needed."""

    sync: bool = False  # a barrier of the group
    fence: bool = False  # before that, for what TMA reads
    reads: int | None = None  # stores that may still be reading shared memory
    reads_in: set = field(default_factory=set)
    arrive: dict[ir.Buffer, set] = field(default_factory=dict)  # the load of that tile has arrived


def find(kernel: ir.Kernel, body) -> tuple[dict[int, Need], list[tuple], list[ir.Expr]]:
    """Needs by the id of a statement, all ways the switches can stand, the switches."""
    conditions = _switches(kernel, body)
    positions = list(itertools.product((True, False), repeat=len(conditions)))
    needs: dict[int, Need] = defaultdict(Need)
    for way, steps in itertools.product(positions, (1, 2, 3)):
        switches = dict(zip(conditions, way, strict=True))
        run = Run(numbers(kernel, ways(kernel)[0], steps), whole=(Chunks,), switches=switches)
        _State(kernel, way, needs).follow(body, run)
    return needs, positions, conditions


def _switches(kernel: ir.Kernel, body) -> list[ir.Expr]:
    """Conditions on parameters alone, around accesses of shared memory."""
    around = [stmt for stmt in ir.walk(body) if isinstance(stmt, ir.If) and _own(kernel, stmt)]
    names = {s.condition: {e.name for e in ir.subexprs(s.condition) if isinstance(e, ir.Var)} for s in around}
    return [condition for condition, used in names.items() if used <= kernel.parameters]


def _own(kernel: ir.Kernel, stmt: ir.Stmt) -> list[ir.Buffer]:
    """Tiles in shared memory that the statement accesses and that each group has for itself."""
    return [b for b in dict.fromkeys(named(stmt)) if b.scope == "shared" and not is_common(kernel, b)]


@dataclass
class _State:
    """Of a run: accesses since the last barrier of the group, loads on their way, stores that still read."""

    kernel: ir.Kernel
    way: tuple[bool, ...]
    needs: dict[int, Need]
    generic: list = field(default_factory=list)  # ((buffer, stage), "read" | "write", how elements lie in threads)
    loading: set = field(default_factory=set)
    storing: list = field(default_factory=list)  # (buffer, stage), oldest first
    waited: set = field(default_factory=set)  # retired by their thread, which the others do not know yet

    def follow(self, body, run: Run) -> None:
        for event in events(body, run):
            parts = events(event.stmt.body, run, event.values) if isinstance(event.stmt, Chunks) else (event,)
            for op in (part.op for part in parts if not isinstance(part.op, ir.Gemm)):
                kind = "load" if is_load(op) else "store" if is_store(op) else "write" if isinstance(op, ir.Copy) else "read"
                for buffer in _own(self.kernel, op):
                    ring = ring_of(self.kernel, buffer)
                    place = buffer, event.values[ring.var.name] % ring.stages if ring else 0
                    # A vector is written in the order of threads and read by columns; a tile is read and written as matrices.
                    by_columns = isinstance(self.kernel.layouts[buffer], Linear) and kind == "read"
                    getattr(self, f"on_{kind}")(event.stmt, place, "columns" if by_columns else "own")

    def sync(self, stmt: ir.Stmt) -> None:
        self.needs[id(stmt)].sync = True
        self.generic.clear()
        self.waited.clear()

    def conflicts(self, place, how: str, kinds: tuple[str, ...]) -> bool:
        """Whether another thread may have accessed the place since the last barrier."""
        return any(p == place and kind in kinds and other != how for p, kind, other in self.generic)

    def retire_reads(self, stmt: ir.Stmt, place) -> None:
        if place in self.storing:
            younger, need = self.storing[::-1].index(place), self.needs[id(stmt)]
            need.reads = younger if need.reads is None else min(need.reads, younger)
            need.reads_in.add(self.way)
            done = len(self.storing) - younger
            self.waited |= set(self.storing[:done])
            del self.storing[:done]

    def on_read(self, stmt, place, how) -> None:
        if place in self.loading:
            self.needs[id(stmt)].arrive.setdefault(place[0], set()).add(self.way)
            self.loading.discard(place)
            self.waited.discard(place)  # the load came after the wait for the stores
        if self.conflicts(place, how, ("write",)):
            self.sync(stmt)
        self.generic.append((place, "read", how))

    def on_write(self, stmt, place, how) -> None:
        self.retire_reads(stmt, place)
        if place in self.waited or self.conflicts(place, how, ("read", "write")):
            self.sync(stmt)
        self.generic.append((place, "write", how))

    def on_load(self, stmt, place, how) -> None:
        self.retire_reads(stmt, place)
        if self.conflicts(place, "", ("read", "write")):
            self.sync(stmt)
        self.loading.add(place)

    def on_store(self, stmt, place, how) -> None:
        if self.conflicts(place, "", ("write",)):
            self.needs[id(stmt)].fence = True
            self.sync(stmt)
        self.storing.append(place)
