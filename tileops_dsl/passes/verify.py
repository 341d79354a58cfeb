"""What must hold between passes, computed independently of the passes that establish it."""

import functools
import itertools

from tileops_dsl import ir, plan
from tileops_dsl.errors import TileError, require
from tileops_dsl.layouts import Linear, PerColumn, PerRow, VectorisedRows, tile_of
from tileops_dsl.passes import verify_roles
from tileops_dsl.targets import Target


def verify(kernel: ir.Kernel, target: Target, properties: tuple[str, ...]) -> None:
    for name in properties:
        CHECKS[name](kernel, target)


def well_formed(kernel: ir.Kernel, target: Target) -> None:
    """Names are in scope, buffers are allocated once and before use, indices fit; a tensor is used only where it was passed."""
    dealt = {number.name for number in ir.Deal.RESULTS} if kernel.deal else set()
    _check_block(kernel.body, {*kernel.tensors, *kernel.parameters, *(block.name for block in kernel.blocks), *dealt})
    sizes = {e: stmt.location for stmt in ir.walk(kernel.body) for e in ir.subexprs(stmt) if isinstance(e, ir.BoxRow)}
    for where in [*sizes.values()][1:]:
        raise TileError(f"{' and '.join(map(str, sizes))} in one kernel", "boxes of as many rows everywhere", where)
    loaded = {s.dst for s in ir.walk(kernel.body) if plan.is_load(s) and target.warp_groups}
    persistent = any(isinstance(stmt, ir.Persistent) and not stmt.alternate for stmt in kernel.body)
    for stmt in () if plan.feeds_itself(kernel) else ir.walk(kernel.body):
        words = _expert(stmt, loaded)
        require(not words, f"{words} in a kernel without T.ws", "the groups' work in T.ws", stmt.location)
        words = None if persistent else _of_groups(stmt, set(kernel.blocks))
        instead = "the groups' work in T.ws, or T.Persistent of tiles that they share"
        require(not words, f"{words} in a kernel without T.ws", instead, stmt.location)


def _of_groups(stmt: ir.Stmt, blocks: set[ir.Var]) -> str | None:
    """What of a statement only kernels of warp groups have so far, which do not alternate.

    Those of rows have elements, too, that are the same for all of the CTA.
    """
    match stmt:
        case ir.Alloc(buffer=ir.Buffer(dtype="int32")):
            return "a fragment of int32"
        case ir.Fill(buffer=tile) if tile.scope == "shared":
            return "T.fill of a tile in shared memory"
        case ir.Store(buffer=ir.Tensor()):
            return "an element of a tensor"
    exprs = list(ir.subexprs(stmt))
    for element in (e for e in exprs if isinstance(e, ir.Element)):
        if not blocks or any(isinstance(e, ir.Var) and e not in blocks for e in ir.subexprs(element)):
            return "an element of a tensor" + " at an index other than T.Kernel's" * bool(blocks)
    return "T.any_of" if any(isinstance(e, ir.AnyOf) for e in exprs) else None


def _expert(stmt: ir.Stmt, loaded: set[ir.Buffer]) -> str | None:
    """What of a statement only kernels with T.ws have so far."""
    match stmt:
        case ir.Alloc(buffer=ir.Buffer(box=box)) if box:
            return "boxes"
        case ir.Copy(src=ir.Buffer(scope="shared") as tile, dst=ir.Buffer(scope="fragment")) if tile not in loaded:
            return "a copy out of shared memory"
        case ir.Pipelined(start=start, step=step) if start != ir.ZERO or step != 1:
            return "a T.Pipelined loop from another start, or in other steps,"
    return None


def _check_block(body, known: set) -> None:
    """Known are tensors, buffers, names, and the conditions that hold here."""
    for stmt in body:
        where, exprs = stmt.location, list(ir.subexprs(stmt))
        inside = known | {ir.EACH.name} if isinstance(stmt, ir.If) else known
        if isinstance(stmt, ir.Alloc):
            require(stmt.buffer not in known, f"{stmt.buffer.name} is allocated twice", "one allocation", where)
            known.add(stmt.buffer)
        for part in (*vars(stmt).values(), *exprs, *(e.buffer for e in exprs if isinstance(e, ir.Load))):
            if isinstance(part, ir.Region | ir.Element):
                tensor, there = part.tensor, not part.tensor.optional or part.tensor.given in known
                require(tensor in known, f"{tensor.name} is no parameter of the program", "its own T.Tensor", where)
                require(there, f"{tensor.name} may be missing here", f"with T.If({tensor.name}.given): around it", where)
            elif isinstance(part, ir.Tile):
                problem = f"{part.name} is not allocated here"
                require(ir.buffer_of(part) in known, problem, "T.alloc_fragment before its first use", where)
        for e in exprs:
            if isinstance(e, ir.Var):
                require(e.name in inside, f"{e.name} is used outside its loop", "the loop's values inside the loop", where)
            elif isinstance(e, ir.BoxRow):
                problem = "T.box_row is no part of the place from which up to 128 rows of shared memory are loaded"
                fits = plan.is_load(stmt) and stmt.dst.shape[0] <= 128  # a lane of four warps for each
                require(fits, problem, "T.tma_copy(x[T.box_row(rows), 0], tile)", where)
            elif isinstance(e, ir.AnyOf):
                require(isinstance(stmt, ir.If), "T.any_of is no condition of T.If", "with T.If(T.any_of(...)):", where)
            elif isinstance(e, ir.Load):
                each = isinstance(stmt, ir.Store | ir.Print) or ir.EACH in e.indices
                require(each, f"{e} is read outside T.Parallel", "a dimension or a T.Scalar", where)
            elif isinstance(e, ir.Call):
                arity = ir.OPS[e.op][0]
                require(len(e.args) == arity, f"{e.op} with {len(e.args)} operands", f"{arity} operands", where)
        if isinstance(stmt, ir.Parallel):
            _check_extents(stmt)
        own = {v.name for v in (*getattr(stmt, "vars", ()), getattr(stmt, "var", None)) if v}
        own |= {stmt.condition} if isinstance(stmt, ir.If) else set()
        known |= {stmt.name} if isinstance(stmt, ir.If) and stmt.name else set()
        _check_block(getattr(stmt, "body", ()), known if isinstance(stmt, ir.On) else known | own)


def _check_extents(loop: ir.Parallel) -> None:
    extent = dict(zip(loop.vars, loop.extents, strict=True))
    for store in loop.body:
        for element in (e for e in (store, *ir.loads(store.value)) if isinstance(e.buffer, ir.Tile)):
            for index, size in zip(element.indices, element.buffer.shape, strict=True):
                problem = f"the loop runs over {extent.get(index)} and {element.buffer.name} has {size}"
                instead = f"T.Parallel over the shape {list(element.buffer.shape)}"
                require(extent.get(index, size) == size, problem, instead, store.location)


def layouts(kernel: ir.Kernel, target: Target) -> None:
    """Each tile has a layout of its shape; a fragment's fills the registers of the threads that have fragments."""
    threads = plan.group_threads(kernel) if kernel.roles else kernel.threads
    for stmt in ir.walk(kernel.body, ir.Alloc):
        buffer, shape, where = stmt.buffer, stmt.buffer.shape, stmt.location
        layout, name = kernel.layouts.get(buffer), buffer.name
        if kernel.roles and not isinstance(layout, Linear):
            shape = (plan.layout_rows(kernel, buffer), *(plan.layout_columns(kernel, buffer) for _ in shape[1:]))
        instead = "a tile that T.gemm, T.copy or T.Parallel uses" if kernel.roles else f"T.annotate_layout({{{name}: ...}})"
        require(layout is not None, f"{name} has no layout: nothing ties it to a tile that has one", instead, where)
        problem = f"{name} is {list(shape)} and its layout {list(layout.shape)}: {layout}"
        of_scope = hasattr(layout, "registers" if buffer.scope == "fragment" else "bytes")
        require(of_scope and layout.shape == shape, problem, "one shape", where)
        if buffer.scope == "fragment":
            problem = f"the layout of {name} has {layout.threads} threads of {threads}"
            require(layout.threads == threads, problem, "T.Kernel's threads", where)
            problem = _placement_problem(layout)
            require(not problem, f"the layout of {name} {problem}", "a layout that covers tile and registers", where)
    (verify_roles.views if kernel.roles else _check_rows)(kernel, target)


@functools.cache
def _placement_problem(layout) -> str | None:
    """By enumeration: compares with what the layout claims. Of a ragged one the last register of a thread may be empty."""
    held: set[tuple[int, int]] = set()
    for threads, register in map(layout.place, itertools.product(*map(range, layout.shape))):
        for place in ((thread, register) for thread in threads):
            if place in held:
                return f"puts two elements into register {register} of thread {place[0]}"
            held.add(place)
    full = set(itertools.product(range(layout.threads), range(layout.registers)))
    empty = {(t, r) for t, r in full - held if not (layout.ragged and r == layout.registers - 1)}
    return "leaves registers or threads out" if empty or held - full else None


def _check_rows(kernel: ir.Kernel, target: Target) -> None:
    """All layouts distribute the same tile and fit the register file; copies access what the tensors promise."""
    tiles = [tile_of(layout) for layout in kernel.layouts.values()]
    for stmt in ir.walk(kernel.body):
        if isinstance(stmt, ir.Alloc):
            tile = tile_of(kernel.layouts[stmt.buffer])
            require(tile == tiles[0], f"a second distribution of rows: {tile} and {tiles[0]}", "one layout", stmt.location)
        elif isinstance(stmt, ir.Copy):
            layout, tensor = kernel.layouts[stmt.tile], stmt.region.tensor
            tile = tile_of(layout)
            vector = {PerRow: 1, PerColumn: tile.column_vector, VectorisedRows: tile.vector}[type(layout)]
            found = f"{stmt.tile.name} is accessed {vector} elements at a time, {tensor.name} promises {tensor.vector}"
            instead = f"T.Tensor(..., vector={vector}), or a layout of that vector"
            require(tensor.vector % vector == 0, found, instead, stmt.location)
        elif isinstance(stmt, ir.Parallel):
            _check_columns(stmt, kernel)
    limit = min(target.registers_per_thread, target.registers_per_cta // kernel.threads)
    largest = max((la.registers * ir.DTYPES[b.dtype] / 4 for b, la in kernel.layouts.items()), default=0)
    problem = f"a fragment needs {largest:.0f} registers of {limit}"
    require(largest <= limit, problem, "fewer passes or chunks, or more threads")


def _check_columns(loop: ir.Parallel, kernel: ir.Kernel) -> None:
    """A shifted tile has columns that no index names, so that an index is no column number."""
    for store in loop.body:
        layout = kernel.layouts[store.buffer]
        column = None if isinstance(layout, PerRow) else loop.vars[-1]
        used = tile_of(layout).shifted and any(e == column for e in ir.as_numbers(store.value))
        problem = f"{column} is used as a number, but the tile is shifted"
        require(not used, problem, "a layout that is not shifted", store.location)


def shared_memory(kernel: ir.Kernel, target: Target) -> None:
    """Tiles, barriers and the exchanges of reductions lie apart, and all fit."""
    ranges = sorted(verify_roles.ranges(kernel) if kernel.roles else _exchanges(kernel))
    apart = all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    fits = max((end for _, end in ranges), default=0) <= kernel.shared_bytes <= target.shared_bytes
    problem = f"shared memory of {kernel.shared_bytes} bytes of {target.shared_bytes}, planned as {ranges}"
    require(apart and fits, problem, "fewer stages or a smaller tile", kernel.location)


def _exchanges(kernel: ir.Kernel):
    """Each reduction's, with its size."""
    for stmt in ir.walk(kernel.body, ir.Reduce):
        layout = kernel.layouts[stmt.src]
        groups = layout.threads_per_row if layout.lanes_on_rows else -(-layout.threads_per_row // 32)
        if groups > 1:
            problem = f"the reduction of {stmt.src.name} has no buffer"
            require(stmt in kernel.shared, problem, "plan_shared_memory", stmt.location)
            yield kernel.shared[stmt], kernel.shared[stmt] + layout.rows * groups * 4


def unchanged(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    return kernel


def of_kind(groups=unchanged, threads=unchanged, rows=unchanged, ws=None):
    """A pass or a check by the kind of a kernel: with roles, of warp groups, T.ws or all threads alike; without, of rows."""

    def run(kernel: ir.Kernel, target: Target):
        by_roles = groups if target.warp_groups else threads
        return (ws if ws and plan.feeds_itself(kernel) else by_roles if kernel.roles else rows)(kernel, target)

    return run


CHECKS = {
    "well_formed": well_formed,
    "roles": of_kind(verify_roles.roles, verify_roles.roles),
    "aliases": of_kind(verify_roles.aliases),
    "schedule": of_kind(verify_roles.schedule, verify_roles.schedule),
    "layouts": layouts,
    "shared_memory": shared_memory,
    "barriers": of_kind(verify_roles.barriers, verify_roles.barriers),
    "budgets": of_kind(verify_roles.budgets),
}
