"""Edges between the groups of T.ws, and where a group refills a box: from the program's one sequential meaning.

The program runs in its order, for a few iterations of each loop and with every condition true. Two accesses of a box by two
groups, of which one writes, are an edge from the completion of the first to the begin of the second, unless what the second
group knows by then implies it. What it knows is a clock: for each group, the step that this one has reached. A load is never
the second: it is issued at the first step at which its group knows that all earlier accesses of the box are complete.
"""

from dataclasses import dataclass, field, replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.passes.meaning import Event, Run, events, numbers, ways
from tileops_dsl.plan import accesses, boxes, is_load, is_store

ITERATIONS = 3  # of each loop: the first, and two that have one before them


@dataclass(eq=False)
class Step:
    """What a group does at one time."""

    group: int
    index: int  # among the steps of its group
    event: Event
    clock: dict[int, int]  # the steps that the groups have reached when it begins
    met: int  # the last step before which the threads of the group met
    done: int | None = None  # the step of its group before which it is known to be complete
    after: list["Step"] = field(default_factory=list)  # of a load: accesses that must be complete
    awaited: list["Step"] = field(default_factory=list)  # of a load: who waited for it


@dataclass(frozen=True)
class Ready:
    """A named barrier: the group of `first` arrives behind it, that of `second` waits in front of it."""

    first: ir.Stmt
    second: ir.Stmt
    groups: tuple[int, int]
    both: bool = False  # and the other way round: each group arrives and waits


@dataclass(frozen=True)
class Refill:
    """A load is issued in front of `at`: for that iteration, or for the next one of the loop over `ahead`.

    Without `at`, for the first iteration of all, in front of everything. What stands in a loop leaves its first iteration to
    what stands outside, unless it is the load's own place.
    """

    load: ir.Copy
    at: ir.Stmt | None
    ahead: str | None
    group: int
    stored: bool  # stores that read the box are waited for in front of it


@dataclass
class Edges:
    ready: list[Ready]
    refills: list[Refill]
    # Before a statement, all but so many products are waited for, after which these are finished.
    retires: list[tuple[ir.Stmt, int, tuple[ir.Gemm, ...]]]
    full: dict[ir.Copy, list[ir.Stmt]]  # of a load, the statements that wait for it
    fences: list[ir.Stmt]  # behind which a group's threads fence what they wrote
    exchanges: list[ir.Stmt]  # behind which, and behind the fence, they meet
    stored: list[ir.Stmt]  # stores that are waited for at once: others than their own group's loads overwrite what they read


def find(kernel: ir.Kernel) -> Edges:
    for loop in (s for s in ir.walk(kernel.body) if isinstance(s, ir.Pipelined) and (s.num_stages > 1 or s.pending)):
        raise TileError("stages of a loop with T.ws: a box has one so far", "num_stages=1", loop.location)
    outer = [s for s in ir.walk(kernel.body) if isinstance(s, ir.If | ir.Pipelined)]
    switches = [s for s in outer if isinstance(s, ir.If)]
    run = Run(numbers(kernel, ways(kernel)[0], ITERATIONS), switches={s.condition: True for s in switches})
    program = _Program(len(kernel.roles))
    for stmt in outer:
        for inner in ir.walk(stmt.body):
            program.around[id(inner)] = (*program.around.get(id(inner), ()), stmt)
    for on in events(kernel.body, replace(run, whole=(ir.On,))):
        for group in on.stmt.groups if isinstance(on.stmt, ir.On) else ():
            for event in events(on.stmt.body, run, on.values):
                if not isinstance(event.stmt, ir.Alloc):
                    program.step(group, event)
    retires = [(stmt, pending, tuple(of)) for stmt, (pending, of) in program.retires.items()]
    ready, refills = _ready(program.ready), _refills(program)
    return Edges(ready, refills, retires, program.full, *map(list, (program.fences, program.exchanges, program.stored)))


class _Program:
    def __init__(self, groups: int):
        self.around: dict[int, tuple[ir.If | ir.Pipelined, ...]] = {}  # by the id of a statement, outermost first
        self.steps: list[list[Step]] = [[] for _ in range(groups)]
        self.flying: list[list[Step]] = [[] for _ in range(groups)]  # products, oldest first
        self.writer: dict[tuple, Step] = {}
        self.readers: dict[tuple, list[Step]] = {}
        self.ready: dict[tuple, tuple[Step, Step]] = {}  # by their statements: the first time
        self.retires: dict[ir.Stmt, tuple[int, dict[ir.Gemm, None]]] = {}
        self.full: dict[ir.Copy, list[ir.Stmt]] = {}
        self.fences: dict[ir.Stmt, None] = {}
        self.exchanges: dict[ir.Stmt, None] = {}
        self.stored: dict[ir.Stmt, None] = {}

    def step(self, group: int, event: Event) -> None:
        own = self.steps[group]
        clock, met = (own[-1].clock, own[-1].met) if own else ({}, -1)
        step = Step(group, len(own), event, {**clock, group: len(own)}, met)
        own.append(step)
        self.retire(step)
        touched = {(box, writes) for writes, tiles in enumerate(accesses(event.op)) for box in _shared(tiles)}
        earlier = {self.writer[box] for box, _ in touched if box in self.writer}
        earlier |= {reader for box, writes in touched if writes for reader in self.readers.get(box, ())}
        for before in sorted(earlier, key=lambda before: (before.group == group, -before.index)):  # barriers of both first
            self.order(before, step)
        for box in (box for box, writes in touched if not writes):
            self.readers.setdefault(box, []).append(step)
        for box in (box for box, writes in touched if writes):
            self.writer[box], self.readers[box] = step, []
        if isinstance(event.op, ir.Gemm):
            self.flying[group].append(step)
        else:
            step.done = step.index + 1

    def retire(self, step: Step) -> None:
        """What waits for products: T.wait, and what touches their registers or, but for loads, overwrites what they read."""
        op, flying = step.event.op, self.flying[step.group]
        if isinstance(op, ir.Wait):
            count = max((n + 1 - op.pending for n, product in enumerate(flying) if product.event.op is op.of), default=0)
        elif isinstance(op, ir.Gemm):
            return
        else:
            touched = {ir.buffer_of(tile) for tiles in accesses(op) for tile in tiles if tile.scope == "fragment"}
            touched |= set() if is_load(op) else _shared(accesses(op)[1])
            used = [{p.event.op.a, p.event.op.c} | _shared(accesses(p.event.op)[0]) for p in flying]
            count = max((n + 1 for n, of_product in enumerate(used) if touched & of_product), default=0)
        if count > 0:
            finished, flying[:count] = flying[:count], []
            stmt = (*self.conditions(step.event.stmt), step.event.stmt)[0]
            pending, of = self.retires.get(stmt, (len(flying), {}))
            self.retires[stmt] = min(len(flying), pending), of | {product.event.op: None for product in finished}
            for product in finished:
                product.done = step.index

    def order(self, first: Step, second: Step) -> None:
        """`first` is complete before `second` begins."""
        if _publishes(first) and not _by_threads(second):
            self.fences[first.event.stmt] = None
        if is_store(first.event.op) and not _own_load(first, second):
            self.stored[first.event.stmt] = None
            self.exchanges |= {first.event.stmt: None} if first.group == second.group else {}
        if is_load(second.event.op):
            second.after.append(first)
        elif is_load(first.event.op):
            if not any(second.clock.get(step.group, 0) > step.index for step in first.awaited):
                self.check_conditions(first, second)
                first.awaited.append(second)
                waiting, place = self.full.setdefault(first.event.op, []), self.level(second, first)
                waiting += [place] if place not in waiting else []
        elif first.group == second.group:
            if _by_threads(first) and second.met <= first.index and not _own_elements(first, second):
                self.exchanges[first.event.stmt] = None
        elif not _knows(second, first):
            if first.done is None or not _same_iteration(first, second):
                problem = f"{second.event.op.location} overwrites what group {first.group} may still read, or reads it too late"
                raise TileError(problem, "T.wait behind the product, or a second tile", first.event.op.location)
            self.check_conditions(first, second)
            told, others = first.done, self.steps[first.group]
            around = self.around.get(id(others[told - 1].event.stmt))
            while told < len(others) and _publishes(others[told]) and self.around.get(id(others[told].event.stmt)) == around:
                told += 1  # what follows is announced with it
            for group, reached in {**others[told - 1].clock, first.group: told}.items():
                second.clock[group] = max(second.clock.get(group, 0), reached)
            second.met = second.index
            ends = self.level(others[told - 1], second), self.level(second, first)
            self.ready.setdefault(ends, (others[told - 1], second))

    def met(self, step: Step, other: Step) -> bool:
        """Whether one thread of a group knows that the others are done with what they accessed themselves."""
        own = step.group == other.group and _by_threads(other)
        return not own or step.met > other.index or other.event.stmt in self.exchanges

    def level(self, step: Step, other: Step) -> ir.Stmt:
        """Where the step's end of an edge is: of what stands in a loop that is not around the other, once for the loop."""
        stmt, common = step.event.stmt, self.around.get(id(other.event.stmt), ())
        loops = [loop for loop in self.around.get(id(stmt), ()) if isinstance(loop, ir.Pipelined)]
        return next((loop for loop in loops if not any(loop is outer for outer in common)), stmt)

    def conditions(self, stmt: ir.Stmt) -> list[ir.If]:
        return [outer for outer in self.around.get(id(stmt), ()) if isinstance(outer, ir.If)]

    def check_conditions(self, first: Step, second: Step) -> None:
        """Both ends of an edge happen, or none."""
        ways = ([switch.condition for switch in self.conditions(step.event.stmt)] for step in (first, second))
        if next(ways) != next(ways):
            problem = f"{second.event.op.location} waits for this, and one of them depends on a condition"
            raise TileError(problem, "both under one T.If, or none", first.event.op.location)


def _shared(tiles: list[ir.Tile]) -> set[tuple[ir.Buffer, int]]:
    return {box for tile in tiles if tile.scope == "shared" for box in boxes(tile)}


def _by_threads(step: Step) -> bool:
    """Whether the threads of the group access memory themselves."""
    return not (isinstance(step.event.op, ir.Gemm) or is_load(step.event.op) or is_store(step.event.op))


def _own_elements(first: Step, second: Step) -> bool:
    """Whether copies between a fragment and a tile give each thread its own; of a vector its warp, which meets behind it."""
    a, b = first.event.op, second.event.op
    copies = isinstance(a, ir.Copy) and isinstance(b, ir.Copy) and _by_threads(second)
    return copies and not (a.src == b.dst and a.src.scope == "shared" and len(b.dst.shape) == 1)


def _own_load(store: Step, load: Step) -> bool:
    return is_load(load.event.op) and store.group == load.group


def _publishes(step: Step) -> bool:
    return _by_threads(step) and any(tile.scope == "shared" for tile in accesses(step.event.op)[1])


def _knows(step: Step, other: Step) -> bool:
    return other.done is not None and step.clock.get(other.group, 0) >= other.done


def _same_iteration(a: Step, b: Step) -> bool:
    return all(a.event.values[name] == b.event.values[name] for name in a.event.values.keys() & b.event.values.keys())


def _ready(edges: dict[tuple, tuple[Step, Step]]) -> list[Ready]:
    """In program order. Two that cross without a step between are one barrier at which both groups wait."""
    found: dict[tuple, Ready] = {}
    for ends, (first, second) in edges.items():
        back = [pair for pair in edges.values() if _adjacent(pair[0], second) and _adjacent(first, pair[1])]
        key = frozenset((first, *(a for a, _ in back)))
        found.setdefault(key, Ready(*ends, (first.group, second.group), bool(back)))
    return list(found.values())


def _adjacent(step: Step, other: Step) -> bool:
    return step.group == other.group and step.index + 1 == other.index


def _refills(program: _Program) -> list[Refill]:
    """Each load at its first step; of the first iteration of a loop, outside of that loop."""
    found: dict[ir.Copy, dict[tuple, Refill]] = {}
    for own in program.steps:
        for load in (step for step in own if is_load(step.event.op)):
            at = _first(program, load) if load.after else None
            ahead = [n for n, v in load.event.values.items() if at and at.event.values.get(n, v) != v]
            stored = any(is_store(step.event.op) and _own_load(step, load) for step in load.after)
            refill = Refill(load.event.stmt, at and at.event.stmt, *ahead or [None], load.group, stored)
            found.setdefault(refill.load, {})[refill.at, refill.ahead] = refill
    own_place = {load: [r for r in at.values() if r.at is load] for load, at in found.items()}
    return [refill for load, at in found.items() for refill in own_place[load] or at.values()]


def _first(program: _Program, load: Step) -> Step:
    """The step in front of which the load is issued: not early where stores that read the box are to be waited for."""
    own, values = program.steps[load.group], load.event.values
    begin = load.index if any(is_store(step.event.op) and _own_load(step, load) for step in load.after) else 0
    end = min((step.index for step in load.awaited if step.group == load.group), default=len(own) - 1)
    for step in (step for step in own[begin : end + 1] if not program.conditions(step.event.stmt)):
        then = step.event.values
        outside = then.keys() < values.keys() or then == values or list(then.items())[:-1] == list(values.items())[:-1]
        if outside and all(_knows(step, other) and program.met(step, other) for other in load.after):
            return step
    unmet = [
        o.event.stmt for o in load.after if o.group == load.group and _by_threads(o) and o.event.stmt not in program.exchanges
    ]
    if unmet:  # no other barrier will do: the group's threads meet behind their accesses
        program.exchanges |= dict.fromkeys(unmet)
        return _first(program, load)
    problem = f"group {load.group} cannot know when what {load.event.op.dst.name} holds has been read"
    raise TileError(problem, "T.wait behind the product that reads it last", load.event.op.location)
