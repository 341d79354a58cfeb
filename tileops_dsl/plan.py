"""Questions about a kernel with roles that passes and code generation ask alike."""

from functools import lru_cache

from tileops_dsl import ir
from tileops_dsl.instruction_layouts import SharedTile, WgmmaAccumulator
from tileops_dsl.layouts import VectorisedRows
from tileops_dsl.schedule import Barrier, Chunks, Issue, Ring, Role, op_of

GROUP = 128  # threads of a warp group


def consumers(kernel: ir.Kernel) -> Role:
    return next(role for role in kernel.roles if role.warp is None)


def threads(kernel: ir.Kernel) -> int:
    """Of a CTA: those that hold fragments, and the producer's group."""
    return kernel.threads + GROUP * sum(len(role.groups) for role in kernel.roles if role.warp is not None)


def tile_loop(kernel: ir.Kernel) -> ir.Persistent:
    return next(stmt for stmt in kernel.body if isinstance(stmt, ir.Persistent))


def sharing(kernel: ir.Kernel) -> int:
    """Groups that divide the rows of a tile; of those that alternate, each has its own."""
    return 1 if tile_loop(kernel).alternate else len(consumers(kernel).groups)


def blocks(kernel: ir.Kernel) -> int:
    """Of 64 rows, which a group has of each fragment, one behind the other in registers."""
    return next((la.rows // 64 for la in kernel.layouts.values() if isinstance(la, WgmmaAccumulator)), 1)


def is_load(stmt: ir.Stmt) -> bool:
    """From global into shared memory, by TMA."""
    return isinstance(stmt, ir.Copy) and isinstance(stmt.src, ir.Region) and stmt.dst.scope == "shared"


def is_store(stmt: ir.Stmt) -> bool:
    """From shared into global memory, by TMA."""
    return isinstance(stmt, ir.Copy) and isinstance(stmt.dst, ir.Region) and stmt.src.scope == "shared"


def is_common(kernel: ir.Kernel, buffer: ir.Buffer) -> bool:
    """Whether a shared tile is one for all groups: the producer fills it. Otherwise each group has its own."""
    producers = [stmt for role in kernel.roles if role.warp is not None for stmt in ir.walk(role.body)]
    return any(isinstance(stmt, Issue) and stmt.op.dst == buffer for stmt in producers)


def copies(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    """How often a shared tile exists."""
    return 1 if is_common(kernel, buffer) else len(consumers(kernel).groups)


def layout_rows(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    """Rows of a tile as it lies in shared memory or in registers: all, or those of a group."""
    return buffer.shape[0] // (1 if is_common(kernel, buffer) else sharing(kernel))


def ring_of(kernel: ir.Kernel, buffer: ir.Buffer) -> Ring | None:
    return next((ring for ring in kernel.rings if buffer in ring.buffers), None)


def stages(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    ring = ring_of(kernel, buffer)
    return ring.stages if ring else 1


def buffer_bytes(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    """Of a shared tile, with its stages and copies."""
    return kernel.layouts[buffer].bytes * stages(kernel, buffer) * copies(kernel, buffer)


def loads_of(kernel: ir.Kernel, ring: Ring) -> list[ir.Copy]:
    return [s for s in ir.walk(kernel.body) if is_load(s) and s.dst in ring.buffers]


def barrier_of(kernel: ir.Kernel, ring: Ring, kind: str) -> Barrier:
    return next(b for b in kernel.barriers if b.ring is ring and b.kind == kind)


def barrier_named(kernel: ir.Kernel, name: str) -> Barrier:
    return next(b for b in kernel.barriers if b.name == name)


def peers(kernel: ir.Kernel, ring: Ring) -> int:
    """CTAs into which the ring's copies write, and whose consumers therefore hand back a stage to this producer."""
    return kernel.ctas if any(load.multicast for load in loads_of(kernel, ring)) else 1


def box(kernel: ir.Kernel, stmt: ir.Copy) -> tuple[int, int]:
    """Columns and rows that one TMA instruction moves."""
    tile = kernel.layouts[stmt.tile]
    return tile.box_columns, tile.rows // (kernel.ctas if stmt.multicast else 1)


def tma_tensors(kernel: ir.Kernel) -> dict[ir.Tensor, tuple[SharedTile, tuple[int, int]]]:
    """Tensors that TMA moves: the layout of the tile and the box of the tensor map."""
    found = {}
    for stmt in ir.walk(kernel.body):
        if is_load(stmt) or is_store(stmt):
            found.setdefault(stmt.region.tensor, (kernel.layouts[stmt.tile], box(kernel, stmt)))
    return {tensor: found[tensor] for tensor in kernel.tensors if tensor in found}


def columns_held(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    """Columns of a fragment that exist at a time: of one that only a chunked copy uses, a chunk."""

    def uses(body) -> int:
        return sum(buffer in named_by(stmt) for stmt in ir.walk(body))

    everywhere = uses(consumers(kernel).body)
    for stmt in ir.walk(consumers(kernel).body):
        if isinstance(stmt, Chunks) and stmt.body[-1].src == buffer and uses(stmt.body) == everywhere:
            return stmt.columns
    return buffer.shape[-1]


@lru_cache(1 << 14)
def named_by(stmt: ir.Stmt) -> tuple[ir.Buffer, ...]:
    """What a statement itself names, in order."""
    stmt = op_of(stmt)
    loads = [e.buffer for x in ir.exprs_of(stmt) for e in ir.subexprs(x) if isinstance(e, ir.Load)]
    return tuple(ir.buffer_of(t) for t in (*vars(stmt).values(), *loads) if isinstance(t, ir.Tile))


@lru_cache(1 << 14)
def named(stmt: ir.Stmt) -> tuple[ir.Buffer, ...]:
    """What a statement and those in it name."""
    return tuple(buffer for s in ir.walk((stmt,)) for buffer in named_by(s))


def registers(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    """Of a fragment, in elements of one thread."""
    held, columns = columns_held(kernel, buffer), buffer.shape[-1]
    return kernel.layouts[buffer].registers * held // columns // (blocks(kernel) if held < columns else 1)


def words(kernel: ir.Kernel, buffer: ir.Buffer) -> int:
    """32-bit registers of a fragment."""
    return -(-registers(kernel, buffer) * ir.DTYPES[buffer.dtype] // 4)


def live_words(kernel: ir.Kernel) -> int:
    """Of all fragments where most are live: each from its first to its last statement of the tile."""
    uses = [set(named(stmt)) for stmt in tile_loop(kernel).body]
    live = [set().union(*uses[: n + 1]) & set().union(*uses[n:]) for n in range(len(uses))]
    return max(sum(words(kernel, b) for b in tiles if b.scope == "fragment") for tiles in live)


def asynchronous(copy: ir.Copy) -> bool:
    """Whether threads load it by cp.async, not through registers."""
    return copy.src.tensor.vector > 1


def lines(kernel: ir.Kernel, copy: ir.Copy) -> VectorisedRows:
    """Which thread moves what between global and shared memory: along rows, at most 16 bytes at a time."""
    tile = copy.tile
    vector = min(copy.region.tensor.vector, 16 // ir.DTYPES[tile.dtype])
    return VectorisedRows(*tile.shape, kernel.threads, tile.shape[1] // vector, vector)
