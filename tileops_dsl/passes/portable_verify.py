"""What must hold of products without warp groups: the threads do what the program does, and barriers order it.

Program and threads run on names instead of numbers: a statement is named after itself, what was done before it, and what it
reads from shared memory, so a wrong stage, a wrong step of K or a lost load shows in the name of the last one. All threads go
through the same statements, so one pass over them shows every order: between two barriers, what two threads do has none. No
access meets one of another thread since the last barrier, nor a copy in flight (which the next tile's copies would meet, too):
a copy may write as soon as it is issued.
"""

import itertools
from collections import Counter, defaultdict

from tileops_dsl import ir
from tileops_dsl.errors import TileError, require
from tileops_dsl.passes.meaning import Event, Run, events, meaning, number, numbers, ways
from tileops_dsl.plan import asynchronous, is_load, ring_of, shared_boxes
from tileops_dsl.schedule import Commit, Issue, Land, Multiply, Operands, Retire, Sync
from tileops_dsl.targets import Target


def schedule(kernel: ir.Kernel, target: Target) -> None:
    """As often, and all but loads in its order; with one iteration and with more than stages; the next tile follows."""
    for parameters, more in itertools.product(ways(kernel), (False, True)):
        steps = max(ring.stages for ring in kernel.rings) + 2 if more else 1
        run = Run(numbers(kernel, parameters, steps))
        names: dict[tuple, int] = defaultdict(itertools.count(1).__next__)  # numbered as they come
        program, threads = _Course(kernel, names), _Course(kernel, names)
        for event in events(kernel.body, run):
            program.step(event)
            program.touched.clear()  # one statement after the other
        for event in events(kernel.roles[0].body, run):
            threads.step(event)
        if threads.done != program.done or not program.loads.items() <= threads.loads.items():  # others read beyond: zeros
            problem = f"the threads do not do what the program does, for {steps} steps"
            raise TileError(problem, "portable.schedule", kernel.location)


class _Course:
    def __init__(self, kernel: ir.Kernel, names: dict[tuple, int]):
        self.kernel, self.names = kernel, names
        self.done = 0  # the name of all so far but loads
        self.loads: Counter[tuple] = Counter()
        self.holds: dict[tuple, object] = {}  # a tile's stage, and registers on the way there or from there: names
        self.touched: set[tuple] = set()  # since the last barrier: tile and stage, whether written, how threads divide the tile
        self.flying: list[list[tuple]] = [[]]  # groups of copies, oldest first; the last is open

    def step(self, event: Event) -> None:
        stmt, op, holds = event.stmt, getattr(event.stmt, "op", event.stmt), self.holds
        if isinstance(stmt, Sync):
            self.touched.clear()
        elif isinstance(stmt, Commit):
            self.flying.append([])
        elif isinstance(stmt, Retire):
            landed = self.flying[: max(len(self.flying) - 1 - stmt.pending, 0)]
            del self.flying[: len(landed)]
            self.touched |= {(place, True, "lines") for group in landed for place in group}
        elif isinstance(stmt, ir.Fill):
            self.done = self.names[self.done, "clear"]
        elif isinstance(stmt, Operands):  # without an index they are zeros
            read = stmt.index and [holds.get(self.access(event, tile, writes=False)) for tile in (op.a, op.b)]
            holds["operands", stmt.step % 2] = read and (stmt.step, *read)
        elif isinstance(stmt, Multiply):
            operands = holds.get(("operands", stmt.step % 2))
            self.done = self.names[self.done, stmt.step, operands] if operands else self.done
        elif isinstance(stmt, ir.Gemm):  # all steps, as the threads do them
            read = [holds.get(self.access(event, tile, writes=False)) for tile in (op.a, op.b)]
            self.done = self.names[self.done, "clear"] if number(op.clear, event.values) else self.done
            for step in range(op.a.shape[0 if op.transpose_a else 1] // 16):
                self.done = self.names[self.done, step, (step, *read)]
        elif isinstance(stmt, Land):
            holds[self.access(event, op.dst, writes=True)] = holds.pop(("loaded", op.dst), None)
        elif is_load(op):
            self.loads[meaning(event)] += 1
            later = isinstance(stmt, Issue) and not asynchronous(op)
            holds[("loaded", op.dst) if later else self.access(event, op.dst, writes=True)] = self.names[meaning(event)]
        elif isinstance(op, ir.Copy | ir.Parallel):
            reads, writes = shared_boxes(op)
            read = [holds.get(self.access(event, tile, writes=False)) for tile, _ in reads]
            self.done = self.names[(self.done, meaning(event), *read)]
            holds |= {self.access(event, tile, writes=True): self.done for tile, _ in writes}

    def access(self, event: Event, tile: ir.Buffer, writes: bool) -> tuple[str, int]:
        """The tile and its stage."""
        stmt, op, ring = event.stmt, getattr(event.stmt, "op", event.stmt), ring_of(self.kernel, tile)
        place = tile.name, number(getattr(stmt, "index", ring.var), event.values) % ring.stages if ring else 0
        by_element = "columns" if isinstance(op, ir.Parallel) and len(tile.shape) == 1 else "accumulators"
        how = "operands" if isinstance(op, ir.Gemm) else "lines" if getattr(op, "region", None) else by_element
        met = any(p == place and (w or writes) and h != how for p, w, h in self.touched)
        problem = f"barriers do not order what threads do with {tile.name} here"
        require(not met and not any(place in group for group in self.flying), problem, "portable.schedule", stmt.location)
        if isinstance(stmt, Issue):
            self.flying[-1].append(place)
        else:
            self.touched.add((place, writes, how))
        return place
