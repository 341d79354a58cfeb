"""The shared-memory plan: a byte range for each tile, and for each reduction whose row spans several warps.

Every reduction has a range of its own, so one barrier for each is enough; in a loop, a second one separates iterations.
A tile has its stages one behind the other, and all of them for each group that has its own. Swizzled tiles come first, so that
their alignment leaves no gaps.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.instruction_layouts import SharedTile
from tileops_dsl.layouts import VectorisedRows
from tileops_dsl.plan import buffer_bytes
from tileops_dsl.targets import Target


def plan_shared_memory(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    needs = []  # (owner, bytes, alignment: of the swizzle's pattern, or of the widest access)
    for buffer, layout in kernel.layouts.items():
        if buffer.scope == "shared" and not buffer.alias:
            alignment = layout.swizzle.alignment if isinstance(layout, SharedTile) else 16
            needs.append((buffer, buffer_bytes(kernel, buffer), alignment))
    for stmt in (s for s in ir.walk(kernel.body) if isinstance(s, ir.Reduce)):
        layout = kernel.layouts[stmt.src]
        if isinstance(layout, VectorisedRows) and layout.warps_per_row > 1:  # a float for each row of each of these groups
            needs.append((stmt, -(-4 * layout.rows * layout.warps_per_row // 16) * 16, 16))
    plan, offset = {}, 0
    for owner, size, alignment in sorted(needs, key=lambda need: -need[2]):
        plan[owner] = -(-offset // alignment) * alignment
        offset = plan[owner] + size
    for buffer, view in ((b, b.alias) for b in kernel.layouts if b.alias):
        plan[buffer] = plan[view.buffer] + view.origin[1].value * view.shape[0] * ir.DTYPES[view.dtype]
    return replace(kernel, shared=plan, shared_bytes=offset)
