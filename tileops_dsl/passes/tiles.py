"""Layouts of kernels with roles: a product fixes its accumulator and its operands, TMA any shared tile; the rest follows.

A fragment lies in one group; its layout is that of the group's rows. So does a shared tile that the consumers write: each group
has its own. A tile that the producer loads is one for all groups.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.instruction_layouts import SharedTile, Swizzle, WgmmaAccumulator
from tileops_dsl.layouts import Linear
from tileops_dsl.passes.portable import accumulators
from tileops_dsl.plan import consumers, is_load, is_store, layout_rows, sharing
from tileops_dsl.targets import Target


def infer_tiles(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    table: dict[ir.Buffer, object] = {}
    groups = sharing(kernel)
    statements = list(ir.walk(kernel.body))

    def of_fragment(tile: ir.Buffer, location: ir.Location):
        if not target.warp_groups:
            return accumulators(kernel, tile, location)
        rows = next((layout.rows for layout in table.values() if isinstance(layout, WgmmaAccumulator)), 64)
        return accumulator(tile, rows, groups, location)

    for stmt in statements:
        if isinstance(stmt, ir.Gemm) and target.warp_groups:
            _product(table, stmt, groups)
        elif isinstance(stmt, ir.Gemm):
            table[stmt.c] = of_fragment(stmt.c, stmt.location)
    for stmt in statements:
        if isinstance(stmt, ir.Copy):
            _copied(table, stmt, kernel)
        elif isinstance(stmt, ir.Parallel):
            _element_wise(table, stmt, of_fragment)
    for stmt in statements:
        if isinstance(stmt, ir.Alloc) and stmt.buffer not in table:
            problem = f"{stmt.buffer.name} has no layout: no product, copy or loop gives it one"
            raise TileError(problem, "a tile that T.gemm, T.copy or T.Parallel uses", stmt.location)
    order = [stmt.buffer for stmt in statements if isinstance(stmt, ir.Alloc)]
    return replace(kernel, layouts={buffer: table[buffer] for buffer in order})


def _product(table: dict, gemm: ir.Gemm, groups: int) -> None:
    rows, columns = gemm.c.shape
    if rows % (64 * groups) or columns % 8 or not 8 <= columns <= 256:
        problem = f"{gemm.c.name} has {rows} x {columns} elements for {groups} groups of 64 rows"
        raise TileError(problem, "64 rows for each 128 threads, and a multiple of 8 columns up to 256", gemm.location)
    table.setdefault(gemm.c, WgmmaAccumulator(columns, rows // groups))
    for tile in (gemm.a, gemm.b):
        table.setdefault(tile, shared_tile(tile, tile.shape[0], gemm.location))


def shared_tile(buffer: ir.Buffer, rows: int, location: ir.Location) -> SharedTile:
    """With the widest swizzle that divides its rows."""
    row_bytes = buffer.shape[1] * ir.DTYPES[buffer.dtype] if len(buffer.shape) == 2 else 0
    fitting = [s for s in (Swizzle.B128, Swizzle.B64, Swizzle.B32) if row_bytes and row_bytes % s.row_bytes == 0]
    if not fitting or rows % 8 or not 8 <= rows <= 256:
        problem = f"{buffer.name} is {list(buffer.shape)}; TMA and wgmma move rows of 32 bytes, 8 to 256 of them"
        raise TileError(problem, "a tile [rows, columns] of such sizes", location)
    return SharedTile(rows, buffer.shape[1], ir.DTYPES[buffer.dtype], fitting[0])


def _copied(table: dict, stmt: ir.Copy, kernel: ir.Kernel) -> None:
    """A tile for TMA; a vector is spread over a group, in shared memory it lies as it is."""
    tensor = next((end.tensor for end in (stmt.src, stmt.dst) if isinstance(end, ir.Region)), None)
    vector = tensor and tensor.dtype == "any" and len(stmt.dst.shape) == 1
    if tensor and not (is_load(stmt) or is_store(stmt) or vector):
        problem = f"{tensor.name} is copied between global memory and a fragment"
        raise TileError(problem, 'a tile in shared memory in between (a vector of dtype "any" needs none)', stmt.location)
    for tile in (stmt.src, stmt.dst):
        if not isinstance(tile, ir.Buffer) or tile in table:
            continue
        if len(tile.shape) == 1 and not is_load(stmt) and not is_store(stmt):
            table.setdefault(tile, Linear(tile.shape[0], kernel.threads // len(consumers(kernel).groups)))
        elif tile.scope == "shared":
            table.setdefault(tile, shared_tile(tile, layout_rows(kernel, tile), stmt.location))
    if stmt.multicast and (stmt.dst.shape[0] % (8 * kernel.ctas) or kernel.ctas == 1):
        problem = f"{stmt.dst.name} has {stmt.dst.shape[0]} rows, of which each of {kernel.ctas} CTAs loads a part"
        raise TileError(problem, "a cluster whose CTAs load 8 rows each, or more; or no multicast", stmt.location)
    if is_load(stmt):
        _check_cluster(stmt, kernel)


def _check_cluster(stmt: ir.Copy, kernel: ir.Kernel) -> None:
    """The CTAs of a cluster have tiles of different rows."""
    (tiles,) = (s for s in kernel.body if isinstance(s, ir.Persistent))
    row = tiles.vars[-2]
    by_cta = any(e == row for o in stmt.src.origin for e in ir.subexprs(o))
    if stmt.multicast and by_cta:
        problem = f"the CTAs of the cluster differ in {row}, so {stmt.dst.name} is not the same for all"
        raise TileError(problem, "the copy without multicast", stmt.location)


def _element_wise(table: dict, loop: ir.Parallel, of_fragment) -> None:
    """Fragments of an element-wise loop have the accumulator's layout, each over its own columns."""
    for store in loop.body:
        if any(e in loop.vars for e in ir.as_numbers(store.value)):
            raise TileError("an index of the loop is used as a number", "only elements of tiles", store.location)
        accesses = [(store.buffer, store.indices)]
        accesses += [(e.buffer, e.indices) for e in ir.subexprs(store.value) if isinstance(e, ir.Load)]
        for tile, indices in accesses:
            vector = tile.scope == "shared" and indices == loop.vars[1:]
            if len(loop.vars) != 2 or not (indices == loop.vars or vector) or (store.buffer.scope == "shared"):
                problem = f"{ir.Load(tile.dtype, tile, indices)} is not the loop's own element"
                raise TileError(problem, "tile[i, j], or row[j] of a vector in shared memory", store.location)
            if isinstance(tile, ir.Buffer) and tile.scope == "fragment":
                table.setdefault(tile, of_fragment(tile, store.location))


def accumulator(tile: ir.Buffer, rows: int, groups: int, location: ir.Location) -> WgmmaAccumulator:
    if tile.shape[0] != rows * groups or tile.shape[1] % 16 or tile.shape[1] > 256:
        problem = f"{tile.name} is {list(tile.shape)} for {groups} groups of {rows} rows"
        raise TileError(problem, "the rows of the accumulator and a multiple of 16 columns", location)
    return WgmmaAccumulator(tile.shape[1], rows)
