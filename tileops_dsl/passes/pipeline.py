"""Pipelining: what begins when, in which stage of its tiles, and where producer and consumers wait for each other.

A buffer has the stages of the T.Pipelined loop that holds all its accesses; what the producer loads once for the tile has one.
Buffers that different products read go round rings of their own. A producer's copies need no more than the stages: its barriers
let it run ahead. Copies that the consumers issue themselves (into a tile that they store) are issued a ring ahead: those of the
first stages at the begin of the tile, each other one where its stage has been read. Of groups that alternate, each leaves out
the stages of the other's tiles. A T.Pipelined loop over views of a fragment is unrolled.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.passes.products import ZERO, Products, at_least_once
from tileops_dsl.passes.roles import only
from tileops_dsl.plan import is_load, is_store, named, ring_of, tile_loop
from tileops_dsl.schedule import Advance, Alone, Await, Chunks, Issue, One, Ring, Role, Signal, Unrolled
from tileops_dsl.targets import Target

CHUNK = 16  # columns that two matrices side by side have


def pipeline(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    kernel = replace(kernel, rings=tuple(find_rings(kernel)))
    producer, consumer = kernel.roles
    for loop in (s for s in ir.walk(kernel.body) if isinstance(s, ir.Pipelined)):
        check_loads(loop, kernel.rings)
    if sum(isinstance(stmt, ir.Pipelined) for stmt in producer.body[0].body) > 1:
        problem = "more than one loop loads tiles that the consumers only read"
        raise TileError(problem, "one T.Pipelined loop with T.gemm", kernel.location)
    roles = (_produce(kernel, producer), _consume(kernel, consumer))
    _check_reads(roles[1].body, ())
    return replace(kernel, roles=roles)


def _uses(body) -> list[ir.Buffer]:
    """Tiles in shared memory, once for each statement that reads or writes them."""
    return [b for stmt in body if not isinstance(stmt, ir.Alloc) for b in named(stmt) if b.scope == "shared"]


def find_rings(kernel: ir.Kernel):
    """For each loop; of what the producer loads those that one statement reads together, with names where there are several."""
    everywhere = _uses(kernel.body)
    common = [s.dst for role in kernel.roles if role.warp is not None for s in ir.walk(role.body) if is_load(s)]
    sources = {s.dst: s.src.tensor.name for s in ir.walk(kernel.body) if is_load(s)}
    groups: dict[tuple, list[ir.Buffer]] = {}
    for loop in (s for s in ir.walk(kernel.body) if isinstance(s, ir.Pipelined)):
        inside, products = _uses(loop.body), [s for s in loop.body if isinstance(s, ir.Gemm)]
        for buffer in dict.fromkeys(b for b in inside if inside.count(b) == everywhere.count(b)):
            reader = next((s for s in products if buffer in (s.a, s.b)), None)
            groups.setdefault((loop.var, loop.num_stages, reader), []).append(buffer)
    for buffer in (b for b in common if not any(b in group for group in groups.values())):
        groups[tile_loop(kernel).vars[-1], 1, buffer] = [buffer]
    alone = sum(group[0] in common for group in groups.values()) == 1
    for number, ((var, stages, _), group) in enumerate(groups.items()):
        name = group[0].name.removesuffix("_tile") if group[0] in common else sources.get(group[0], "")
        yield Ring(f"ring {number}", tuple(group), stages, var, "" if alone and group[0] in common else f"{name}_")


def check_loads(loop: ir.Pipelined, rings) -> None:
    """What a loop loads is used in it alone, and a product's operands are loaded in its loop or once for the tile."""
    own = [b for ring in rings if ring.var == loop.var for b in ring.buffers]
    loaded = [s.dst for s in ir.walk(loop.body) if is_load(s)] + [b for r in rings if r.var != loop.var for b in r.buffers]
    for stmt in ir.walk(loop.body):
        tiles = [stmt.dst] if is_load(stmt) else [stmt.a, stmt.b] if isinstance(stmt, ir.Gemm) else []
        for tile in (t for t in tiles if t.scope == "shared"):
            if tile not in loaded or (is_load(stmt) and tile not in own):
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


def _produce(kernel: ir.Kernel, role: Role) -> Role:
    """What the tile loads once goes behind the first load of the loop, whose stages the tile before hands back earlier."""
    (tiles,), once = role.body, []
    body: list[ir.Stmt] = []
    for stmt in tiles.body:
        if isinstance(stmt, ir.Pipelined):
            steps = _loaded(kernel, stmt.body, stmt.var, stmt.location)
            if once:
                at_least_once(stmt)
                first = tuple(s for step in _loaded(kernel, once, stmt.var, stmt.location) for s in step)
                steps.insert(1, [ir.If(stmt.location, ir.Call("bool", "eq", (stmt.var, ZERO)), first)])
            body.append(replace(stmt, body=tuple(s for step in steps for s in step)))
        elif body:
            problem = "a tile is loaded behind the loop whose product reads it"
            raise TileError(problem, "the copy in the loop, or in front of it", stmt.location)
        else:
            once.append(stmt)
    return replace(role, body=(replace(tiles, body=tuple(body)),))


def _loaded(kernel: ir.Kernel, body, index: ir.Var, where: ir.Location) -> list[list[ir.Stmt]]:
    """Each load, with what the first and the last one of its ring have besides."""
    out, rings = [], [ring_of(kernel, s.dst) if isinstance(s, ir.Copy) else None for s in body]
    for n, (stmt, ring) in enumerate(zip(body, rings, strict=True)):
        if ring is None:
            raise TileError("a load of the loop's tiles depends on a condition", "the copy outside T.If", stmt.location)
        empty, full = Await(stmt.location, f"{ring.prefix}empty", index), Signal(stmt.location, f"{ring.prefix}full", "this")
        first, last = ring not in rings[:n], ring not in rings[n + 1 :]
        out.append([*[empty, full] * first, Issue(stmt.location, stmt, index), *[Advance(where, ring)] * last])
    return out


def _consume(kernel: ir.Kernel, role: Role) -> Role:
    (tiles,), products = role.body, Products(kernel)
    ahead, body = [], []
    for stmt in tiles.body:
        if isinstance(stmt, ir.Pipelined) and any(isinstance(s, ir.Gemm) for s in ir.walk(stmt.body)):
            body += products.pipelined(stmt, tiles.alternate)
        elif isinstance(stmt, ir.Pipelined):
            body += products.straight([_unrolled(stmt, kernel.rings, ahead)])
        else:
            body += products.straight([_stored(plain(stmt), ZERO)])
    body += products.retire()
    skips = tuple(stmt for stmt in body if isinstance(stmt, Advance)) if tiles.alternate else ()
    late = (Alone(tiles.location, "last", skips),) if skips else ()
    return replace(role, body=(*late, replace(tiles, body=(*ahead, *chunked(body)))))


def constant_extent(loop) -> int:
    if not isinstance(loop.extent, ir.Const):
        problem = f"a loop without T.gemm runs {loop.extent} times"
        raise TileError(problem, "a constant number of iterations, over views of a fragment", loop.location)
    return loop.extent.value


def _unrolled(loop: ir.Pipelined, rings, ahead: list[ir.Stmt]) -> Unrolled:
    """The loop; what it needs before goes to the end of `ahead`. Its loads stay under their conditions."""
    extent, ring = constant_extent(loop), next((ring for ring in rings if ring.var == loop.var), None)
    refills = []
    for load in (stmt for stmt in ir.walk(loop.body) if is_load(stmt)):
        where, var, stages = load.location, loop.var, ir.Const("int32", ring.stages)
        alone, expects = only(loop.body, lambda stmt, load=load: stmt is load), Signal(where, f"{ring.prefix}full", "this")
        first = Unrolled(where, var, min(ring.stages, extent), (expects, Issue(where, load, var)))
        ahead.append(_instead(alone, One(where, (first,))))
        if extent > ring.stages:
            later = replace(load, src=ir.replaced(load.src, {var: ir.Call("int32", "add", (var, stages))}))
            more = ir.Call("bool", "lt", (var, ir.Const("int32", extent - ring.stages)))
            refills.append(One(where, (_instead(alone, ir.If(where, more, (expects, Issue(where, later, var)))),)))
    body = [_stored(stmt, loop.var) for stmt in only(loop.body, lambda stmt: not is_load(stmt))]
    return Unrolled(loop.location, loop.var, extent, (*chunked(body), *refills))


def _instead(alone: tuple[ir.Stmt, ...], new: ir.Stmt) -> ir.Stmt:
    """Of a statement that is alone in what it stands in."""
    (stmt,) = alone
    return replace(stmt, body=(_instead(stmt.body, new),)) if hasattr(stmt, "body") else new


def _stored(stmt: ir.Stmt, index: ir.Var) -> ir.Stmt:
    """A store is issued by one thread."""
    return One(stmt.location, (Issue(stmt.location, stmt, index),)) if is_store(stmt) else stmt


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
        return copy.dst in _uses(stmt.body) and all(_in_chunks(s, copy) for s in stmt.body)
    return isinstance(stmt, ir.Parallel) and stmt.extents == copy.src.shape


def plain(stmt: ir.Stmt) -> ir.Stmt:
    """The statement; if it is a condition, no loop and no copy of a tile stands under it."""
    for inner in ir.walk(stmt.body) if isinstance(stmt, ir.If) else ():
        if isinstance(inner, ir.Pipelined) or _from_fragment(inner) or is_store(inner):
            problem = "a loop or a copy of a tile stands under T.If"
            raise TileError(problem, "T.If around what is neither", inner.location)
    return stmt
