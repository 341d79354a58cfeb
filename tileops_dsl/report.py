"""What was decided about a kernel with roles: the comment at the head of its text, and the schedule report beside it."""

from tileops_dsl import ir, plan
from tileops_dsl.configs import SHORT, GemmConfig
from tileops_dsl.schedule import Barrier
from tileops_dsl.targets import Target

EXAMPLES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 16384, 4096))  # M, N, K


def header(config: GemmConfig, kernel: ir.Kernel) -> str:
    groups = plan.consumers(kernel).groups
    lines = [
        f"{config.name}: tile {' x '.join(map(str, config.tile))}, {config.stages} stages",
        f"{len(groups) + 1} warp groups: group 0 loads, groups {groups[0]} to {groups[-1]} multiply, 64 rows each",
        f"Cluster of {kernel.ctas} CTAs; tiles in groups of {config.group_size} clusters of rows",
        f"c is stored {config.store_columns} columns at a time",
        "",
        *_shared_memory(kernel),
        "",
        *_barriers(kernel),
        "",
        *_registers(kernel),
    ]
    return "\n".join(f"// {line}".rstrip() for line in lines) + "\n"


def report(config: GemmConfig, kernel: ir.Kernel, target: Target) -> str:
    """The schedule, and what a problem of M x N x K costs."""
    tiles, extents = next(s for s in kernel.body if isinstance(s, ir.Persistent)), config.tile
    lines = [
        f"{config.name}",
        f"tiles: {' x '.join(map(str, extents))}; {', '.join(map(str, tiles.vars))} of {', '.join(map(str, tiles.extents))}",
        f"cluster: {kernel.cluster[0]} x {kernel.cluster[1]}; groups of {tiles.group_size} rows of clusters",
        *(str(ring) for ring in kernel.rings),
        "",
        *_shared_memory(kernel),
        "",
        *_barriers(kernel),
        "",
        *_registers(kernel),
        "",
        *_tensor_maps(kernel),
        "",
        *_work(config, kernel, target),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _shared_memory(kernel: ir.Kernel) -> list[str]:
    lines = ["Shared memory: offset, bytes"]
    for buffer, offset in kernel.shared.items():
        factors = [plan.copies(kernel, buffer), plan.stages(kernel, buffer), plan.stage_bytes(kernel, buffer)]
        names = (f"{factors[0]} groups", f"{factors[1]} stages", f"{factors[2]} bytes")
        size = " x ".join(name for factor, name in zip(factors, names, strict=True) if factor > 1)
        lines.append(f"{offset:8d}  {buffer.name:12s} {size}; {kernel.layouts[buffer]}")
    lines += [f"{b.offset:8d}  {b.name:12s} {b.count} x 8 bytes" for b in kernel.barriers]
    return [*lines, f"{kernel.shared_bytes:8d}  in all"]


def _barriers(kernel: ir.Kernel) -> list[str]:
    lines = ["Barriers: arrivals and bytes that complete a phase"]
    lines += [_barrier(kernel, b) for b in kernel.barriers]
    groups = plan.consumers(kernel).groups
    return [*lines, f"  named {groups[0]} to {groups[-1]}: the 128 threads of a consumer group"]


def _barrier(kernel: ir.Kernel, barrier: Barrier) -> str:
    count = f"{barrier.ring.stages} stages" + (f" x {barrier.copies} groups" if barrier.copies > 1 else "")
    groups, peers = len(plan.consumers(kernel).groups), plan.peers(kernel, barrier.ring)
    parts = f"{groups} groups x {peers} CTAs" if peers > 1 else f"{groups} groups x 4 warps"
    arrivals = f"{barrier.arrivals}" + (f" ({parts})" if barrier.kind == "empty" else "")
    return f"  {barrier.name:14s} {count:20s} arrivals {arrivals}, bytes {barrier.bytes}"


def _registers(kernel: ir.Kernel) -> list[str]:
    held = ", ".join(
        f"{b.name} {plan.registers(kernel, b)} x {SHORT[b.dtype]}" for b in kernel.layouts if b.scope == "fragment"
    )
    budgets = "; ".join(f"{r.registers} for the {r.name}" for r in kernel.roles)
    return [f"Registers of a thread: {budgets}", f"  {held}"]


def _tensor_maps(kernel: ir.Kernel) -> list[str]:
    lines = ["Tensor maps: box (columns x rows), swizzle"]
    for tensor, (tile, (columns, rows)) in plan.tma_tensors(kernel).items():
        lines.append(f"  {tensor.name:12s} {columns} x {rows}, {tile.swizzle.row_bytes} bytes")
    return lines


def _work(config: GemmConfig, kernel: ir.Kernel, target: Target) -> list[str]:
    bm, bn, bk = config.tile
    loads = [s for ring in kernel.rings for s in plan.loads_of(kernel, ring) if plan.is_common(kernel, s.dst)]
    moved = sum(kernel.layouts[s.dst].bytes // (kernel.ctas if s.multicast else 1) for s in loads)
    clusters = target.multiprocessors // kernel.ctas
    flops = 2 * bm * bn * bk
    lines = [
        f"Work of a CTA for {bk} of K: {flops} FLOP, {moved} bytes of a and b ({flops / moved:.0f} FLOP a byte)",
        f"Waves on {target.multiprocessors} multiprocessors, {clusters} clusters at a time:",
    ]
    for m, n, k in EXAMPLES:
        rows, columns = -(-m // (bm * kernel.cluster[0])), -(-n // bn)
        tiles, steps = rows * columns, -(-k // bk)
        total = tiles * kernel.ctas * steps * moved
        lines.append(
            f"  {m} x {n} x {k}: {tiles} tiles of a cluster, {tiles / clusters:.2f} waves, {2 * m * n * k:.3g} FLOP, "
            f"{total:.3g} bytes loaded, {m * n * ir.DTYPES[config.y]:.3g} stored"
        )
    return lines
