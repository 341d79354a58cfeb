"""Matrix products, and the loops whose copies and products overlap."""

import enum

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.language.builder import builder, here
from tileops_dsl.language.memory import Fragment
from tileops_dsl.language.rebinding import reject_rebinding
from tileops_dsl.language.scalar import Value, to_expr


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


def Pipelined(stop, *, num_stages: int, pending: int = 0):
    """for i in T.Pipelined(n, num_stages=4): the body n times in order; its copies run ahead by up to `num_stages` buffers.

    `pending`: products that may be unfinished when the next iteration begins. Over views of a fragment, n is a constant.
    """
    b, where = builder(), here()
    reject_rebinding()
    if num_stages < 1 or pending not in (0, 1) or pending >= num_stages:
        problem = f"{num_stages} stages with {pending} products unfinished"
        raise TileError(problem, "at least one stage, pending=1 with two or more, or pending=0", where)
    (var,) = b.loop_vars("int32", where, 1)
    b.open()
    yield Value(var)
    body = b.close()
    b.emit(ir.Pipelined(where, var, to_expr(stop), num_stages, pending, body))


def Persistent(extents: tuple, *, group_size: int = 1):
    """for row, column in T.Persistent((rows, columns)): this CTA's share of all tiles, in groups of `group_size` rows.

    Within a group the tiles go down its rows, column by column, so that CTAs that run together share what they read.
    """
    b, where = builder(), here()
    reject_rebinding()
    if len(extents) != 2 or group_size < 1:
        raise TileError(f"{len(extents)} extents in groups of {group_size}", "rows and columns, groups of 1 or more", where)
    names = b.loop_vars("int32", where, len(extents))
    b.open()
    yield tuple(map(Value, names))
    body = b.close()
    b.emit(ir.Persistent(where, names, tuple(to_expr(e) for e in extents), group_size, body))
