"""Runs the roles of a cluster against each other, to see whether their barriers order what touches the same bytes.

It derives nothing from edges. A stage of a tile holds no values but the name of what was written there (`meaning`), and each
reader compares it with what the recorded program, run in its order, would have left there. Copies and products take effect at
a random moment between their issue and what retires them; roles run in random order. A barrier's phase must complete by exactly
its arrivals and bytes. A group is two agents: its first thread, and all others. A turn is a barrier of two groups:
all agents of both arrive once before it opens. Where all threads copy (cp.async), each agent copies its own lines of a tile,
which hold nothing from the issue to the wait: so early they may be written, and so late be read.
"""

import itertools
import math
import random
from dataclasses import dataclass, field, replace

from tileops_dsl import ir, plan
from tileops_dsl.passes.meaning import Event, Run, events, meaning, number, numbers
from tileops_dsl.schedule import Barrier, One, Role

FIRST, OTHERS = 0, 1  # the agents of a group
IN_FLIGHT = ("a copy on its way",)
Box = tuple[ir.Buffer, int]  # of a tile


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
    """A stage of a tile: what its elements hold, and those written by threads that TMA does not see yet.

    Elements by who has them where the tile is copied in lines (or the CTA that loads them), and who where it is a fragment.
    """

    holds: dict[tuple[int, int], tuple] = field(default_factory=dict)
    unfenced: dict[tuple[int, int], tuple] = field(default_factory=dict)  # by whom


class Machine:
    """The shared memory and the barriers of a cluster, and what is in flight."""

    def __init__(self, kernel: ir.Kernel, parameters: dict[str, int], steps: int, seed: int):
        self.kernel, self.random = kernel, random.Random(seed)
        self.haste = (0.0, 0.02, 0.3)[seed % 3]  # how soon what is in flight takes effect
        self.one_ahead = seed % 6 == 1  # the first agent runs as far as it can, then the next
        moved = [buffer for buffer in kernel.shared if len(buffer.shape) == 2]
        # What touches this one takes effect when nothing else can happen; over the seeds, with each haste.
        self.last = moved[(seed + seed // math.lcm(3, len(moved))) % len(moved)]
        self.by_box = plan.feeds_itself(kernel)
        tiles = 4 - seed % 2 if not self.by_box and plan.tile_loop(kernel).alternate else 2
        values = numbers(kernel, parameters, steps)
        self.runs = [Run(values, tiles, cta, kernel.ctas, whole=(One,)) for cta in range(kernel.ctas)]
        self.common = {buffer: plan.is_common(kernel, buffer) for buffer in kernel.layouts if buffer.scope == "shared"}
        self.peers = {ring: plan.peers(kernel, ring) for ring in kernel.rings}
        self.readers = 1 if self.by_box else plan.readers(kernel)
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
            reads, writes = plan.shared_boxes(event.op)
            seen |= {(moment(event), box): last.get(box, ()) for box in reads}
            last |= dict.fromkeys(writes, version(event))
        return seen

    def run(self) -> None:
        agents = [a for cta in range(self.kernel.ctas) for role in self.kernel.roles for a in self.agents(cta, role)]
        waiting = dict.fromkeys(agents)
        while agents:
            ready = [agent for agent in agents if waiting[agent] is None or waiting[agent]()]
            due = [flight for flight in self.flying if self.last not in flight[0]] or self.flying * (not ready)
            if due and (not ready or self.random.random() < self.haste):
                flight = self.random.choice(due)
                self.flying.remove(flight)
                flight[1]()
            elif not ready:
                raise Fault("all roles wait for each other")
            else:
                agent = ready[0] if self.one_ahead else self.random.choice(ready)
                try:
                    waiting[agent] = next(agent)
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
        copies = [group - plan.consumers(self.kernel).groups[0] for group in role.groups]
        return [Agent(self, role, cta, copy, who).steps() for copy in copies for who in (FIRST, OTHERS)]

    def barrier(self, cta: int, copy: int, table: Barrier, stage: int) -> MBarrier:
        return self.barriers.setdefault((cta, 0 if table.common else copy, table, stage), MBarrier(table))

    def tile(self, cta: int, copy: int, box: Box, stage: int) -> Tile:
        return self.tiles.setdefault((cta, 0 if self.common[box[0]] else copy, box, stage), Tile())


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
        # Where all threads copy: groups of what is on its way, the last one open; what is in registers; operands by step % 2.
        self.copies: list[list] = [[]]
        self.loaded: dict[ir.Buffer, tuple] = {}
        self.operands: dict[int, tuple] = {}

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
        return number(getattr(event.stmt, "index", ring.var), event.values) % ring.stages

    def slot(self, event: Event) -> tuple[Barrier, int]:
        """The barrier that the statement names, and its present stage."""
        barrier = plan.barrier_named(self.kernel, event.stmt.barrier)
        return barrier, self.place(barrier.ring.buffers[0], event)

    def check(self, event: Event, box: Box, stage: int, elements, by_tma: bool) -> None:
        expected, buffer = self.machine.expected[self.cta][moment(event), box], box[0]
        tile = self.machine.tile(self.cta, self.copy, box, stage)
        for element in elements:
            if tile.holds.get(element) != expected:
                raise Fault(f"{event.op.location} reads {buffer.name} too early or too late")
            if by_tma and element in tile.unfenced:
                raise Fault(f"{event.op.location} reads {buffer.name} without a fence")

    def elements(self, buffer: ir.Buffer, op: ir.Stmt | None = None) -> list[tuple[int, int]]:
        """Of a tile: all, or those that the agent's threads access. A vector is written in their order and read by columns.

        An element of a common tile has one agent of all groups; of a reduction's vector an agent reads its rows from all.
        (Down the rows, of which each agent has some, all of it.)
        """
        common = self.machine.common[buffer] and not self.machine.by_box
        groups = self.machine.readers if common else 1
        every = list(itertools.product(range(self.kernel.ctas if common else 2), range(2 * groups)))
        down = isinstance(op, ir.Reduce) and plan.down_rows(self.kernel)
        if op is None or down or isinstance(op, ir.Gemm) or (isinstance(op, ir.Parallel) and len(buffer.shape) == 1):
            return every
        if groups > 1:
            of_rows, mine = isinstance(op, ir.Reduce), 2 * self.copy + self.who
            return [e for e in every if (e[1] % 2 == self.who if of_rows else e[1] == mine)]
        in_lines = isinstance(op, ir.Copy) and op.region is not None
        return [element for element in every if element[0 if in_lines else 1] == self.who]

    def read(self, event: Event) -> None:
        for box in plan.shared_boxes(event.op)[0]:
            self.check(event, box, self.place(box[0], event), self.elements(box[0], event.op), by_tma=False)

    def write(self, event: Event, what: tuple) -> None:
        for box in plan.shared_boxes(event.op)[1]:
            tile = self.machine.tile(self.cta, self.copy, box, self.place(box[0], event))
            mine = self.elements(box[0], event.op)
            if IN_FLIGHT == what == tile.holds.get(mine[0]):
                raise Fault(f"{event.op.location} loads {box[0].name} before an earlier copy has arrived")
            tile.holds |= dict.fromkeys(mine, what)
            tile.unfenced |= dict.fromkeys(mine, (self.cta, self.copy, self.who))

    def on_others(self, event: Event):
        """By the group's own threads."""
        self.check_registers(event)
        self.read(event)
        self.write(event, version(event))

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
                self.read_later(event, self.machine.products.setdefault((self.cta, self.copy), []))
            self.products += 1
            return self.meet(self.copy, "product", 2)
        if plan.is_store(op):
            self.read_later(event, self.stores)
        elif self.kernel.barriers:
            self.load(event)
        elif plan.asynchronous(op):  # by all threads
            self.write(event, IN_FLIGHT)
            self.copies[-1].append(event)
        else:
            self.loaded[op.dst] = version(event)
        return None

    def on_land(self, event: Event):
        self.write(event, self.loaded.pop(event.op.dst, ()))

    def on_commit(self, event: Event):
        self.copies.append([])

    def on_operands(self, event: Event):
        if event.stmt.index:  # otherwise zeros
            self.read(event)
            self.operands[event.stmt.step % 2] = moment(event), event.stmt.step

    def on_multiply(self, event: Event):
        if self.operands.get(event.stmt.step % 2) != (moment(event), event.stmt.step):
            raise Fault(f"{event.op.location} multiplies operands of another step")

    def read_later(self, event: Event, queue: list) -> None:
        take = Reading(self, event, [(box, self.place(box[0], event)) for box in plan.shared_boxes(event.op)[0]])
        queue.append(take)
        self.machine.flying.append(([buffer for (buffer, _), _ in take.places], take))

    def load(self, event: Event) -> None:
        op, machine, by_box = event.op, self.machine, self.machine.by_box
        stage, boxes = self.place(ir.buffer_of(op.dst), event), plan.boxes(op.dst)
        elements = [e for e in self.elements(boxes[0][0]) if not op.multicast or e[0] == self.cta]
        size = self.kernel.layouts[ir.buffer_of(op.dst)].bytes // (self.kernel.ctas if op.multicast else 1)
        table = plan.barrier_of(self.kernel, plan.ring_of(self.kernel, boxes[0][0]), "full")

        def arrive(cta, box):
            tile = machine.tile(cta, self.copy, box, stage)
            tile.holds |= dict.fromkeys(elements, version(event))
            tile.unfenced = {element: by for element, by in tile.unfenced.items() if element not in elements}
            place, moved = (box[1], table.bytes) if by_box else (stage, size)
            machine.barrier(cta, self.copy, table, place).count(0, -moved)

        for cta, box in itertools.product(range(self.kernel.ctas) if op.multicast else (self.cta,), boxes):
            if by_box:
                machine.barrier(cta, self.copy, table, box[1]).count(1, table.bytes)
            machine.flying.append(((box[0],), lambda cta=cta, box=box: arrive(cta, box)))

    def on_retire(self, event: Event):
        if event.stmt.kind == "copy":
            arrived = max(len(self.copies) - 1 - event.stmt.pending, 0)
            for copied in itertools.chain(*self.copies[:arrived]):
                self.write(copied, version(copied))
            del self.copies[:arrived]
            return
        product = event.stmt.kind == "product"
        queue = self.machine.products.get((self.cta, self.copy), [])[: self.products] if product else self.stores
        for take in queue[: max(len(queue) - event.stmt.pending, 0)]:
            take()
            take.known |= take.event.op in event.stmt.of

    def on_await(self, event: Event):
        (barrier, stage), by_box = self.slot(event), self.machine.by_box
        stage = event.stmt.index.value if by_box else stage
        key = barrier.ring.name if barrier.common and not by_box else (barrier.ring.name, stage)
        parity = self.phase.get(key, 0) ^ (barrier.kind == "empty")
        if by_box or not barrier.common:
            self.phase[key] = self.phase.get(key, 0) ^ 1
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

    def on_release(self, event: Event):
        (barrier, _), box = self.slot(event), event.stmt.index.value
        self.machine.barrier(self.cta, self.copy, barrier, box).count(1, 0)

    def on_sync(self, event: Event):
        if event.stmt.all_groups:
            return self.meet(0, "barrier of all groups", 2 * len(self.role.groups))
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
        for tile in self.machine.tiles.values():
            mine = self.cta, self.copy, self.who
            tile.unfenced = {element: by for element, by in tile.unfenced.items() if by != mine}

    def on_meet(self, event: Event):
        which = event.stmt.number
        which = number(which, {"group": self.role.groups[0] + self.copy}) if isinstance(which, ir.Expr) else which
        opens = self.meet(0, f"edge {which}", 4)
        return opens if event.stmt.waits else None

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
        self.registers = {event.op.a, ir.buffer_of(event.op.c)} if isinstance(event.op, ir.Gemm) else set()

    def __call__(self) -> None:
        if self.pending:
            self.pending = False
            for box, stage in self.places:
                self.agent.check(self.event, box, stage, self.agent.elements(box[0]), by_tma=True)


def simulate(kernel: ir.Kernel, parameters: dict[str, int], seed: int) -> None:
    """One order; raises a Fault. Each ring goes round twice, and the next tile finds it in another stage.

    Where all threads copy beyond the loop, the last copy goes to the stage with which the next tile begins.
    """
    steps = 2 * max((ring.stages for ring in kernel.rings), default=1) + (1 if kernel.barriers or plan.chained(kernel) else 2)
    Machine(kernel, parameters, steps, seed).run()
