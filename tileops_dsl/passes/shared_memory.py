"""The shared-memory plan: a byte range for each tile, and for each reduction whose row spans several warps.

Every reduction has a range of its own, so one barrier for each is enough; in a loop, a second one separates iterations.
A tile has its stages one behind the other, and all of them for each group that has its own. Swizzled tiles come first, so that
their alignment leaves no gaps.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.instruction_layouts import SharedTile
from tileops_dsl.plan import buffer_bytes
from tileops_dsl.targets import Target


def exchange_bytes(kernel: ir.Kernel, reduce: ir.Reduce) -> int:
    """A float for each row of the tile and each group of threads that reduces it; 0 when one group does."""
    tile = kernel.layouts[reduce.src]
    return 4 * tile.rows * tile.warps_per_row if tile.warps_per_row > 1 else 0


def plan_shared_memory(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    if kernel.roles:
        return _plan_tiles(kernel)
    plan, offset = {}, 0
    for stmt in ir.walk(kernel.body):
        if isinstance(stmt, ir.Reduce) and exchange_bytes(kernel, stmt):
            plan[stmt] = offset
            offset += -(-exchange_bytes(kernel, stmt) // 16) * 16
    return replace(kernel, shared=plan, shared_bytes=offset)


def alignment(layout) -> int:
    """Bytes: of the swizzle's pattern, or of the widest access."""
    return layout.swizzle.alignment if isinstance(layout, SharedTile) else 16


def _plan_tiles(kernel: ir.Kernel) -> ir.Kernel:
    plan, offset = {}, 0
    tiles = [(buffer, layout) for buffer, layout in kernel.layouts.items() if buffer.scope == "shared"]
    for buffer, layout in sorted(tiles, key=lambda entry: -alignment(entry[1])):
        offset = -(-offset // alignment(layout)) * alignment(layout)
        plan[buffer] = offset
        offset += buffer_bytes(kernel, buffer)
    return replace(kernel, shared=plan, shared_bytes=offset)
