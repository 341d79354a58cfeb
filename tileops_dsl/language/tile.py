"""Loops, conditions, reductions and matrix products over tiles."""

import enum
import operator
from contextlib import contextmanager

from tileops_dsl import ir
from tileops_dsl.errors import TileError, require
from tileops_dsl.language.builder import RESERVED_PERSISTENT, builder, here
from tileops_dsl.language.memory import Fragment, Token, is_cut
from tileops_dsl.language.scalar import Value, to_expr

__all__ = [
    "GemmWarpPolicy", "If", "Parallel", "Persistent", "Pipelined", "any_above", "any_of", "gemm", "reduce_max", "reduce_sum",
    "serial", "wgmma_gemm", "ws",
]  # fmt: skip


def Parallel(*extents: int):
    """for i, j in T.Parallel(rows, cols): element-wise assignments, spread over the threads by the fragments' layouts."""
    b, where = builder(), here()
    require(not b.in_parallel, "T.Parallel inside T.Parallel", "one loop with all extents: for i, j in T.Parallel(m, n)", where)
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


def Pipelined(*bounds, num_stages: int, pending: int = 0, turns: bool = False):
    """for i in T.Pipelined(n, num_stages=4): the body n times in order; its copies run ahead by up to `num_stages` buffers.

    Also (start, n) and (start, n, step), as in range(). `pending`: products that may be unfinished when the next iteration
    begins. `turns`: of the groups of 128 threads one after the other issues an iteration's products, so that one's run beside
    the others' arithmetic. Over views of a fragment, n is a constant.
    """
    b, where = builder(), here()
    if num_stages < 1 or pending not in (0, 1) or pending >= num_stages:
        problem = f"{num_stages} stages with {pending} products unfinished"
        raise TileError(problem, "at least one stage, pending=1 with two or more, or pending=0", where)
    start, stop, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}.get(len(bounds), (0, 0, 0))
    if not isinstance(step, int) or step < 1:
        raise TileError("a loop is not over range(stop), (start, stop) or (start, stop, step)", "a constant step >= 1", where)
    (var,) = b.loop_vars(where, 1)
    b.open()
    yield Value(var)
    b.emit(ir.Pipelined(where, var, to_expr(stop), num_stages, pending, b.close(), to_expr(start), step, turns))


def Persistent(*extents, group_size: int = 1, alternate: bool = False, zigzag: bool = False, longest_first=None):
    """for row, column in T.Persistent((rows, columns)): this CTA's share of all tiles, in groups of `group_size` rows.

    Within a group the tiles go down its rows, column by column, so that CTAs that run together share what they read.
    With (batch, rows, columns) all of one item come before those of the next. `alternate`: each of two groups of 128 threads
    takes every other tile, with all its rows; their product loops take turns, and what follows one runs beside the other's.
    `zigzag`: a CTA takes the last column of a row of tiles and the first, or the second from both ends, and so on: where work
    grows along the columns, as in a triangle, each pair is as much work. `longest_first`, a number of rows of tiles: of a
    section of so many, all last columns come first, then those before them; with a CTA for each tile, which then starts when
    another is done, that is even work, too, and a section's rows are what the L2 cache shall hold.

    In a kernel with a grid, for item in T.Persistent(begin, end): the run of items that is this CTA's, which may be none.
    """
    b, where = builder(), here()
    start, extents = (to_expr(extents[0]), extents[1:]) if len(extents) == 2 else (None, *extents)
    if bool(b.kernel["grid"]) != bool(start) or (start and (group_size > 1 or alternate or zigzag or longest_first)):
        problem = f"{'a run' if start else 'a share'} of tiles in a kernel with{'' if b.kernel['grid'] else 'out'} a grid"
        instead = "T.Persistent((rows, columns), ..) without a grid; with one T.Persistent(begin, end), which has no options"
        raise TileError(problem, instead, where)
    if not start and (len(extents) not in (2, 3) or group_size < 1):
        problem = f"{len(extents)} extents in groups of {group_size}"
        raise TileError(problem, "rows and columns, perhaps a batch before them, groups of 1 or more", where)
    orders = [name for name, given in (("zigzag", zigzag), ("longest_first", longest_first is not None)) if given]
    if orders and (len(orders) > 1 or alternate or group_size > 1 or b.kernel["cluster"] != (1, 1)):
        problem = f"{orders[0]} with {orders[1] if len(orders) > 1 else 'alternate, a group_size or a cluster'}"
        raise TileError(problem, f"T.Persistent(extents, {orders[0]}=..) alone, in a kernel without clusters", where)
    section = None if longest_first is None else to_expr(longest_first)
    if start:
        b.in_run, b.reserved = True, b.reserved | RESERVED_PERSISTENT
    names = b.loop_vars(where, len(extents))
    b.open()
    yield Value(names[0]) if start else tuple(map(Value, names))
    b.emit(ir.Persistent(where, names, tuple(map(to_expr, extents)), group_size, b.close(), alternate, zigzag, start, section))
    b.in_run = False


@contextmanager
def If(condition, name: str = ""):
    """with T.If(condition): statements that run where the condition, the same for all threads, holds.

    With a name, what it is (`as again`) may be the condition of another T.If behind it, in the same loop.
    """
    b, where, condition = builder(), here(), to_expr(condition)
    require(condition.dtype == "bool", f"{condition} is not a condition", "a comparison, such as n > 0", where)
    b.open()
    yield Value(ir.AnyOf("bool", ir.Var("bool", b.declare(name)))) if name else None
    body = b.close()
    of_warps = any(isinstance(e, ir.AnyOf) for e in ir.subexprs(condition))
    for stmt in body if of_warps else ():
        if not isinstance(stmt, ir.Parallel | ir.Reduce):
            problem = "a statement of more than a warp stands under T.any_of"
            raise TileError(problem, "only T.Parallel and reductions", stmt.location)
    b.emit(ir.If(where, condition, body, name))


def any_of(fragment: Fragment, test) -> Value:
    """For T.If: whether the warp holds an element for which test(element) is true.

    Only T.Parallel and reductions may stand under it.
    """
    where, element = here(), ir.Load(fragment.dtype, fragment.buffer, (ir.EACH,) * len(fragment.shape))
    result = to_expr(test(Value(element)))
    if fragment.buffer.scope != "fragment" or result.dtype != "bool":
        raise TileError("T.any_of takes a fragment and a condition", "T.any_of(tile, lambda v: v > 0.0)", where)
    return Value(ir.AnyOf("bool", result))


def any_above(tile: Fragment, limit: Fragment) -> Value:
    """For T.If, as T.any_of: whether the warp holds an element of the tile that is above its row's limit (a NaN may count).

    Fast where no limit is negative: the order of floats is that of integers then, of which one instruction compares three.
    T.reduce_max of the tile under it takes what was found: of a row without such an element, perhaps less than the largest.
    """
    where, fits = here(), len(tile.shape) == 2 and limit.shape == tile.shape[:1]
    if not fits or {(t.buffer.scope, t.dtype) for t in (tile, limit)} != {("fragment", "float32")}:
        problem = f"T.any_above of {list(tile.shape)} and {list(limit.shape)}"
        raise TileError(problem, 'float32 fragments: a tile [rows, columns], and a vector [rows]', where)
    above, each = (ir.Load(t.dtype, t.buffer, (ir.EACH,) * len(t.shape)) for t in (limit, tile))
    return Value(ir.AnyOf("bool", ir.call("lt", above, each)))


@contextmanager
def ws(*groups: int):
    """with T.ws(0): statements of these groups of 128 threads, each on fragments of its own.

    Their order in the program is their meaning, in whatever group. In a kernel with T.ws no group is added.
    """
    b, where = builder(), here()
    known = range(b.kernel["threads"] // 128)
    if b.groups or not groups or len({*groups}) < len(groups) or not {*groups} <= {*known}:
        problem = f"T.ws{groups} of {len(known)} groups{' inside T.ws' * bool(b.groups)}"
        raise TileError(problem, "T.ws(0), T.ws(0, 1), ...: groups of 128 threads, one T.ws beside the other", where)
    b.open()
    b.groups, b.reserved = groups, b.reserved | {"a", "b"}  # names of a product in the text
    yield
    b.groups = ()
    b.emit(ir.On(where, groups, b.close()))


def reduce_max(src: Fragment, dst: Fragment, dim: int = -1, *, clear: bool = True) -> None:
    """dst[i] = max over j of src[i, j] (a NaN gives way to a number); with clear=False, of the old dst[i] too.

    `dim=0`, in a kernel with T.gemm whose reductions all have it: dst[j] = max over i.
    """
    _reduce("max", src, dst, dim, clear)


def reduce_sum(src: Fragment, dst: Fragment, dim: int = -1, *, clear: bool = True, partial: bool = False) -> None:
    """dst[i] = sum over j of src[i, j] in float32, pairwise; with clear=False, plus the old dst[i].

    `partial`: each thread keeps the sum of its own columns, which only factors of the row may change until
    T.reduce_sum(dst, total) adds them up. `dim=0`: over i, as of T.reduce_max; of a partial sum, each thread its own rows.
    """
    _reduce("sum", src, dst, dim, clear, partial)


def _reduce(op: str, src: Fragment, dst: Fragment, dim: int, clear: bool, partial: bool = False) -> None:
    where = here()
    closes = op == "sum" and src.shape == dst.shape and clear and not partial
    left = src.shape[1:] if dim == 0 else src.shape[:-1]
    if not closes and (len(src.shape) != 2 or dim not in (-1, 0, 1) or left != dst.shape):
        problem = f"reduction of {list(src.shape)} over dim {dim} into {list(dst.shape)}"
        raise TileError(problem, "a dimension of a tile [rows, columns], into a fragment of the other", where)
    if dst.dtype != "float32":
        raise TileError(f"{dst.buffer.name} is {dst.dtype}; reductions are done in float32", 'a "float32" fragment', where)
    builder().emit(ir.Reduce(where, op, src.buffer, dst.buffer, clear, partial, 0 if dim == 0 and not closes else -1))


class GemmWarpPolicy(enum.Enum):
    """How the groups of 128 threads divide the result: FullRow, each has some of the rows; FullCol, some of the columns.

    All products of a kernel have one policy, which divides the other tiles and fragments, too. Of columns that are divided,
    what a product reads from registers and what a reduction makes of a row is exchanged between the groups.
    """

    FullRow = "full_row"
    FullCol = "full_col"


def gemm(
    a: Fragment,
    b: Fragment,
    c: Fragment,
    *,
    transpose_A: bool = False,
    transpose_B: bool = False,
    policy: GemmWarpPolicy = GemmWarpPolicy.FullRow,
    clear_accum=False,
    stage: int = 0,
) -> None:
    """c += a b, in float32; where `clear_accum` (a condition, perhaps) holds, c = a b. a [M, K], b [K, N], or transposed.

    a lies in shared memory or in a fragment; so does b where one group has all of it. `stage=1`: the product runs in the next
    iteration, behind that one's products.
    """
    require(not builder().groups, "T.gemm divides its rows among all groups", "T.wgmma_gemm in T.ws", here())
    require(stage in (0, 1), f"a product of stage {stage}", "stage=0, or stage=1 for one that runs an iteration later", here())
    builder().emit(_product(a, b, c, transpose_A, transpose_B, policy, clear_accum, stage))


def wgmma_gemm(a: Fragment, b: Fragment, c: Fragment, *, transpose_A=False, transpose_B=False, clear_accum=False) -> Token:
    """T.gemm by each group of T.ws for itself, all rows; a and b may be views of shared tiles, and c columns of a fragment."""
    return Token(_product(a, b, c, transpose_A, transpose_B, GemmWarpPolicy.FullRow, clear_accum, 0))


def _has_whole_registers(c: ir.View) -> bool:
    """Whether T.ws has it, and it begins at a multiple of 8 columns."""
    first = c.origin[1]
    return bool(builder().groups) and isinstance(first, ir.Const) and first.value % 8 == 0


def _product(a, b, c, transpose_A, transpose_B, policy, clear_accum, stage) -> ir.Gemm:
    where = here()
    (m, k), (k_b, n) = (a.shape[::-1] if transpose_A else a.shape), (b.shape[::-1] if transpose_B else b.shape)
    problem = f"a product of {[m, k]} and {[k_b, n]} into {list(c.shape)}"
    require(k == k_b and c.shape == (m, n), problem, "a [M, K], b [K, N] (or transposed) and c [M, N]", where)
    in_registers = a.buffer.scope == "fragment"
    one_group = builder().kernel["threads"] == 128 and not in_registers and not builder().groups
    b_there = b.buffer.scope == "shared" or one_group
    cut = any(is_cut(t.buffer) for t in (a, b)) or (is_cut(c.buffer) and not _has_whole_registers(c.buffer))
    if not b_there or cut or (in_registers and transpose_A):
        problem = "a product takes b from shared memory and a from there or from a whole fragment, as it lies"
        instead = "T.alloc_shared tiles and a fragment (which may be b, where T.Kernel has 128 threads and a is shared)"
        raise TileError(problem, instead, where)
    if a.dtype != b.dtype or a.dtype == "float32" or c.dtype != "float32" or c.buffer.scope != "fragment":
        problem = f"a product of {a.dtype} and {b.dtype} into {c.buffer.scope} {c.dtype}"
        raise TileError(problem, "two tiles of bfloat16 or of float16, and a float32 fragment", where)
    clear = to_expr(clear_accum)
    if clear.dtype != "bool":
        raise TileError(f"clear_accum is {clear}, not a condition", "True, False or a comparison, such as i == 0", where)
    return ir.Gemm(where, a.buffer, b.buffer, c.buffer, transpose_A, transpose_B, policy.value, clear, stage)
