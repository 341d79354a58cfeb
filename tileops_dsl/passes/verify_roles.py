"""What must hold of kernels with roles, computed from their bodies and not from the tables of the passes."""

import itertools
import math
from collections import Counter, defaultdict

from tileops_dsl import ir, plan
from tileops_dsl.errors import TileError, require
from tileops_dsl.instruction_layouts import SharedTile
from tileops_dsl.passes.meaning import Run, events, meaning, number, numbers, views_of, ways
from tileops_dsl.passes.simulate import Fault, simulate
from tileops_dsl.schedule import Advance, Await, Fence, Retire, Signal, Sync, Turn, op_of
from tileops_dsl.targets import Target

ORDERS = 3  # one for each haste of what is in flight


def roles(kernel: ir.Kernel, target: Target) -> None:
    """Each statement of the program is some role's, and in no other role."""
    lines = [{(type(op), op.location) for op in map(op_of, ir.walk(role.body)) if _works(op)} for role in kernel.roles]
    program = {(type(s), s.location) for s in ir.walk(kernel.body) if _works(s)}
    split = Counter(line for role in lines for line in role) == Counter(program)
    require(split, "a statement is in no role or in two", "assign_roles", kernel.location)


def _works(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, ir.Copy | ir.Gemm | ir.Parallel | ir.Reduce)


def schedule(kernel: ir.Kernel, target: Target) -> None:
    """The roles do what the program does, as often, and all but loads in its order on each tile."""
    for parameters, steps in itertools.product(ways(kernel), range(6)):
        run = Run(numbers(kernel, parameters, steps))
        program, parts = _done(kernel.body, run), [_done(role.body, run) for role in kernel.roles]
        same = Counter(program[None]) == Counter(load for part in parts for load in part[None])
        for tile in {tile for part in (program, *parts) for tile in part} - {None}:
            same &= program[tile] == [what for part in parts for what in part[tile]]
        require(same, f"the roles do not do what the program does, for {steps} steps", "pipeline", kernel.location)


def _done(body, run: Run) -> dict:
    """What is done to each tile, in order; and all loads."""
    quiet, done = (Advance, Await, Fence, Retire, Signal, Sync, Turn, ir.Alloc), defaultdict(list)
    tiles: dict[int, set] = {}  # by the id of a statement
    for event in (e for e in events(body, run) if not isinstance(e.stmt, quiet)):
        load = plan.is_load(event.op)
        what = meaning(event), None if load else tuple(event.values.items())
        for tile in tiles.get(id(event.op)) or tiles.setdefault(id(event.op), {None} if load else set(plan.named(event.op))):
            done[tile].append(what)
    return done


def views(kernel: ir.Kernel, target: Target) -> None:
    """They begin at whole registers, inside the fragment."""
    for event in events(kernel.body, Run(numbers(kernel, ways(kernel)[0], 1))):
        for view in views_of(event.op) if isinstance(event.op, ir.Parallel) else ():
            first, limit = number(view.origin[1], event.values), view.buffer.shape[1]
            unit = 8 * getattr(kernel.layouts[view.buffer], "across", 1)
            inside = first % unit == view.shape[1] % unit == 0 and 0 <= first <= limit - view.shape[1]
            problem = f"{view.buffer.name}[:, {first} : {first + view.shape[1]}] is no groups of {unit} of the {limit} columns"
            require(inside, problem, f"multiples of {unit} columns, inside the fragment", event.op.location)


def ranges(kernel: ir.Kernel) -> list[tuple[int, int]]:
    """What tiles and barriers take of shared memory; tiles start as their swizzle wants it."""
    found = [(b.offset, b.offset + 8 * b.ring.stages * b.copies) for b in kernel.barriers]
    for buffer, offset in kernel.shared.items():
        layout = kernel.layouts[buffer]
        aligned = not isinstance(layout, SharedTile) or offset % (8 * layout.swizzle.row_bytes) == 0
        require(aligned, f"{buffer.name} starts at byte {offset}", "plan_shared_memory", kernel.location)
        ring = next((ring for ring in kernel.rings if buffer in ring.buffers), None)
        whole = len(buffer.shape) == 1 or plan.tile_loop(kernel).alternate  # each group has all of it
        elements = math.prod(buffer.shape) * (plan.copies(kernel, buffer) if whole else 1)
        found.append((offset, offset + elements * ir.DTYPES[buffer.dtype] * (ring.stages if ring else 1)))
    return found


def barriers(kernel: ir.Kernel, target: Target) -> None:
    """Run against each other, the roles read what the program says, and every phase completes exactly."""
    for parameters, order in itertools.product(relevant(kernel), range(ORDERS)):
        try:
            simulate(kernel, parameters, order)
        except Fault as fault:
            raise TileError(f"the barriers are wrong: {fault}", "derive_barriers", kernel.location) from fault


def relevant(kernel: ir.Kernel) -> list[dict[str, int]]:
    """The ways that differ in what happens in shared memory: a condition around fragments only is taken as it comes first."""
    names = set()
    for stmt in (s for s in ir.walk(kernel.body) if isinstance(s, ir.If)):
        if any(buffer in kernel.shared for inner in stmt.body for buffer in plan.named(inner)):
            names |= {e.name for e in ir.subexprs(stmt.condition) if isinstance(e, ir.Var)}
    chosen: dict[tuple, dict[str, int]] = {}
    for way in ways(kernel):
        chosen.setdefault(tuple(value for name, value in way.items() if name in names), way)
    return list(chosen.values())


def budgets(kernel: ir.Kernel, target: Target) -> None:
    """Fragments, 44 more (24 with several products), fit; all groups have what they started with, in steps of 8."""
    total = sum(128 * role.registers * len(role.groups) for role in kernel.roles)
    words = plan.live_words(kernel)
    steps = all(24 <= role.registers <= 240 and role.registers % 8 == 0 for role in kernel.roles)
    start = target.registers_per_cta // (kernel.threads + 128) // 8 * 8 * (kernel.threads + 128)
    beside = 44 if sum(isinstance(s, ir.Gemm) for s in ir.walk(kernel.body)) == 1 else 24
    fits = total <= start and words + beside <= plan.consumers(kernel).registers and steps
    require(fits, f"registers of {total} in all, {words} in fragments", "budget_registers", kernel.location)
