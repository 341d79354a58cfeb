"""What must hold between passes, computed independently of the passes that establish it."""

import functools
import itertools

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.layouts import PerColumn, PerRow, VectorisedRows, tile_of
from tileops_dsl.passes import portable_verify, verify_roles
from tileops_dsl.targets import Target


def verify(kernel: ir.Kernel, target: Target, properties: tuple[str, ...]) -> None:
    for name in properties:
        CHECKS[name](kernel, target)


def well_formed(kernel: ir.Kernel, target: Target) -> None:
    """Names are in scope, buffers are allocated once and before use, indices fit; a tensor is used only where it was passed."""
    scope = {v.name for v in (*kernel.dims, *kernel.scalars, *kernel.blocks)}
    scope |= {t.flag for t in kernel.tensors if t.flag}
    _check_block(kernel.body, scope, set(), list(kernel.tensors))
    for tensor in (t for t in kernel.tensors if t.optional):
        guarded = {id(s) for s in ir.walk_where(kernel.body, tensor.given)}
        for stmt in (s for s in ir.walk(kernel.body) if isinstance(s, ir.Copy) and s.region and s.region.tensor == tensor):
            there = id(stmt) in guarded
            _require(there, f"{tensor.name} may be missing here", f"with T.If({tensor.name}.given): around it", stmt)


def _check_block(body, scope: set[str], live: set[ir.Buffer], tensors: list[ir.Tensor]) -> None:
    for stmt in body:
        for expr in ir.exprs_of(stmt):
            _check_expr(expr, scope, live, stmt)
        for region in (r for r in vars(stmt).values() if isinstance(r, ir.Region)):
            _require(region.tensor in tensors, f"{region.tensor.name} is no parameter of the program", "its own T.Tensor", stmt)
        tiles = (t for t in vars(stmt).values() if isinstance(t, ir.Tile) and not isinstance(stmt, ir.Alloc))
        for buffer in map(ir.buffer_of, tiles):
            _require(buffer in live, f"{buffer.name} is not allocated here", "T.alloc_fragment before its first use", stmt)
        if isinstance(stmt, ir.Alloc):
            _require(stmt.buffer not in live, f"{stmt.buffer.name} is allocated twice", "one allocation", stmt)
            live.add(stmt.buffer)
        if isinstance(stmt, ir.Parallel):
            _check_extents(stmt)
        own = {v.name for v in getattr(stmt, "vars", ())} | ({stmt.var.name} if hasattr(stmt, "var") else set())
        _check_block(getattr(stmt, "body", ()), scope | own, set(live) if own else live, tensors)


def _check_extents(loop: ir.Parallel) -> None:
    extent = dict(zip(loop.vars, loop.extents, strict=True))
    for store in loop.body:
        for element in (store, *ir.loads(store.value)):
            for index, size in zip(element.indices, element.buffer.shape, strict=True):
                problem = f"the loop runs over {extent.get(index)} and {element.buffer.name} has {size}"
                instead = f"T.Parallel over the shape {list(element.buffer.shape)}"
                _require(extent.get(index, size) == size, problem, instead, store)


def _check_expr(expr: ir.Expr, scope: set[str], live: set[ir.Buffer], stmt: ir.Stmt) -> None:
    for e in ir.subexprs(expr):
        if isinstance(e, ir.Var):
            _require(e.name in scope, f"{e.name} is used outside its loop", "the loop's values inside the loop", stmt)
        elif isinstance(e, ir.Load):
            problem = f"{e.buffer.name} is not allocated here"
            _require(ir.buffer_of(e.buffer) in live, problem, "T.alloc_fragment before its first use", stmt)
            _require(isinstance(stmt, ir.Store), f"{e} is read outside T.Parallel", "a dimension or a T.Scalar", stmt)
        elif isinstance(e, ir.Call):
            arity = ir.OPS[e.op][0]
            _require(len(e.args) == arity, f"{e.op} with {len(e.args)} operands", f"{arity} operands", stmt)


def layouts(kernel: ir.Kernel, target: Target) -> None:
    """Each layout places each element, fills the registers of each of its threads exactly, and fits the register file.

    All layouts of a kernel distribute the same tile, and its copies access what the tensors promise.
    """
    if kernel.roles:
        verify_roles.layouts(kernel, target)
        return
    first = None
    for stmt in ir.walk(kernel.body):
        if isinstance(stmt, ir.Alloc):
            layout = kernel.layouts.get(stmt.buffer)
            _require(layout is not None, f"{stmt.buffer.name} has no layout", "T.annotate_layout", stmt)
            _check_layout(stmt, layout, kernel.threads)
            tile = tile_of(layout)
            first = first or tile
            _require(tile == first, f"a second distribution of rows: {tile} and {first}", "one layout", stmt)
        elif isinstance(stmt, ir.Copy):
            _check_copy(stmt, kernel)
        elif isinstance(stmt, ir.Parallel):
            _check_columns(stmt, kernel)
    limit = min(target.registers_per_thread, target.registers_per_cta // kernel.threads)
    largest = max((la.registers * ir.DTYPES[b.dtype] / 4 for b, la in kernel.layouts.items()), default=0)
    if largest > limit:
        raise TileError(f"a fragment needs {largest:.0f} registers of {limit}", "fewer passes or chunks, or more threads")


def _check_copy(stmt: ir.Copy, kernel: ir.Kernel) -> None:
    layout, tensor = kernel.layouts[stmt.tile], stmt.region.tensor
    tile = tile_of(layout)
    vector = {PerRow: 1, PerColumn: tile.column_vector, VectorisedRows: tile.vector}[type(layout)]
    found = f"{stmt.tile.name} is accessed {vector} elements at a time, {tensor.name} promises {tensor.vector}"
    _require(tensor.vector % vector == 0, found, f"T.Tensor(..., vector={vector}), or a layout of that vector", stmt)


def _check_columns(loop: ir.Parallel, kernel: ir.Kernel) -> None:
    """A shifted tile has columns that no index names, so that an index is no column number."""
    for store in loop.body:
        layout = kernel.layouts[store.buffer]
        column = None if isinstance(layout, PerRow) else loop.vars[-1]
        used = tile_of(layout).shifted and any(e == column for e in ir.as_numbers(store.value))
        _require(not used, f"{column} is used as a number, but the tile is shifted", "a layout that is not shifted", store)


def _check_layout(stmt: ir.Alloc, layout, threads: int) -> None:
    """By enumeration of the tile's shape: compare with what the layout claims."""
    shape = stmt.buffer.shape
    tile = tile_of(layout)
    expected = {VectorisedRows: (tile.rows, tile.cols), PerRow: (tile.rows,), PerColumn: (tile.cols,)}[type(layout)]
    _require(shape == expected, f"{stmt.buffer.name} is {list(shape)} and its layout {list(expected)}", "one shape", stmt)
    _require(tile.threads == threads, f"layout of {tile.threads} threads in a kernel of {threads}", "T.Kernel's threads", stmt)
    problem = _placement_problem(layout, shape)
    _require(problem is None, f"the layout of {stmt.buffer.name} {problem}", "a layout that covers tile and registers", stmt)


@functools.cache
def _placement_problem(layout, shape: tuple[int, ...]) -> str | None:
    seen: dict[int, set[int]] = {}
    for index in itertools.product(*map(range, shape)):
        holders, register = layout.place(index)
        for thread in holders:
            registers = seen.setdefault(thread, set())
            if register in registers:
                return f"puts two elements into register {register} of thread {thread}"
            registers.add(register)
    tile = tile_of(layout)
    edge = {layout.registers - 1} if tile.shifted and not isinstance(layout, PerRow) else set()
    full, threads = set(range(layout.registers)) - edge, set(range(tile.threads))
    return None if set(seen) == threads and all(r == full for r in seen.values()) else "leaves registers or threads out"


def shared_memory(kernel: ir.Kernel, target: Target) -> None:
    """Each exchange buffer has its size, none overlaps another, all fit."""
    if kernel.roles:
        verify_roles.shared_memory(kernel, target)
        return
    ranges = []
    for stmt in ir.walk(kernel.body):
        if isinstance(stmt, ir.Reduce):
            layout = kernel.layouts[stmt.src]
            groups = layout.threads_per_row if layout.lanes_on_rows else -(-layout.threads_per_row // 32)
            if groups > 1:
                _require(stmt in kernel.shared, f"the reduction of {stmt.src.name} has no buffer", "plan_shared_memory", stmt)
                ranges.append((kernel.shared[stmt], kernel.shared[stmt] + layout.rows * groups * 4))
    ranges.sort()
    overlap = any(a[1] > b[0] for a, b in itertools.pairwise(ranges))
    if overlap or (ranges and ranges[-1][1] > kernel.shared_bytes) or kernel.shared_bytes > target.shared_bytes:
        raise TileError(f"the shared-memory plan {ranges} does not fit {kernel.shared_bytes} bytes", "a smaller tile")


def _require(holds: bool, problem: str, instead: str, stmt: ir.Stmt) -> None:
    if not holds:
        raise TileError(problem, instead, stmt.location)


def of_target(with_groups, without=lambda kernel, target: kernel):
    """A pass or a check for targets with warp groups, and one for those without."""
    return lambda kernel, target: (with_groups if target.warp_groups else without)(kernel, target)


CHECKS = {
    "well_formed": well_formed,
    "roles": verify_roles.roles,
    "schedule": of_target(verify_roles.schedule, portable_verify.schedule),
    "layouts": layouts,
    "shared_memory": shared_memory,
    "barriers": of_target(verify_roles.barriers, portable_verify.order),
    "budgets": of_target(verify_roles.budgets),
}
