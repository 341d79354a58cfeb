"""Questions about a kernel with roles that passes and code generation ask alike."""

from dataclasses import replace
from functools import lru_cache

from tileops_dsl import ir
from tileops_dsl.instruction_layouts import SharedTile, WgmmaAccumulator
from tileops_dsl.layouts import VectorisedRows
from tileops_dsl.schedule import Barrier, Chunks, Issue, Retire, Ring, Role, op_of

GROUP = 128  # threads of a warp group


def consumers(kernel: ir.Kernel) -> Role:
    return next(role for role in kernel.roles if role.warp is None)


def threads(kernel: ir.Kernel) -> int:
    """Of a CTA: those that hold fragments, and the producer's group."""
    return kernel.threads + GROUP * sum(len(role.groups) for role in kernel.roles if role.warp is not None)


def tile_loop(kernel: ir.Kernel) -> ir.Persistent:
    return next(stmt for stmt in kernel.body if isinstance(stmt, ir.Persistent))


def by_columns(kernel: ir.Kernel) -> bool:
    """Whether each group has all rows of a product, and its columns (FullCol)."""
    return any(gemm.policy == "full_col" for gemm in ir.walk(kernel.body, ir.Gemm))


def down_rows(kernel: ir.Kernel) -> bool:
    """Whether reductions run down the rows, so that vectors have a value for each column."""
    return any(stmt.dim == 0 for stmt in ir.walk(kernel.body, ir.Reduce))


def sharing(kernel: ir.Kernel) -> int:
    """Groups that divide the rows of a tile; of those that alternate, or that T.ws names, each has its own."""
    groups = len(consumers(kernel).groups)
    return 1 if groups == 1 or by_columns(kernel) or tile_loop(kernel).alternate else groups


def parts(kernel: ir.Kernel) -> int:
    """Groups that divide the columns of a tile."""
    return len(consumers(kernel).groups) if by_columns(kernel) else 1


def readers(kernel: ir.Kernel) -> int:
    """Groups that read what the producer loads."""
    return sharing(kernel) * parts(kernel)


def own_columns(kernel: ir.Kernel, columns: int) -> int:
    """Of so many columns, those that a group holds."""
    return columns // parts(kernel)


def divides_rows(kernel: ir.Kernel) -> bool:
    """Whether a group has a part of a tile's rows, which begins where its number says."""
    return not feeds_itself(kernel) and not by_columns(kernel) and not tile_loop(kernel).alternate


def feeds_itself(kernel: ir.Kernel) -> bool:
    """Whether T.ws says who does what: a role for each group, of which one may only load, and no producer beside them."""
    return any(ir.walk(kernel.body, ir.On))


def chained(kernel: ir.Kernel) -> bool:
    """Whether products follow each other, of which one reads what another has left in registers. Then warps need whole rows."""
    gemms = list(ir.walk(kernel.body, ir.Gemm))
    return len(gemms) > 1 or any(gemm.a.scope == "fragment" for gemm in gemms)


def group_threads(kernel: ir.Kernel) -> int:
    return kernel.threads // sum(len(role.groups) for role in kernel.roles if role.warp is None)


def blocks(kernel: ir.Kernel) -> int:
    """Of 64 rows, which a group has of each fragment, one behind the other in registers; 1 where each has its own number."""
    if down_rows(kernel):
        return 1
    return next((la.rows // 64 for la in kernel.layouts.values() if isinstance(la, WgmmaAccumulator)), 1)


def is_load(stmt: ir.Stmt) -> bool:
    """From global into shared memory, by TMA."""
    return isinstance(stmt, ir.Copy) and isinstance(stmt.src, ir.Region) and stmt.dst.scope == "shared"


def is_store(stmt: ir.Stmt) -> bool:
    """From shared into global memory, by TMA."""
    return isinstance(stmt, ir.Copy) and isinstance(stmt.dst, ir.Region) and stmt.src.scope == "shared"


def written(kernel: ir.Kernel) -> set[ir.Tensor]:
    """Tensors that the kernel writes."""
    found = {s.dst.tensor for s in ir.walk(kernel.body, ir.Copy) if isinstance(s.dst, ir.Region)}
    found |= {s.buffer for s in ir.walk(kernel.body, ir.Store)}
    return found | ({kernel.deal.pieces} if kernel.deal else set())


def is_common(kernel: ir.Kernel, buffer: ir.Buffer) -> bool:
    """Whether a shared tile is one for all groups, which the producer fills, T.ws, or each in part. Otherwise each has one."""
    if buffer.common:
        return True
    producers = [op_of(stmt) for role in kernel.roles if role.warp is not None for stmt in ir.walk(role.body)]
    return feeds_itself(kernel) or any(is_load(op) and op.dst == buffer for op in producers)


def copies(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    """How often a shared tile exists."""
    return 1 if is_common(kernel, buffer) else len(consumers(kernel).groups)


def layout_rows(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    """Rows of a tile as it lies in shared memory or in registers: all, or those of a group."""
    return buffer.shape[0] // (1 if is_common(kernel, buffer) else sharing(kernel))


def layout_columns(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    """The same of columns."""
    return buffer.shape[1] // (1 if is_common(kernel, buffer) else parts(kernel))


def tile_layout(kernel: ir.Kernel, tile: ir.Tile) -> SharedTile:
    """Of a view, as if it were a tile: whole boxes of one."""
    layout = kernel.layouts[ir.buffer_of(tile)]
    return replace(layout, columns=tile.shape[1]) if isinstance(tile, ir.View) else layout


def ring_of(kernel: ir.Kernel, buffer: ir.Buffer) -> Ring | None:
    return next((ring for ring in kernel.rings if buffer in ring.buffers), None)


def stages(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    ring = ring_of(kernel, buffer)
    return ring.stages if ring else 1


def of_rows(role: Role) -> ir.Copy | None:
    """A load of a producer whose boxes of rows lie apart in global memory."""
    return next((op for op in map(op_of, ir.walk(role.body)) if role.warp is not None and is_load(op) and op.box_row), None)


def loads_of(kernel: ir.Kernel, ring: Ring) -> list[ir.Copy]:
    return [s for s in ir.walk(kernel.body) if is_load(s) and ir.buffer_of(s.dst) in ring.buffers]


def barrier_of(kernel: ir.Kernel, ring: Ring, kind: str) -> Barrier:
    return next(b for b in kernel.barriers if b.ring is ring and b.kind == kind)


def barrier_named(kernel: ir.Kernel, name: str) -> Barrier:
    return next(b for b in kernel.barriers if b.name == name)


def peers(kernel: ir.Kernel, ring: Ring) -> int:
    """CTAs into which the ring's copies write, and whose consumers therefore hand back a stage to this producer."""
    return kernel.ctas if any(load.multicast for load in loads_of(kernel, ring)) else 1


def box(kernel: ir.Kernel, stmt: ir.Copy) -> tuple[int, int]:
    """Columns and rows that one TMA instruction moves."""
    tile = tile_layout(kernel, stmt.tile)
    return tile.box_columns, tile.rows // (kernel.ctas if stmt.multicast else 1)


def tma_tensors(kernel: ir.Kernel) -> dict[ir.Tensor, tuple[SharedTile, tuple[int, int]]]:
    """Tensors that TMA moves: the layout of the tile and the box of the tensor map."""
    found = {}
    for stmt in ir.walk(kernel.body):
        if is_load(stmt) or is_store(stmt):
            found.setdefault(stmt.region.tensor, (tile_layout(kernel, stmt.tile), box(kernel, stmt)))
    return {tensor: found[tensor] for tensor in kernel.tensors if tensor in found}


def flying(stmts, before: tuple[ir.Gemm, ...]) -> tuple[ir.Gemm, ...]:
    """The products that may be unfinished behind the statements of a group, of those `before` and their own."""
    for stmt in stmts:
        if isinstance(stmt, Issue) and isinstance(stmt.op, ir.Gemm):
            before = (*before, stmt.op)
        elif isinstance(stmt, Retire):
            before = tuple(gemm for gemm in before if gemm not in stmt.of)
        elif hasattr(stmt, "body"):
            inner = flying(stmt.body, before)
            before = tuple(dict.fromkeys((*before, *inner))) if isinstance(stmt, ir.If) else inner
    return before


def operands(gemm: ir.Gemm) -> list[ir.Buffer]:
    """Tiles in shared memory that a product reads."""
    return [ir.buffer_of(tile) for tile in (gemm.a, gemm.b) if tile.scope == "shared"]


def accesses(stmt: ir.Stmt) -> tuple[list[ir.Tile], list[ir.Tile]]:
    """Tiles that a statement reads, and those that it writes; what is written in part is read as well."""
    match stmt:
        case ir.Copy(src=src, dst=dst):
            reads, writes = [src], [dst]
        case ir.Gemm(a=a, b=b, c=c, clear=clear):
            reads, writes = [a, b, *[c] * (clear != ir.Const("bool", True))], [c]
        case ir.Fill(buffer=tile):
            reads, writes = [tile] * (isinstance(tile, ir.View) and tile.origin[0] != ir.ZERO), [tile]
        case ir.Reduce(src=src, dst=dst, clear=clear):
            reads, writes = [src, *[dst] * (not clear)], [dst]
        case _:
            reads, writes = [e.buffer for e in ir.loads(stmt)], [stmt.buffer] if isinstance(stmt, ir.Store) else []
    for inner in stmt.body if isinstance(stmt, ir.Parallel | Chunks) else ():
        reads, writes = reads + accesses(inner)[0], writes + accesses(inner)[1]
    return tuple([tile for tile in tiles if isinstance(tile, ir.Tile)] for tiles in (reads, writes))


def boxes(tile: ir.Tile) -> list[tuple[ir.Buffer, int]]:
    """Of a tile in shared memory: what has edges of its own. A tile that lies over another's view has that one's."""
    buffer = ir.buffer_of(tile)
    if not buffer.box:
        return [(buffer, 0)]
    start = sum(part.origin[1].value for part in (tile, buffer.alias) if isinstance(part, ir.View)) // buffer.box
    root = buffer.alias.buffer if buffer.alias else buffer
    return [(root, n) for n in range(start, start + tile.shape[1] // buffer.box)]


@lru_cache(1 << 14)
def shared_boxes(stmt: ir.Stmt) -> tuple[list[tuple[ir.Buffer, int]], list[tuple[ir.Buffer, int]]]:
    """Those that a statement reads, and those that it writes."""
    found = ([box for tile in tiles if tile.scope == "shared" for box in boxes(tile)] for tiles in accesses(stmt))
    return tuple(list(dict.fromkeys(of_tiles)) for of_tiles in found)


def columns_held(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    """Columns of a fragment that exist at a time: of one that only a chunked copy uses, a chunk."""
    body = [stmt for role in kernel.roles if role.warp is None for stmt in role.body]
    chunks = [stmt for stmt in ir.walk(body, Chunks) if stmt.body[-1].src == buffer]
    used, used_in_chunks = ([b for stmt in stmts for b in named(stmt)].count(buffer) for stmts in (body, chunks))
    return chunks[0].columns if chunks and used == used_in_chunks else own_columns(kernel, buffer.shape[-1])


@lru_cache(1 << 14)
def named(stmt: ir.Stmt) -> tuple[ir.Buffer, ...]:
    """The tiles that a statement and those in it name, in order."""
    ops = [op_of(s) for s in ir.walk((stmt,))]
    tiles = [tile for op in ops for tile in (*vars(op).values(), *(e.buffer for e in ir.loads(op)))]
    return tuple(ir.buffer_of(tile) for tile in tiles if isinstance(tile, ir.Tile))


def registers(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    """Of a fragment, in elements of one thread."""
    held, columns = columns_held(kernel, buffer), own_columns(kernel, buffer.shape[-1])
    return kernel.layouts[buffer].registers * held // columns // (blocks(kernel) if held < columns else 1)


def words(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    """32-bit registers of a fragment."""
    return -(-registers(kernel, buffer) * ir.DTYPES[buffer.dtype] // 4)


def live_words(kernel: ir.Kernel) -> int:
    """Of all fragments where most are live: each from its first to its last statement of the tile."""
    loop = next((s for s in kernel.body if isinstance(s, ir.Persistent | ir.Pipelined)), kernel)
    uses = [set(named(stmt)) for stmt in loop.body]
    live = [set().union(*uses[: n + 1]) & set().union(*uses[n:]) for n in range(len(uses))]
    return max(sum(words(kernel, b) for b in tiles if b.scope == "fragment") for tiles in live)


def asynchronous(copy: ir.Copy) -> bool:
    """Whether threads load it by cp.async, not through registers."""
    return copy.src.tensor.vector > 1


def lines(kernel: ir.Kernel, copy: ir.Copy) -> VectorisedRows:
    """Which thread moves what between global and shared memory: along rows, at most 16 bytes at a time.

    Of a row that is no power of two of them, in parts that are one: of whole boxes.
    """
    tile = copy.tile
    vector = min(copy.region.tensor.vector, 16 // ir.DTYPES[tile.dtype])
    pieces = tile.shape[1] // vector
    return VectorisedRows(*tile.shape, kernel.threads, pieces & -pieces, vector)
