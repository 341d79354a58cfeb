"""Tiles and their movement."""

import operator
import re

from tileops_dsl import ir, layouts
from tileops_dsl.errors import TileError
from tileops_dsl.language.builder import builder, here
from tileops_dsl.language.scalar import Value, convert, to_expr


class TensorArg:
    """A tensor in global memory. `x[a, b, c]` is the tile whose first element that is; `x.given`: whether it was passed."""

    def __init__(self, tensor: ir.Tensor):
        self.tensor = tensor

    dtype = property(lambda self: self.tensor.dtype)

    @property
    def given(self) -> Value:
        """Whether an optional tensor (of dtype "any", or marked so) was passed."""
        if self.tensor.dtype != "any" and not self.tensor.optional:
            raise TileError(f"{self.tensor.name} is always given", 'T.Tensor(dims, "any") for an optional tensor', here())
        code = ir.Var("int32", f"has_{self.tensor.name}" if self.tensor.optional else f"{self.tensor.name}_dtype")
        return Value(ir.Call("bool", "ne", (code, ir.Const("int32", 0))))

    def __getitem__(self, origin) -> ir.Region:
        origin = origin if isinstance(origin, tuple) else (origin,)
        if len(origin) != len(self.tensor.dims):
            raise TileError(
                f"{self.tensor.name} has {len(self.tensor.dims)} dimensions and is given {len(origin)} coordinates",
                f"{self.tensor.name}[{', '.join(map(str, self.tensor.dims))}]",
                here(),
            )
        return ir.Region(self.tensor, tuple(to_expr(o) for o in origin))


class Fragment:
    """A tile in registers, distributed over the CTA's threads, or in shared memory.

    Elements are read and written in T.Parallel. tile[:, a:b] is a view of some columns of a fragment.
    """

    def __init__(self, buffer: ir.Tile):
        self.buffer = buffer

    shape = property(lambda self: self.buffer.shape)
    dtype = property(lambda self: self.buffer.dtype)

    def __getitem__(self, indices):
        if isinstance(indices, tuple) and any(isinstance(i, slice) for i in indices):
            return self._view(indices)
        return Value(ir.Load(self.buffer.dtype, self.buffer, self._indices(indices)))

    def __setitem__(self, indices, value) -> None:
        stored = convert(to_expr(value), self.buffer.dtype)
        builder().emit(ir.Store(here(), self.buffer, self._indices(indices), stored))

    def _view(self, slices) -> "Fragment":
        columns = slices[-1]
        start, stop = (to_expr(bound) for bound in (columns.start, columns.stop))
        if isinstance(stop, ir.Const) and isinstance(start, ir.Const):
            size = stop.value - start.value
        else:
            size = stop.args[1].value if isinstance(stop, ir.Call) and stop.op == "add" and stop.args[0] == start else None
        if len(self.shape) != 2 or slices[0] != slice(None) or self.buffer.scope != "fragment" or not isinstance(size, int):
            problem = f"{self.buffer.name} is cut in another way than some columns of a fragment, a constant number of them"
            raise TileError(problem, "tile[:, a : a + 64]", here())
        zero = ir.Const("int32", 0)
        return Fragment(ir.View(self.buffer, (zero, start), (self.shape[0], size)))

    def _indices(self, indices) -> tuple[ir.Expr, ...]:
        indices = indices if isinstance(indices, tuple) else (indices,)
        if len(indices) != len(self.shape):
            raise TileError(
                f"{self.buffer.name} has {len(self.shape)} dimensions and is given {len(indices)} indices",
                "one index for each dimension",
                here(),
            )
        return tuple(to_expr(i) for i in indices)


def alloc_fragment(shape: tuple[int, ...], dtype: str) -> Fragment:
    """A tile of `shape` elements in registers; takes the name that it is assigned to."""
    return _alloc("fragment", shape, dtype)


def alloc_shared(shape: tuple[int, ...], dtype: str) -> Fragment:
    """A tile of `shape` elements in shared memory; has as many stages as the T.Pipelined loop that it is used in asks for."""
    return _alloc("shared", shape, dtype)


def _alloc(scope: str, shape: tuple[int, ...], dtype: str) -> Fragment:
    where = here()
    kind = {"fragment": "fragment", "shared": "tile"}[scope]
    name = re.match(rf"(\w+) = T\.alloc_{scope}\(", where.text)
    if not name:
        raise TileError(f"the {kind} gets its name from the line that allocates it", f"name = T.alloc_{scope}(...)", where)
    if dtype not in ir.FLOATS:
        raise TileError(f"a {kind} of {dtype!r}", f"one of {', '.join(ir.FLOATS)}", where)
    buffer = ir.Buffer(builder().declare(name[1]), scope, tuple(map(operator.index, shape)), dtype)
    builder().emit(ir.Alloc(where, buffer))
    return Fragment(buffer)


def vectorised_rows(
    shape: tuple[int, int],
    *,
    threads: int,
    threads_per_row: int,
    vector: int,
    lanes_on_rows: bool = False,
    shifted: bool = False,
) -> layouts.VectorisedRows:
    """The layout in which `threads_per_row` threads hold a row, `vector` neighbouring elements at a time (layouts.py)."""
    try:
        return layouts.VectorisedRows(*shape, threads, threads_per_row, vector, lanes_on_rows, shifted)
    except ValueError as e:
        raise TileError(str(e), "tile sizes that the threads divide", here()) from e


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
    while something else waits there to be read again. (Where nothing waits, the mark costs bandwidth.)
    A tensor of dtype "any" is converted to the fragment's float32 and, where it was not passed, reads as `absent`;
    otherwise the dtypes are equal. `multicast`: all CTAs of the cluster need the tile, and each loads a part of it for all.
    """
    where = here()
    if eviction_policy not in ("evict_first", "evict_normal"):
        raise TileError(f"eviction_policy is {eviction_policy!r}", '"evict_first" or "evict_normal"', where)
    ends = [end.buffer if isinstance(end, Fragment) else end for end in (src, dst)]
    kinds = tuple("global" if isinstance(e, ir.Region) else getattr(e, "scope", "none") for e in ends)
    views = any(isinstance(end, ir.View) for end in ends)
    if kinds not in _COPIES or views:
        raise TileError("a copy has a tensor's tile on one side and a fragment on the other", "T.copy(x[i, j], tile)", where)
    if multicast and kinds != ("global", "shared"):
        raise TileError("only a load into shared memory is multicast", "the copy without multicast", where)
    if "global" in kinds:
        _check_tensor(ends, eviction_policy, where)
    elif ends[0].dtype != ends[1].dtype or ends[0].shape != ends[1].shape:
        problem = (
            f"{ends[0].name} is {ends[0].dtype}{list(ends[0].shape)} and {ends[1].name} {ends[1].dtype}{list(ends[1].shape)}"
        )
        raise TileError(problem, "two tiles of one shape and dtype", where)
    _check_values(ends, kinds, fill, absent, where)
    values = [None if v is None else convert(to_expr(v), ends[1].dtype) for v in (fill, absent)]
    builder().emit(ir.Copy(where, *ends, *values, eviction_policy == "evict_first", multicast))


_COPIES = (("global", "fragment"), ("fragment", "global"), ("global", "shared"), ("shared", "global"), ("fragment", "shared"))


def _check_tensor(ends, eviction_policy: str, where) -> None:
    """The tensor's end of a copy and the other one fit."""
    loads = isinstance(ends[0], ir.Region)
    region, tile = ends if loads else ends[::-1]
    tensor = region.tensor
    if tensor.dtype != tile.dtype and not (
        tensor.dtype == "any" and loads and (tile.dtype, tile.scope) == ("float32", "fragment")
    ):
        raise TileError(
            f"{tile.name} is {tile.dtype} and {tensor.name} is {tensor.dtype}; a copy does not convert",
            "a fragment of the tensor's dtype, and T.cast in T.Parallel",
            where,
        )
    if len(tile.shape) > len(tensor.dims):
        raise TileError(
            f"{tile.name} has {len(tile.shape)} dimensions and {tensor.name} {len(tensor.dims)}",
            "a fragment of the tensor's last dimensions",
            where,
        )
    if tensor.dtype == "any" and eviction_policy != "evict_normal":
        problem = f'{tensor.name} is of dtype "any"; its copy has no eviction_policy'
        raise TileError(problem, "the copy without it", where)
    if tile.scope == "shared" and eviction_policy != "evict_normal":
        raise TileError("a copy of shared memory has no eviction_policy", "the copy without it", where)


def _check_values(ends, kinds, fill, absent, where) -> None:
    """What is read outside a tensor, and in place of one."""
    loads = kinds == ("global", "fragment")
    if loads == (fill is None):
        raise TileError(
            "a copy from global memory says what lies outside the tensor"
            if loads
            else "what lies outside the tensor is 0 in shared memory"
            if kinds == ("global", "shared")
            else "a store fills nothing",
            "T.copy(x[i, j], tile, fill=0.0)" if loads else "the copy without fill",
            where,
        )
    optional = kinds[0] == "global" and ends[0].tensor.dtype == "any"
    if optional == (absent is None):
        name = next(end.tensor.name if isinstance(end, ir.Region) else end.name for end in ends)
        raise TileError(
            f"{name} is optional; its copy says what is read where it was not passed"
            if absent is None
            else f"{name} is always given",
            "T.copy(x[i], tile, fill=0.0, absent=1.0)" if absent is None else "the copy without absent",
            where,
        )
