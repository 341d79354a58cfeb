"""Loops, conditions and reductions over tiles."""

import operator
from contextlib import contextmanager

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.language.builder import builder, here
from tileops_dsl.language.memory import Fragment
from tileops_dsl.language.rebinding import reject_rebinding
from tileops_dsl.language.scalar import Value, to_expr


def Parallel(*extents: int):
    """for i, j in T.Parallel(rows, cols): element-wise assignments, spread over the threads by the fragments' layouts."""
    b, where = builder(), here()
    reject_rebinding()
    if b.in_parallel:
        raise TileError("T.Parallel inside T.Parallel", "one loop with all extents: for i, j in T.Parallel(m, n)", where)
    extents = tuple(map(operator.index, extents))
    names = b.loop_vars("int32", where, len(extents))
    b.open()
    b.in_parallel = True
    yield Value(names[0]) if len(names) == 1 else tuple(map(Value, names))
    b.in_parallel = False
    body = b.close()
    b.emit(ir.Parallel(where, names, extents, body))


def serial(extent):
    """for k in T.serial(n): the body n times in order; n may be known only at run time."""
    b, where = builder(), here()
    reject_rebinding()
    (var,) = b.loop_vars("int32", where, 1)
    b.open()
    yield Value(var)
    body = b.close()
    b.emit(ir.Serial(where, var, to_expr(extent), body))


@contextmanager
def If(condition):
    """with T.If(condition): statements that run where the condition, the same for all threads, holds."""
    b, where = builder(), here()
    reject_rebinding()
    if to_expr(condition).dtype != "bool":
        raise TileError(f"{to_expr(condition)} is not a condition", "a comparison, such as n > 0", where)
    b.open()
    yield
    body = b.close()
    b.emit(ir.If(where, to_expr(condition), body))


def reduce_max(src: Fragment, dst: Fragment, dim: int = -1, *, clear: bool = True) -> None:
    """dst[i] = max over j of src[i, j] (a NaN gives way to a number); with clear=False, of the old dst[i] too."""
    _reduce("max", src, dst, dim, clear)


def reduce_sum(src: Fragment, dst: Fragment, dim: int = -1, *, clear: bool = True) -> None:
    """dst[i] = sum over j of src[i, j] in float32, pairwise; with clear=False, plus the old dst[i]."""
    _reduce("sum", src, dst, dim, clear)


def _reduce(op: str, src: Fragment, dst: Fragment, dim: int, clear: bool) -> None:
    where = here()
    if len(src.shape) != 2 or dim not in (-1, 1) or src.shape[:-1] != dst.shape:
        raise TileError(
            f"reduction of {list(src.shape)} over dim {dim} into {list(dst.shape)}",
            "the last dimension of a tile, into a fragment of the others",
            where,
        )
    if dst.dtype != "float32":
        raise TileError(f"{dst.buffer.name} is {dst.dtype}; reductions are done in float32", 'a "float32" fragment', where)
    builder().emit(ir.Reduce(where, op, src.buffer, dst.buffer, clear))
