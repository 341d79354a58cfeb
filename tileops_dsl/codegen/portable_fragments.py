"""How the fragments of warps lie, in text (WarpAccumulators): their columns, and their way into shared memory and back."""

from tileops_dsl import ir
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.instruction_layouts import SharedTile, WarpAccumulators


def warps(w: Writer) -> WarpAccumulators:
    """The layout of C, whose warps all fragments share."""
    return next(layout for layout in w.kernel.layouts.values() if isinstance(layout, WarpAccumulators))


def column(w: Writer, x: str) -> str:
    """Of register x (WarpAccumulators.place): a block of 8 columns is a register of each 4 of a warp's rows."""
    c = warps(w)
    return f"({x} / {4 * c.blocks[0]} * {c.across} + warp_column) * 8 + lane % 4 * 2 + {x} % 2"


def offset(w: Writer, layout: SharedTile) -> str:
    """Elements to the row of the thread's first element, and within 16 bytes."""
    rows = warps(w).rows // warps(w).down
    within = "lane % 4" if layout.element_bytes == 2 else "lane % 2"
    return f"(warp_row * {rows} + lane / 4) * {layout.box_columns} + {within} * 2"


def place(w: Writer, layout: SharedTile, q: str) -> str:
    """What is added for block q: the place of its 16 bytes in row lane / 4 (Swizzle.permute)."""
    c, per = warps(w), 16 // layout.element_bytes
    block = f"{q} * {c.across} + warp_column"
    piece = block if per == 8 else f"({block}) * 2 + lane % 4 / 2"
    pieces = layout.swizzle.row_bytes // 16
    turn = "lane / 4" if pieces == 8 else f"lane / {32 // pieces} % {pieces}"
    return f" + (({piece}) ^ {turn}) * {per}"


def move(w: Writer, word: str, tile: ir.Buffer, fragment: str, first: str, q: str, stmt: ir.Stmt) -> None:
    """Block q between registers and shared memory, in pairs: registers x and x + 1 are neighbours, in rows 8 apart."""
    layout, row = w.kernel.layouts[tile], f"{tile.name}_row"
    at = f"(x / 4 * 16 + x / 2 % 2 * 8) * {layout.box_columns}"
    registers = "x" if first == "0" else f"{first} + x"
    ends = f"{fragment}, {registers}, {row}, {at}" if word == "load" else f"{row}, {at}, {fragment}, {registers}"
    w.each(f"{word}_shared<2>({ends}, {w.site(stmt)});", "x", w.span(8 * warps(w).across), step=2)
