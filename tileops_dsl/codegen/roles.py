"""CUDA text of kernels with roles: the parameter struct, shared memory and barriers, then a branch for each role."""

from itertools import groupby

from tileops_dsl import ir, plan
from tileops_dsl.codegen import group_fragments
from tileops_dsl.codegen.arithmetic import arithmetic, ceil_divided
from tileops_dsl.codegen.expressions import CTYPES
from tileops_dsl.codegen.role_statements import STATEMENTS, body
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.instruction_layouts import SharedTile
from tileops_dsl.schedule import Role, Signal


def emit_roles(kernel: ir.Kernel, name: str, struct: str) -> tuple[str, dict[int, str]]:
    """The definition of the kernel `name`, which takes a `struct`, and the program's line for each site number."""
    w = Writer(kernel, fragments=group_fragments, statements=STATEMENTS)
    _frame(w)
    for i, role in enumerate(kernel.roles):
        w.line("} else {" if i else f"if (group == {role.groups[0]}) {{")
        w.depth += 1
        (_producer if role.warp is not None else _consumer)(w, role)
        w.depth -= 1
    w.line("}")
    if kernel.ctas > 1:
        w.line(f"cluster_sync({w.site_at(kernel.location)});  // nobody leaves while a peer may arrive")
    head = f"// {kernel.location}: {kernel.location.text}"
    opening = f"TILEOPS_KERNEL({name}, {struct}, {plan.threads(kernel)}, {kernel.min_blocks}) {{"
    return "\n".join([head, opening, *w.lines, "}", ""]), w.sites


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
            with w.loop("s", count):
                for b in barriers:
                    place = b.name if b.common else f"shared<mbarrier>({b.offset})"
                    w.line(f"init_barrier({place} + s, {b.arrivals}, {w.site_at(kernel.location)});")
        w.line(f"fence_barrier_init({w.site_at(kernel.location)});")
    w.line(f"{'cluster_sync' if kernel.ctas > 1 else 'sync_threads'}({w.site_at(kernel.location)});")
    w.line()
    count_tiles(w)


def count_tiles(w: Writer) -> None:
    """The work of all CTAs, and what of it is this one's."""
    kernel = w.kernel
    tiles, ctas = plan.tile_loop(kernel), kernel.cluster[0]
    if ctas > 1:
        w.line(f"// Tiles of the cluster, whose CTAs have {ctas} neighbouring rows of tiles.")
    *items, rows, columns = tiles.extents
    w.line(f"const int rows = {arithmetic(kernel, ceil_divided(rows, ctas))};")
    w.line(f"const int columns = {arithmetic(kernel, columns)};")
    w.line(f"const int tiles = {''.join(f'{arithmetic(kernel, item, 3)} * ' for item in items)}rows * columns;")
    for loop in (s for s in ir.walk(kernel.body) if isinstance(s, ir.Pipelined) and not isinstance(s.extent, ir.Const)):
        w.line(f"const int {w.steps(loop)} = {arithmetic(kernel, loop.extent)};")
    w.line(f"const int first = static_cast<int>(block_index_x()){f' / {ctas}' if ctas > 1 else ''};")
    w.line(f"const int clusters = static_cast<int>(grid_size_x()){f' / {ctas}' if ctas > 1 else ''};")
    w.line()


def _producer(w: Writer, role: Role) -> None:
    w.role = role
    where = w.kernel.location
    w.line(f"register_budget_decrease<{role.registers}>({w.site_at(where)});")
    with w.block(f"if (warp_index() == {role.warp} && elect_one({w.site_at(where)}))"):
        w.line("int stage = 0, phase = 0;")
        body(w, role.body)
    w.line(f"sync_warp({w.site_at(where)});")


def _consumer(w: Writer, role: Role) -> None:
    w.role = role
    kernel, first = w.kernel, role.groups[0]
    change = "increase" if len(role.groups) > 1 else "decrease"  # one consumer begins with half the register file
    w.line(f"register_budget_{change}<{role.registers}>({w.site_at(kernel.location)});")
    w.line("const int thread = thread_index() % 128;")
    w.line("const int lane = thread % 32;")
    for buffer in (b for b in kernel.shared if not plan.is_common(kernel, b)):
        w.quote(w.allocation(buffer))
        elements = plan.stage_bytes(kernel, buffer) * plan.stages(kernel, buffer) // ir.DTYPES[buffer.dtype]
        base = f"shared<{CTYPES[buffer.dtype]}>({kernel.shared[buffer]})"
        w.line(f"const auto {buffer.name} = {base} + (group - {first}) * {elements};")
        layout = kernel.layouts[buffer]
        if isinstance(layout, SharedTile):
            w.line(f"const int {buffer.name}_offset = {group_fragments.offset(w, layout)};")
    for b in (b for b in kernel.barriers if not b.common):
        w.line(f"const auto {b.name} = shared<mbarrier>({b.offset}) + (group - {first}) * {b.ring.stages};")
    for buffer in (b for b in kernel.layouts if b.scope == "fragment"):
        w.quote(w.allocation(buffer))
        w.line(f"Fragment<{CTYPES[buffer.dtype]}, {plan.registers(kernel, buffer)}> {buffer.name};")
    phases = "".join(f", {w.phase(b)} = 0" for b in kernel.barriers if not b.common)
    w.line(f"int stage = 0, phase = 0{phases};")
    w.late = any(isinstance(s, Signal) and s.which == "before" for s in ir.walk(role.body))
    body(w, role.body)
