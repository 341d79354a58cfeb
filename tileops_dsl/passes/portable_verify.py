"""What must hold of products without warp groups: the threads do what the program does, and barriers order it.

All threads go through the same statements, so one pass over them shows every order: between two barriers, what two threads do
has none. A stage of a tile holds the name of what was written there last (a copy may write as soon as it is issued). A reader
compares it with what the recorded program, run in its order, would have left there, and no access meets one of another thread
since the last barrier, nor a copy in flight (which the next tile's copies would meet, too).
"""

import itertools
from collections import Counter
from collections.abc import Iterator

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.passes.meaning import Event, Run, events, meaning, number, ways
from tileops_dsl.passes.pipeline import shared_buffers
from tileops_dsl.passes.simulate import shared_reads, shared_writes, version
from tileops_dsl.passes.verify_roles import relevant
from tileops_dsl.plan import asynchronous, is_load, is_store, ring_of
from tileops_dsl.schedule import Advance, Commit, Issue, Land, Multiply, Operands, Retire, Sync
from tileops_dsl.targets import Target

QUIET = (Advance, Commit, Land, Retire, Sync, ir.Alloc)


def schedule(kernel: ir.Kernel, target: Target) -> None:
    """The threads do what the program does, as often, and all but loads in its order."""
    for parameters, steps in itertools.product(ways(kernel), range(1, 5)) if kernel.roles else ():
        run = Run(parameters, steps)
        program, threads = list(_done(kernel.body, run)), list(_done(kernel.roles[0].body, run))
        for load in (True, False):
            found, expected = ([what for what, is_load in done if is_load is load] for done in (threads, program))
            if Counter(found) != Counter(expected) if load else found != expected:
                problem = f"the threads do not do what the program does, for {steps} steps"
                raise TileError(problem, "portable.schedule", kernel.location)


def _done(body, run: Run) -> Iterator[tuple]:
    """What is done, and whether it is a load. A product is its steps; one of operands that are zeros does nothing."""
    held: dict[int, tuple] = {}  # operands in registers: step and iteration
    for event in events(body, run):
        stmt, op = event.stmt, event.op
        if isinstance(stmt, Operands):
            held[stmt.step % 2] = stmt.step, None if stmt.index is None else number(stmt.index, event.values)
        elif isinstance(stmt, Multiply):
            step, index = held.get(stmt.step % 2, (None, 0))
            if index is not None or step != stmt.step:
                yield ("multiply", stmt.op.location, stmt.step, step, index), False
        elif isinstance(op, ir.Gemm):
            index, depth = event.values[_loop(op)], op.a.shape[0 if op.transpose_a else 1]
            yield from [(("fill", op.c.name), False)] if number(op.clear, event.values) else []
            yield from ((("multiply", op.location, step, step, index), False) for step in range(depth // 16))
        elif isinstance(stmt, ir.Fill):
            yield ("fill", stmt.buffer.name), False
        elif not isinstance(stmt, QUIET) and not (isinstance(stmt, Issue) and _beyond(stmt, event.values, run)):
            yield meaning(event), is_load(op)


def _loop(gemm: ir.Gemm) -> str:
    return next(e.name for e in ir.subexprs(gemm.clear) if isinstance(e, ir.Var))


def _beyond(stmt: Issue, values: dict[str, int], run: Run) -> bool:
    """A load of an iteration that the product's loop does not have: it reads zeros."""
    ahead = isinstance(stmt.index, ir.Call) or stmt.index.name == "ahead"
    return ahead and number(stmt.index, values) >= run.steps


def order(kernel: ir.Kernel, target: Target) -> None:
    for parameters in relevant(kernel) if kernel.roles else ():
        _Order(kernel, Run(parameters, max(ring.stages for ring in kernel.rings) + 2)).check()


class _Order:
    def __init__(self, kernel: ir.Kernel, run: Run):
        self.kernel, self.run = kernel, run
        self.holds: dict[tuple, tuple] = {}  # by tile and stage
        self.done: list[tuple] = []  # since the last barrier: tile and stage, whether written, how threads divide the tile
        self.flying: list[list[tuple]] = [[]]  # groups of copies, oldest first; the last is open

    def check(self) -> None:
        expected, last = {}, {}
        for event in events(self.kernel.body, self.run):
            for buffer in shared_reads(event.op):
                expected[self.key(event), buffer.name] = last.get(buffer.name)
            last |= {buffer.name: version(event) for buffer in shared_writes(event.op)}
        for event in events(self.kernel.roles[0].body, self.run):
            stmt = event.stmt
            if isinstance(stmt, Sync):
                self.done.clear()
            elif isinstance(stmt, Commit):
                self.flying.append([])
            elif isinstance(stmt, Retire):
                landed = self.flying[: max(len(self.flying) - 1 - stmt.pending, 0)]
                del self.flying[: len(landed)]
                self.done += [(place, True, "lines") for group in landed for place in group]
            for buffer, writes, how in self.accesses(event):
                self.access(event, buffer, writes, how, expected)

    def key(self, event: Event) -> tuple:
        op, values = getattr(event.stmt, "op", event.stmt), event.values
        if isinstance(event.stmt, Operands):
            values = values | {_loop(op): number(event.stmt.index, values)}
        return op.location, tuple(sorted(values.items()))

    def accesses(self, event: Event) -> Iterator[tuple]:
        stmt, op = event.stmt, getattr(event.stmt, "op", event.stmt)
        if isinstance(stmt, Operands):
            yield from ((tile, False, "operands") for tile in (op.a, op.b) if stmt.index is not None)
        elif isinstance(stmt, Issue | Land):
            yield from [(op.dst, True, "lines")] if isinstance(stmt, Land) or asynchronous(op) else []
        elif isinstance(op, ir.Copy | ir.Parallel):
            for buffer in dict.fromkeys(b for s in getattr(op, "body", (op,)) for b in shared_buffers(s)):
                matrix, copy = len(buffer.shape) == 2, isinstance(op, ir.Copy)
                how = "lines" if copy and (is_store(op) or not matrix) else "accumulators" if matrix else "columns"
                yield buffer, copy and not is_store(op), how

    def access(self, event: Event, buffer: ir.Buffer, writes: bool, how: str, expected: dict) -> None:
        stmt, ring = event.stmt, ring_of(self.kernel, buffer)
        index = getattr(stmt, "index", ring.var if ring else None)
        place = buffer.name, number(index, event.values) % ring.stages if ring else 0
        met = any(p == place and (w or writes) and h != how for p, w, h in self.done)
        wrong = not writes and self.holds.get(place) != expected[self.key(event), buffer.name]
        if met or wrong or any(place in group for group in self.flying):
            problem = f"barriers do not order what threads do with {buffer.name} here"
            raise TileError(problem, "portable.schedule", stmt.location)
        if writes:
            self.holds[place] = version(Event(getattr(stmt, "op", stmt), event.values))
        if isinstance(stmt, Issue):
            self.flying[-1].append(place)
        else:
            self.done.append((place, writes, how))
