"""The text of products of warp groups: operands, instructions, and the waits for what they read."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

from tileops_dsl import ir, plan
from tileops_dsl.codegen.writer import Writer
from tileops_dsl.instruction_layouts import Operand, Swizzle
from tileops_dsl.schedule import Await, Issue

SWIZZLES = {Swizzle.B128: "k128", Swizzle.B64: "k64", Swizzle.B32: "k32"}


def product(w: Writer, stmt: Issue, waits: list[Await] = ()) -> None:
    """Boxes of b that T.ws waits for here: each in front of the instructions that read it."""
    gemm = stmt.op
    several = sum(isinstance(s, ir.Gemm) for s in ir.walk(w.kernel.body)) > 1  # each has its names for itself
    with w.block("") if several else nullcontext():
        c, first = ir.buffer_of(gemm.c), gemm.c.origin[1].value if isinstance(gemm.c, ir.View) else 0
        blocks = w.kernel.layouts[c].rows // 64
        operands, b = operand_a(w, gemm, blocks), Operand(plan.tile_layout(w.kernel, gemm.b), not gemm.transpose_b)
        columns = plan.own_columns(w.kernel, gemm.c.shape[1])
        matrix(w, "b", gemm.b, b, w.part(b.skip(columns) // b.tile.element_bytes))
        to = f"h * {w.span(columns)}" if blocks > 1 else w.span(first) if first else "0"
        word = f"wgmma<{columns}>({c.name}, {to}, {operands}, b + {step(b)}, {accumulate(w, gemm.clear)}"
        steps = b.steps // max(len(waits), 1)
        with each_box(w, len(waits)) as box:
            if waits:
                wait_for_box(w, waits[0], box)
            if not w.issuing:
                w.line(f"wgmma_fence({w.site(stmt)});")
            word = f"{word}, {w.site(stmt)});"
            first, end = (f"box * {steps}", f"box * {steps} + {steps}") if box else (0, steps)
            if blocks == 1:
                w.each(word, "q", end, first)
            else:
                with w.loop("q", end, first), w.of_blocks(blocks):
                    w.line(word)
        if waits:
            turn_phase(w, waits)
        w.line(f"wgmma_commit({w.site(stmt)});")


def settle(w: Writer, gemms) -> None:
    """Registers of the products are touched on this side only, except those of other products that are unfinished."""
    held = _fragments(w.flying)
    for tile in dict.fromkeys(tile for tile in _fragments(gemms) if tile not in held):
        w.line(f"fence_operand({tile.name});")


def _fragments(gemms) -> list[ir.Buffer]:
    return [ir.buffer_of(tile) for gemm in gemms for tile in (gemm.c, gemm.a) if tile.scope == "fragment"]


def wait_for_box(w: Writer, first: Await, box: str) -> None:
    phase, index = w.phase(plan.barrier_named(w.kernel, first.barrier).ring), box_index(first.index.value, box)
    w.line(f"wait({first.barrier} + {index}, {phase} >> {f'({index})' if ' ' in index else index} & 1, {w.site(first)});")


def turn_phase(w: Writer, waits: list[Await]) -> None:
    """A bit for each box."""
    phase = w.phase(plan.barrier_named(w.kernel, waits[0].barrier).ring)
    w.line(f"{phase} ^= {sum(1 << wait.index.value for wait in waits)};")


def box_index(first: int, box: str) -> str:
    return box if box and not first else f"{first} + {box}" if box else str(first)


@contextmanager
def each_box(w: Writer, count: int):
    """A loop over boxes, if there are several, and its variable."""
    with w.loop("box", count) if count > 1 else nullcontext():
        yield "box" if count > 1 else ""


def operand_a(w: Writer, gemm: ir.Gemm, blocks: int) -> str:
    """Of instruction q: 8 registers, or the group's rows of a tile that is declared here."""
    if gemm.a.scope == "fragment":
        return f"{gemm.a.name}, {f'h * {w.span(gemm.a.shape[1])} + ' if blocks > 1 else ''}q * {w.span(16)}"
    a = Operand(plan.tile_layout(w.kernel, gemm.a), gemm.transpose_a)
    rows = f" + (group - {w.role.groups[0]}) * {blocks * a.group_bytes // a.tile.element_bytes}"
    matrix(w, "a", gemm.a, a, rows if plan.divides_rows(w.kernel) else "")
    return f"a{f' + h * {a.group_bytes}' if blocks > 1 else ''} + {step(a)}"


def matrix(w: Writer, name: str, tile: ir.Tile, operand: Operand, rows: str) -> None:
    layout = operand.tile
    leading = f", {operand.leading}" if operand.mn_major else ""
    template = f"Swizzle::{SWIZZLES[layout.swizzle]}, Major::{'kMN' if operand.mn_major else 'kK'}, {operand.stride}{leading}"
    w.line(f"const auto {name} = matrix_at<{template}>({w.start(tile)}{rows});")


def step(operand: Operand) -> str:
    """Bytes to the operand of instruction q: within a box, then from box to box."""
    if all(operand.advance(q) == q * operand.advance(1) for q in range(operand.steps)):
        return f"q * {operand.advance(1)}"
    in_box = operand.tile.swizzle.row_bytes // 32
    return f"(q / {in_box} * {operand.advance(in_box)} + q % {in_box} * {operand.advance(1)})"


def accumulate(w: Writer, clear: ir.Expr) -> str:
    match clear:
        case ir.Const(value=clears):
            return "q > 0" if clears else "true"
        case ir.Call(op="eq", args=(ir.Var() as var, ir.Const(value=0))):
            return f"{var} + q > 0"
        case ir.Call(op="eq"):
            return f"q > 0 || {w.number(replace(clear, op='ne'))}"
    return f"q > 0 || !({w.number(clear)})"
