"""Runs the roles of a cluster against each other, to see whether their barriers order what touches the same bytes.

It derives nothing from edges. A stage of a tile holds no values but the name of what was written there (`meaning`), and each
reader compares it with what the recorded program, run in its order, would have left there. Copies and products take effect at
a random moment between their issue and what retires them; roles run in random order. A barrier's phase must complete by exactly
its arrivals and bytes. A group is two agents: its first thread, and all others. A turn is a barrier of two groups:
all agents of both arrive once before it opens.
"""

import random
from dataclasses import dataclass, field, replace

from tileops_dsl import ir, plan
from tileops_dsl.passes.meaning import Event, Run, events, length, meaning
from tileops_dsl.passes.pipeline import shared_buffers
from tileops_dsl.schedule import Advance, Await, Fence, Issue, One, Retire, Role, Signal, Sync, Turn

FIRST, OTHERS = 0, 1  # the agents of a group


class Fault(Exception):
    """What an order of events has shown."""


@dataclass
class MBarrier:
    arrivals: int
    pending: int = field(init=False)
    bytes: int = 0
    phase: int = 0

    def __post_init__(self):
        self.pending = self.arrivals

    def arrive(self, name: str, expected: int = 0) -> None:
        if self.pending == 0:
            raise Fault(f"{name} gets more arrivals than its {self.arrivals}")
        self.pending, self.bytes = self.pending - 1, self.bytes + expected
        self.complete()

    def bring(self, count: int) -> None:
        self.bytes -= count
        self.complete()

    def complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.arrivals, self.phase ^ 1


@dataclass
class Tile:
    """A stage of a tile: what each part of it holds, and the parts written by threads that TMA does not see yet."""

    parts: dict[int, tuple] = field(default_factory=dict)
    unfenced: set[int] = field(default_factory=set)


class Machine:
    """The shared memory and the barriers of a cluster, and what is in flight."""

    def __init__(self, kernel: ir.Kernel, parameters: dict[str, int], steps: int, seed: int):
        self.kernel, self.random = kernel, random.Random(seed)
        self.haste = (0.0, 0.02, 0.3)[seed % 3]  # how soon what is in flight takes effect
        moved = [buffer for ring in kernel.rings for buffer in ring.buffers]
        self.last = moved[seed % len(moved)]  # what touches this one takes effect when nothing else can happen
        tiles = 4 - seed % 2 if plan.tile_loop(kernel).alternate else 2
        self.runs = [Run(parameters, steps, tiles, cta, kernel.ctas, enter=(One,)) for cta in range(kernel.ctas)]
        self.tiles: dict[tuple, Tile] = {}
        self.barriers: dict[tuple, MBarrier] = {}
        self.flying: list = []  # (tiles, operation that may take effect at any time)
        self.products: dict[tuple, list] = {}  # reads of operands of each group, oldest first
        self.met: dict[tuple, int] = {}  # arrivals where the agents of a group meet
        self.turns: dict[tuple, list] = {}  # agents that have arrived where a group waits for its turn
        self.expected = [self.sequential(run) for run in self.runs]

    def sequential(self, run: Run) -> dict[tuple, dict[str, tuple]]:
        """What each reader of the recorded program sees in each shared tile."""
        last, seen = {}, {}
        for event in events(self.kernel.body, run):
            key = (meaning(event), tuple(sorted(event.values.items())))
            for buffer in shared_reads(event.op):
                seen.setdefault(key, {})[buffer.name] = last.get(buffer.name, ())
            for buffer in shared_writes(event.op):
                last[buffer.name] = version(event)
        return seen

    def run(self) -> None:
        agents = [a for cta in range(self.kernel.ctas) for role in self.kernel.roles for a in self.agents(cta, role)]
        waiting = {id(agent): None for agent in agents}
        while agents:
            ready = [a for a in agents if waiting[id(a)] is None or waiting[id(a)]()]
            due = [flight for flight in self.flying if self.last not in flight[0]] or self.flying * (not ready)
            if due and (not ready or self.random.random() < self.haste):
                flight = self.random.choice(due)
                self.flying.remove(flight)
                flight[1]()
            elif not ready:
                raise Fault("all roles wait for each other")
            else:
                agent = self.random.choice(ready)
                try:
                    waiting[id(agent)] = next(agent)
                except StopIteration:
                    agents.remove(agent)
        for name, barrier in self.barriers.items():
            if barrier.bytes or (barrier.pending != barrier.arrivals and name[1].kind == "full"):
                raise Fault(f"{name[1].name} is left in the middle of a phase")
        if any(self.turns.values()):
            raise Fault("a turn is left over")

    def agents(self, cta: int, role: Role):
        if role.warp is not None:
            return [Agent(self, role, cta, 0, FIRST).steps()]
        return [Agent(self, role, cta, copy, who).steps() for copy in range(len(role.groups)) for who in (FIRST, OTHERS)]

    def barrier(self, cta: int, copy: int, name: str, stage: int) -> MBarrier:
        table = plan.barrier_named(self.kernel, name)
        key = (cta, table, copy if not table.common else 0, stage)
        return self.barriers.setdefault(key, MBarrier(table.arrivals))

    def tile(self, cta: int, copy: int, buffer: ir.Buffer, stage: int) -> Tile:
        return self.tiles.setdefault((cta, 0 if plan.is_common(self.kernel, buffer) else copy, buffer.name, stage), Tile())


def shared_reads(op: ir.Stmt) -> list[ir.Buffer]:
    inner = op.body if isinstance(op, ir.Parallel) else (op,)
    written = shared_writes(op)
    return [b for s in inner for b in dict.fromkeys(shared_buffers(s)) if b not in written]


def shared_writes(op: ir.Stmt) -> list[ir.Buffer]:
    return [op.dst] if isinstance(op, ir.Copy) and isinstance(op.dst, ir.Buffer) and op.dst.scope == "shared" else []


def version(event: Event) -> tuple:
    """Of what was written: a load by what it loads, another by its iteration."""
    return meaning(event) if plan.is_load(event.op) else (meaning(event), tuple(sorted(event.values.items())))


class Agent:
    """One thread, or those that do the same, going through a role's body."""

    def __init__(self, machine: Machine, role: Role, cta: int, copy: int, who: int):
        self.machine, self.kernel, self.role = machine, machine.kernel, role
        self.cta, self.copy, self.who = cta, copy, who
        self.stage: dict[str, int] = {}
        self.phase: dict[object, int] = {}  # of a ring; of a stage where a group has barriers for itself
        self.products = 0  # that this agent has issued; a product is its whole group's
        self.stores: list = []

    def steps(self):
        """Yields None, or what must hold before the next step."""
        run = replace(self.machine.runs[self.cta], group=self.copy, groups=len(self.role.groups))
        for event in events(self.role.body, run):
            if isinstance(event.stmt, One):
                inner = events(event.stmt.body, run, event.values) if self.who == FIRST else ()
            else:
                inner = (event,)
            for one in inner:
                yield from getattr(self, HANDLERS.get(type(one.stmt), "generic"))(one)
        if any(take.pending for take in self.stores):
            raise Fault(f"{self.role.name} leaves while a store reads its shared memory")

    def place(self, buffer: ir.Buffer, event: Event) -> int:
        ring = plan.ring_of(self.kernel, buffer)
        if ring is None:
            return 0
        if plan.is_common(self.kernel, buffer):
            return self.stage.get(ring.name, 0)
        return event.values[ring.var.name] % ring.stages

    def slot(self, name: str, event: Event) -> int:
        barrier = plan.barrier_named(self.kernel, name)
        return self.place(barrier.ring.buffers[0], event)

    def check(self, event: Event, buffer: ir.Buffer, stage: int, parts, by_tma: bool) -> None:
        key = (meaning(event), tuple(sorted((k, v) for k, v in event.values.items())))
        expected = self.machine.expected[self.cta][key][buffer.name]
        tile = self.machine.tile(self.cta, self.copy, buffer, stage)
        for part in parts:
            if tile.parts.get(part) != expected:
                raise Fault(f"{event.op.location} reads {buffer.name} too early or too late")
            if by_tma and part in tile.unfenced:
                raise Fault(f"{event.op.location} reads {buffer.name} without a fence")

    def parts(self, buffer: ir.Buffer) -> range:
        return range(self.kernel.ctas if plan.is_common(self.kernel, buffer) else 2)

    def generic(self, event: Event):
        """By the group's own threads: a tile as matrices, each its own part; a vector by columns."""
        self.check_accumulator(event)
        for buffer in shared_reads(event.op):
            parts = self.parts(buffer) if len(buffer.shape) == 1 else (self.who,)
            self.check(event, buffer, self.place(buffer, event), parts, by_tma=False)
        for buffer in shared_writes(event.op):
            tile = self.machine.tile(self.cta, self.copy, buffer, self.place(buffer, event))
            tile.parts[self.who] = version(event)
            tile.unfenced.add(self.who)
        yield None

    def check_accumulator(self, event: Event) -> None:
        products = self.machine.products.get((self.cta, self.copy), [])[: self.products]
        for store in event.op.body if isinstance(event.op, ir.Parallel) else ():
            tiles = [store.buffer, *(e.buffer for e in ir.subexprs(store.value) if isinstance(e, ir.Load))]
            if any(take.pending and ir.buffer_of(tile) == take.accumulator for take in products for tile in tiles):
                raise Fault(f"{store.location} touches the result of a product that is not finished")

    def issue(self, event: Event):
        op = event.op
        if isinstance(op, ir.Gemm):
            if self.who == FIRST:
                self.read_later(event, (op.a, op.b), self.machine.products.setdefault((self.cta, self.copy), []))
            self.products += 1
            yield from self.meet("product")
        elif plan.is_store(op):
            self.read_later(event, (op.src,), self.stores)
        else:
            self.load(event)
        yield None

    def read_later(self, event: Event, buffers, queue: list) -> None:
        take = Reading(self, event, [(buffer, self.place(buffer, event)) for buffer in buffers])
        queue.append(take)
        self.machine.flying.append((buffers, take))

    def load(self, event: Event) -> None:
        op, machine = event.op, self.machine
        stage = self.place(op.dst, event)
        parts = [self.cta] if op.multicast else list(self.parts(op.dst))
        size = self.kernel.layouts[op.dst].bytes // (self.kernel.ctas if op.multicast else 1)
        name = plan.barrier_of(self.kernel, plan.ring_of(self.kernel, op.dst), "full").name

        def arrive(cta):
            tile = machine.tile(cta, self.copy, op.dst, stage)
            tile.parts |= dict.fromkeys(parts, version(event))
            tile.unfenced -= set(parts)
            machine.barrier(cta, self.copy, name, stage).bring(size)

        for cta in range(self.kernel.ctas) if op.multicast else (self.cta,):
            machine.flying.append(((op.dst,), lambda cta=cta: arrive(cta)))

    def retire(self, event: Event):
        product = event.stmt.kind == "product"
        queue = self.machine.products[self.cta, self.copy][: self.products] if product else self.stores
        for take in queue[: max(len(queue) - event.stmt.pending, 0)]:
            take()
        yield None

    def wait(self, event: Event):
        name = event.stmt.barrier
        barrier, stage = plan.barrier_named(self.kernel, name), self.slot(name, event)
        ring = barrier.ring
        key = ring.name if barrier.common else (ring.name, stage)
        parity = self.phase.get(key, 0) ^ (barrier.kind == "empty")
        state = self.machine.barrier(self.cta, self.copy, name, stage)
        yield lambda: state.phase != parity
        if not barrier.common:
            self.phase[key] = parity ^ 1

    def signal(self, event: Event):
        stmt = event.stmt
        barrier = plan.barrier_named(self.kernel, stmt.barrier)
        stage = self.slot(stmt.barrier, event)
        if barrier.kind == "full":
            self.machine.barrier(self.cta, self.copy, stmt.barrier, stage).arrive(stmt.barrier, barrier.bytes)
            yield None
            return
        if stmt.which == "before" and event.values[barrier.ring.var.name] == 0:
            return
        stage = stage if stmt.which == "this" else (stage - 1) % barrier.ring.stages
        peers = plan.peers(self.kernel, barrier.ring)
        # Threads 0, 1, ... tell one CTA each; without peers the first lane of each of four warps tells its own.
        mine = [0] if self.who == FIRST else list(range(1, peers))
        if peers == 1:
            mine = [self.cta] * (1 if self.who == FIRST else 3)
        for cta in mine:
            self.machine.barrier(cta, self.copy, stmt.barrier, stage).arrive(stmt.barrier)
        yield None

    def sync(self, event: Event):
        yield from self.meet("barrier")

    def meet(self, what: str):
        """Both agents of the group."""
        key = (self.cta, self.copy, what)
        met = self.machine.met
        met[key] = met.get(key, 0) + 1
        target = (met[key] + 1) // 2 * 2
        yield lambda: met[key] >= target

    def fence(self, event: Event):
        for (cta, copy, *_), tile in self.machine.tiles.items():
            if (cta, copy) == (self.cta, self.copy):
                tile.unfenced.discard(self.who)
        yield None

    def turn(self, event: Event):
        key = (self.cta, self.copy if event.stmt.takes else 1 - self.copy)
        arrived = self.machine.turns.setdefault(key, [])
        if (self.copy, self.who) in arrived:
            raise Fault(f"{event.stmt} twice")
        arrived.append((self.copy, self.who))
        if len(arrived) == 4:
            del self.machine.turns[key]
        yield lambda: not event.stmt.takes or self.machine.turns.get(key) is not arrived

    def advance(self, event: Event):
        ring, steps = event.stmt.ring, event.stmt.steps
        by = length(steps, self.machine.runs[self.cta]) if steps else 1
        rounds, self.stage[ring.name] = divmod(self.stage.get(ring.name, 0) + by, ring.stages)
        self.phase[ring.name] = self.phase.get(ring.name, 0) ^ rounds & 1
        yield None


HANDLERS = {
    Issue: "issue",
    Retire: "retire",
    Await: "wait",
    Signal: "signal",
    Sync: "sync",
    Fence: "fence",
    Advance: "advance",
    Turn: "turn",
}


class Reading:
    """What an asynchronous product or store reads, when it does."""

    def __init__(self, agent: Agent, event: Event, places: list):
        self.agent, self.event, self.places, self.pending = agent, event, places, True
        self.accumulator = event.op.c if isinstance(event.op, ir.Gemm) else None

    def __call__(self) -> None:
        if self.pending:
            self.pending = False
            for buffer, stage in self.places:
                self.agent.check(self.event, buffer, stage, self.agent.parts(buffer), by_tma=self.accumulator is None)


def simulate(kernel: ir.Kernel, parameters: dict[str, int], seed: int) -> None:
    """One order; raises a Fault. Each ring goes round twice, and the next tile finds it in another stage."""
    steps = 2 * max(ring.stages for ring in kernel.rings) + 1
    Machine(kernel, parameters, steps, seed).run()
