"""Loops, conditions, reductions and matrix products over tiles."""

import enum
import operator
from contextlib import contextmanager

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.language.builder import builder, here
from tileops_dsl.language.memory import Fragment
from tileops_dsl.language.scalar import Value, to_expr

__all__ = ["GemmWarpPolicy", "If", "Parallel", "Persistent", "Pipelined", "gemm", "reduce_max", "reduce_sum", "serial"]


def Parallel(*extents: int):
    """for i, j in T.Parallel(rows, cols): element-wise assignments, spread over the threads by the fragments' layouts."""
    b, where = builder(), here()
    if b.in_parallel:
        raise TileError("T.Parallel inside T.Parallel", "one loop with all extents: for i, j in T.Parallel(m, n)", where)
    extents = tuple(map(operator.index, extents))
    names = b.loop_vars(where, len(extents))
    b.open()
    b.in_parallel = True
    yield Value(names[0]) if len(names) == 1 else tuple(map(Value, names))
    b.in_parallel = False
    b.emit(ir.Parallel(where, names, extents, b.close()))


def serial(extent):
    """for k in T.serial(n): the body n times in order; n may be known only at run time."""
    b, where = builder(), here()
    (var,) = b.loop_vars(where, 1)
    b.open()
    yield Value(var)
    b.emit(ir.Serial(where, var, to_expr(extent), b.close()))


def Pipelined(stop, *, num_stages: int, pending: int = 0):
    """for i in T.Pipelined(n, num_stages=4): the body n times in order; its copies run ahead by up to `num_stages` buffers.

    `pending`: products that may be unfinished when the next iteration begins. Over views of a fragment, n is a constant.
    """
    b, where = builder(), here()
    if num_stages < 1 or pending not in (0, 1) or pending >= num_stages:
        problem = f"{num_stages} stages with {pending} products unfinished"
        raise TileError(problem, "at least one stage, pending=1 with two or more, or pending=0", where)
    (var,) = b.loop_vars(where, 1)
    b.open()
    yield Value(var)
    b.emit(ir.Pipelined(where, var, to_expr(stop), num_stages, pending, b.close()))


def Persistent(extents: tuple, *, group_size: int = 1, alternate: bool = False):
    """for row, column in T.Persistent((rows, columns)): this CTA's share of all tiles, in groups of `group_size` rows.

    Within a group the tiles go down its rows, column by column, so that CTAs that run together share what they read.
    With (batch, rows, columns) all of one item come before those of the next. `alternate`: each of two groups of 128 threads
    takes every other tile, with all its rows; their product loops take turns, and what follows one runs beside the other's.
    """
    b, where = builder(), here()
    if len(extents) not in (2, 3) or group_size < 1:
        problem = f"{len(extents)} extents in groups of {group_size}"
        raise TileError(problem, "rows and columns, perhaps a batch before them, groups of 1 or more", where)
    names = b.loop_vars(where, len(extents))
    b.open()
    yield tuple(map(Value, names))
    b.emit(ir.Persistent(where, names, tuple(map(to_expr, extents)), group_size, b.close(), alternate))


@contextmanager
def If(condition):
    """with T.If(condition): statements that run where the condition, the same for all threads, holds."""
    b, where, condition = builder(), here(), to_expr(condition)
    if condition.dtype != "bool":
        raise TileError(f"{condition} is not a condition", "a comparison, such as n > 0", where)
    b.open()
    yield
    b.emit(ir.If(where, condition, b.close()))


def reduce_max(src: Fragment, dst: Fragment, dim: int = -1, *, clear: bool = True) -> None:
    """dst[i] = max over j of src[i, j] (a NaN gives way to a number); with clear=False, of the old dst[i] too."""
    _reduce("max", src, dst, dim, clear)


def reduce_sum(src: Fragment, dst: Fragment, dim: int = -1, *, clear: bool = True) -> None:
    """dst[i] = sum over j of src[i, j] in float32, pairwise; with clear=False, plus the old dst[i]."""
    _reduce("sum", src, dst, dim, clear)


def _reduce(op: str, src: Fragment, dst: Fragment, dim: int, clear: bool) -> None:
    where = here()
    if len(src.shape) != 2 or dim not in (-1, 1) or src.shape[:-1] != dst.shape:
        problem = f"reduction of {list(src.shape)} over dim {dim} into {list(dst.shape)}"
        raise TileError(problem, "the last dimension of a tile, into a fragment of the others", where)
    if dst.dtype != "float32":
        raise TileError(f"{dst.buffer.name} is {dst.dtype}; reductions are done in float32", 'a "float32" fragment', where)
    builder().emit(ir.Reduce(where, op, src.buffer, dst.buffer, clear))


class GemmWarpPolicy(enum.Enum):
    """How the groups of 128 threads divide the result: FullRow, each has some of the rows."""

    FullRow = "full_row"


def gemm(
    a: Fragment,
    b: Fragment,
    c: Fragment,
    *,
    transpose_A: bool = False,
    transpose_B: bool = False,
    policy: GemmWarpPolicy = GemmWarpPolicy.FullRow,
    clear_accum=False,
) -> None:
    """c += a b, in float32; where `clear_accum` (a condition, perhaps) holds, c = a b. a [M, K], b [K, N], or transposed."""
    where = here()
    (m, k), (k_b, n) = (a.shape[::-1] if transpose_A else a.shape), (b.shape[::-1] if transpose_B else b.shape)
    if k != k_b or c.shape != (m, n):
        problem = f"a product of {[m, k]} and {[k_b, n]} into {list(c.shape)}"
        raise TileError(problem, "a [M, K], b [K, N] (or transposed) and c [M, N]", where)
    if (a.buffer.scope, b.buffer.scope) != ("shared", "shared") or not isinstance(c.buffer, ir.Buffer):
        raise TileError("a product takes its operands from shared memory", "T.alloc_shared tiles and a fragment", where)
    if a.dtype != b.dtype or a.dtype == "float32" or c.dtype != "float32" or c.buffer.scope != "fragment":
        problem = f"a product of {a.dtype} and {b.dtype} into {c.buffer.scope} {c.dtype}"
        raise TileError(problem, "two tiles of bfloat16 or of float16, and a float32 fragment", where)
    clear = to_expr(clear_accum)
    if clear.dtype != "bool":
        raise TileError(f"clear_accum is {clear}, not a condition", "True, False or a comparison, such as i == 0", where)
    builder().emit(ir.Gemm(where, a.buffer, b.buffer, c.buffer, transpose_A, transpose_B, policy.value, clear))
