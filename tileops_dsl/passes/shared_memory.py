"""The shared-memory plan: a byte range for each reduction whose row spans several warps.

Every reduction has a range of its own, so one barrier for each is enough; in a loop, a second one separates iterations.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.targets import Target


def exchange_bytes(kernel: ir.Kernel, reduce: ir.Reduce) -> int:
    """A float for each row of the tile and each group of threads that reduces it; 0 when one group does."""
    tile = kernel.layouts[reduce.src]
    return 4 * tile.rows * tile.warps_per_row if tile.warps_per_row > 1 else 0


def plan_shared_memory(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    plan, offset = {}, 0
    for stmt in ir.walk(kernel.body):
        if isinstance(stmt, ir.Reduce) and exchange_bytes(kernel, stmt):
            plan[stmt] = offset
            offset += -(-exchange_bytes(kernel, stmt) // 16) * 16
    return replace(kernel, shared=plan, shared_bytes=offset)
