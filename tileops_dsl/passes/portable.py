"""Products without warp groups: all threads do the same, copies run ahead, one barrier of the CTA orders what they touch.

With S stages, and Q steps of 16 in one tile of K, a loop with a product becomes

    copies of iterations 0 .. S - 2; accumulators and the operands of step Q - 1 are 0
    for i:  operands of step 0, products of step Q - 1 of the iteration before
            for q in 0 .. Q - 2:  operands of step q + 1, copies of iteration i + S - 1 (when q is 0), products of step q
    products of step Q - 1

so that operands are on their way from shared memory, and the barrier in front of step 0 is waited for, while products run.
(ptxas moves products across a barrier. These stay behind it, since in the same block of code others wait for what is loaded
behind it.) Copies behind the last iteration write zeros: no iteration is special. Copies are cp.async where they move 16 bytes;
single elements go through registers, and land behind the products.

A loop with several products, which follow each other, R of which are the first to read something that is copied, becomes

    copies for the first R S - 1 of those, a group for each
    for i:  for each of them, behind what stands in front of it: its copies are waited for; what is cleared of its tiles;
            barrier; copies for the one before it, S iterations on, whose tiles nobody reads any more; the product

(With R S = 1 its copies begin behind a barrier of their own. Of tiles that others read as well, R is 1.)
With several stages the next tile's copies begin where the last product reads: where nothing behind the loop has a barrier, one
stands at the end.
A barrier stands behind each write of a shared tile by the threads themselves, and behind each wait for copies. That this orders
all accesses is what `simulate` finds out.
"""

import itertools
from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError, require
from tileops_dsl.instruction_layouts import WarpAccumulators
from tileops_dsl.passes.pipeline import check_loads, find_rings
from tileops_dsl.passes.products import at_least_once
from tileops_dsl.passes.stores import chunked, constant_extent, plain
from tileops_dsl.plan import GROUP, asynchronous, chained, consumers, is_load, is_store, lines, operands
from tileops_dsl.schedule import Advance, At, Chunks, Commit, Issue, Land, Multiply, Operands, Retire, Ring, Sync, Unrolled
from tileops_dsl.targets import Target

AHEAD = ir.Var("int32", "ahead")  # counts the first copies
STEP = 16  # of K, in mma.m16n8k16


def schedule(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    problem = f"{target.name} has no clusters, and the kernel asks for one of {kernel.ctas} CTAs"
    require(kernel.ctas <= 1, problem, "cluster=(1, 1), and copies without multicast", kernel.location)
    rings, role, chain = tuple(_rings(kernel)), consumers(kernel), chained(kernel)
    (tiles,), gemms = role.body, list(ir.walk(kernel.body, ir.Gemm))
    columns = 8 if chain else 8 * accumulators(kernel, gemms[0].c, gemms[0].location).across  # a block of each warp
    for copy in (s for s in ir.walk(kernel.body) if is_load(s) or is_store(s)):
        _check_copy(kernel, copy)
    body: list[ir.Stmt] = []
    once = [stmt for stmt in tiles.body if is_load(stmt)]  # for the tile
    for stmt in (stmt for stmt in tiles.body if stmt not in once):
        if not isinstance(stmt, ir.Pipelined):
            body.append(plain(stmt))
            continue
        ring = next((ring for ring in rings if ring.var == stmt.var), None)
        check_loads(stmt, rings)
        if gemms[0] in stmt.body:
            body += _products_loop(kernel, stmt, once) if chain else _product_loop(stmt, ring)
        else:
            inner = tuple(s for inner in stmt.body for s in _loads_first(inner, stmt.var))
            body.append(Unrolled(stmt.location, stmt.var, constant_extent(stmt), inner))
    body = _announced(body, columns)
    behind = [*itertools.dropwhile(lambda stmt: not isinstance(stmt, ir.Pipelined), body)]
    if chain and behind[0].num_stages > 1 and not any(isinstance(s, Sync) for s in ir.walk(tuple(behind[1:]))):
        body += (Sync(tiles.location),)
    role = replace(role, body=(replace(tiles, body=body),))
    return replace(kernel, roles=(role,), rings=rings)


def _rings(kernel: ir.Kernel):
    """A loop over views of a fragment has no more stages than iterations."""
    extents = {loop.var: loop.extent for loop in ir.walk(kernel.body, ir.Pipelined)}
    for ring in find_rings(kernel):
        match extents.get(ring.var):
            case ir.Const(value=extent):
                ring = replace(ring, stages=min(ring.stages, extent))
        yield ring


def _check_copy(kernel: ir.Kernel, copy: ir.Copy) -> None:
    tile, tensor = copy.tile, copy.region.tensor
    try:
        t = lines(kernel, copy)
        vector, parts = t.vector, t.chunks > 1 and not (is_load(copy) and chained(kernel))
        problem = None if vector * ir.DTYPES[tile.dtype] == 16 or vector == 1 else f"{tensor.name} promises {vector} elements"
        problem = f"{tile.name} has rows of {tile.shape[1]} elements" if parts else problem
    except (ValueError, ZeroDivisionError):
        problem = f"{kernel.threads} threads do not divide the {list(tile.shape)} elements of {tile.name}"
    instead = "a vector of 16 bytes or of 1 element, and rows of a power of two of them, no more than threads"
    require(not problem, problem, instead, copy.location)


def _products_loop(kernel: ir.Kernel, loop: ir.Pipelined, once: list[ir.Copy]) -> list[ir.Stmt]:
    """What the loop's products read once for the tile is in the first group."""
    at_least_once(loop)
    products, loads = [s for s in loop.body if isinstance(s, ir.Gemm)], {}
    for load in (s for s in loop.body if is_load(s)):
        loads.setdefault(next((p for p in products if load.dst in operands(p)), None), []).append(load)
    firsts = list(loads)  # products that are the first to read something
    depth = loop.num_stages * len(firsts) - 1  # groups on their way
    apart = firsts == [p for p in products if p in firsts] and firsts[:1] == products[:1]
    apart = apart and [*itertools.chain(*loads.values())] == [s for s in ir.walk(loop.body) if is_load(s)]
    instead = "for each product, in their order, T.copy of tiles that it is the first to read"
    require(apart, "copies of the loop do not belong to one product each", instead, loop.location)
    problem = f"{kernel.threads} threads have products that follow each other"
    require(kernel.threads == GROUP, problem, f"T.Kernel(threads={GROUP})", kernel.location)
    for gemm in products:
        whole_boxes = ir.buffer_of(gemm.a).shape[1] % 64 == 0
        turned = gemm.transpose_a and gemm.a.scope == "shared" and whole_boxes and not gemm.transpose_b
        parts = [tile for tile in (*[gemm.a] * (not turned), gemm.b, gemm.c) if isinstance(tile, ir.View)]
        fits = (turned or not gemm.transpose_a) and not parts and gemm.c.shape[1] % 16 == 0
        instead = "whole tiles, a multiple of 16 columns; an a stored [M, K], or [K, M] with b [K, N]"
        require(fits, "a form of product that no mma is written for", instead, gemm.location)

    def copies(number: int, first: ir.Expr | None = None) -> list[ir.Stmt]:
        """For a product, counted from those of iteration `first` on, or of iteration 0; behind the last one, none."""
        ahead, which = divmod(number, len(firsts))
        index = ir.Const("int32", ahead) if first is None else ir.call("add", first, ahead) if ahead else first
        *begin, commit = _copies(loads[firsts[which]], loop.var, index)[0]
        if ahead:
            begin = [ir.If(commit.location, ir.call("lt", index, loop.extent), tuple(begin))]
        return [*begin, commit]

    ahead = [s for number in range(depth) for s in copies(number)]
    body: list[ir.Stmt] = []
    for stmt in (s for s in loop.body if not is_load(s)):
        if stmt in firsts:
            where, more = stmt.location, copies(firsts.index(stmt) + depth, loop.var)
            cleared = [_cleared(body.pop())] if body and _clears(body[-1], stmt) else []
            now, later = ([], more) if depth else ([Sync(where), *more], [])
            body += [*now, Retire(where, "copy", max(depth - 1, 0)), *cleared, Sync(where), *later]
        body.append(stmt)
    return [*(Issue(load.location, load, ir.ZERO) for load in once), *ahead, replace(loop, body=tuple(body))]


def _clears(stmt: ir.Stmt, gemm: ir.Gemm) -> bool:
    """Whether it writes rows of what the product reads, which have been loaded."""
    fills = ir.walk(stmt.body, ir.Fill) if isinstance(stmt, ir.If) else ()
    return any(ir.buffer_of(fill.buffer) in operands(gemm) for fill in fills)


def _cleared(stmt: ir.If) -> ir.If:
    """Other threads have loaded these rows."""
    return replace(stmt, body=(Sync(stmt.location), *stmt.body))


def _product_loop(loop: ir.Pipelined, ring: Ring) -> list[ir.Stmt]:
    *loads, gemm = loop.body
    depth = gemm.a.shape[0 if gemm.transpose_a else 1] if isinstance(gemm, ir.Gemm) else 0
    clear = ir.call("eq", loop.var, 0)
    steps, where = depth // STEP, gemm.location
    fits = depth and depth % (2 * STEP) == 0 and gemm.clear == clear and gemm.a.scope == "shared" and not gemm.stage
    problem = f"the loop is not loads and a product of a multiple of {2 * STEP} of K, in 3 stages or more, cleared at first"
    instead = f"T.copy(a..), T.copy(b..), T.gemm(.., clear_accum={loop.var} == 0) in T.Pipelined(.., num_stages=4)"
    require(all(map(is_load, loads)) and ring.stages >= 3 and fits, problem, instead, loop.location)
    begin_first, land_first = _copies(loads, loop.var, AHEAD)
    begin, land = _copies(loads, loop.var, ir.call("add", loop.var, ring.stages - 1))
    wait = [Retire(where, "copy", ring.stages - 2)] if asynchronous(loads[0]) else []
    before, last = ir.call("sub", loop.var, 1), ir.call("sub", loop.extent, 1)
    late = (Multiply(where, gemm, steps - 1),)
    body = [*wait, Sync(where), Operands(where, gemm, 0, loop.var), At(where, loop.var, before, late)]
    for q in range(1, steps):
        body += [Operands(where, gemm, q, loop.var), *(begin if q == 1 else []), Multiply(where, gemm, q - 1)]
    return [
        ir.Serial(loop.location, AHEAD, ir.Const("int32", ring.stages - 1), (*begin_first, *land_first)),
        ir.Fill(where, gemm.c, ir.Const("float32", 0.0)),
        Operands(where, gemm, steps - 1, None),
        replace(loop, body=(*body, *land, Advance(where, ring))),
        At(where, loop.var, last, late),
        *([Retire(where, "copy", 0)] if wait else []),
    ]


def _copies(loads: list[ir.Copy], var: ir.Var, index: ir.Expr) -> tuple[list[ir.Stmt], list[ir.Stmt]]:
    """The loads of an iteration begin; they land."""
    moved = [replace(load, src=ir.replaced(load.src, {var: index})) for load in loads]
    begin: list[ir.Stmt] = [Issue(load.location, load, index) for load in moved]
    if asynchronous(loads[0]):
        return [*begin, Commit(loads[-1].location)], []
    return begin, [Land(load.location, load, index) for load in moved]


def _loads_first(stmt: ir.Stmt, var: ir.Var) -> list[ir.Stmt]:
    """Loads under a condition are done before the rest of it, so that the rest can go with what follows."""
    if is_load(stmt):
        begin, land = _copies([stmt], var, var)
        return [*begin, *land, *([] if land else [Retire(stmt.location, "copy", 0)]), Sync(stmt.location)]
    if not isinstance(stmt, ir.If):
        return [stmt]
    done = tuple(s for load in stmt.body if is_load(load) for s in _loads_first(load, var))
    rest = tuple(s for s in stmt.body if not is_load(s))
    return [replace(stmt, body=body) for body in (done, rest) if body]


def _announced(body, columns: int) -> tuple[ir.Stmt, ...]:
    """What is written to shared memory goes so many columns at a time, with a barrier behind it."""
    out: list[ir.Stmt] = []
    for stmt in chunked(body, columns):
        within = isinstance(stmt, ir.If | ir.Pipelined | Unrolled)
        out.append(replace(stmt, body=_announced(stmt.body, columns)) if within else stmt)
        copy = stmt.body[-1] if isinstance(stmt, Chunks) else stmt
        if isinstance(copy, ir.Copy) and isinstance(copy.dst, ir.Buffer) and copy.dst.scope == "shared":
            out.append(Sync(copy.location))
    return tuple(out)


def accumulators(kernel: ir.Kernel, tile: ir.Buffer, location: ir.Location) -> WarpAccumulators:
    """Each group of four warps has some of the rows of C (FullRow), its warps have tiles as square as can be; so beside C."""
    (gemm,) = ir.walk(kernel.body, ir.Gemm)
    (rows, columns), groups = gemm.c.shape, kernel.threads // GROUP
    shapes = [(groups * d, 4 // d) for d in (1, 2, 4)]
    fitting = [(m, n) for m, n in shapes if {rows / m, columns / n} <= {16, 32, 64, 128}]
    problem = f"{gemm.c.name} is {rows} x {columns} for {kernel.threads} threads"
    require(fitting, problem, "16, 32, 64 or 128 rows and columns for each warp", gemm.location)
    down, across = min(fitting, key=lambda warps: rows // warps[0] + columns // warps[1])
    if tile.shape[0] != rows or tile.shape[1] % (8 * across):
        problem = f"{tile.name} is {list(tile.shape)} beside {gemm.c.name}, of {down} x {across} warps"
        raise TileError(problem, f"{rows} rows and a multiple of {8 * across} columns", location)
    return WarpAccumulators(*tile.shape, down, across)
