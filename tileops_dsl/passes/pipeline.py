"""Pipelining: what begins when, and in which stage of its tiles.

A buffer has the stages of the T.Pipelined loop that holds all its accesses. A producer's copies need no more than the stages:
its barriers let it run ahead. Copies that the consumers issue themselves (into a tile that they store) are issued a ring ahead:
those of the first stages at the begin of the tile, each other one where its stage has been read. A product is retired with
`pending` others unfinished, and finally behind the loop, where its accumulator is first used. Of groups that alternate, each
leaves out the stages of the other's tiles.
A T.Pipelined loop over views of a fragment is unrolled.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.plan import is_load, is_store
from tileops_dsl.schedule import Advance, Alone, Chunks, Issue, One, Retire, Ring, Role, Unrolled
from tileops_dsl.targets import Target

CHUNK = 16  # columns that two matrices side by side have


def pipeline(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    if not kernel.roles:
        return kernel
    rings = tuple(find_rings(kernel))
    producer, consumer = kernel.roles
    for loop in (s for s in ir.walk(kernel.body) if isinstance(s, ir.Pipelined)):
        check_loads(loop, next((ring.buffers for ring in rings if ring.var == loop.var), ()))
    if sum(any(map(is_load, ir.walk(stmt.body))) for stmt in producer.body[0].body) > 1:
        problem = "more than one loop loads tiles that the consumers only read"
        raise TileError(problem, "one T.Pipelined loop with T.gemm", kernel.location)
    roles = (replace(producer, body=_produce(producer.body, rings)), _consume(consumer, rings))
    _check_reads(roles[1].body, ())
    return replace(kernel, roles=roles, rings=rings)


def shared_buffers(stmt: ir.Stmt):
    """Those that the statement itself reads or writes, in order."""
    for tile in vars(stmt).values():
        if isinstance(tile, ir.Buffer) and tile.scope == "shared":
            yield tile
    for expr in ir.exprs_of(stmt):
        yield from (e.buffer for e in ir.subexprs(expr) if isinstance(e, ir.Load) and e.buffer.scope == "shared")


def _uses(body) -> list[ir.Buffer]:
    return [b for s in ir.walk(body) if not isinstance(s, ir.Alloc) for b in shared_buffers(s)]


def find_rings(kernel: ir.Kernel):
    loops = [s for s in ir.walk(kernel.body) if isinstance(s, ir.Pipelined)]
    everywhere = _uses(kernel.body)
    for number, loop in enumerate(loops):
        inside = _uses(loop.body)
        buffers = dict.fromkeys(b for b in inside if inside.count(b) == everywhere.count(b))
        if buffers:
            yield Ring(f"ring {number}", tuple(buffers), loop.num_stages, loop.var)


def check_loads(loop: ir.Pipelined, own: tuple[ir.Buffer, ...]) -> None:
    """What a loop loads is used in it alone, and a product's operands are loaded in its loop."""
    loaded = [s.dst for s in ir.walk(loop.body) if is_load(s)]
    for stmt in ir.walk(loop.body):
        tiles = [stmt.dst] if is_load(stmt) else [stmt.a, stmt.b] if isinstance(stmt, ir.Gemm) else []
        for tile in tiles:
            if tile not in own or tile not in loaded:
                problem = f"{tile.name} is not loaded by this loop, or used outside it"
                raise TileError(problem, "a tile of the loop's own, loaded by T.copy in it", stmt.location)


def _check_reads(body, open_to: tuple[ir.Buffer, ...]) -> None:
    """Elements of a tile in shared memory are read by matrices, where a copy into that tile follows."""
    for stmt in body:
        if isinstance(stmt, ir.Parallel):
            for tile in (b for b in _uses(stmt.body) if len(b.shape) == 2 and b not in open_to):
                problem = f"{tile.name} is read where no copy of a fragment into it follows"
                raise TileError(problem, "T.Parallel over the tile's shape, then T.copy(out, tile)", stmt.location)
        elif hasattr(stmt, "body"):
            _check_reads(stmt.body, (stmt.body[-1].dst,) if isinstance(stmt, Chunks) else open_to)


def ring_along(rings, var: ir.Var) -> Ring:
    return next(ring for ring in rings if ring.var == var)


def _produce(body, rings):
    out = []
    for stmt in body:
        if isinstance(stmt, ir.Pipelined):
            ring = ring_along(rings, stmt.var)
            issues = tuple(_issued(stmt.body, stmt.var))
            out.append(replace(stmt, body=(*issues, Advance(stmt.location, ring))))
        else:
            out.append(replace(stmt, body=_produce(stmt.body, rings)))
    return tuple(out)


def _issued(body, index: ir.Var):
    for stmt in body:
        if not isinstance(stmt, ir.Copy):
            raise TileError("a load of the loop's tiles depends on a condition", "the copy outside T.If", stmt.location)
        yield Issue(stmt.location, stmt, index)


def _consume(role: Role, rings) -> Role:
    (tiles,) = role.body
    ahead, body = [], []
    for stmt in tiles.body:
        if isinstance(stmt, ir.Pipelined) and any(isinstance(s, ir.Gemm) for s in ir.walk(stmt.body)):
            body += _products(stmt, rings, tiles.alternate)
        elif isinstance(stmt, ir.Pipelined):
            body.append(_unrolled(stmt, rings, ahead))
        else:
            body.append(_stored(plain(stmt), ir.Const("int32", 0)))
    skips = tuple(stmt for stmt in body if isinstance(stmt, Advance))
    late = (Alone(tiles.location, "last", skips),) if skips else ()
    return replace(role, body=(*late, replace(tiles, body=(*ahead, *chunked(body)))))


def _products(loop: ir.Pipelined, rings, alternate: bool) -> list[ir.Stmt]:
    if [type(s) for s in loop.body] != [ir.Gemm]:
        problem = "the loop has more than one product and the copies of its operands"
        raise TileError(problem, "one T.gemm in T.Pipelined, everything else behind it", loop.location)
    gemm, where = loop.body[0], loop.body[0].location
    ring = ring_along(rings, loop.var)
    steps = (Issue(where, gemm, loop.var), Retire(where, "product", loop.pending), Advance(where, ring))
    retired = [Retire(where, "product", 0)] if loop.pending else []
    return [replace(loop, body=steps), *retired, *([Advance(where, ring, loop.extent)] if alternate else [])]


def constant_extent(loop) -> int:
    if not isinstance(loop.extent, ir.Const):
        problem = f"a loop without T.gemm runs {loop.extent} times"
        raise TileError(problem, "a constant number of iterations, over views of a fragment", loop.location)
    return loop.extent.value


def _unrolled(loop: ir.Pipelined, rings, ahead: list[ir.Stmt]) -> Unrolled:
    """The loop; what it needs before goes to the front of `ahead`."""
    extent, ring = constant_extent(loop), next((ring for ring in rings if ring.var == loop.var), None)
    first, refills, body = [], [], []
    for stmt in loop.body:
        rest = _without_loads(stmt, loop, ring, extent, first, refills)
        body += [] if rest is None else [_stored(rest, loop.var)]
    ahead += first
    return Unrolled(loop.location, loop.var, extent, (*chunked(body), *refills))


def _stored(stmt: ir.Stmt, index: ir.Var) -> ir.Stmt:
    """A store is issued by one thread."""
    return One(stmt.location, (Issue(stmt.location, stmt, index),)) if is_store(stmt) else stmt


def _without_loads(stmt, loop, ring: Ring, extent: int, first: list, refills: list):
    """The statement without the loads in it, which are issued ahead, under the same condition; None if nothing is left."""
    if isinstance(stmt, ir.If):
        inner_first, inner_refills = [], []
        kept = [_without_loads(s, loop, ring, extent, inner_first, inner_refills) for s in stmt.body]
        first += [replace(stmt, body=tuple(inner_first))] if inner_first else []
        refills += [One(s.location, (replace(stmt, body=s.body),)) for s in inner_refills]
        kept = tuple(s for s in kept if s is not None)
        return replace(stmt, body=kept) if kept else None
    if not is_load(stmt):
        return stmt
    where, stages = stmt.location, ir.Const("int32", ring.stages)
    once = min(ring.stages, extent)
    first.append(One(where, (Unrolled(where, loop.var, once, (Issue(where, stmt, loop.var),)),)))
    later = ir.replaced(stmt.src, {loop.var: ir.Call("int32", "add", (loop.var, stages))})
    if extent > ring.stages:
        more = ir.Call("bool", "lt", (loop.var, ir.Const("int32", extent - ring.stages)))
        refills.append(One(where, (ir.If(where, more, (Issue(where, replace(stmt, src=later), loop.var),)),)))
    return None


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
    return isinstance(stmt, ir.Copy) and isinstance(stmt.src, ir.Buffer) and len(stmt.src.shape) == 2 and not is_store(stmt)


def _in_chunks(stmt: ir.Stmt, copy: ir.Copy) -> bool:
    """Element-wise work on the tile. A condition is repeated in each chunk, so only one whose work reads the tile."""
    if isinstance(stmt, ir.If):
        return copy.dst in _uses(stmt.body) and all(_in_chunks(s, copy) for s in stmt.body)
    return isinstance(stmt, ir.Parallel) and stmt.extents == copy.src.shape


def plain(stmt: ir.Stmt) -> ir.Stmt:
    """The statement; if it is a condition, no loop and no copy of a tile stands under it."""
    for inner in ir.walk(stmt.body) if isinstance(stmt, ir.If) else ():
        if isinstance(inner, ir.Pipelined) or _from_fragment(inner) or is_store(inner):
            problem = "a loop or a copy of a tile stands under T.If"
            raise TileError(problem, "T.If around what is neither", inner.location)
    return stmt
