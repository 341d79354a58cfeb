"""How the fragments of four warps lie that have 16 rows each, as a warp group's do, in text; without the words of sm_90."""

from contextlib import nullcontext

from tileops_dsl import ir, plan
from tileops_dsl.codegen.group_fragments import column, column_parts, column_register, keeper, kept, own_row, row, row_register
from tileops_dsl.codegen.portable_copies import place_of
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.instruction_layouts import SharedTile

DEEP = 128  # of K

__all__ = ["column", "column_parts", "column_register", "keeper", "kept", "move", "offset", "own_row", "place", "product"]
__all__ += ["row", "row_register"]


def offset(w: Writer, layout: SharedTile) -> str:
    """Elements to the thread's first row, and within 16 bytes."""
    return f"own_row * {layout.box_columns} + lane % 4 * 2"


def place(w: Writer, layout: SharedTile, q: str) -> str:
    """What is added for 8 columns q: the place of their 16 bytes in row lane / 4 (Swizzle.permute)."""
    pieces = layout.swizzle.row_bytes // 16
    turn = "lane / 4" if pieces == 8 else f"lane / {32 // pieces} % {pieces}"
    return f" + ({q} ^ {turn}) * 8"


def move(w: Writer, word: str, tile: ir.Buffer, fragment: str, first: str, q: str, stmt: ir.Stmt) -> None:
    """8 columns between registers and shared memory, in pairs: registers x and x + 1 are neighbours, x + 2 is 8 rows below."""
    registers = "x" if first == "0" else f"{first} + x"
    at = f"{tile.name}_row, x * {4 * w.kernel.layouts[tile].box_columns}"
    ends = f"{fragment}, {registers}, {at}" if word == "load" else f"{at}, {fragment}, {registers}"
    w.each(f"{word}_shared<2>({ends}, {w.site(stmt)});", "x", 4, step=2)


def product(w: Writer, gemm: ir.Gemm) -> None:
    """16 of K after 16: A by 16 x 16, B by two blocks of 8 columns. ptxas loads ahead, of a deep product more than registers
    hold; there, box by box. A that is stored [K, M] is loaded where it is multiplied, 64 rows of M, a box, at a time."""
    a, b, c = gemm.a, gemm.b, gemm.c.name
    columns, blocks = gemm.c.shape[1], gemm.c.shape[0] // 64
    depth = a.shape[0 if gemm.transpose_a else 1]
    box = plan.tile_layout(w.kernel, a).box_columns if a.scope == "shared" else 0
    if gemm.clear != ir.Const("bool", False):
        always = gemm.clear == ir.Const("bool", True)
        fill = f"fill<{plan.registers(w.kernel, gemm.c)}>({c}, 0, 0.0f);"
        w.line(fill if always else f"if ({w.number(gemm.clear)}) {fill}")
    with w.block(""):
        factor, first = a.name, f"{f'h * {w.span(depth)} + ' * (blocks > 1)}q * {w.span(16)}"
        if a.scope == "shared":
            factor, first = f"{ir.buffer_of(a).name}_part", "h * 8" if blocks > 1 and not gemm.transpose_a else "0"
            w.line(f"Fragment<{_ctype(a)}, {8 * (1 if gemm.transpose_a else blocks)}> {factor};")
        _first_matrices(w, gemm)
        deep = a.scope == "shared" and not gemm.transpose_a and depth > DEEP
        boxes = w.loop("box", depth // box, unrolled=False) if deep else nullcontext()
        with boxes, w.loop("q", (box if deep else depth) // 16):
            if a.scope == "shared" and not gemm.transpose_a:
                rows = f" + h * {64 * box}" * (blocks > 1)
                with w.of_blocks(blocks):
                    w.line(f"load_matrix<4>({factor}, {first}, {_at(w, a, 'q', deep)}{rows}, {w.site(gemm)});")
            with w.loop("y", columns // 16):
                across, down = ("q", "y") if gemm.transpose_b else ("y", "q")
                start = f"{_at(w, b, across, deep)} + {down} * {16 * w.kernel.layouts[b].box_columns}"
                w.line(f"load_matrix<4{'' if gemm.transpose_b else ', true'}>({b.name}_part, 0, {start}, {w.site(gemm)});")
                with w.of_blocks(blocks):
                    if gemm.transpose_a:
                        at = f"{w.start(a)} + {ir.buffer_of(a).name}_from + h * {a.shape[0] * box} + q * {16 * box}"
                        w.line(f"load_matrix<4, true>({factor}, 0, {at}, {w.site(gemm)});")
                    for block in (0, 4):
                        at = f"{f'h * {w.span(columns)} + ' * (blocks > 1)}y * 8" + f" + {block}" * (block > 0)
                        w.line(f"mma({c}, {at}, {factor}, {first}, {b.name}_part, {block}, {w.site(gemm)});")


def _first_matrices(w: Writer, gemm: ir.Gemm) -> None:
    """Where the first ones lie: rows and 16 bytes, of M or N and of K."""
    a, b, low, high, half = gemm.a, gemm.b, "lane % 8", "lane / 8 % 2", "lane / 16"
    if gemm.transpose_a:
        _first_matrix(w, ir.buffer_of(a), f"{half} * 8 + {low}", f"thread / 32 * 2 + {high}")
    elif a.scope == "shared":
        _first_matrix(w, a, "thread / 32 * 16 + lane % 16", half)
    w.line(f"Fragment<{_ctype(b)}, 8> {b.name}_part;")
    _first_matrix(w, b, *((f"{half} * 8 + {low}", high) if gemm.transpose_b else (f"{high} * 8 + {low}", half)))


def _ctype(tile: ir.Buffer) -> str:
    return {"bfloat16": "bf16", "float16": "f16"}[tile.dtype]


def _first_matrix(w: Writer, tile: ir.Buffer, row: str, piece: str) -> None:
    w.line(f"const int {tile.name}_row = {row};  // of a matrix of 8 x 8, in {tile.name}")
    w.line(f"const int {tile.name}_from = {place_of(w.kernel.layouts[tile], f'{tile.name}_row', piece)};")


def _at(w: Writer, tile: ir.Buffer, step: str, in_box: bool) -> str:
    """16 columns after 16, or of the box `box`; they change bits that are 0 in the first one's place."""
    layout, start = w.kernel.layouts[tile], f"{tile.name}_from"
    per = layout.box_columns // 16
    number = "box" if in_box else f"{step} / {per}" if layout.columns > layout.box_columns else ""
    box = f" + {number} * {layout.rows * layout.box_columns}" if number else ""
    inside = "" if per == 1 else f" ^ {step}{'' if in_box or not box else f' % {per}'} * 16"
    return f"{w.at_stage(tile)} + {f'({start}{inside})' if inside else start}{box}"
