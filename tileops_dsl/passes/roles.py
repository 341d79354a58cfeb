"""Roles: who does which statement. Standard programs do not say it; what they copy and multiply does.

Consumers are as many groups as `threads` has, each with its rows of the tiles, or with every other tile. If a T.Pipelined loop
copies tiles into shared memory that nobody else writes, one thread of a producer group in front issues these copies, and those
that the tile loop makes of such tiles. All other statements are the consumers'; the loops and conditions around are repeated in
each role. With T.ws roles are as written: one for each group, of which one may do nothing but load.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError, require
from tileops_dsl.plan import GROUP, accesses, chained, feeds_itself, is_load
from tileops_dsl.schedule import Role
from tileops_dsl.targets import Target


def assign_roles(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    """Kernels whose threads all do the same keep having no roles."""
    if not any(is_staged(stmt) for stmt in ir.walk(kernel.body)):
        return kernel
    if feeds_itself(kernel):
        for stmt in (s for s in ir.walk(kernel.body, ir.Alloc) if isinstance(s.buffer.alias, ir.Buffer)):
            raise TileError(f"{stmt.buffer.name} lies over a whole tile in T.ws", "alias=tile[:, a : a + n]", stmt.location)
        return replace(kernel, roles=tuple(_as_written(kernel, target)))
    _check_kernel(kernel, target)
    if not target.warp_groups:  # all threads do the same
        return replace(kernel, roles=(Role("threads", (0,), None, only(kernel.body, lambda stmt: True)),))
    loads = _producer_copies(kernel)
    require(loads, "no T.Pipelined loop copies tiles for T.gemm", "T.copy(a[i, k], a_tile) in the loop", kernel.location)
    (loading,) = only(kernel.body, lambda stmt: stmt in loads)
    producer = Role("producer", (0,), 0, (replace(loading, alternate=False),))
    groups = tuple(range(1, kernel.threads // GROUP + 1))
    consumer = Role("consumer", groups, None, only(kernel.body, lambda stmt: stmt not in loads))
    return replace(kernel, roles=(producer, consumer))


def is_staged(stmt: ir.Stmt) -> bool:
    """Whether the statement is one that needs roles."""
    shared = isinstance(stmt, ir.Alloc) and stmt.buffer.scope == "shared"
    return shared or isinstance(stmt, ir.Gemm | ir.Pipelined | ir.Persistent | ir.On)


def only(body: tuple[ir.Stmt, ...], wanted, group: int | None = None) -> tuple[ir.Stmt, ...]:
    """The wanted statements, of T.ws those of the group, in the loops and conditions that they stand in."""
    kept = []
    for stmt in body:
        if isinstance(stmt, ir.On):
            kept += only(stmt.body, wanted, group) if group in stmt.groups else ()
        elif isinstance(stmt, ir.Pipelined | ir.Persistent | ir.If):
            inner = only(stmt.body, wanted, group)
            kept += [replace(stmt, body=inner)] if inner else []
        elif not isinstance(stmt, ir.Alloc) and wanted(stmt):
            kept.append(stmt)
    return tuple(kept)


def _as_written(kernel: ir.Kernel, target: Target):
    """Each group's own statements, in the loops around them."""
    groups = range(kernel.threads // GROUP)
    for stmt in only(kernel.body, lambda stmt: True):
        problem, inner = "which groups do this is not said", next(s for s in ir.walk((stmt,)) if not hasattr(s, "body"))
        raise TileError(problem, "with T.ws(0, 1):", inner.location)
    bodies = [only(kernel.body, lambda stmt: True, group) for group in groups]
    if not target.warp_groups or not kernel.grid or not all(bodies):
        problem = f"T.ws in {len(groups)} groups of {target.name}, {'' if kernel.grid else 'no grid, '}"
        problem += f"{bodies.count(())} of them without work"
        raise TileError(problem, "T.Kernel(blocks, threads=256) on sm_90a, and work for each group", kernel.location)
    for group, body in zip(groups, bodies, strict=True):
        written = {ir.buffer_of(tile) for stmt in ir.walk(body) for tile in accesses(stmt)[1]}
        for stmt in ir.walk(body):
            for tile in (t for t in accesses(stmt)[0] if t.scope == "fragment" and ir.buffer_of(t) not in written):
                problem = f"group {group} reads {tile.name}, which it never writes: each group has fragments of its own"
                raise TileError(problem, "T.alloc_shared, and T.copy into it and out of it", stmt.location)
        loads = all(is_load(stmt) for stmt in ir.walk(body) if not hasattr(stmt, "body"))
        yield Role(f"group {group}", (group,), None, body, loads=loads)


def _check_kernel(kernel: ir.Kernel, target: Target) -> None:
    loops = [stmt for stmt in kernel.body if not isinstance(stmt, ir.Alloc)]
    runs = any(isinstance(stmt, ir.Persistent) and stmt.start for stmt in loops)
    if bool(kernel.grid) != runs or kernel.threads not in range(GROUP, 5 * GROUP, GROUP):
        problem = f"a kernel with T.gemm has {kernel.threads} threads and {'a' if kernel.grid else 'no'} grid"
        instead = "T.Kernel(threads=256), or another one to four groups of 128, and no grid"
        raise TileError(problem, instead, kernel.location)
    if [type(stmt) for stmt in loops] != [ir.Persistent]:
        raise TileError("a kernel without a grid is one T.Persistent loop", "all statements in the loop", kernel.location)
    if runs and not (target.warp_groups or chained(kernel)):
        problem = f"T.Persistent of a run on {target.name}, with one product"
        raise TileError(problem, "products that follow each other, or target sm_90a", loops[0].location)
    if loops[0].alternate and (kernel.threads != 2 * GROUP or not target.warp_groups):
        problem = f"{kernel.threads} threads of {target.name} are to alternate"
        raise TileError(problem, "T.Kernel(threads=256), two warp groups; or no alternate", loops[0].location)
    kinds = (ir.Pipelined, ir.If, ir.Copy, ir.Gemm, ir.Parallel, ir.Store, ir.Print)
    kinds += (ir.Fill, ir.Reduce) if target.warp_groups or chained(kernel) else ()
    for stmt in ir.walk(loops[0].body):
        problem = f"T.{type(stmt).__name__.lower()} has no meaning in T.Persistent yet"
        require(isinstance(stmt, kinds), problem, "T.Parallel, T.gemm, T.copy", stmt.location)
        by_element = isinstance(stmt, ir.Store) and isinstance(stmt.buffer, ir.Tensor)
        problem, right = f"elements of a tensor are stored on {target.name}", target.warp_groups or chained(kernel)
        require(right or not by_element, problem, "T.copy of a tile, or target sm_90a", stmt.location)


def _producer_copies(kernel: ir.Kernel) -> list[ir.Copy]:
    """Loads into tiles that no other statement writes, if some of them stand in a T.Pipelined loop."""
    written = [s.dst for s in ir.walk(kernel.body, ir.Copy) if not is_load(s)]
    piped = {s for loop in ir.walk(kernel.body, ir.Pipelined) for s in ir.walk(loop.body)}
    loads = [s for s in ir.walk(kernel.body) if is_load(s)]
    for stmt in (s for s in loads if s.dst in written and s not in piped):
        raise TileError("a tile is loaded into shared memory outside T.Pipelined", "the copy in the loop", stmt.location)
    loads = [s for s in loads if s.dst not in written]
    return loads if piped.intersection(loads) else []
