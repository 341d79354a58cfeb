"""The shared-memory plan: a byte range for each tile, for each reduction whose row spans several warps, and for the barriers.

Every reduction has a range of its own, so one barrier for each is enough; in a loop, a second one separates iterations.
A tile has its stages one behind the other, and all of them for each group that has its own. Swizzled tiles come first, so that
their alignment leaves no gaps.

The mbarriers have their arrivals and bytes here; their ends stand in the schedule. Between producer and consumers each
ring has `full` (its copies have arrived) and `empty` (its products have read); for loads that a group issues itself, there is
`full` only, and where a group of T.ws only loads, `free` for each of its loads, at the place of its first box.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.instruction_layouts import SharedTile
from tileops_dsl.layouts import VectorisedRows
from tileops_dsl.plan import boxes, consumers, copies, feeds_itself, is_common, loads_of, peers, readers, stages
from tileops_dsl.schedule import Barrier, op_of
from tileops_dsl.targets import Target


def plan_shared_memory(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    needs = []  # (owner, bytes, alignment: of the swizzle's pattern, or of the widest access)
    for buffer, layout in kernel.layouts.items():
        if buffer.scope == "shared" and not buffer.alias:
            alignment = layout.swizzle.alignment if isinstance(layout, SharedTile) else 16
            needs.append((buffer, layout.bytes * stages(kernel, buffer) * copies(kernel, buffer), alignment))
    for stmt in ir.walk(kernel.body, ir.Reduce):
        layout = kernel.layouts[ir.buffer_of(stmt.src)]
        if isinstance(layout, VectorisedRows) and layout.warps_per_row > 1:  # a float for each row of each of these groups
            needs.append((stmt, -(-4 * layout.rows * layout.warps_per_row // 16) * 16, 16))
    plan, offset = {}, 0
    for owner, size, alignment in sorted(needs, key=lambda need: -need[2]):
        plan[owner] = -(-offset // alignment) * alignment
        offset = plan[owner] + size
    for buffer, view in ((b, b.alias) for b in kernel.layouts if b.alias):
        first = view.origin[1].value if isinstance(view, ir.View) else 0
        plan[buffer] = plan[ir.buffer_of(view)] + first * view.shape[0] * ir.DTYPES[view.dtype]
    if kernel.deal:
        offset = -(-offset // 16) * 16
        kernel = replace(kernel, deal=replace(kernel.deal, offset=offset))
        offset += ir.Deal.BYTES
    return replace(kernel, shared=plan, shared_bytes=offset)


def derive_barriers(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    barriers, offset = [], kernel.shared_bytes
    for barrier in _barriers(kernel):
        barriers.append(replace(barrier, offset=offset))
        offset += 8 * barrier.count
    return replace(kernel, barriers=tuple(barriers), shared_bytes=offset)


def _barriers(kernel: ir.Kernel):
    for ring in kernel.rings:
        groups = len(consumers(kernel).groups)
        loads = loads_of(kernel, ring)
        if not loads:
            continue
        common = is_common(kernel, ring.buffers[0])
        if feeds_itself(kernel):  # a barrier for each box
            (tile,), count = ring.buffers, len(boxes(ring.buffers[0]))
            yield Barrier(f"{ring.prefix}full", "full", ring, True, count, 1, kernel.layouts[tile].bytes // count)
            told = {load for role in kernel.roles if role.loads for load in map(op_of, ir.walk(role.body))}
            if told.intersection(loads):
                yield Barrier(f"{ring.prefix}free", "empty", ring, True, count, 1, 0)
            continue
        expected = sum(kernel.layouts[load.dst].bytes for load in loads)
        yield Barrier(f"{ring.prefix}full", "full", ring, common, 1 if common else groups, 1, expected)
        if common:
            each = peers(kernel, ring) if peers(kernel, ring) > 1 else 4  # a thread of the group for each peer, or each warp
            yield Barrier(f"{ring.prefix}empty", "empty", ring, True, 1, readers(kernel) * each, 0)
