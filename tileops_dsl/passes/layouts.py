"""Layout inference: strict (an annotation or an instruction fixes a layout), then common (it spreads through use).

The layouts are a closed set of values, so equality is comparison and no solver is needed. A fragment that nothing ties
to a laid-out one stays without, which the verifier reports; there is no guess.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.layouts import PerColumn, PerRow, tile_of
from tileops_dsl.targets import Target


def infer_layouts(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    table: dict[ir.Buffer, object] = {}
    statements = list(ir.walk(kernel.body))
    for stmt in statements:
        if isinstance(stmt, ir.Annotate):
            _fix(table, stmt.buffer, stmt.layout, stmt.location)
    for _ in statements:  # each round lays out at least one more fragment, or is not needed
        for stmt in statements:
            if isinstance(stmt, ir.Reduce) and (stmt.partial or len(stmt.src.shape) == 1):
                raise TileError("a partial sum in a kernel without T.gemm", "T.reduce_sum(tile, sums)", stmt.location)
            if isinstance(stmt, ir.Reduce) and stmt.src in table:
                _fix(table, stmt.dst, PerRow(table[stmt.src]), stmt.location)
            elif isinstance(stmt, ir.Parallel):
                _spread(table, stmt)
    return replace(kernel, layouts=table)


def _spread(table: dict, loop: ir.Parallel) -> None:
    """All fragments of an element-wise loop share the tile: [i, j] all of it, [i] a value per row, [j] one per column."""
    used = [(store, element) for store in loop.body for element in (store, *ir.loads(store.value))]
    first = next((table[e.buffer] for _, e in used if e.buffer in table), None)
    if first is None:
        return
    tile, names = tile_of(first), ", ".join(map(str, loop.vars))
    forms = {loop.vars: first}
    if len(loop.vars) == 2:
        forms = {loop.vars: tile, loop.vars[:1]: PerRow(tile), loop.vars[1:]: PerColumn(tile)}
    for store, element in used:
        name = ir.Load(element.buffer.dtype, element.buffer, element.indices)
        if element is store and set(element.indices) < set(loop.vars):
            problem = f"{name} is assigned again and again by the loop, in each thread for itself"
            raise TileError(problem, f"a tile assigned at [{names}], and T.reduce_sum or T.reduce_max of it", store.location)
        if element.indices not in forms:
            problem = f"{name} is not the loop's own element"
            raise TileError(problem, f"indices from {names}, in order: a tile's element stays in its thread", store.location)
        _fix(table, element.buffer, forms[element.indices], store.location)


def _fix(table: dict, buffer: ir.Buffer, layout, location: ir.Location) -> None:
    if table.setdefault(buffer, layout) != layout:
        problem = f"{buffer.name} is laid out as {table[buffer]} and used here as {layout}"
        raise TileError(problem, "a second fragment, or the same tile shape and annotation on both sides", location)
