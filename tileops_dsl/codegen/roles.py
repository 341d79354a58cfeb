"""CUDA text of kernels with roles: the parameter struct, shared memory and barriers, then a branch for each role."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby

from tileops_dsl import ir, plan
from tileops_dsl.codegen import group_fragments, groups, role_statements
from tileops_dsl.codegen.arithmetic import arithmetic, ceil_divided
from tileops_dsl.codegen.expressions import CTYPES
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.instruction_layouts import SharedTile
from tileops_dsl.schedule import Await, Issue, Role


def emit_roles(kernel: ir.Kernel, name: str, struct: str) -> tuple[str, dict[int, str]]:
    """The definition of the kernel `name`, which takes a `struct`, and the program's line for each site number."""
    of_groups = plan.feeds_itself(kernel)
    how = groups if of_groups else role_statements
    w = Writer(kernel, fragments=group_fragments, statements=how.STATEMENTS, body=how.body)
    _frame(w)
    (groups.declare if kernel.grid else count_tiles)(w)
    loading = any(role.loads for role in kernel.roles)
    roles = sorted(kernel.roles, key=lambda role: not role.loads)
    for i, role in enumerate(roles):
        rest = 0 < i == len(roles) - 1
        w.line("} else " * (i > 0) + f"if (group == {role.groups[0]}) " * (not rest) + "{")
        w.depth, w.role = w.depth + 1, role
        if not of_groups or loading:
            more = not role.loads if loading else len(role.groups) > 1  # one consumer begins with half the register file
            w.line(f"register_budget_{'increase' if more else 'decrease'}<{role.registers}>({w.site_at(kernel.location)});")
        (_loader if role.loads else _producer if role.warp is not None else _consumer)(w, role)
        w.depth -= 1
    w.line("}")
    if kernel.ctas > 1:
        w.line(f"cluster_sync({w.site_at(kernel.location)});  // nobody leaves while a peer may arrive")
    return f"// {kernel.location}: {kernel.location.text}\n" + w.definition(name, struct), w.sites


def _frame(w: Writer) -> None:
    """What all threads do first."""
    kernel = w.kernel
    w.line("const int group = warp_group_index();")
    if kernel.ctas > 1:
        w.line("const int rank = cluster_rank();")
    for buffer in (b for b in kernel.shared if plan.is_common(kernel, b)):
        w.quote(w.allocation(buffer))
        w.line(f"const auto {buffer.name} = shared<{CTYPES[buffer.dtype]}>({kernel.shared[buffer]});")
    for barrier in (b for b in kernel.barriers if b.common):
        w.line(f"const auto {barrier.name} = shared<mbarrier>({barrier.offset});")
    with w.block("if (thread_index() == 0)"):
        for count, barriers in groupby(kernel.barriers, key=lambda b: b.count):
            with w.loop("s", count) if count > 1 else nullcontext():
                for b in barriers:
                    place = b.name if b.common else f"shared<mbarrier>({b.offset})"
                    w.line(f"init_barrier({place}{' + s' * (count > 1)}, {b.arrivals}, {w.site_at(kernel.location)});")
        w.line(f"fence_barrier_init({w.site_at(kernel.location)});")
    w.line(f"{'cluster_sync' if kernel.ctas > 1 else 'sync_threads'}({w.site_at(kernel.location)});")
    w.line()


def count_tiles(w: Writer) -> None:
    """The work of all CTAs, and what of it is this one's."""
    kernel = w.kernel
    tiles, ctas = plan.tile_loop(kernel), kernel.cluster[0]
    if ctas > 1:
        w.line(f"// Tiles of the cluster, whose CTAs have {ctas} neighbouring rows of tiles.")
    w.name_numbers([replace(tiles, body=())])
    *items, rows, columns = map(w.named, tiles.extents)
    w.line(f"const int rows = {arithmetic(kernel, ceil_divided(rows, ctas))};")
    w.line(f"const int columns = {arithmetic(kernel, columns)};")
    w.line(f"const int tiles = {''.join(f'{arithmetic(kernel, item, 3)} * ' for item in items)}rows * columns;")
    w.name_numbers([s for role in kernel.roles for s in role.body])
    w.line(f"const int first = static_cast<int>(block_index_x()){f' / {ctas}' if ctas > 1 else ''};")
    w.line(f"const int clusters = static_cast<int>(grid_size_x()){f' / {ctas}' if ctas > 1 else ''};")
    w.line()


def _declare_progress(w: Writer, barriers) -> None:
    """Where the role is in each ring."""
    names = []
    for barrier in (b for b in barriers if b.kind == "full"):
        names += [w.index(barrier.ring)] * (barrier.common and barrier.ring.stages > 1) + [w.phase(barrier.ring)]
    if names:
        w.line(f"int {', '.join(f'{name} = 0' for name in names)};")


def _producer(w: Writer, role: Role) -> None:
    """One thread; or the warps that have boxes of rows to load: one that had none might wait for a phase that is over."""
    where, of_rows = w.kernel.location, plan.of_rows(role)
    if of_rows:
        w.line("const int warp = warp_index() % 4;")
        who = f"warp * {w.number(of_rows.box_row.rows, 4)} < {of_rows.dst.shape[0]}"
    else:
        who = f"warp_index() == {role.warp} && elect_one({w.site_at(where)})"
    with w.block(f"if ({who})"):
        _declare_progress(w, [b for b in w.kernel.barriers if b.common])
        w.body(w, role.body)
    w.line(f"sync_warp({w.site_at(where)});")


def _loader(w: Writer, role: Role) -> None:
    """Of T.ws, the group that only loads: its first warp, or all of them, each of which has boxes of rows."""
    w.line("const int warp = warp_index() % 4;")
    of_rows = any(s.op.box_row for s in ir.walk(role.body, Issue))
    with nullcontext() if of_rows else w.block("if (warp == 0)"):
        told = [b for b in w.kernel.barriers if b.name in {s.barrier for s in ir.walk(role.body, Await)}]
        w.line(f"int {', '.join(f'{w.phase(b.ring)} = -1' for b in told)};  // the first waits pass")
        w.body(w, role.body)


def _consumer(w: Writer, role: Role) -> None:
    kernel, first = w.kernel, role.groups[0]
    w.line("const int thread = thread_index() & 127;")  # a remainder, of a number with a sign, took a register more
    w.line("const int lane = thread % 32;")
    if plan.feeds_itself(kernel):
        w.line("const int warp = warp_index() % 4;")
    for buffer in (b for b in kernel.shared if not plan.is_common(kernel, b)):
        w.quote(w.allocation(buffer))
        elements = kernel.layouts[buffer].bytes * plan.stages(kernel, buffer) // ir.DTYPES[buffer.dtype]
        base = f"shared<{CTYPES[buffer.dtype]}>({kernel.shared[buffer]})"
        w.line(f"const auto {buffer.name} = {base} + (group - {first}) * {elements};")
        layout = kernel.layouts[buffer]
        if isinstance(layout, SharedTile):
            w.line(f"const int {buffer.name}_offset = {group_fragments.offset(w, layout)};")
    for b in (b for b in kernel.barriers if not b.common):
        w.line(f"const auto {b.name} = shared<mbarrier>({b.offset}) + (group - {first}) * {b.ring.stages};")
    used = {buffer for stmt in role.body for buffer in plan.named(stmt)}
    for buffer in (b for b in kernel.layouts if b.scope == "fragment" and b in used):
        w.declare_fragment(buffer)
    waits = {s.barrier for s in ir.walk(role.body) if isinstance(s, Await)}
    _declare_progress(w, [b for b in kernel.barriers if b.name in waits])
    start = len(w.lines)
    w.body(w, role.body)
    numbers = {"own_row": f"{group_fragments.own_row(w)};  // the thread's first one of a tile"}
    for buffer, layout in kernel.layouts.items():
        if plan.is_common(kernel, buffer) and isinstance(layout, SharedTile):
            rows = f"(group - {first}) * {64 * w.blocks * layout.box_columns} + " * plan.divides_rows(kernel)
            numbers[f"{buffer.name}_offset"] = f"{rows}{group_fragments.offset(w, layout)};"
    for name, number in numbers.items():
        if any(name in line for line in w.lines[start:]):
            w.lines.insert(start, f"    const int {name} = {number}")
    w.grid_dependency("launch")
