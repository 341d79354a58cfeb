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
from tileops_dsl.passes.meaning import Event, Run, events, meaning, number, numbers
from tileops_dsl.schedule import Barrier, One, Role

FIRST, OTHERS = 0, 1  # the agents of a group


class Fault(Exception):
    """What an order of events has shown."""


class MBarrier:
    def __init__(self, table: Barrier):
        self.table, self.pending, self.bytes, self.phase = table, table.arrivals, 0, 0

    def count(self, arrivals: int, expected: int) -> None:
        """So many arrive, and expect so many bytes more (or fewer: they have come)."""
        if arrivals > self.pending:
            raise Fault(f"{self.table.name} gets more arrivals than its {self.table.arrivals}")
        self.pending, self.bytes = self.pending - arrivals, self.bytes + expected
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.table.arrivals, self.phase ^ 1


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
        moved = [buffer for buffer in kernel.shared if len(buffer.shape) == 2]
        self.last = moved[seed % len(moved)]  # what touches this one takes effect when nothing else can happen
        tiles = 4 - seed % 2 if plan.tile_loop(kernel).alternate else 2
        values = numbers(kernel, parameters, steps)
        self.runs = [Run(values, tiles, cta, kernel.ctas, whole=(One,)) for cta in range(kernel.ctas)]
        self.common = {buffer: plan.is_common(kernel, buffer) for buffer in kernel.layouts if buffer.scope == "shared"}
        self.peers = {ring: plan.peers(kernel, ring) for ring in kernel.rings}
        self.tiles: dict[tuple, Tile] = {}
        self.barriers: dict[tuple, MBarrier] = {}
        self.flying: list = []  # (tiles, operation that may take effect at any time)
        self.products: dict[tuple, list] = {}  # reads of operands of each group, oldest first
        self.met: dict[tuple, set] = {}  # agents that have arrived where they wait for each other, or for a turn
        self.expected = [self.sequential(run) for run in self.runs]

    def sequential(self, run: Run) -> dict[tuple, tuple]:
        """What each reader of the recorded program sees in each shared tile."""
        last, seen = {}, {}
        for event in events(self.kernel.body, run):
            for buffer in shared_reads(event.op):
                seen[moment(event), buffer.name] = last.get(buffer.name, ())
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
        for barrier in self.barriers.values():
            if barrier.bytes or (barrier.pending != barrier.table.arrivals and barrier.table.kind == "full"):
                raise Fault(f"{barrier.table.name} is left in the middle of a phase")
        if self.met:
            raise Fault("a turn is left over")

    def agents(self, cta: int, role: Role):
        if role.warp is not None:
            return [Agent(self, role, cta, 0, FIRST).steps()]
        return [Agent(self, role, cta, copy, who).steps() for copy in range(len(role.groups)) for who in (FIRST, OTHERS)]

    def barrier(self, cta: int, copy: int, table: Barrier, stage: int) -> MBarrier:
        return self.barriers.setdefault((cta, 0 if table.common else copy, table, stage), MBarrier(table))

    def tile(self, cta: int, copy: int, buffer: ir.Buffer, stage: int) -> Tile:
        return self.tiles.setdefault((cta, 0 if self.common[buffer] else copy, buffer.name, stage), Tile())


def shared_reads(op: ir.Stmt) -> list[ir.Buffer]:
    return [b for b in dict.fromkeys(plan.named(op)) if b.scope == "shared" and b not in shared_writes(op)]


def shared_writes(op: ir.Stmt) -> list[ir.Buffer]:
    return [op.dst] if isinstance(op, ir.Copy) and isinstance(op.dst, ir.Buffer) and op.dst.scope == "shared" else []


def version(event: Event) -> tuple:
    """Of what was written: a load by what it loads, another by its iteration."""
    return meaning(event) if plan.is_load(event.op) else moment(event)


def moment(event: Event) -> tuple:
    return meaning(event), tuple(sorted(event.values.items()))


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
                yield getattr(self, f"on_{type(one.stmt).__name__.lower()}", self.on_others)(one)
        if any(take.pending for take in self.stores):
            raise Fault(f"{self.role.name} leaves while a store reads its shared memory")

    def place(self, buffer: ir.Buffer, event: Event) -> int:
        ring = plan.ring_of(self.kernel, buffer)
        if ring is None:
            return 0
        if self.machine.common[buffer]:
            return self.stage.get(ring.name, 0)
        return event.values[ring.var.name] % ring.stages

    def slot(self, event: Event) -> tuple[Barrier, int]:
        """The barrier that the statement names, and its present stage."""
        barrier = plan.barrier_named(self.kernel, event.stmt.barrier)
        return barrier, self.place(barrier.ring.buffers[0], event)

    def check(self, event: Event, buffer: ir.Buffer, stage: int, parts, by_tma: bool) -> None:
        expected = self.machine.expected[self.cta][moment(event), buffer.name]
        tile = self.machine.tile(self.cta, self.copy, buffer, stage)
        for part in parts:
            if tile.parts.get(part) != expected:
                raise Fault(f"{event.op.location} reads {buffer.name} too early or too late")
            if by_tma and part in tile.unfenced:
                raise Fault(f"{event.op.location} reads {buffer.name} without a fence")

    def parts(self, buffer: ir.Buffer) -> range:
        return range(self.kernel.ctas if self.machine.common[buffer] else 2)

    def on_others(self, event: Event):
        """By the group's own threads: a tile as matrices, each its own part; a vector by columns."""
        self.check_registers(event)
        for buffer in shared_reads(event.op):
            parts = self.parts(buffer) if len(buffer.shape) == 1 else (self.who,)
            self.check(event, buffer, self.place(buffer, event), parts, by_tma=False)
        for buffer in shared_writes(event.op):
            tile = self.machine.tile(self.cta, self.copy, buffer, self.place(buffer, event))
            tile.parts[self.who] = version(event)
            tile.unfenced.add(self.who)

    def check_registers(self, event: Event) -> None:
        """A product's accumulators and its operand in registers are its own until it is waited for."""
        products = self.machine.products.get((self.cta, self.copy), [])[: self.products]
        flying = {tile for take in products if take.pending or not take.known for tile in take.registers}
        if flying and flying.intersection(plan.named(event.op)):
            raise Fault(f"{event.op.location} touches registers of a product that is not finished")

    def on_issue(self, event: Event):
        op = event.op
        if isinstance(op, ir.Gemm):
            if self.who == FIRST:
                operands = [tile for tile in (op.a, op.b) if tile.scope == "shared"]
                self.read_later(event, operands, self.machine.products.setdefault((self.cta, self.copy), []))
            self.products += 1
            return self.meet(self.copy, "product", 2)
        if plan.is_store(op):
            self.read_later(event, (op.src,), self.stores)
        else:
            self.load(event)
        return None

    def read_later(self, event: Event, buffers, queue: list) -> None:
        take = Reading(self, event, [(buffer, self.place(buffer, event)) for buffer in buffers])
        queue.append(take)
        self.machine.flying.append((buffers, take))

    def load(self, event: Event) -> None:
        op, machine = event.op, self.machine
        stage = self.place(op.dst, event)
        parts = [self.cta] if op.multicast else list(self.parts(op.dst))
        size = self.kernel.layouts[op.dst].bytes // (self.kernel.ctas if op.multicast else 1)
        table = plan.barrier_of(self.kernel, plan.ring_of(self.kernel, op.dst), "full")

        def arrive(cta):
            tile = machine.tile(cta, self.copy, op.dst, stage)
            tile.parts |= dict.fromkeys(parts, version(event))
            tile.unfenced -= set(parts)
            machine.barrier(cta, self.copy, table, stage).count(0, -size)

        for cta in range(self.kernel.ctas) if op.multicast else (self.cta,):
            machine.flying.append(((op.dst,), lambda cta=cta: arrive(cta)))

    def on_retire(self, event: Event):
        product = event.stmt.kind == "product"
        queue = self.machine.products[self.cta, self.copy][: self.products] if product else self.stores
        for take in queue[: max(len(queue) - event.stmt.pending, 0)]:
            take()
            take.known |= take.event.op in event.stmt.of

    def on_await(self, event: Event):
        barrier, stage = self.slot(event)
        key = barrier.ring.name if barrier.common else (barrier.ring.name, stage)
        parity = self.phase.get(key, 0) ^ (barrier.kind == "empty")
        if not barrier.common:
            self.phase[key] = parity ^ 1
        state = self.machine.barrier(self.cta, self.copy, barrier, stage)
        return lambda: state.phase != parity

    def on_signal(self, event: Event):
        (barrier, stage), which = self.slot(event), event.stmt.which
        if which == "before" and event.values[barrier.ring.var.name] == 0:
            return
        peers = self.machine.peers[barrier.ring]
        if barrier.kind == "full":
            told = [self.cta]
        elif peers > 1:  # threads 0, 1, ... tell one CTA each
            told = [0] if self.who == FIRST else range(1, peers)
        else:  # the first lane of each of four warps
            told = [self.cta] * (1 if self.who == FIRST else 3)
        stage = stage if which == "this" else (stage - 1) % barrier.ring.stages
        for cta in told:
            self.machine.barrier(cta, self.copy, barrier, stage).count(1, barrier.bytes)

    def on_sync(self, event: Event):
        return self.meet(self.copy, "barrier", 2)

    def meet(self, copy: int, what: str, agents: int):
        """Arrives where so many agents do; what holds when they all have."""
        key, met = (self.cta, copy, what), self.machine.met
        arrived = met.setdefault(key, set())
        if (self.copy, self.who) in arrived:
            raise Fault(f"{self.role.name} arrives twice for a {what}")
        arrived.add((self.copy, self.who))
        if len(arrived) == agents:
            del met[key]
        return lambda: met.get(key) is not arrived

    def on_fence(self, event: Event):
        for (cta, copy, *_), tile in self.machine.tiles.items():
            if (cta, copy) == (self.cta, self.copy):
                tile.unfenced.discard(self.who)

    def on_turn(self, event: Event):
        opens = self.meet(self.copy if event.stmt.takes else 1 - self.copy, "turn", 4)
        return opens if event.stmt.takes else None

    def on_advance(self, event: Event):
        ring, steps = event.stmt.ring, event.stmt.steps
        by = number(steps, event.values, True) if steps else 1
        rounds, self.stage[ring.name] = divmod(self.stage.get(ring.name, 0) + by, ring.stages)
        self.phase[ring.name] = self.phase.get(ring.name, 0) ^ rounds & 1


class Reading:
    """What an asynchronous product or store reads, when it does."""

    def __init__(self, agent: Agent, event: Event, places: list):
        self.agent, self.event, self.places, self.pending = agent, event, places, True
        self.known = False  # the statements that follow see its registers
        self.registers = {event.op.a, event.op.c} if isinstance(event.op, ir.Gemm) else set()

    def __call__(self) -> None:
        if self.pending:
            self.pending = False
            for buffer, stage in self.places:
                self.agent.check(self.event, buffer, stage, self.agent.parts(buffer), by_tma=not self.registers)


def simulate(kernel: ir.Kernel, parameters: dict[str, int], seed: int) -> None:
    """One order; raises a Fault. Each ring goes round twice, and the next tile finds it in another stage."""
    steps = 2 * max(ring.stages for ring in kernel.rings) + 1
    Machine(kernel, parameters, steps, seed).run()
