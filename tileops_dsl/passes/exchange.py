"""Exchange through shared memory: where groups divide the columns of a product (FullCol) and a statement needs all of them,
where the warps of a group do so with the rows that a reduction runs down, and where b of a product lies in registers.

A product that has its a (or b) in registers reads it from a tile to which each group copies its columns. A reduction is each
group's (or warp's) own; their results go to a vector, of which each combines all, in one order. These are statements like an
author's, so that all that follows sees them: `stores.exchanged` has the groups meet, the planner gives them shared memory.
Vectors are the same in all groups and warps that have their rows or columns. A partial sum stays a thread's own until it is
closed.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.plan import GROUP, by_columns, down_rows
from tileops_dsl.targets import Target

WARPS = 4  # of a group


def exchange(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    across, down, groups = by_columns(kernel), down_rows(kernel), kernel.threads // GROUP
    if down:
        _check_down(kernel)
    elif across:
        _check(kernel, target)
    for gemm in (s for s in ir.walk(kernel.body, ir.Gemm) if s.b.scope == "fragment" and not (target.warp_groups or down)):
        problem = f"{target.name} takes b from shared memory, and {gemm.b.name} lies in registers"
        raise TileError(problem, "T.copy into a T.alloc_shared tile, reductions over dim 0, or target sm_90a", gemm.location)
    added = _Exchanges(kernel, WARPS if down else groups if across else 1)
    body = added.body(kernel.body)
    return replace(kernel, body=(*added.allocations, *body)) if added.allocations else kernel


def _check(kernel: ir.Kernel, target: Target) -> None:
    gemms = list(ir.walk(kernel.body, ir.Gemm))
    first = next(gemm for gemm in gemms if gemm.policy == "full_col")
    other = next((gemm for gemm in gemms if gemm.policy != "full_col"), None)
    turns = any(loop.alternate for loop in ir.walk(kernel.body, ir.Persistent))
    problems = {
        f"{target.name} has no warp groups to divide columns": not target.warp_groups,
        "groups that alternate have whole tiles, and no columns to divide": turns,
        f"the product into {other and other.c.name} divides its rows": other is not None,
    }
    for problem in (text for text, holds in problems.items() if holds):
        raise TileError(problem, "one policy for all products: FullRow, or FullCol of groups that share tiles", first.location)


def _check_down(kernel: ir.Kernel) -> None:
    """Vectors have a value for each column: all reductions are alike, and one group has all rows."""
    reduces = [s for s in ir.walk(kernel.body, ir.Reduce) if len(s.src.shape) == 2]
    first = next(s for s in reduces if s.dim == 0)
    other = next((s for s in reduces if s.dim != 0), None)
    problems = {
        "a reduction over dim 0 in a kernel without products of warp groups": not any(ir.walk(kernel.body, ir.Gemm)),
        f"{kernel.threads // GROUP} groups divide the rows of a reduction over dim 0": kernel.threads != GROUP,
        f"{first.dst.name} has a value for each column, {other and other.dst.name} for each row": other is not None,
    }
    for problem in (text for text, holds in problems.items() if holds):
        raise TileError(problem, "T.Kernel(.., threads=128) with T.gemm, and dim=0 in all reductions", first.location)


class _Exchanges:
    def __init__(self, kernel: ir.Kernel, groups: int):
        self.groups, self.allocations = groups, []  # `groups`: that have a part of what a reduction takes
        self.across = by_columns(kernel) and kernel.threads > GROUP
        self.names = {s.buffer.name for s in ir.walk(kernel.body, ir.Alloc)} | {t.name for t in kernel.tensors}

    def body(self, body) -> tuple[ir.Stmt, ...]:
        out: list[ir.Stmt] = []
        for stmt in body:
            if isinstance(stmt, ir.Gemm) and stmt.b.scope == "fragment":
                out += self.operand(stmt, "b")
            elif isinstance(stmt, ir.Gemm) and stmt.a.scope == "fragment" and self.across:
                out += self.operand(stmt, "a")
            elif isinstance(stmt, ir.Reduce) and not stmt.partial and self.groups > 1:
                out += self.reduction(stmt)
            elif isinstance(stmt, ir.If) and self.groups > 1 and _of_warps(stmt):
                problem = "a reduction of more than a warp stands under T.any_of"
                raise TileError(problem, "GemmWarpPolicy.FullRow, or the reduction in front of it", stmt.location)
            else:
                out.append(replace(stmt, body=self.body(stmt.body)) if hasattr(stmt, "body") else stmt)
        return tuple(out)

    def operand(self, gemm: ir.Gemm, which: str) -> list[ir.Stmt]:
        tile = getattr(gemm, which)
        whole = self.allocate(gemm, f"{tile.name}_all", "shared", tile.shape, tile.dtype)
        return [_copy(gemm.location, tile, whole), replace(gemm, **{which: whole})]

    def reduction(self, stmt: ir.Reduce) -> list[ir.Stmt]:
        """What dst held counts once."""
        dst, (size,), dtype = stmt.dst, stmt.dst.shape, stmt.dst.dtype
        own = dst if stmt.clear else self.allocate(stmt, f"{dst.name}_own", "fragment", (size,), dtype)
        of_all = self.allocate(stmt, f"{dst.name}_all", "shared", (self.groups * size,), dtype)
        return [replace(stmt, dst=own, clear=True), _copy(stmt.location, own, of_all), replace(stmt, src=of_all, dim=-1)]

    def allocate(self, stmt: ir.Stmt, name: str, scope: str, shape: tuple[int, ...], dtype: str) -> ir.Buffer:
        while name in self.names:
            name += "_"
        self.names.add(name)
        buffer = ir.Buffer(name, scope, shape, dtype, common=scope == "shared")
        self.allocations.append(ir.Alloc(stmt.location, buffer))
        return buffer


def _of_warps(stmt: ir.If) -> bool:
    """Whether reductions stand under T.any_of."""
    return any(isinstance(e, ir.AnyOf) for e in ir.subexprs(stmt.condition)) and any(ir.walk(stmt.body, ir.Reduce))


def _copy(where: ir.Location, src: ir.Buffer, dst: ir.Buffer) -> ir.Copy:
    return ir.Copy(where, src, dst, None, None, None)
