"""How the fragments of a warp group lie, in text: their columns, and their way into shared memory and back."""

from tileops_dsl import ir, plan
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.instruction_layouts import SharedTile


def column(w: Writer, x: str) -> str:
    """Of register x (WgmmaAccumulator.place)."""
    return f"{x} / 4 * 8 + lane % 4 * 2 + {x} % 2"


def column_parts(w: Writer, x: str) -> tuple[str, str]:
    """The same as a sum: of the register, and of the thread."""
    return f"{x} / 4 * 8 + {x} % 2", "lane % 4 * 2"


def row_register(w: Writer, x: str) -> str:
    """The register of a row vector that belongs to register x of a tile (AccumulatorRows.place)."""
    return f"{'h * 2 + ' if w.blocks > 1 else ''}{x} / 2 % 2"


def column_register(x: str, odd: str) -> str:
    """The same of a vector of columns (AccumulatorColumns.place), x in a block; with ` + 1` the one behind x, which is even."""
    return f"{x} / 4 * 2{odd or f' + {x} % 2'}"


def row(w: Writer, x: str) -> str:
    """Of register x of a row vector: the row of the tile."""
    return "own_row + " + (f"({x}) / 2 * 64 + ({x}) % 2 * 8" if w.blocks > 1 else f"{x} * 8")


def kept(w: Writer, x: str) -> str:
    """Of register x of a vector: the row of the tile, or its column."""
    return f"{x} / 2 * 8 + lane % 4 * 2 + {x} % 2" if plan.down_rows(w.kernel) else row(w, x)


def keeper(w: Writer, parts: bool = False) -> str:
    """One of the threads (or, of `parts`, one in each warp) that have an element of a vector."""
    return ("lane" if parts else "thread") + " < 4" if plan.down_rows(w.kernel) else "lane % 4 == 0"


def own_row(w: Writer) -> str:
    """The thread's first row of the tile."""
    of_group = f"(group - {w.role.groups[0]}) * {64 * w.blocks} + " * (plan.sharing(w.kernel) > 1)
    return f"{of_group}thread / 32 * 16 + lane / 4"


def offset(w: Writer, layout: SharedTile) -> str:
    """Elements to the row that the thread tells the matrix words of, or to its own first element."""
    if layout.element_bytes == 2:
        return f"(thread / 32 * 16 + lane % 16) * {layout.box_columns}"
    return f"(thread / 32 * 16 + lane / 4) * {layout.box_columns} + lane % 2 * 2"


def place(w: Writer, layout: SharedTile, q: str) -> str:
    """What is added for the matrices of chunk q: the place of 16 bytes of row lane % 16 (Swizzle.permute)."""
    if layout.element_bytes != 2:
        return ""
    pieces = layout.swizzle.row_bytes // 16
    turn = f"lane / {8 // pieces} % {pieces}" if pieces < 8 else "lane % 8"
    return f" + (({q} * 2 + lane / 16) ^ {turn}) * 8"


def move(w: Writer, word: str, tile: ir.Buffer, fragment: str, first: str, q: str, stmt: ir.Stmt) -> None:
    """Chunk q between registers and shared memory: of 16 bits as two matrices side by side, in four parts; of 32 bits in pairs.

    Registers x and x + 1 are neighbours, in row lane / 4 or 8 below it. (Two rows of a half warp meet in the same banks.)
    """
    layout, row = w.kernel.layouts[tile], f"{tile.name}_row"
    if layout.element_bytes == 2:
        ends = f"{fragment}, {first}, {row}" if word == "load" else f"{row}, {fragment}, {first}"
        w.line(f"{word}_matrix<4>({ends}, {w.site(stmt)});")
        return
    turn = 32 * 16 // layout.swizzle.row_bytes
    place = f"x / 2 % 2 * {8 * layout.box_columns} + (({q} * 4 + x / 4 * 2 + lane % 4 / 2) ^ lane / {turn}) * 4"
    registers = "x" if first == "0" else f"{first} + x"
    ends = f"{fragment}, {registers}, {row}, {place}" if word == "load" else f"{row}, {place}, {fragment}, {registers}"
    w.each(f"{word}_shared<2>({ends}, {w.site(stmt)});", "x", 8, step=2)
