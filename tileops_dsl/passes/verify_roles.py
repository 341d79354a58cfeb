"""What must hold of kernels with roles, computed from their bodies and not from the tables of the passes."""

import functools
import itertools
import math
from collections import Counter

from tileops_dsl import ir, plan
from tileops_dsl.errors import TileError
from tileops_dsl.instruction_layouts import SharedTile, WarpAccumulators, WgmmaAccumulator
from tileops_dsl.layouts import Linear
from tileops_dsl.passes.meaning import Run, events, meaning, number, views_of, ways
from tileops_dsl.passes.simulate import Fault, simulate
from tileops_dsl.schedule import Advance, Await, Fence, Issue, Multiply, Retire, Signal, Sync, Turn
from tileops_dsl.targets import Target

ORDERS = 3  # one for each haste of what is in flight


def roles(kernel: ir.Kernel, target: Target) -> None:
    """Each statement of the program is some role's, and in no other role."""
    lines = [{(type(op), op.location) for op in map(_op, ir.walk(role.body)) if _works(op)} for role in kernel.roles]
    if kernel.roles:
        program = {(type(s), s.location) for s in ir.walk(kernel.body) if _works(s)}
        split = Counter(line for role in lines for line in role) == Counter(program)
        _require(split, "a statement is in no role or in two", "assign_roles", kernel.location)


def _op(stmt: ir.Stmt) -> ir.Stmt:
    return stmt.op if isinstance(stmt, Issue | Multiply) else stmt


def _works(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, ir.Copy | ir.Gemm | ir.Parallel)


def schedule(kernel: ir.Kernel, target: Target) -> None:
    """The roles do what the program does, as often, and all but loads in its order."""
    for parameters, steps in itertools.product(ways(kernel), range(6)) if kernel.roles else ():
        run = Run(parameters, steps)
        program = _done(kernel.body, run)
        parts = [_done(role.body, run) for role in kernel.roles]
        for load in (True, False):
            found = [m for part in parts for m, is_load in part if is_load is load]
            expected = [m for m, is_load in program if is_load is load]
            same = Counter(found) == Counter(expected) if load else found == expected
            _require(same, f"the roles do not do what the program does, for {steps} steps", "pipeline", kernel.location)


def _done(body, run: Run) -> list[tuple]:
    """What is done, and whether it is a load."""
    quiet = (Advance, Await, Fence, Retire, Signal, Sync, Turn, ir.Alloc)
    return [(meaning(e), plan.is_load(e.op)) for e in events(body, run) if not isinstance(e.stmt, quiet)]


def layouts(kernel: ir.Kernel, target: Target) -> None:
    """Each tile has a layout of its shape; a fragment's fills the registers of a group; views begin at whole registers."""
    groups = len(plan.consumers(kernel).groups)
    for stmt in (s for s in kernel.body if isinstance(s, ir.Alloc)):
        buffer, layout = stmt.buffer, kernel.layouts.get(stmt.buffer)
        kinds = {"fragment": WgmmaAccumulator | WarpAccumulators | Linear, "shared": SharedTile | Linear}[buffer.scope]
        rows = (plan.layout_rows(kernel, buffer), *buffer.shape[1:])
        fits = isinstance(layout, kinds) and _shape(layout) == (buffer.shape if isinstance(layout, Linear) else rows)
        _require(fits, f"{buffer.name} is {list(buffer.shape)} and its layout {layout}", "infer_layouts", stmt.location)
        whole = buffer.scope == "shared" or _fills(layout, kernel.threads // groups)
        _require(whole, f"the layout of {buffer.name} leaves registers or threads out", "infer_layouts", stmt.location)
    for event in events(kernel.body, Run(ways(kernel)[0], 1)):
        for view in views_of(event.op) if isinstance(event.op, ir.Parallel) else ():
            first, limit = number(view.origin[1], event.values), view.buffer.shape[1]
            unit = 8 * getattr(kernel.layouts[view.buffer], "across", 1)
            inside = first % unit == view.shape[1] % unit == 0 and 0 <= first <= limit - view.shape[1]
            problem = f"{view.buffer.name}[:, {first} : {first + view.shape[1]}] is no groups of {unit} of the {limit} columns"
            _require(inside, problem, f"multiples of {unit} columns, inside the fragment", event.op.location)


def _shape(layout) -> tuple[int, ...]:
    return (layout.extent,) if isinstance(layout, Linear) else (layout.rows, layout.columns)


@functools.cache
def _fills(layout, threads: int) -> bool:
    """By enumeration: each element is in one register, and each register of each thread of a group holds one.

    A vector may leave the last register of some threads.
    """
    places = [layout.place(index) for index in itertools.product(*map(range, _shape(layout)))]
    held = Counter((thread, register) for threads, register in places for thread in threads)
    empty = set(itertools.product(range(threads), range(layout.registers))) - set(held)
    ragged = isinstance(layout, Linear) and all(register == layout.registers - 1 for _, register in empty)
    return layout.threads == threads and set(held.values()) == {1} and (ragged or not empty)


def shared_memory(kernel: ir.Kernel, target: Target) -> None:
    """Tiles and barriers lie apart, tiles as their swizzle wants it, and all fit."""
    ranges = []
    for buffer, offset in kernel.shared.items():
        layout = kernel.layouts[buffer]
        aligned = not isinstance(layout, SharedTile) or offset % (8 * layout.swizzle.row_bytes) == 0
        _require(aligned, f"{buffer.name} starts at byte {offset}", "plan_shared_memory", kernel.location)
        ring = next((ring for ring in kernel.rings if buffer in ring.buffers), None)
        whole = len(buffer.shape) == 1 or plan.tile_loop(kernel).alternate  # each group has all of it
        elements = math.prod(buffer.shape) * (plan.copies(kernel, buffer) if whole else 1)
        ranges.append((offset, offset + elements * ir.DTYPES[buffer.dtype] * (ring.stages if ring else 1)))
    ranges += [(b.offset, b.offset + 8 * b.ring.stages * b.copies) for b in kernel.barriers]
    ranges.sort()
    apart = all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    if not apart or (ranges and ranges[-1][1] > kernel.shared_bytes) or kernel.shared_bytes > target.shared_bytes:
        problem = f"shared memory of {kernel.shared_bytes} bytes of {target.shared_bytes}"
        raise TileError(problem, "fewer stages or a smaller tile", kernel.location)


def barriers(kernel: ir.Kernel, target: Target) -> None:
    """Run against each other, the roles read what the program says, and every phase completes exactly."""
    for parameters, order in itertools.product(relevant(kernel), range(ORDERS)) if kernel.roles else ():
        try:
            simulate(kernel, parameters, order)
        except Fault as fault:
            raise TileError(f"the barriers are wrong: {fault}", "derive_barriers", kernel.location) from fault


def relevant(kernel: ir.Kernel) -> list[dict[str, int]]:
    """The ways that differ in what happens in shared memory: a condition around fragments only is taken as it comes first."""
    shared = {b.name for b in kernel.shared}
    names = set()
    for stmt in (s for s in ir.walk(kernel.body) if isinstance(s, ir.If)):
        inner = [x for s in ir.walk(stmt.body) for x in (*vars(s).values(), *_loaded(s))]
        if any(isinstance(tile, ir.Buffer) and tile.name in shared for tile in inner):
            names |= {e.name for e in ir.subexprs(stmt.condition) if isinstance(e, ir.Var)}
    chosen: dict[tuple, dict[str, int]] = {}
    for way in ways(kernel):
        chosen.setdefault(tuple(value for name, value in way.items() if name in names), way)
    return list(chosen.values())


def _loaded(stmt: ir.Stmt) -> list[ir.Tile]:
    return [e.buffer for x in ir.exprs_of(stmt) for e in ir.subexprs(x) if isinstance(e, ir.Load)]


def budgets(kernel: ir.Kernel, target: Target) -> None:
    """Fragments, 44 more, fit; all groups together have what they started with; the instruction takes steps of 8."""
    if kernel.roles:
        total = sum(128 * role.registers * len(role.groups) for role in kernel.roles)
        words = sum(-(-plan.registers(kernel, b) * ir.DTYPES[b.dtype] // 4) for b in kernel.layouts if b.scope == "fragment")
        steps = all(24 <= role.registers <= 240 and role.registers % 8 == 0 for role in kernel.roles)
        start = target.registers_per_cta // (kernel.threads + 128) // 8 * 8 * (kernel.threads + 128)
        fits = total <= start and words + 44 <= plan.consumers(kernel).registers and steps
        _require(fits, f"registers of {total} in all, {words} in fragments", "budget_registers", kernel.location)


def _require(holds: bool, problem: str, instead: str, location: ir.Location) -> None:
    if not holds:
        raise TileError(problem, instead, location)
