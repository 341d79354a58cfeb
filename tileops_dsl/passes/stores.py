"""What the consumers write into shared memory and store, and the loops over views of a fragment that do so.

Such a loop is unrolled. A store stands behind a fence and a barrier. Its tile is written anew when one thread has waited for
the stores of the stage and a barrier has told the others, or when what was loaded there meanwhile has arrived.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.passes.roles import only
from tileops_dsl.plan import accesses, is_load, is_store, named
from tileops_dsl.schedule import Await, Chunks, Fence, Issue, One, Retire, Ring, Signal, Sync, Unrolled, op_of

OPPOSITE = {"eq": "ne", "ne": "eq"}
LOOPS = ir.Persistent | ir.Pipelined | Unrolled
CHUNK = 16  # columns that two matrices side by side have


def uses(body) -> list[ir.Buffer]:
    """Tiles in shared memory, once for each statement that reads or writes them."""
    return [b for stmt in body if not isinstance(stmt, ir.Alloc) for b in named(stmt) if b.scope == "shared"]


def constant_extent(loop) -> int:
    if not isinstance(loop.extent, ir.Const):
        problem = f"a loop without T.gemm runs {loop.extent} times"
        raise TileError(problem, "a constant number of iterations, over views of a fragment", loop.location)
    return loop.extent.value


def unrolled(loop: ir.Pipelined, rings, stores: list[ir.Copy], ahead: list[ir.Stmt]) -> Unrolled:
    """The loop; what it needs before goes to the end of `ahead`. Its loads stay under their conditions."""
    extent, ring = constant_extent(loop), next((ring for ring in rings if ring.var == loop.var), None)
    refills, loads = [], {}
    for load in (stmt for stmt in ir.walk(loop.body) if is_load(stmt)):
        where, var = load.location, loop.var
        alone = loads[load.dst] = only(loop.body, lambda stmt, load=load: stmt is load)
        reads = [Retire(where, "read", 0)] * (load.dst in [store.src for store in stores])
        expects = Signal(where, f"{ring.prefix}full", "this")
        first = Unrolled(where, var, min(ring.stages, extent), (expects, Issue(where, load, var)))
        ahead.append(_instead(alone, One(where, (*reads, first))))
        if extent > ring.stages:
            later = replace(load, src=ir.replaced(load.src, {var: ir.call("add", var, ring.stages)}))
            more = ir.call("lt", var, extent - ring.stages)
            refills.append(_instead(alone, ir.If(where, more, (*reads, expects, Issue(where, later, var)))))
    body = [s for stmt in only(loop.body, lambda stmt: not is_load(stmt)) for s in stored(stmt, loop.var)]
    if refills:
        last = body.pop() if isinstance(body[-1], One) else One(loop.location, ())
        body.append(replace(last, body=(*last.body, *refills)))
    return Unrolled(loop.location, loop.var, extent, tuple(anew(chunked(body), stores, loads, extent, ring)))


def anew(body: list[ir.Stmt], stores: list[ir.Copy], loads=None, extent: int = 1, ring: Ring | None = None) -> list[ir.Stmt]:
    """With what the writer of a tile waits for: stores of the stage, and its load, given as it stands in its conditions."""
    out: list[ir.Stmt] = []
    in_turn = sum(isinstance(stmt, Issue) and is_store(stmt.op) for stmt in ir.walk(body))
    pending = in_turn * ((extent - 1) % ring.stages) if ring else 0  # the tile before has left its last stages
    for stmt in body:
        where, tile = stmt.location, stmt.body[-1].dst if isinstance(stmt, Chunks) else None
        load = (loads or {}).get(tile, ())
        if tile in [store.src for store in stores] and not any(map(is_load, load)):  # before a load they have been waited for
            wait: ir.Stmt = Retire(where, "read", pending)
            match [s.condition for s in ir.walk(load, ir.If)]:
                case [ir.Call(op="eq" | "ne" as op) as condition]:
                    wait = ir.If(where, replace(condition, op=OPPOSITE[op]), (wait,))
            out += [One(where, (wait,)), Sync(where)]
        out += [_instead(load, Await(where, f"{ring.prefix}full", ring.var)), stmt] if load else [stmt]
    return out


def _instead(alone: tuple[ir.Stmt, ...], new: ir.Stmt) -> ir.Stmt:
    """Of a statement that is alone in what it stands in."""
    (stmt,) = alone
    return replace(stmt, body=(_instead(stmt.body, new),)) if hasattr(stmt, "body") else new


def stored(stmt: ir.Stmt, index: ir.Var) -> list[ir.Stmt]:
    """A store is issued by one thread, when all have written."""
    where = stmt.location
    return [Fence(where), Sync(where), One(where, (Issue(where, stmt, index),))] if is_store(stmt) else [stmt]


def last_wait(stores: list[ir.Copy]) -> list[ir.Stmt]:
    """Shared memory stays until it has been read."""
    return [One(store.location, (Retire(store.location, "store", 0),)) for store in stores[-1:]]


def exchanged(body, touched: set[tuple[ir.Buffer, bool]], common: dict[ir.Buffer, str]) -> tuple[ir.Stmt, ...]:
    """The group meets between writing a vector, in the order of threads, and reading it, by columns.

    So do all groups between writing and reading what is `common` to them: tiles, and of loaded ones the barrier behind which
    nobody touches what they held before. `touched`: what was written (or read) since they met last. A product reads
    until it is waited for.
    """
    out: list[ir.Stmt] = []
    for stmt, following in zip(body, (*body[1:], None), strict=True):
        if hasattr(stmt, "body") and not isinstance(stmt, ir.Parallel | Chunks):
            before = set(touched)
            for _ in range(2 if isinstance(stmt, LOOPS) else 1):  # one iteration behind another
                stmt = replace(stmt, body=exchanged(stmt.body, touched, common))
            touched |= before if isinstance(stmt, ir.If) else set()
        if isinstance(stmt, Await):
            touched -= {touch for touch in touched if common.get(touch[0]) == stmt.barrier}
        begun = _touches(op_of(stmt), common)
        meets = touched & {(tile, not writes) for tile, writes in begun}
        sync = Sync(stmt.location, any(tile in common for tile, _ in meets)) if meets else stmt
        if isinstance(sync, Sync):
            touched &= set() if sync.all_groups else {touch for touch in touched if touch[0] in common}
        out += [sync] if meets else []
        touched |= set() if isinstance(op_of(stmt), ir.Gemm) else begun
        touched |= {touch for gemm in getattr(stmt, "of", ()) for touch in _touches(gemm, common)}
        out.append(stmt)
        exchanges = any(tile.common for tile in common)  # so that they meet in front of the product anyway
        if isinstance(stmt, ir.Fill) and begun and not exchanges:  # at once: where its condition does not hold, nobody waits
            out += [] if isinstance(following, Sync) else [Sync(stmt.location, True)]
            touched.clear()
    return tuple(out)


def fenced(body, common: dict[ir.Buffer, str], written: list[ir.Stmt]) -> tuple[ir.Stmt, ...]:
    """In front of where all groups meet, what threads wrote for products becomes visible to them. `written`: since then."""
    out: list[ir.Stmt] = []
    for stmt in body:
        if hasattr(stmt, "body") and not isinstance(stmt, ir.Parallel | Chunks):
            before = list(written) if isinstance(stmt, ir.If) else []
            for _ in range(2 if isinstance(stmt, LOOPS) else 1):
                stmt = replace(stmt, body=fenced(stmt.body, common, written))
            written += before
        elif any(ir.buffer_of(tile) in common and len(tile.shape) == 2 for tile in accesses(stmt)[1]):
            written.append(stmt)
        elif isinstance(stmt, Sync) and stmt.all_groups and written:
            out += [] if out and isinstance(out[-1], Fence) else [Fence(written[-1].location)]
            written.clear()
        out.append(stmt)
    return tuple(out)


def _touches(stmt: ir.Stmt, common: dict[ir.Buffer, str]) -> set[tuple[ir.Buffer, bool]]:
    """Vectors and common tiles, with whether they are written."""
    tiles = {(ir.buffer_of(tile), bool(writes)) for writes, tiles in enumerate(accesses(stmt)) for tile in tiles}
    return {(t, writes) for t, writes in tiles if t.scope == "shared" and (len(t.shape) == 1 or t in common)}


def chunked(body: list[ir.Stmt], columns: int = CHUNK) -> list[ir.Stmt]:
    """Element-wise statements and the copy into shared memory that ends them, together: the copied fragment is short-lived."""
    out = []
    for stmt in body:
        if _from_fragment(stmt):
            run = [stmt]
            while out and _in_chunks(out[-1], stmt):
                run.insert(0, out.pop())
            out.append(Chunks(run[0].location, columns, tuple(run)))
        else:
            out.append(stmt)
    return out


def _from_fragment(stmt: ir.Stmt) -> bool:
    """A tile, into shared memory."""
    ends = isinstance(stmt, ir.Copy) and isinstance(stmt.src, ir.Buffer) and isinstance(stmt.dst, ir.Tile)
    return ends and stmt.src.scope == "fragment" and len(stmt.src.shape) == 2


def _in_chunks(stmt: ir.Stmt, copy: ir.Copy) -> bool:
    """Element-wise work on the tile. A condition is repeated in each chunk, so only one whose work reads the tile."""
    if isinstance(stmt, ir.If):
        return copy.dst in uses(stmt.body) and all(_in_chunks(s, copy) for s in stmt.body)
    return isinstance(stmt, ir.Parallel) and stmt.extents == copy.src.shape


def plain(stmt: ir.Stmt) -> ir.Stmt:
    """The statement; if it is a condition, no loop and no copy of a tile stands under it."""
    for inner in ir.walk(stmt.body) if isinstance(stmt, ir.If) else ():
        if isinstance(inner, ir.Pipelined) or _from_fragment(inner) or is_store(inner):
            problem = "a loop or a copy of a tile stands under T.If"
            raise TileError(problem, "T.If around what is neither", inner.location)
    return stmt
