"""Edges between the groups of T.ws, and where a group refills a box: from the program's one sequential meaning.

The program runs in its order, for a few iterations of each loop and with every condition true. Two accesses of a box by two
groups, of which one writes, are an edge from the completion of the first to the begin of the second, unless what the second
group knows by then implies it. What it knows is a clock: for each group, the step that this one has reached. A load is never
the second: it is issued at the first step at which its group knows that all earlier accesses of the box are complete; or, of a
group that only loads, once the group that read the box last has known it and told so.
"""

from dataclasses import dataclass, field, replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError, require
from tileops_dsl.passes.meaning import Run, Values, events, numbers, ways
from tileops_dsl.plan import accesses, is_load, is_store, shared_boxes

ITERATIONS = 3  # of each loop: the first, and two that have one before them


@dataclass(eq=False)
class Step:
    """What a group does at one time."""

    group: int
    index: int  # among the steps of its group
    time: int  # among all
    stmt: ir.Stmt
    values: Values
    around: tuple[ir.If | ir.Pipelined, ...]  # what it stands in, outermost first
    clock: dict[int, int]  # the steps that the groups have reached when it begins
    met: int  # the last step before which the threads of the group met
    done: int | None = None  # the step of its group before which it is known to be complete
    after: list["Step"] = field(default_factory=list)  # of a load: accesses that must be complete
    awaited: list["Step"] = field(default_factory=list)  # of a load: who waited for it

    conditions = property(lambda self: [outer for outer in self.around if isinstance(outer, ir.If)])
    # Whether the threads of the group access memory themselves, and write what others may see.
    by_threads = property(lambda self: not (isinstance(self.stmt, ir.Gemm) or is_load(self.stmt) or is_store(self.stmt)))
    publishes = property(lambda self: self.by_threads and bool(shared_boxes(self.stmt)[1]))
    # Of a load, whether stores of its own group read the box before.
    stored = property(lambda self: any(is_store(step.stmt) and step.group == self.group for step in self.after))

    def knows(self, other: "Step") -> bool:
        """That it is complete."""
        return other.done is not None and self.clock.get(other.group, 0) >= other.done

    def follows(self, other: "Step") -> bool:
        return self.group == other.group and self.index == other.index + 1

    def level(self, other: "Step") -> ir.Stmt:
        """Where its end of an edge is: of what stands in a loop that is not around the other, once for the loop."""
        loops = (outer for outer in self.around if isinstance(outer, ir.Pipelined) and outer not in other.around)
        return next(loops, self.stmt)


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

    By the load's group; or there another one tells that group, which `told` is.
    Without `at`, for the first iteration of all, in front of everything. What stands in a loop leaves its first iteration to
    what stands outside, unless it is the load's own place.
    """

    load: ir.Copy
    at: ir.Stmt | None
    ahead: str | None
    group: int
    stored: bool  # stores that read the box are waited for in front of it
    told: bool


def find(kernel: ir.Kernel) -> "Edges":
    for loop in (loop for loop in ir.walk(kernel.body, ir.Pipelined) if loop.num_stages > 1 or loop.pending):
        raise TileError("stages of a loop with T.ws: a box has one so far", "num_stages=1", loop.location)
    loading = {role.groups[0] for role in kernel.roles if role.loads}
    found, outer = Edges(len(kernel.roles), loading), list(ir.walk(kernel.body, ir.If | ir.Pipelined))
    for stmt in outer:
        for inner in ir.walk(stmt.body):
            found.around[inner] = (*found.around.get(inner, ()), stmt)
    switches = {stmt.condition: True for stmt in outer if isinstance(stmt, ir.If)}
    run = Run(numbers(kernel, ways(kernel)[0], ITERATIONS), switches=switches)
    for on in events(kernel.body, replace(run, whole=(ir.On,))):
        for group in on.stmt.groups if isinstance(on.stmt, ir.On) else ():
            for event in events(on.stmt.body, run, on.values):
                if not isinstance(event.stmt, ir.Alloc):
                    found.step(group, event.stmt, event.values)
    found.ready, found.refills = _ready(found.waits), _refills(found)
    return found


class Edges:
    """What is found while the program runs; dicts without values are ordered sets."""

    def __init__(self, groups: int, loading: set[int]):
        self.loading = loading  # groups that only load
        self.ready: list[Ready] = []
        self.refills: list[Refill] = []
        # In front of a statement, all but so many products are waited for, after which these are finished.
        self.retires: dict[ir.Stmt, tuple[int, dict[ir.Gemm, None]]] = {}
        self.full: dict[ir.Copy, list[ir.Stmt]] = {}  # of a load, the statements that wait for it
        self.fences: dict[ir.Stmt, None] = {}  # behind which a group's threads fence what they wrote
        self.exchanges: dict[ir.Stmt, None] = {}  # behind which, and behind the fence, they meet
        self.stored: dict[ir.Stmt, None] = {}  # waited for at once: others than its own group's loads overwrite what it reads

        self.around: dict[ir.Stmt, tuple[ir.If | ir.Pipelined, ...]] = {}  # outermost first
        self.steps: list[list[Step]] = [[] for _ in range(groups)]
        self.flying: list[list[Step]] = [[] for _ in range(groups)]  # products, oldest first
        self.writer: dict[tuple, Step] = {}
        self.readers: dict[tuple, list[Step]] = {}
        self.waits: dict[tuple, tuple[Step, Step]] = {}  # of a group for another: by their statements, the first time

    def step(self, group: int, stmt: ir.Stmt, values: Values) -> None:
        own = self.steps[group]
        clock, met = (own[-1].clock, own[-1].met) if own else ({}, -1)
        time = sum(map(len, self.steps))
        step = Step(group, len(own), time, stmt, values, self.around.get(stmt, ()), {**clock, group: len(own)}, met)
        own.append(step)
        self.retire(step)
        reads, writes = shared_boxes(stmt)
        earlier = {self.writer[box] for box in (*reads, *writes) if box in self.writer}
        earlier |= {reader for box in writes for reader in self.readers.get(box, ())}
        for before in sorted(earlier, key=lambda before: (before.group == group, -before.index)):  # barriers of both first
            self.order(before, step)
        for box in reads:
            self.readers.setdefault(box, []).append(step)
        for box in writes:
            self.writer[box], self.readers[box] = step, []
        if isinstance(stmt, ir.Gemm):
            self.flying[group].append(step)
        else:
            step.done = step.index + 1

    def retire(self, step: Step) -> None:
        """What waits for products: T.wait, and what touches their registers or, but for loads, overwrites what they read."""
        stmt, flying = step.stmt, self.flying[step.group]
        if isinstance(stmt, ir.Wait):
            count = max((n + 1 - stmt.pending for n, product in enumerate(flying) if product.stmt is stmt.of), default=0)
        elif isinstance(stmt, ir.Gemm):
            return
        else:
            touched = {ir.buffer_of(tile) for tiles in accesses(stmt) for tile in tiles if tile.scope == "fragment"}
            touched |= set() if is_load(stmt) else set(shared_boxes(stmt)[1])
            used = [{p.stmt.a, ir.buffer_of(p.stmt.c), *shared_boxes(p.stmt)[0]} for p in flying]
            count = max((n + 1 for n, of_product in enumerate(used) if touched & of_product), default=0)
        if count > 0:
            finished, flying[:count] = flying[:count], []
            place = (*step.conditions, stmt)[0]
            pending, of = self.retires.get(place, (len(flying), {}))
            self.retires[place] = min(len(flying), pending), of | {product.stmt: None for product in finished}
            for product in finished:
                product.done = step.index

    def order(self, first: Step, second: Step) -> None:
        """`first` is complete before `second` begins."""
        if first.publishes and not second.by_threads:
            self.fences[first.stmt] = None
        if is_store(first.stmt) and not (is_load(second.stmt) and first.group == second.group):
            self.stored[first.stmt] = None
            self.exchanges |= {first.stmt: None} if first.group == second.group else {}
        if is_load(second.stmt):  # who has read what an earlier load brought knows that one to be complete
            second.after += [first] if not is_load(first.stmt) or second.group not in self.loading else []
        elif is_load(first.stmt):
            if not any(second.clock.get(step.group, 0) > step.index for step in first.awaited):
                _check_conditions(first, second)
                first.awaited.append(second)
                waiting, place = self.full.setdefault(first.stmt, []), second.level(first)
                waiting += [place] if place not in waiting else []
        elif first.group == second.group:
            if first.by_threads and second.met <= first.index and not _own_elements(first, second):
                self.exchanges[first.stmt] = None
        elif not second.knows(first):
            self.tell(first, second)

    def tell(self, first: Step, second: Step) -> None:
        """By a named barrier, behind which the second's group knows what the first's knew there."""
        if first.done is None or any(first.values[name] != second.values[name] for name in first.values.keys() & second.values):
            problem = f"{second.stmt.location} overwrites what group {first.group} may still read, or reads it too late"
            raise TileError(problem, "T.wait behind the product, or a second tile", first.stmt.location)
        _check_conditions(first, second)
        told, others = first.done, self.steps[first.group]
        around = others[told - 1].around
        while told < len(others) and others[told].publishes and others[told].around == around:
            told += 1  # what follows is announced with it
        last = others[told - 1]
        for group, reached in {**last.clock, first.group: told}.items():
            second.clock[group] = max(second.clock.get(group, 0), reached)
        second.met = second.index
        self.waits.setdefault((last.level(second), second.level(first)), (last, second))

    def met(self, step: Step, other: Step) -> bool:
        """Whether one thread of a group knows that the others are done with what they accessed themselves."""
        return step.group != other.group or not other.by_threads or step.met > other.index or other.stmt in self.exchanges


def _check_conditions(first: Step, second: Step) -> None:
    """Both ends of an edge happen, or none."""
    ways = [[switch.condition for switch in step.conditions] for step in (first, second)]
    problem = f"{second.stmt.location} waits for this, and one of them depends on a condition"
    require(ways[0] == ways[1], problem, "both under one T.If, or none", first.stmt.location)


def _own_elements(first: Step, second: Step) -> bool:
    """Whether copies between a fragment and a tile give each thread its own; of a vector its warp, which meets behind it."""
    a, b = first.stmt, second.stmt
    copies = isinstance(a, ir.Copy) and isinstance(b, ir.Copy) and second.by_threads
    return copies and not (a.src == b.dst and a.src.scope == "shared" and len(b.dst.shape) == 1)


def _ready(waits: dict[tuple, tuple[Step, Step]]) -> list[Ready]:
    """In program order. Two that cross without a step between are one barrier at which both groups wait."""
    found: dict[frozenset, Ready] = {}
    for ends, (first, second) in waits.items():
        back = [a for a, b in waits.values() if second.follows(a) and b.follows(first)]
        found.setdefault(frozenset((first, *back)), Ready(*ends, (first.group, second.group), bool(back)))
    return list(found.values())


def _refills(found: Edges) -> list[Refill]:
    """Each load at its first step; of the first iteration of a loop, outside of that loop."""
    places: dict[ir.Copy, dict[tuple, Refill]] = {}
    for load in (step for own in found.steps for step in own if is_load(step.stmt)):
        told = load.group in found.loading
        group = max(load.after, key=lambda step: step.time).group if told and load.after else load.group
        at = _first(found, load, group) if load.after else None
        ahead = [n for n, v in load.values.items() if at and at.values.get(n, v) != v]
        refill = Refill(load.stmt, at and at.stmt, *ahead or [None], group, load.stored, told)
        places.setdefault(load.stmt, {})[refill.at, refill.ahead] = refill
    own_place = {load: [r for r in at.values() if r.at is load] for load, at in places.items()}
    return [refill for load, at in places.items() for refill in own_place[load] or at.values()]


def _first(found: Edges, load: Step, group: int) -> Step:
    """The group's step in front of which it may be issued: not early where stores that read the box are to be waited for."""
    own, values = found.steps[group], load.values
    end = min((step.index for step in load.awaited if step.group == group), default=len(own) - 1)
    for step in (step for step in own[load.index if load.stored else 0 : end + 1] if not step.conditions):
        then = step.values
        outside = then.keys() < values.keys() or then == values or list(then.items())[:-1] == list(values.items())[:-1]
        if outside and all(step.knows(other) and found.met(step, other) for other in load.after):
            return step
    unmet = [o.stmt for o in load.after if o.group == group and o.by_threads and o.stmt not in found.exchanges]
    if unmet:  # no other barrier will do: the group's threads meet behind their accesses
        found.exchanges |= dict.fromkeys(unmet)
        return _first(found, load, group)
    problem = f"group {group} cannot know when what {load.stmt.dst.name} holds has been read"
    raise TileError(problem, "T.wait behind the product that reads it last", load.stmt.location)
