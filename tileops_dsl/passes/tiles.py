"""Layouts of kernels with roles: a product fixes its accumulator and its operands, TMA any shared tile; the rest follows.

A fragment lies in one group; its layout is that of the group's rows. So does a shared tile that the consumers write: each group
has its own. A tile that the producer loads is one for all groups. A product that takes a from registers reads it as it lies in
an accumulator (16 bits: `place` of wgmma's A fragment is the same). A vector of rows lies with the rows of an accumulator.
Without warp groups the four warps of a kernel whose products follow each other lie as those of a group, since mma.sync has
16 rows, too.
"""

from dataclasses import replace

from tileops_dsl import ir, plan
from tileops_dsl.errors import TileError, require
from tileops_dsl.instruction_layouts import AccumulatorColumns, AccumulatorRows, SharedTile, Swizzle, WgmmaAccumulator
from tileops_dsl.layouts import Linear
from tileops_dsl.passes.meaning import views_of
from tileops_dsl.passes.portable import accumulators
from tileops_dsl.plan import (
    down_rows,
    group_threads,
    is_load,
    is_store,
    layout_columns,
    layout_rows,
    named,
    parts,
    sharing,
    tile_loop,
)
from tileops_dsl.targets import Target


def infer_tiles(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    table: dict[ir.Buffer, object] = {}
    groups, across = sharing(kernel), parts(kernel)
    statements = list(ir.walk(kernel.body))
    of_groups = target.warp_groups or plan.chained(kernel)

    def of_fragment(tile: ir.Buffer, location: ir.Location):
        if not of_groups:
            return accumulators(kernel, tile, location)
        if down_rows(kernel):
            return accumulator_of_columns(tile, location)
        rows = next((layout.rows for layout in table.values() if isinstance(layout, WgmmaAccumulator)), 64)
        return accumulator(tile, rows, groups, across, location)

    for stmt in statements:
        if isinstance(stmt, ir.Gemm) and of_groups:
            _product(table, stmt, groups, across)
        elif isinstance(stmt, ir.Gemm):
            table[stmt.c] = of_fragment(stmt.c, stmt.location)
    for stmt in statements:
        if isinstance(stmt, ir.Parallel):
            _check_views(stmt, across)
            _element_wise(table, stmt, of_fragment, of_groups, down_rows(kernel))
        elif isinstance(stmt, ir.Reduce):
            for tile in (ir.buffer_of(t) for t in (stmt.src, stmt.dst) if t.scope == "fragment"):
                table.setdefault(tile, of_fragment(tile, stmt.location))
    for stmt in statements:
        if isinstance(stmt, ir.Copy):
            _copied(table, stmt, kernel)
    _check_partial(statements)
    order = [stmt.buffer for stmt in statements if isinstance(stmt, ir.Alloc)]
    return replace(kernel, layouts={buffer: table[buffer] for buffer in order if buffer in table})


def _product(table: dict, gemm: ir.Gemm, groups: int, across: int) -> None:
    rows, columns = gemm.c.shape
    if across > 1:
        _check_parts(gemm, across)
        columns //= across
    if rows % (64 * groups) or columns % 8 or not 8 <= columns <= 256:
        problem = f"{gemm.c.name} has {rows} x {columns} elements for {groups} groups of 64 rows"
        raise TileError(problem, "64 rows for each 128 threads, and a multiple of 8 columns up to 256", gemm.location)
    whole = ir.buffer_of(gemm.c)
    table.setdefault(whole, WgmmaAccumulator(whole.shape[1] // across, rows // groups))
    for tile in (gemm.a, gemm.b):
        if tile.scope == "shared":
            table.setdefault(ir.buffer_of(tile), shared_tile(ir.buffer_of(tile), tile.shape[0], gemm.location))
        else:
            table.setdefault(tile, accumulator(tile, rows // groups, groups, across, gemm.location))


def _check_parts(gemm: ir.Gemm, across: int) -> None:
    """Each group's columns are rows of a b [N, K], two matrices at least; or whole boxes of one that is stored [K, N]."""
    columns = gemm.c.shape[1]
    stored, unit = ("[N, K]", 16) if gemm.transpose_b else ("[K, N]", 128 // ir.DTYPES[gemm.b.dtype])
    problem = f"{gemm.c.name} has {columns} columns for {across} groups, of a b stored {stored}"
    require(columns % (unit * across) == 0, problem, f"a multiple of {unit} columns for each group", gemm.location)


def shared_tile(buffer: ir.Buffer, rows: int, location: ir.Location, columns: int = 0) -> SharedTile:
    """With the widest swizzle that divides its rows; of boxes, one as wide as they are. `columns`: of a group, if not all."""
    columns = columns or buffer.shape[-1]
    row_bytes = (buffer.box or columns) * ir.DTYPES[buffer.dtype] if len(buffer.shape) == 2 else 0
    fitting = [s for s in (Swizzle.B128, Swizzle.B64, Swizzle.B32) if row_bytes and row_bytes % s.row_bytes == 0]
    problem = f"{buffer.name} has boxes of {row_bytes} bytes; TMA moves rows of 128, 64 or 32 bytes"
    of_box = not buffer.box or row_bytes in [s.row_bytes for s in fitting]
    require(of_box, problem, f"box={128 // ir.DTYPES[buffer.dtype]}", location)
    problem = f"{buffer.name} is {list(buffer.shape)}; TMA and wgmma move rows of 32 bytes, 8 to 256 of them"
    require(fitting and rows % 8 == 0 and 8 <= rows <= 256, problem, "a tile [rows, columns] of such sizes", location)
    return SharedTile(rows, columns, ir.DTYPES[buffer.dtype], fitting[0])


def _copied(table: dict, stmt: ir.Copy, kernel: ir.Kernel) -> None:
    """A tile for TMA; a vector is spread over a group, in shared memory it lies as it is."""
    by_tma, tensor = is_load(stmt) or is_store(stmt), stmt.region and stmt.region.tensor
    of_rows = isinstance(table.get(stmt.src), AccumulatorRows | AccumulatorColumns)
    down = down_rows(kernel)
    pairs = isinstance(table.get(stmt.src), WgmmaAccumulator) and tensor and tensor.vector % 2 == 0 and not down
    vector = pairs or (tensor and len(stmt.tile.shape) == 1 and (of_rows or tensor.dtype == "any"))
    if tensor and not (by_tma or vector):
        problem = f"{tensor.name} is copied between global memory and a fragment"
        instead = 'a tile in shared memory in between (a vector of dtype "any", or a store to a tensor of vector=2, needs none)'
        raise TileError(problem, instead, stmt.location)
    ends = [ir.buffer_of(end) for end in (stmt.src, stmt.dst) if isinstance(end, ir.Tile)]
    problem = f"{ends[0].name} has more than 64 rows, and reductions run down them"
    stacked = down and isinstance(table.get(ends[0]), WgmmaAccumulator) and ends[0].shape[0] > 64
    require(not stacked, problem, "T.Parallel that stores its elements", stmt.location)
    for tile in (end for end in ends if end not in table):
        if len(tile.shape) == 1 and not by_tma:
            table[tile] = Linear(tile.shape[0], group_threads(kernel))
        elif tile.scope == "shared":
            table[tile] = shared_tile(tile, layout_rows(kernel, tile), stmt.location, layout_columns(kernel, tile))
    if stmt.multicast:
        _check_multicast(stmt, kernel)


def _check_multicast(stmt: ir.Copy, kernel: ir.Kernel) -> None:
    """The CTAs of a cluster have tiles of different rows; each loads 8 rows or more."""
    tile, row = stmt.dst, tile_loop(kernel).vars[-2]
    if tile.shape[0] % (8 * kernel.ctas) or kernel.ctas == 1:
        problem = f"{tile.name} has {tile.shape[0]} rows, of which each of {kernel.ctas} CTAs loads a part"
        raise TileError(problem, "a cluster whose CTAs load 8 rows each, or more; or no multicast", stmt.location)
    if any(e == row for o in stmt.src.origin for e in ir.subexprs(o)):
        problem = f"the CTAs of the cluster differ in {row}, so {tile.name} is not the same for all"
        raise TileError(problem, "the copy without multicast", stmt.location)


def _element_wise(table: dict, loop: ir.Parallel, of_fragment, of_groups: bool, down: bool) -> None:
    """Fragments of an element-wise loop have the accumulator's layout, each over its own columns; vectors that of its rows, or
    of its columns where reductions run down the rows."""
    for store in loop.body:
        if isinstance(store.buffer, ir.Tensor):
            _check_elements(loop, store, down)
        elements = [e for e in (store, *ir.loads(store.value)) if isinstance(e.buffer, ir.Tile)]
        whole = of_groups and all(isinstance(element.buffer, ir.Buffer) for element in elements)
        if any(e in loop.vars for e in ir.as_numbers(store.value)) and not whole:
            raise TileError("an index of the loop is used as a number", "only elements of tiles", store.location)
        for element in elements:
            tile, indices, read = element.buffer, element.indices, element is not store
            own, fragment = len(loop.vars) == 2 and indices == loop.vars, tile.scope == "fragment"
            vector = not fragment and len(loop.vars) == 2 and indices == loop.vars[1:]
            kept = loop.vars[-1:] if down else loop.vars[:1]
            of_row = fragment and of_groups and indices == kept and (read or len(loop.vars) == 1)
            problem = f"{ir.Load(tile.dtype, tile, indices)} is not the loop's own element"
            kept = "columns[j]" if down else "rows[i]"
            instead = f"tile[i, j], {kept} of a fragment, or row[j] of a vector in shared memory"
            require((own or vector or of_row) and (read or fragment), problem, instead, store.location)
            if isinstance(tile, ir.Buffer) and fragment:
                table.setdefault(tile, of_fragment(tile, store.location))


def _check_elements(loop: ir.Parallel, store: ir.Store, down: bool) -> None:
    """What threads store of their own; a tile's rows lie along the tensor's last dimension."""
    name, (*outer, last) = store.buffer.name, store.indices
    problem = f"what is stored into {name} is no element of a fragment"
    require(ir.loads(store.value), problem, "x[i] = vector[i]", store.location)
    used = {e for index in outer for e in ir.subexprs(index)}
    whole = last == loop.vars[0] and last not in used and store.buffer.dims[-1] == ir.Const("int32", loop.extents[0])
    problem = f"elements of a tile are stored into {name} one by one"
    instead = "T.copy; or, where reductions run down the rows, x[.., j, i] = tile[i, j] for all i of x"
    require(len(loop.vars) == 1 or (down and whole), problem, instead, store.location)


def _check_views(loop: ir.Parallel, across: int) -> None:
    """Some columns of a fragment are one group's, if groups divide them."""
    for view in (v for v in views_of(loop) if across > 1 and v.shape[1] < v.buffer.shape[1]):
        problem = f"{view.name} is a part of what {across} groups divide by columns"
        raise TileError(problem, "the whole fragment, and a tile in shared memory as wide", loop.location)


def accumulator(tile: ir.Buffer, rows: int, groups: int, across: int, location) -> WgmmaAccumulator | AccumulatorRows:
    columns = tile.shape[1] / across if len(tile.shape) == 2 else 16
    if tile.shape[0] != rows * groups or columns % 16 or columns > 256:
        problem = f"{tile.name} is {list(tile.shape)} for {groups} groups of {rows} rows"
        raise TileError(problem, "the rows of the accumulator and a multiple of 16 columns", location)
    return WgmmaAccumulator(int(columns), rows) if len(tile.shape) == 2 else AccumulatorRows(rows)


def accumulator_of_columns(tile: ir.Buffer, location) -> WgmmaAccumulator | AccumulatorColumns:
    """Where vectors have a value for each column, tiles have any number of blocks of 64 rows."""
    *rows, columns = tile.shape
    if columns % 16 or columns > 256 or any(n % 64 for n in rows):
        problem = f"{tile.name} is {list(tile.shape)} where reductions run down the rows"
        raise TileError(problem, "a multiple of 64 rows and a multiple of 16 columns, at most 256", location)
    return WgmmaAccumulator(columns, *rows) if rows else AccumulatorColumns(columns)


def _check_partial(statements: list[ir.Stmt]) -> None:
    """A partial sum is zero at first; a factor may change it, and T.reduce_sum(sums, total) alone reads it."""
    partial = {s.dst for s in statements if isinstance(s, ir.Reduce) and s.partial}
    for stmt in statements:
        match stmt:
            case ir.Alloc() | ir.Fill(value=ir.Const(value=0.0)) | ir.Reduce(partial=True, clear=False):
                continue
            case ir.Store(buffer=to, value=ir.Call(op="mul", args=(ir.Load(buffer=by), factor))) if to == by:
                used = {e.buffer for e in ir.loads(factor)}
            case ir.Reduce(src=src) if len(src.shape) == 1 and src not in partial and src.scope == "fragment":
                problem = f"{src.name} has no sums of each thread's own columns"
                raise TileError(problem, f"T.reduce_sum(tile, {src.name}, partial=True) before", stmt.location)
            case ir.Reduce(src=src, dst=dst) if src in partial:
                used = {dst}
            case _:
                used = set() if hasattr(stmt, "body") else set(named(stmt))
        if used & partial:
            problem = f"{next(iter(used & partial)).name} is the sum of each thread's own columns"
            raise TileError(problem, "sums[i] = sums[i] * factor, and T.reduce_sum(sums, total) before its use", stmt.location)
