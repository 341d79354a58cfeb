"""Layout inference: strict (an annotation or an instruction fixes a layout), then common (it spreads through use).

The layouts are a closed set of values, so equality is comparison and no solver is needed. A fragment that nothing ties
to a laid-out one is an error; there is no guess.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.layouts import PerColumn, PerRow, tile_of
from tileops_dsl.passes.tiles import infer_tiles
from tileops_dsl.targets import Target


def infer_layouts(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    if kernel.roles:
        return infer_tiles(kernel)
    table: dict[ir.Buffer, object] = {}
    statements = list(ir.walk(kernel.body))
    for stmt in statements:
        if isinstance(stmt, ir.Annotate):
            _fix(table, stmt.buffer, stmt.layout, stmt.location)
    size = -1
    while size != len(table):  # each round lays out at least one more fragment, or is the last
        size = len(table)
        for stmt in statements:
            if isinstance(stmt, ir.Reduce) and stmt.src in table:
                _fix(table, stmt.dst, PerRow(table[stmt.src]), stmt.location)
            elif isinstance(stmt, ir.Parallel):
                _spread(table, stmt)
    for stmt in statements:
        if isinstance(stmt, ir.Alloc) and stmt.buffer not in table:
            raise TileError(
                f"{stmt.buffer.name} has no layout: no loop or reduction ties it to a fragment that has one",
                f"T.annotate_layout({{{stmt.buffer.name}: ...}})",
                stmt.location,
            )
    return replace(kernel, layouts=table)


def accesses(loop: ir.Parallel):
    """(buffer, indices, location, stored) of each fragment element that the loop reads or writes."""
    for store in loop.body:
        yield store.buffer, store.indices, store.location, True
        for expr in (*store.indices, store.value):
            yield from ((e.buffer, e.indices, store.location, False) for e in ir.subexprs(expr) if isinstance(e, ir.Load))


def _spread(table: dict, loop: ir.Parallel) -> None:
    """All fragments of an element-wise loop share the tile: [i, j] all of it, [i] a value per row, [j] one per column."""
    used = list(accesses(loop))
    tile = next((tile_of(table[buffer]) for buffer, *_ in used if buffer in table), None)
    if tile is None:
        return
    for buffer, indices, location, stored in used:
        if len(loop.vars) == 2:
            forms = {loop.vars: tile, loop.vars[:1]: PerRow(tile), loop.vars[1:]: PerColumn(tile)}
        else:
            per = PerRow if isinstance(next(table[b] for b, *_ in used if b in table), PerRow) else PerColumn
            forms = {loop.vars: per(tile)}
        if stored and set(indices) < set(loop.vars):
            raise TileError(
                f"{ir.Load(buffer.dtype, buffer, indices)} is assigned again and again by the loop, in each thread for itself",
                f"a tile assigned at [{', '.join(map(str, loop.vars))}], and T.reduce_sum or T.reduce_max of it",
                location,
            )
        if indices not in forms:
            raise TileError(
                f"{ir.Load(buffer.dtype, buffer, indices)} is not the loop's own element",
                f"indices from {', '.join(str(v) for v in loop.vars)}, in order: a tile's element stays in its thread",
                location,
            )
        _fix(table, buffer, forms[indices], location)


def _fix(table: dict, buffer: ir.Buffer, layout, location: ir.Location) -> None:
    if table.setdefault(buffer, layout) != layout:
        raise TileError(
            f"{buffer.name} is laid out as {table[buffer]} and used here as {layout}",
            "a second fragment, or the same tile shape and annotation on both sides",
            location,
        )
