"""Tiles and their movement."""

import operator
import re

from tileops_dsl import ir
from tileops_dsl.errors import require
from tileops_dsl.language.builder import builder, here
from tileops_dsl.language.scalar import Value, convert, to_expr

__all__ = ["alloc_fragment", "alloc_shared", "annotate_layout", "box_row", "copy", "fill", "tma_copy", "wait"]


class TensorArg:
    """A tensor in global memory. `x[a, b, c]` is the tile that begins there, or as a number that element.

    `x[a, b : b + n, c]`, to which a fragment is copied, has n rows of the tile (of a vector: x[a, b : b + n]); the others are
    dropped. `x[a, b, c] = value` in T.Parallel stores an element; those outside are dropped. `x.given`: whether it was passed.
    """

    def __init__(self, tensor: ir.Tensor):
        self.tensor = tensor

    @property
    def given(self) -> Value:
        """Whether an optional tensor (of dtype "any", or marked so) was passed."""
        require(self.tensor.flag, f"{self.tensor.name} is always given", 'T.Tensor(dims, "any") for an optional tensor', here())
        return Value(self.tensor.given)

    def __getitem__(self, origin) -> "Place":
        origin = origin if isinstance(origin, tuple) else (origin,)
        rows = [index for index in origin if isinstance(index, slice)]
        bounded = not rows or (len(rows) == 1 and rows[0].start is not None and rows[0].stop is not None and not rows[0].step)
        require(bounded, f"{self.tensor.name} is cut in another way than some of its rows", "x[a, b : b + n, c]", here())
        first = tuple(index.start if isinstance(index, slice) else index for index in origin)
        cut = next((n for n, index in enumerate(origin) if isinstance(index, slice)), None)
        return Place(ir.Region(self.tensor, _indices(self.tensor, first), *[to_expr(row.stop) for row in rows]), cut)

    def __setitem__(self, indices, value) -> None:
        _assign(self.tensor, indices, value)


class Place(Value):
    """Of a tensor: an end of a copy, or as a number the element there, which is the same for all threads."""

    def __init__(self, region: ir.Region, cut: int | None = None):
        self.region, self.cut = region, cut  # the dimension of which it has some

    @property
    def expr(self) -> ir.Element:
        tensor = self.region.tensor
        require(self.cut is None, f"{self.region} is read as a number", "an index for each dimension", here())
        problem = f"{self.region} is {tensor.dtype}; only an integer is read as a number that all threads share"
        require(tensor.dtype in ir.INTS, problem, "T.copy into a fragment", here())
        return ir.Element(tensor.dtype, tensor, self.region.origin)


class Token:
    """An operation that has begun."""

    def __init__(self, stmt: ir.Stmt):
        b = builder()
        b.emit(stmt)
        self.stmt, self.groups = stmt, b.groups
        word = "tma_copy" if isinstance(stmt, ir.Copy) else "wgmma_gemm"
        require(b.groups, f"T.{word} outside T.ws", f"T.{word.split('_')[1]}, or `with T.ws(0):`", stmt.location)


def wait(token: Token, *, pending: int = 0) -> None:
    """Until, of the group's operations up to the token's, at most the last `pending` are unfinished.

    It says when what an operation reads is free. Results are waited for without it.
    """
    b, where = builder(), here()
    own = isinstance(token, Token) and b.groups and set(b.groups) <= set(token.groups) and pending >= 0
    require(own, "no operation of these groups is waited for", "token = T.wgmma_gemm(...); T.wait(token)", where)
    b.emit(ir.Wait(where, token.stmt, pending))


def _indices(of: ir.Tensor | ir.Tile, indices) -> tuple[ir.Expr, ...]:
    indices, dims = indices if isinstance(indices, tuple) else (indices,), of.shape
    problem = f"{of.name} has {len(dims)} dimensions and is given {len(indices)} indices"
    require(len(indices) == len(dims), problem, f"one index for each of {', '.join(map(str, dims))}", here())
    return tuple(map(to_expr, indices))


def _assign(to: ir.Tensor | ir.Tile, indices, value) -> None:
    stored = convert(to_expr(value), to.dtype)
    builder().emit(ir.Store(here(), to, _indices(to, indices), stored))


class Fragment:
    """A tile in registers, distributed over the CTA's threads, or in shared memory.

    Elements are read and written in T.Parallel. tile[:, a:b] is a view of some columns; in shared memory they are whole boxes
    (of 128 bytes, if the tile has no `box`), and for T.fill tile[row:, a:b] begins at a row that is known at run time.
    """

    def __init__(self, buffer: ir.Tile):
        self.buffer = buffer

    shape = property(lambda self: self.buffer.shape)
    dtype = property(lambda self: self.buffer.dtype)

    def __getitem__(self, indices):
        if isinstance(indices, tuple) and any(isinstance(i, slice) for i in indices):
            return self._view(indices)
        return Value(ir.Load(self.dtype, self.buffer, _indices(self.buffer, indices)))

    def __setitem__(self, indices, value) -> None:
        _assign(self.buffer, indices, value)

    def _view(self, slices) -> "Fragment":
        rows, columns = slices[0], slices[-1]
        whole = isinstance(rows, slice) and rows.stop is None and (rows.start is None or self.buffer.scope == "shared")
        start, stop = (to_expr(bound) for bound in (columns.start, columns.stop))
        if isinstance(stop, ir.Const) and isinstance(start, ir.Const):
            size = stop.value - start.value
        else:
            size = stop.args[1].value if isinstance(stop, ir.Call) and stop.op == "add" and stop.args[0] == start else None
        of_columns = len(self.shape) == 2 and whole and isinstance(self.buffer, ir.Buffer) and isinstance(size, int)
        problem = f"{self.buffer.name} is cut in another way than some columns, a constant number of them"
        require(of_columns, problem, "tile[:, a : a + 64]", here())
        first = ir.ZERO if rows.start is None else to_expr(rows.start)
        view, box = ir.View(self.buffer, (first, start), (self.shape[0], size)), self.buffer.box or 128 // ir.DTYPES[self.dtype]
        inside = isinstance(start, ir.Const) and 0 <= start.value < start.value + size <= self.shape[1]
        of_boxes = self.buffer.scope == "fragment" or (inside and start.value % box == size % box == self.shape[1] % box == 0)
        problem = f"{view.name} is no whole boxes of {self.buffer.name}"
        require(of_boxes, problem, f"multiples of {box} columns, or T.alloc_shared(shape, dtype, box=n) and those of n", here())
        return Fragment(view)


def alloc_fragment(shape: tuple[int, ...], dtype: str) -> Fragment:
    """A tile of `shape` elements in registers; takes the name that it is assigned to. In T.ws each group has one."""
    return _alloc("fragment", shape, dtype)


def alloc_shared(shape: tuple[int, ...], dtype: str, *, box: int | None = None, alias: Fragment | None = None) -> Fragment:
    """A tile of `shape` elements in shared memory; has as many stages as the T.Pipelined loop that it is used in asks for.

    `box`: so many columns are ready, and free, by themselves. `alias`: it lies over that view, and has its boxes; or, outside
    T.ws, over a whole tile, which nothing reads behind its first use.
    """
    return _alloc("shared", shape, dtype, box, alias and alias.buffer)


def _alloc(scope: str, shape: tuple[int, ...], dtype: str, box=None, alias=None) -> Fragment:
    b, where = builder(), here()
    kind, dtypes = ("tile", ir.FLOATS) if scope == "shared" else ("fragment", (*ir.FLOATS, "int32"))
    written = re.match(rf"(\w+(?:, \w+)*) = \(?T\.alloc_{scope}\(", where.text)
    require(written, f"the {kind} gets its name from the line that allocates it", f"name = T.alloc_{scope}(...)", where)
    require(dtype in dtypes, f"a {kind} of {dtype!r}", f"one of {', '.join(dtypes)}", where)
    names, shape = written[1].split(", "), tuple(map(operator.index, shape))
    name = b.declare(names[list(b.names.values()).count(where) % len(names)])  # several are taken in the line's order
    view = isinstance(alias, ir.View)
    fits = not alias or ((alias.scope, alias.dtype) == ("shared", dtype) and (not view or alias.shape == shape))
    require(fits, f"{name} is to lie over what is no view of its shape and dtype", "alias=tile[:, a : a + n]", where)
    box = box or (view and alias.buffer.box) or None
    whole = not box or (len(shape) == 2 and shape[1] % box == 0)
    require(whole, f"{name} of {list(shape)} has no boxes of {box} columns", "a number that divides its columns", where)
    buffer = ir.Buffer(name, scope, shape, dtype, box, alias)
    b.emit(ir.Alloc(where, buffer))
    return Fragment(buffer)


def annotate_layout(table: dict) -> None:
    """Fix the layouts of fragments: {tile: layout}. Those of the others follow from use."""
    for tile, layout in table.items():
        builder().emit(ir.Annotate(here(), tile.buffer, layout))


def fill(tile: Fragment, value) -> None:
    """Set every element."""
    builder().emit(ir.Fill(here(), tile.buffer, convert(to_expr(value), tile.dtype)))


def copy(src, dst, *, fill=None, absent=None, eviction_policy: str = "evict_normal", multicast: bool = False) -> None:
    """Copy a tile between global memory, a fragment and shared memory; the buffer's shape is the tile's.

    The tile covers the tensor's last dimensions. What lies outside the tensor is not written, and reads as `fill` (in shared
    memory as 0). `eviction_policy` "evict_first" marks data that may leave the caches before other data: for what is used once
    while something else waits there to be read again. (Where nothing waits, the mark costs bandwidth.) "evict_last", of a load
    into shared memory: data that shall stay longer than other data.
    A tensor of dtype "any" is converted to the fragment's float32 and, where it was not passed, reads as `absent`;
    otherwise the dtypes are equal. `multicast`: all CTAs of the cluster need the tile, and each loads a part of it for all.
    """
    builder().emit(_copy(src, dst, fill, absent, eviction_policy, multicast))


def tma_copy(src, dst, *, eviction_policy: str = "evict_normal") -> Token:
    """T.copy of a tile into shared memory, in T.ws: by one thread of the group. What needs the tile waits for it, or T.wait."""
    return Token(_copy(src, dst, None, None, eviction_policy, False))


def box_row(rows) -> Value:
    """Of each box of `rows` rows of a tile, a number that divides them, its first row: in the place of a T.tma_copy.

    Each box is loaded from the place that follows from its row, by a thread of its own.
    """
    return Value(ir.BoxRow("int32", to_expr(rows)))


def is_cut(tile: ir.Tile) -> bool:
    """Whether it is a part of a fragment, or begins at a run-time row."""
    return isinstance(tile, ir.View) and (tile.scope == "fragment" or tile.origin[0] != ir.ZERO)


def _copy(src, dst, fill, absent, eviction_policy: str, multicast: bool) -> ir.Copy:
    where = here()
    ends = [getattr(end, "region", None) or getattr(end, "buffer", None) for end in (src, dst)]
    kinds = tuple("global" if isinstance(e, ir.Region) else getattr(e, "scope", "none") for e in ends)
    whole, into_shared = kinds in _COPIES and not any(map(is_cut, ends)), kinds == ("global", "shared")
    require(whole, "a copy has a tensor's tile on one side and a fragment on the other", "T.copy(x[i, j], tile)", where)
    require(into_shared or not multicast, "only a load into shared memory is multicast", "the copy without multicast", where)
    policies = ["evict_first", "evict_normal", *["evict_last"] * into_shared]
    require(eviction_policy in policies, f"eviction_policy is {eviction_policy!r}", f"one of {', '.join(policies)}", where)
    tile = ends[kinds[0] == "global"]
    values = (None if value is None else convert(to_expr(value), tile.dtype) for value in (fill, absent))
    stmt = ir.Copy(where, *ends, *values, None if eviction_policy == "evict_normal" else eviction_policy, multicast)
    cut = getattr(dst, "cut", None) if kinds[0] == "fragment" else None
    rows = cut is not None and cut == len(ends[1].origin) - len(tile.shape)
    problem = f"{getattr(stmt.region, 'tensor', tile).name} is cut where that means nothing"
    require(rows or not getattr(stmt.region, "stop", None), problem, "T.copy(fragment, x[a, b : b + n, c]), its rows", where)
    if stmt.region:
        _check_tensor(stmt)
    else:
        a, b = (f"{end.dtype}{list(end.shape)}" for end in ends)
        require(a == b, f"{ends[0].name} is {a} and {ends[1].name} {b}", "two tiles of one shape and dtype", where)
    _check_values(stmt, kinds)
    return stmt


_COPIES = [(a, b) for a in ("global", "fragment", "shared") for b in ("global", "fragment", "shared") if a != b]


def _check_tensor(stmt: ir.Copy) -> None:
    """The tensor's end of a copy and the other one fit."""
    tensor, tile = stmt.region.tensor, stmt.tile
    converts = tensor.dtype == "any" and tile is stmt.dst and (tile.dtype, tile.scope) == ("float32", "fragment")
    problem = f"{tile.name} is {tile.dtype} and {tensor.name} is {tensor.dtype}; a copy does not convert"
    instead = "a fragment of the tensor's dtype, and T.cast in T.Parallel"
    require(tensor.dtype == tile.dtype or converts, problem, instead, stmt.location)
    problem = f"{tile.name} has {len(tile.shape)} dimensions and {tensor.name} {len(tensor.shape)}"
    require(len(tile.shape) <= len(tensor.shape), problem, "a fragment of the tensor's last dimensions", stmt.location)
    what = f'{tensor.name} is of dtype "any"; its copy' if tensor.dtype == "any" else "a store of shared memory"
    plain = tensor.dtype == "any" or (tile is stmt.src and tile.scope == "shared")
    require(not (plain and stmt.eviction), f"{what} has no eviction_policy", "the copy without it", stmt.location)


def _check_values(stmt: ir.Copy, kinds: tuple[str, str]) -> None:
    """What is read outside a tensor, and in place of one."""
    loads, where = kinds == ("global", "fragment"), stmt.location
    problem = "a copy from global memory says what lies outside the tensor"
    require(not loads or stmt.fill is not None, problem, "T.copy(x[i, j], tile, fill=0.0)", where)
    problem = "what lies outside the tensor is 0 in shared memory" if kinds[0] == "global" else "a store fills nothing"
    require(loads or stmt.fill is None, problem, "the copy without fill", where)
    optional = kinds[0] == "global" and stmt.src.tensor.dtype == "any"
    name = stmt.region.tensor.name if stmt.region else stmt.src.name
    problem = f"{name} is optional; its copy says what is read where it was not passed"
    require(not optional or stmt.absent is not None, problem, "T.copy(x[i], tile, fill=0.0, absent=1.0)", where)
    require(stmt.absent is None or optional, f"{name} is always given", "the copy without absent", where)
