"""Exchange through shared memory, where groups divide the columns of a product (FullCol) and a statement needs all of them.

A product that has its a in registers reads it from a tile to which each group copies its columns. A reduction is each group's
own; the groups' results go to a vector, of which each group combines all, in one order. These are statements like an author's,
so that all that follows sees them: `stores.exchanged` has the groups meet, the planner gives them shared memory. Row vectors
are the same in all groups. A partial sum stays a thread's own until it is closed.
"""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.plan import GROUP, by_columns
from tileops_dsl.targets import Target


def exchange(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    if not by_columns(kernel):
        return kernel
    _check(kernel, target)
    groups = kernel.threads // GROUP
    if groups == 1:
        return kernel
    added = _Exchanges(kernel, groups)
    body = added.body(kernel.body)
    return replace(kernel, body=(*added.allocations, *body))


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


class _Exchanges:
    def __init__(self, kernel: ir.Kernel, groups: int):
        self.groups, self.allocations = groups, []
        self.names = {s.buffer.name for s in ir.walk(kernel.body, ir.Alloc)} | {t.name for t in kernel.tensors}

    def body(self, body) -> tuple[ir.Stmt, ...]:
        out: list[ir.Stmt] = []
        for stmt in body:
            if isinstance(stmt, ir.Gemm) and stmt.a.scope == "fragment":
                out += self.operand(stmt)
            elif isinstance(stmt, ir.Reduce) and not stmt.partial:
                out += self.reduction(stmt)
            else:
                out.append(replace(stmt, body=self.body(stmt.body)) if hasattr(stmt, "body") else stmt)
        return tuple(out)

    def operand(self, gemm: ir.Gemm) -> list[ir.Stmt]:
        whole = self.allocate(gemm, f"{gemm.a.name}_all", "shared", gemm.a.shape, gemm.a.dtype)
        return [_copy(gemm.location, gemm.a, whole), replace(gemm, a=whole)]

    def reduction(self, stmt: ir.Reduce) -> list[ir.Stmt]:
        """What dst held counts once."""
        dst, (rows,), dtype = stmt.dst, stmt.dst.shape, stmt.dst.dtype
        own = dst if stmt.clear else self.allocate(stmt, f"{dst.name}_own", "fragment", (rows,), dtype)
        of_all = self.allocate(stmt, f"{dst.name}_all", "shared", (self.groups * rows,), dtype)
        return [replace(stmt, dst=own, clear=True), _copy(stmt.location, own, of_all), replace(stmt, src=of_all)]

    def allocate(self, stmt: ir.Stmt, name: str, scope: str, shape: tuple[int, ...], dtype: str) -> ir.Buffer:
        while name in self.names:
            name += "_"
        self.names.add(name)
        buffer = ir.Buffer(name, scope, shape, dtype, common=scope == "shared")
        self.allocations.append(ir.Alloc(stmt.location, buffer))
        return buffer


def _copy(where: ir.Location, src: ir.Buffer, dst: ir.Buffer) -> ir.Copy:
    return ir.Copy(where, src, dst, None, None, None)
