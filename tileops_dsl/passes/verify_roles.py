"""What must hold of kernels with roles, computed from their bodies and not from the tables of the passes."""

import itertools
import math
from collections import Counter, defaultdict

from tileops_dsl import ir, plan
from tileops_dsl.errors import TileError, require
from tileops_dsl.instruction_layouts import SharedTile
from tileops_dsl.passes.meaning import Event, Run, events, meaning, number, numbers, views_of, ways
from tileops_dsl.passes.roles import only
from tileops_dsl.passes.simulate import Fault, simulate
from tileops_dsl.schedule import Land, Multiply, Operands, op_of
from tileops_dsl.targets import Target

ORDERS = 3  # one for each haste of what is in flight
WORK = ir.Copy | ir.Gemm | ir.Parallel | ir.Reduce  # and T.fill, which a pass may add


def roles(kernel: ir.Kernel, target: Target) -> None:
    """Each statement of the program is some role's, and in no other role; in T.ws, each of its groups'."""
    ons = list(ir.walk(kernel.body, ir.On))
    of_groups = {(line, group) for on in ons for group in on.groups for line in _lines(on.body)}
    program = Counter(line for line, _ in of_groups) if ons else Counter(_lines(kernel.body))
    split = program == Counter(line for role in kernel.roles for line in _lines(role.body))
    require(split, "a statement is in no role or in two", "assign_roles", kernel.location)


def _lines(body) -> set[tuple[type, ir.Location]]:
    """Where the program says the work that is done."""
    return {(type(op), op.location) for op in map(op_of, ir.walk(body)) if isinstance(op, WORK)}


def schedule(kernel: ir.Kernel, target: Target) -> None:
    """The roles do what the program does, as often, and all but loads in its order on each tile.

    Copies of all threads go beyond the loop, where they write zeros; their product has an iteration or more.
    """
    programs = [(kernel.body, kernel.roles)]
    if plan.feeds_itself(kernel):  # each group on its own; what orders them, the simulation checks
        programs = [(only(kernel.body, lambda stmt: True, role.groups[0]), (role,)) for role in kernel.roles]
    for parameters, steps, (body, roles) in itertools.product(ways(kernel), range(not target.warp_groups, 6), programs):
        run = Run(numbers(kernel, parameters, steps))
        program, parts = _done(body, run, target), [_done(role.body, run, target) for role in roles]
        wanted, loads = Counter(program[None]), Counter(load for part in parts for load in part[None])
        same = wanted == (loads if target.warp_groups else {load: loads[load] for load in wanted})
        for tile in {tile for part in (program, *parts) for tile in part} - {None}:
            same &= program[tile] == [what for part in parts for what in part[tile]]
        require(same, f"the roles do not do what the program does, for {steps} steps", "pipeline", kernel.location)


def _done(body, run: Run, target: Target) -> dict:
    """What is done to each tile, in order (by products to their registers: the rest is the simulation's); and all loads."""
    done, tiles = defaultdict(list), {}
    for event in (e for e in events(body, run) if isinstance(e.op, WORK | ir.Fill) and not isinstance(e.stmt, Land | Operands)):
        op, load = event.op, plan.is_load(event.op)
        what = meaning(event), None if load else tuple(event.values.items())
        parts = [what] if target.warp_groups else _of_threads(event, what)
        if op not in tiles:
            named = {tile for tile in plan.named(op) if tile.scope == "fragment" or not isinstance(op, ir.Gemm)}
            tiles[op] = {None} if load else named
        for tile in tiles[op]:
            done[tile] += parts
    return done


def _of_threads(event: Event, what: tuple) -> list:
    """A product is its steps of K, and what it clears before."""
    match event.stmt:
        case ir.Fill():
            return ["clear"]
        case Multiply(step=step):
            return [(*what, step)]
        case ir.Gemm(a=a, transpose_a=turned, clear=clear):
            return ["clear"] * number(clear, event.values) + [(*what, q) for q in range(a.shape[not turned] // 16)]
    return [what]


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
        if isinstance(view := buffer.alias, ir.Buffer):
            size, room = (kernel.layouts[b].bytes * plan.stages(kernel, b) * plan.copies(kernel, b) for b in (buffer, view))
            problem = f"{buffer.name} of {size} bytes lies over {view.name} of {room}"
            require(offset == kernel.shared[view] and size <= room, problem, "fewer stages", kernel.location)
            continue
        if view:
            over = kernel.layouts[view.buffer].offset(0, view.origin[1].value)
            inside = offset == kernel.shared[view.buffer] + over and layout.swizzle == kernel.layouts[view.buffer].swizzle
            require(inside, f"{buffer.name} does not lie over {view.name}", "plan_shared_memory", kernel.location)
            continue
        whole = len(buffer.shape) == 1 or plan.sharing(kernel) == plan.parts(kernel) == 1  # each group has all of it
        elements = math.prod(buffer.shape) * (plan.copies(kernel, buffer) if whole else 1) * plan.stages(kernel, buffer)
        found.append((offset, offset + elements * ir.DTYPES[buffer.dtype]))
    return found


def aliases(kernel: ir.Kernel, target: Target) -> None:
    """What is read from a box was written there through the same tile, whichever way the conditions go."""
    _separate(kernel.body, {})


def _separate(body, last: dict[tuple, set[ir.Buffer]]) -> None:
    """`last`: the tiles through which a box may have been written last."""
    for stmt in body:
        for tile in (t for t in plan.accesses(stmt)[0] if t.scope == "shared"):
            for other in (o for box in plan.boxes(tile) for o in last.get(box, ()) if o != ir.buffer_of(tile)):
                problem = f"{tile.name} is read where {other.name} may have been written over it"
                raise TileError(problem, "a tile of its own, or the copy into it once more", stmt.location)
        last |= {box: {ir.buffer_of(t)} for t in plan.accesses(stmt)[1] if t.scope == "shared" for box in plan.boxes(t)}
        for _ in range(2 if hasattr(stmt, "body") else 0):  # a loop's second iteration sees the first one's
            done = dict(last)
            _separate(stmt.body, done)
            skipped = {} if isinstance(stmt, ir.On) else last
            last |= {box: tiles | skipped.get(box, set()) for box, tiles in done.items()}


def barriers(kernel: ir.Kernel, target: Target) -> None:
    """Run against each other, the roles read what the program says, and every phase completes exactly."""
    for parameters, order in itertools.product(relevant(kernel), range(ORDERS)):
        try:
            simulate(kernel, parameters, order)
        except Fault as fault:
            raise TileError(f"the barriers are wrong: {fault}", "derive_barriers", kernel.location) from fault


def relevant(kernel: ir.Kernel) -> list[dict[str, int]]:
    """The ways that differ in what happens in shared memory: a condition around fragments only is taken as it comes first."""
    around = [s for s in ir.walk(kernel.body, ir.If) if kernel.shared.keys() & set(plan.named(s))]
    names = {e.name for stmt in around for e in ir.subexprs(stmt) if isinstance(e, ir.Var)}
    chosen: dict[tuple, dict[str, int]] = {}
    for way in ways(kernel):
        chosen.setdefault(tuple(value for name, value in way.items() if name in names), way)
    return list(chosen.values())


def budgets(kernel: ir.Kernel, target: Target) -> None:
    """Fragments, 44 more (24 with several products), fit; all groups have what they started with, in steps of 8."""
    total = sum(128 * role.registers * len(role.groups) for role in kernel.roles)
    words = plan.live_words(kernel)
    if plan.feeds_itself(kernel):
        beside = 24 if any(role.loads for role in kernel.roles) else 44
        fits = total <= target.registers_per_cta and words + beside <= kernel.roles[0].registers <= target.registers_per_thread
        require(fits, f"registers of {total} in all, {words} in fragments", "whole_share", kernel.location)
        return
    steps = all(24 <= role.registers <= 240 and role.registers % 8 == 0 for role in kernel.roles)
    start = target.registers_per_cta // (kernel.threads + 128) // 8 * 8 * (kernel.threads + 128)
    beside = 44 if len(list(ir.walk(kernel.body, ir.Gemm))) == 1 else 24
    fits = total <= start and words + beside <= plan.consumers(kernel).registers and steps
    require(fits, f"registers of {total} in all, {words} in fragments", "budget_registers", kernel.location)
