"""The shared-memory plan: a byte range for each tile, and for each reduction whose row spans several warps.

Every reduction has a range of its own, so one barrier for each is enough; in a loop, a second one separates iterations.
A tile has its stages one behind the other, and all of them for each group that has its own. Swizzled tiles come first, so that
their alignment leaves no gaps.
"""

from collections.abc import Iterator
from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.instruction_layouts import SharedTile
from tileops_dsl.plan import buffer_bytes
from tileops_dsl.targets import Target


def plan_shared_memory(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    plan, offset = {}, 0
    for owner, size, align in _tiles(kernel) if kernel.roles else _exchanges(kernel):
        plan[owner] = -(-offset // align) * align
        offset = plan[owner] + size
    return replace(kernel, shared=plan, shared_bytes=offset)


def _exchanges(kernel: ir.Kernel) -> Iterator[tuple[ir.Reduce, int, int]]:
    """A float for each row of the tile and each group of threads that reduces it, where there are several: bytes, alignment."""
    for stmt in ir.walk(kernel.body):
        if isinstance(stmt, ir.Reduce) and kernel.layouts[stmt.src].warps_per_row > 1:
            tile = kernel.layouts[stmt.src]
            yield stmt, -(-4 * tile.rows * tile.warps_per_row // 16) * 16, 16


def _tiles(kernel: ir.Kernel) -> list[tuple[ir.Buffer, int, int]]:
    """A tile is aligned to its swizzle's pattern, or to the widest access."""
    tiles = [(buffer, layout) for buffer, layout in kernel.layouts.items() if buffer.scope == "shared"]
    aligned = [(b, buffer_bytes(kernel, b), la.swizzle.alignment if isinstance(la, SharedTile) else 16) for b, la in tiles]
    return sorted(aligned, key=lambda entry: -entry[2])
