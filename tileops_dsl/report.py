"""What was decided about a kernel: the comment at the head of its text, and of one with roles the schedule report beside it."""

import math

from tileops_dsl import ir, plan
from tileops_dsl.configs import SHORT, Config
from tileops_dsl.instruction_layouts import WarpAccumulators
from tileops_dsl.schedule import Barrier, Retire, Sync
from tileops_dsl.targets import Target


def of_rows(config: Config, kernel: ir.Kernel) -> str:
    """The comment of a row-wise kernel."""
    rows, columns = config.tile
    registers = ", ".join(f"{b.name} {la.registers} x {SHORT[b.dtype]}" for b, la in kernel.layouts.items())
    lines = [f"{config.name}: {config.lengths}, {rows} rows x {columns} columns per CTA"]
    lines += [f"Layout: {config.layout}; {config.threads} threads", f"Registers of a thread: {registers}"]
    return _comment([*lines, f"Shared memory: {kernel.shared_bytes} bytes"])


def _comment(lines: list[str]) -> str:
    return "\n".join(f"// {line}".rstrip() for line in lines) + "\n"


def header(config: Config, kernel: ir.Kernel) -> str:
    stages = "" if plan.feeds_itself(kernel) else f", {config.stages} stages"
    lines = [f"{config.name}: tile {' x '.join(map(str, config.tile))}{stages}", _threads(kernel), *config.choices]
    return _comment([*lines, "", *_tables(kernel)])


def _threads(kernel: ir.Kernel) -> str:
    groups = plan.consumers(kernel).groups
    if plan.feeds_itself(kernel):
        loading = [str(role.groups[0]) for role in kernel.roles if role.loads]
        how = f"of which {', '.join(loading)} loads and the others multiply" if loading else "which load and multiply"
        return f"{len(kernel.roles)} warp groups, {how}"
    if kernel.barriers:
        how = "take tiles in turn" if plan.tile_loop(kernel).alternate else "multiply"
        part = ", some columns each" if plan.parts(kernel) > 1 else " each"
        rows = "all rows" if plan.down_rows(kernel) else f"{64 * plan.blocks(kernel)} rows{part}"
        return f"{len(groups) + 1} warp groups: group 0 loads, {', '.join(map(str, groups))} {how}, {rows}"
    if plan.chained(kernel):
        return f"4 warps of {16 * plan.blocks(kernel)} rows"
    layout = next(layout for layout in kernel.layouts.values() if isinstance(layout, WarpAccumulators))
    return f"{layout.down} x {layout.across} warps of {layout.rows // layout.down} x {layout.columns // layout.across}"


def report(config: Config, kernel: ir.Kernel, target: Target) -> str:
    """The schedule, and what a step of its products costs."""
    tiles, work = [], []
    if not plan.feeds_itself(kernel):
        loop, extents = plan.tile_loop(kernel), " x ".join(map(str, config.tile))
        tiles = [f"tiles: {extents}; {', '.join(map(str, loop.vars))} of {', '.join(map(str, loop.extents))}"]
        tiles += [f"cluster: {kernel.cluster[0]} x {kernel.cluster[1]}; groups of {loop.group_size} rows of clusters"]
        work = [*_work(config, kernel, target), ""]
    lines = [config.name, *tiles, *map(str, kernel.rings), "", *_tables(kernel), "", *_tensor_maps(kernel), "", *work]
    return "\n".join(lines)


def _tables(kernel: ir.Kernel) -> list[str]:
    return [*_shared_memory(kernel), "", *_barriers(kernel), "", *_registers(kernel)]


def _shared_memory(kernel: ir.Kernel) -> list[str]:
    lines = ["Shared memory: offset, bytes"]
    for buffer, offset in kernel.shared.items():
        factors = [plan.copies(kernel, buffer), plan.stages(kernel, buffer), kernel.layouts[buffer].bytes]
        names = (f"{factors[0]} groups", f"{factors[1]} stages", f"{factors[2]} bytes")
        size = " x ".join(name for factor, name in zip(factors, names, strict=True) if factor > 1)
        lines.append(f"{offset:8d}  {buffer.name:12s} {size}; {kernel.layouts[buffer]}")
    lines += [f"{b.offset:8d}  {b.name:12s} {b.count} x 8 bytes" for b in kernel.barriers]
    return [*lines, f"{kernel.shared_bytes:8d}  in all"]


def _barriers(kernel: ir.Kernel) -> list[str]:
    consumers = plan.consumers(kernel)
    if not kernel.barriers:
        title = "Waits for copies (groups that may be unfinished) and barriers of the CTA, each before the line"
        orders = [s for s in ir.walk(consumers.body) if isinstance(s, Retire | Sync)]
        return [title, *(f"  {s.location}: {s if isinstance(s, Retire) else 'barrier'}" for s in orders)]
    lines = ["Barriers: arrivals and bytes that complete a phase", *(_barrier(kernel, b) for b in kernel.barriers)]
    if plan.feeds_itself(kernel):
        return lines
    lines += [f"  named {', '.join(map(str, consumers.groups))}: the 128 threads of a consumer group each"]
    if any(isinstance(s, Sync) and s.all_groups for s in ir.walk(consumers.body)):
        lines.append(f"  named {consumers.groups[-1] + 1}: those of all consumer groups, which exchange through shared memory")
    return lines + ["  named 3, 4: the turns of groups 1 and 2"] * plan.tile_loop(kernel).alternate


def _barrier(kernel: ir.Kernel, barrier: Barrier) -> str:
    copies = f" x {barrier.copies} groups" if barrier.copies > 1 else ""
    count = f"{barrier.ring.stages} stage{'s' * (barrier.ring.stages > 1)}{copies}"
    groups, peers = plan.readers(kernel), plan.peers(kernel, barrier.ring)
    parts = f"{groups} group{'s' * (groups > 1)} x {f'{peers} CTAs' if peers > 1 else '4 warps'}"
    arrivals = f"{barrier.arrivals}" + (f" ({parts})" if barrier.kind == "empty" and not plan.feeds_itself(kernel) else "")
    return f"  {barrier.name:14s} {count:20s} arrivals {arrivals}, bytes {barrier.bytes}"


def _registers(kernel: ir.Kernel) -> list[str]:
    fragments = [b for b in kernel.layouts if b.scope == "fragment"]
    held = ", ".join(f"{b.name} {plan.registers(kernel, b)} x {SHORT.get(b.dtype, b.dtype)}" for b in fragments)
    budgets = "; ".join(f"{r.registers} for the {r.name}" for r in kernel.roles if r.registers)
    return [f"Registers of a thread: {budgets}".rstrip(), f"  {held}"]


def _tensor_maps(kernel: ir.Kernel) -> list[str]:
    lines = ["Tensor maps: box (columns x rows), swizzle"]
    for tensor, (tile, (columns, rows)) in plan.tma_tensors(kernel).items() if kernel.barriers else ():
        lines.append(f"  {tensor.name:12s} {columns} x {rows}, {tile.swizzle.row_bytes} bytes")
    return lines


def _work(config: Config, kernel: ir.Kernel, target: Target) -> list[str]:
    """Of an iteration of the loop with the products."""
    loops = (s for s in ir.walk(kernel.body) if isinstance(s, ir.Pipelined))
    loop = next(s for s in loops if any(isinstance(inner, ir.Gemm) for inner in s.body))
    gemms, loads = [s for s in loop.body if isinstance(s, ir.Gemm)], [s for s in loop.body if plan.is_load(s)]
    flops = sum(2 * math.prod(gemm.c.shape) * gemm.a.shape[not gemm.transpose_a] for gemm in gemms)
    moved = sum(kernel.layouts[s.dst].bytes // (kernel.ctas if s.multicast else 1) for s in loads)
    what = f"{moved} bytes of {' and '.join(s.src.tensor.name for s in loads)}"
    of_step = f"Work of a CTA for {config.step}: {flops} FLOP, {what} ({flops / moved:.0f} FLOP a byte)"
    return [of_step, *config.examples(target.multiprocessors, moved)]
