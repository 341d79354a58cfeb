"""CUDA text of products without warp groups: cp.async, ldmatrix, mma.sync."""

from tileops_dsl import ir, plan
from tileops_dsl.codegen import chained_fragments, groups, portable_fragments
from tileops_dsl.codegen.cuda import serial
from tileops_dsl.codegen.expressions import CTYPES
from tileops_dsl.codegen.portable_copies import declare_lines, issue, land, place_of, store
from tileops_dsl.codegen.portable_fragments import warps
from tileops_dsl.codegen.role_statements import STATEMENTS, body
from tileops_dsl.codegen.roles import count_tiles
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.instruction_layouts import SharedTile
from tileops_dsl.schedule import Advance, Commit, Issue, Land, Multiply, Operands, Retire, Sync


def emit_threads(kernel: ir.Kernel, name: str, struct: str) -> tuple[str, dict[int, str]]:
    """The definition of the kernel `name`, which takes a `struct`, and the program's line for each site number."""
    statements, chain = STATEMENTS | OF_THREADS, plan.chained(kernel)
    fragments = chained_fragments if chain else portable_fragments
    w = Writer(kernel, role=kernel.roles[0], fragments=fragments, statements=statements, body=body)
    w.line("const int thread = thread_index();")
    w.line("const int lane = thread & 31;")  # a remainder, of a number with a sign, took a register more
    gemm = next(ir.walk(kernel.body, ir.Gemm))
    if chain:
        w.line(f"const int own_row = {fragments.own_row(w)};  // the thread's first one of a tile")
    else:
        across = warps(w).across
        w.line(f"const int warp_row = thread / {32 * across}, warp_column = thread / 32 % {across};")
    for buffer, start in kernel.shared.items():
        w.quote(w.allocation(buffer))
        w.line(f"const auto {buffer.name} = shared<{CTYPES[buffer.dtype]}>({start});")
        layout = kernel.layouts[buffer]
        if isinstance(layout, SharedTile):
            declare_lines(w, buffer)
            if any(isinstance(s, ir.Copy) and s.dst == buffer and not plan.is_load(s) for s in ir.walk(kernel.body)):
                w.line(f"const int {buffer.name}_offset = {fragments.offset(w, layout)};")
    (groups.declare if kernel.grid else count_tiles)(w)
    for buffer in (b for b in kernel.layouts if b.scope == "fragment"):
        w.declare_fragment(buffer)
    if not chain:
        _declare_operands(w, gemm)
    body(w, kernel.roles[0].body)
    return f"// {kernel.location}: {kernel.location.text}\n" + w.definition(name, struct), w.sites


def _declare_operands(w: Writer, gemm: ir.Gemm) -> None:
    """Fragments of two steps of K, and where the first matrix begins whose row this lane gives."""
    c = warps(w)
    w.quote(gemm.location)
    for tile, registers in ((gemm.a, c.blocks[0] * 8), (gemm.b, c.blocks[1] * 4)):
        w.line(f"Fragment<{CTYPES[tile.dtype]}, {registers}> {tile.name}_part[2];")
    low, high, rows = "lane % 8", "lane / 8 % 2", c.rows // c.down
    a = (f"warp_row * {rows} + lane % 16", "lane / 16")
    b = (f"(lane / 16 * {c.across} + warp_column) * 8 + {low}", high)
    if gemm.transpose_a:
        a = (f"lane / 16 * 8 + {low}", f"warp_row * {rows // 8} + {high}")
    if not gemm.transpose_b:
        b = (f"{high} * 8 + {low}", f"lane / 16 * {c.across} + warp_column")
    for tile, (row, piece) in ((gemm.a, a), (gemm.b, b)):
        w.line(f"const int {tile.name}_row = {row};  // of a matrix of 8 x 8, in {tile.name}")
        w.line(f"const int {tile.name}_from = {place_of(w.kernel.layouts[tile], f'{tile.name}_row', piece)};")


def _operands(w: Writer, stmt: Operands) -> None:
    """By matrices, 16 x 16 of A or two blocks of B at a time. What is added to a place changes bits that are 0 there."""
    gemm, c = stmt.op, warps(w)
    for tile, count, mn_major, width in (
        (gemm.a, c.blocks[0], gemm.transpose_a, 16),
        (gemm.b, c.blocks[1] // 2, not gemm.transpose_b, 16 * c.across),
    ):
        part, layout = f"{tile.name}_part[{stmt.step % 2}]", w.kernel.layouts[tile]
        if stmt.index is None:
            w.line(f"fill<{count * 8}>({part}, 0, from_float<{CTYPES[tile.dtype]}>(0.0f));")
            continue
        columns = f"x * {width}" if mn_major else str(stmt.step * 16)
        rows = str(stmt.step * 16 * layout.box_columns) if mn_major else f"x * {width * layout.box_columns}"
        at = f"{_columns_on(layout, f'{tile.name}_from', columns)} + {rows}"
        start = f"{tile.name} + stage * {layout.bytes // layout.element_bytes}"
        w.each(f"load_matrix<4{', true' * mn_major}>({part}, x * 8, {start} + {at}, {w.site(stmt)});", "x", count)


def _columns_on(layout: SharedTile, start: str, columns: str) -> str:
    if columns == "0":
        return start
    if layout.columns <= layout.box_columns:
        return f"({start} ^ {columns})"
    box = f"{columns} / {layout.box_columns} * {layout.rows * layout.box_columns}"
    return f"({start} ^ {columns} % {layout.box_columns}) + {box}"


def _multiply(w: Writer, stmt: Multiply) -> None:
    c, gemm, held = warps(w), stmt.op, stmt.step % 2
    with w.loop("y", c.blocks[1]):
        operands = f"{gemm.a.name}_part[{held}], x * 8, {gemm.b.name}_part[{held}], y * 4"
        w.each(f"mma({gemm.c.name}, (y * {c.blocks[0]} + x) * 4, {operands}, {w.site(stmt)});", "x", c.blocks[0])


def _pipelined(w: Writer, stmt: ir.Pipelined) -> None:
    if any(isinstance(inner, Advance) for inner in stmt.body):
        w.line("int stage = 0;")
    STATEMENTS[ir.Pipelined](w, stmt)


def _copy(w: Writer, stmt: ir.Copy) -> None:
    (store if plan.is_store(stmt) else STATEMENTS[ir.Copy])(w, stmt)


OF_THREADS = {
    Advance: lambda w, stmt: w.line(f"if (++stage == {stmt.ring.stages}) stage = 0;"),
    Commit: lambda w, stmt: w.line(f"copy_commit({w.site(stmt)});"),
    Issue: issue,
    Land: land,
    Multiply: _multiply,
    Operands: _operands,
    Retire: lambda w, stmt: w.line(f"copy_wait<{stmt.pending}>({w.site(stmt)});"),
    Sync: lambda w, stmt: w.line(f"sync_threads({w.site(stmt)});"),
    ir.Copy: _copy,
    ir.Gemm: chained_fragments.product,
    ir.Pipelined: _pipelined,
    ir.Serial: serial,
}
