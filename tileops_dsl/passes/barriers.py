"""The mbarriers with their arrivals and bytes, whose ends the schedule has placed.

Between the producer and the consumers each ring has `full` (its copies have arrived) and `empty` (its products have read); for
loads that a group issues itself, there is `full` only.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.plan import boxes, consumers, feeds_itself, is_common, loads_of, peers, sharing
from tileops_dsl.schedule import Barrier
from tileops_dsl.targets import Target


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
            continue
        expected = sum(kernel.layouts[load.dst].bytes for load in loads)
        yield Barrier(f"{ring.prefix}full", "full", ring, common, 1 if common else groups, 1, expected)
        if common:
            each = peers(kernel, ring) if peers(kernel, ring) > 1 else 4  # a thread of the group for each peer, or each warp
            yield Barrier(f"{ring.prefix}empty", "empty", ring, True, 1, sharing(kernel) * each, 0)
