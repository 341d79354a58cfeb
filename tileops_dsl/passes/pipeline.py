"""Pipelining: what begins when, in which stage of its tiles, and where producer and consumers wait for each other.

A buffer has the stages of the T.Pipelined loop that holds all its accesses; what the producer loads once for the tile has one.
Buffers that different products read go round rings of their own. A producer's copies need no more than the stages: its barriers
let it run ahead. Copies that the consumers issue themselves (into a tile that they store) are issued a ring ahead: those of the
first stages at the begin of the tile, each other one where its stage has been read. Of groups that alternate, each leaves out
the stages of the other's tiles, and their product loops take turns: a group that waited for a stage while the other still waits
for the round before would take that one's phase for its own.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError, require
from tileops_dsl.passes.products import Products, at_least_once, handed_back, lies_under, runs_once, turns
from tileops_dsl.passes.stores import anew, chunked, exchanged, fenced, last_wait, plain, stored, unrolled, uses
from tileops_dsl.plan import is_common, is_load, is_store, operands, ring_of, tile_loop
from tileops_dsl.schedule import Advance, Alone, At, Await, Chunks, Issue, Meet, One, Retire, Ring, Role, Signal, Sync
from tileops_dsl.targets import Target


def pipeline(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    kernel = replace(kernel, rings=tuple(find_rings(kernel)))
    producer, consumer = kernel.roles
    for loop in ir.walk(kernel.body, ir.Pipelined):
        check_loads(loop, kernel.rings)
    _check_over(kernel)
    if sum(isinstance(stmt, ir.Pipelined) for stmt in producer.body[0].body) > 1:
        problem = "more than one loop loads tiles that the consumers only read"
        raise TileError(problem, "one T.Pipelined loop with T.gemm", kernel.location)
    roles = (_produce(kernel, producer), _consume(kernel, consumer))
    _check_reads(roles[1].body, ())
    return replace(kernel, roles=roles)


def find_rings(kernel: ir.Kernel):
    """For each loop; of what the producer loads those that one statement reads together, with names where there are several."""
    everywhere = uses(kernel.body)
    common = [s.dst for role in kernel.roles if role.warp is not None for s in ir.walk(role.body) if is_load(s)]
    sources = {s.dst: s.src.tensor.name for s in ir.walk(kernel.body) if is_load(s)}
    groups: dict[tuple, list[ir.Buffer]] = {}
    for loop in ir.walk(kernel.body, ir.Pipelined):
        inside, products = uses(loop.body), [s for s in loop.body if isinstance(s, ir.Gemm)]
        for buffer in dict.fromkeys(b for b in inside if inside.count(b) == everywhere.count(b) and not b.common):
            reader = next((s for s in products if buffer in operands(s)), None)
            groups.setdefault((loop.var, loop.num_stages, reader), []).append(buffer)
    for buffer in (b for b in sources if not any(b in group for group in groups.values())):
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
        tiles = [stmt.dst] if is_load(stmt) else operands(stmt) if isinstance(stmt, ir.Gemm) else []
        for tile in (t for t in tiles if not t.common):
            if tile not in loaded or (is_load(stmt) and tile not in own):
                problem = f"{tile.name} is not loaded by this loop, or used outside it"
                raise TileError(problem, "a tile of the loop's own, loaded by T.copy in it", stmt.location)


def _check_over(kernel: ir.Kernel) -> None:
    """What lies over a tile is written behind the products that read it."""
    copied = {stmt.src for stmt in ir.walk(kernel.body, ir.Copy) if isinstance(stmt.src, ir.Buffer)}
    for stmt in (s for s in ir.walk(kernel.body, ir.Alloc) if s.buffer.alias):
        under = stmt.buffer.alias
        once = isinstance(under, ir.Buffer) and any(r.var == tile_loop(kernel).vars[-1] for r in [ring_of(kernel, under)] if r)
        problem = f"{stmt.buffer.name} lies over {under.name}, which is not loaded once for the tile and read by products alone"
        require(once and under not in copied, problem, "a tile of its own", stmt.location)


def _check_reads(body, open_to: tuple[ir.Buffer, ...]) -> None:
    """Elements of a tile in shared memory are read by matrices, where a copy into that tile follows."""
    for stmt in body:
        if isinstance(stmt, ir.Parallel):
            for tile in (b for b in uses(stmt.body) if len(b.shape) == 2 and b not in open_to):
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
            steps, last = _in_order_of_use(kernel, stmt, _loaded(kernel, stmt.body, stmt.var, stmt.location))
            if once:
                at_least_once(stmt)
                first = tuple(s for step in _loaded(kernel, once, stmt.var, stmt.location) for s in step)
                steps.insert(1, [ir.If(stmt.location, ir.call("eq", stmt.var, 0), first)])
            body += [replace(stmt, body=tuple(s for step in steps for s in step)), *last]
        elif body:
            problem = "a tile is loaded behind the loop whose product reads it"
            raise TileError(problem, "the copy in the loop, or in front of it", stmt.location)
        else:
            once.append(stmt)
    return replace(role, body=(replace(tiles, body=tuple(body)),))


def _in_order_of_use(kernel: ir.Kernel, loop: ir.Pipelined, steps: list[list[ir.Stmt]]):
    """What products of stage 1 read is loaded an iteration later, too; and those of the last iteration, behind the loop.

    (Boxes of rows stay where they are, with the places that they share.)
    """
    late = {tile for s in ir.walk(kernel.body, ir.Gemm) if s.stage for tile in operands(s)}
    loads = [next(s.op for s in step if isinstance(s, Issue)) for step in steps]
    if not late or any(load.box_row for load in loads) or not runs_once(loop):
        return steps, []
    where, before, last = loop.location, ir.call("sub", loop.var, 1), ir.call("sub", loop.extent, 1)
    later = [n for n, load in enumerate(loads) if load.dst in late]
    in_loop = [
        [ir.If(where, ir.call("lt", 0, loop.var), (At(where, loop.var, before, tuple(step)),))] if n in later else step
        for n, step in enumerate(steps)
    ]
    return in_loop, [At(where, loop.var, last, tuple(s for n in later for s in steps[n]))]


def _loaded(kernel: ir.Kernel, body, index: ir.Var, where: ir.Location) -> list[list[ir.Stmt]]:
    """Each load, with what the first and the last one of its ring have besides."""
    out, rings = [], [ring_of(kernel, s.dst) if isinstance(s, ir.Copy) else None for s in body]
    for n, (stmt, ring) in enumerate(zip(body, rings, strict=True)):
        require(ring is not None, "a load of the loop's tiles depends on a condition", "the copy outside T.If", stmt.location)
        empty, full = Await(stmt.location, f"{ring.prefix}empty", index), Signal(stmt.location, f"{ring.prefix}full", "this")
        first, last = ring not in rings[:n], ring not in rings[n + 1 :]
        out.append([*[empty, full] * first, Issue(stmt.location, stmt, index), *[Advance(where, ring)] * last])
    return out


def _consume(kernel: ir.Kernel, role: Role) -> Role:
    (tiles,), products, stores = role.body, Products(kernel), [s for s in ir.walk(role.body) if is_store(s)]
    ahead, body = [], []
    for stmt in tiles.body:
        if isinstance(stmt, ir.Pipelined) and any(ir.walk(stmt.body, ir.Gemm)):
            body += products.pipelined(stmt, tiles.alternate)
        elif isinstance(stmt, ir.Pipelined):
            over = [ring for ring in kernel.rings if set(lies_under(kernel, ring)) & set(uses((stmt,)))]
            meet = [Sync(stmt.location, True)] if over else []  # all groups have read what lies there
            body += [*meet, *products.straight([unrolled(stmt, kernel.rings, stores, ahead)])]
            for ring in over:
                body += [One(stmt.location, (Retire(stmt.location, "read", 0),)), *handed_back([ring], stmt.location)]
        else:
            rings = _read_once(kernel, stmt)
            body += [Await(stmt.location, f"{ring.prefix}full", ring.var) for ring in rings]
            body += [*products.straight(stored(plain(stmt), ir.ZERO)), *handed_back(rings, stmt.location)]
    body = [*ahead, *anew(chunked(body + products.retire()), stores)]
    before, body, behind = _in_turns(body, tiles.location) if tiles.alternate else ((), body, ())
    loop = next((loop for loop in ir.walk(kernel.body, ir.Pipelined) if loop.turns), None)
    if loop:  # the first group's turn comes first
        problem = f"{len(role.groups)} groups are to take turns{' and to alternate' * tiles.alternate}"
        require(len(role.groups) > 1 and not tiles.alternate, problem, "threads=256 or more; or no turns", loop.location)
        take, give = turns(kernel, tiles.location)
        before, behind = (Alone(tiles.location, "last", (give,)),), (Alone(tiles.location, "first", (take,)),)
    rings = {buffer: f"{ring.prefix}full" for ring in kernel.rings for buffer in ring.buffers}
    common = {buffer: rings.get(buffer, "") for buffer in uses(role.body) if is_common(kernel, buffer)}
    body = fenced(exchanged((replace(tiles, body=tuple(body)),), set(), common), common, [])
    return replace(role, body=(*before, *body, *behind, *last_wait(stores)))


def _read_once(kernel: ir.Kernel, stmt: ir.Stmt) -> list[Ring]:
    """What the producer loads once for the tile, and the statement copies into registers."""
    copies = isinstance(stmt, ir.Copy) and isinstance(stmt.dst, ir.Tile) and stmt.dst.scope == "fragment"
    return [ring_of(kernel, stmt.src)] if copies and isinstance(stmt.src, ir.Tile) else []


def _in_turns(body: list[ir.Stmt], where: ir.Location):
    """The product loops: a group waits for its turn and gives the other one's.

    Before all tiles the last group gives the first its first turn; behind them one is left over.
    """
    group = ir.Var("int32", "group")  # 1 or 2, which are the groups' own barriers
    take, give = Meet(where, ir.call("add", group, 2), True), Meet(where, ir.call("sub", 5, group), False)
    turns = [s for stmt in body for s in ((take, stmt, give) if isinstance(stmt, ir.Pipelined) else (stmt,))]
    skips = [stmt for stmt in body if isinstance(stmt, Advance)]
    return (Alone(where, "last", (give, *skips)),), turns, (Alone(where, "next", (take,)),)
