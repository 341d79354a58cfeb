"""Tiles and their movement."""

import operator
import re
from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.language.builder import builder, here
from tileops_dsl.language.scalar import Value, convert, to_expr

__all__ = ["alloc_fragment", "alloc_shared", "annotate_layout", "copy", "fill"]


class TensorArg:
    """A tensor in global memory. `x[a, b, c]` is the tile whose first element that is; `x.given`: whether it was passed."""

    def __init__(self, tensor: ir.Tensor):
        self.tensor = tensor

    @property
    def given(self) -> Value:
        """Whether an optional tensor (of dtype "any", or marked so) was passed."""
        if not self.tensor.flag:
            raise TileError(f"{self.tensor.name} is always given", 'T.Tensor(dims, "any") for an optional tensor', here())
        return Value(self.tensor.given)

    def __getitem__(self, origin) -> ir.Region:
        return ir.Region(self.tensor, _indices(self.tensor.name, self.tensor.dims, origin))


def _indices(name: str, dims: tuple, indices) -> tuple[ir.Expr, ...]:
    indices = indices if isinstance(indices, tuple) else (indices,)
    if len(indices) != len(dims):
        problem = f"{name} has {len(dims)} dimensions and is given {len(indices)} indices"
        raise TileError(problem, f"one index for each of {', '.join(map(str, dims))}", here())
    return tuple(map(to_expr, indices))


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
        return Value(ir.Load(self.dtype, self.buffer, _indices(self.buffer.name, self.shape, indices)))

    def __setitem__(self, indices, value) -> None:
        stored = convert(to_expr(value), self.dtype)
        builder().emit(ir.Store(here(), self.buffer, _indices(self.buffer.name, self.shape, indices), stored))

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
    where = here()
    ends = [end.buffer if isinstance(end, Fragment) else end for end in (src, dst)]
    kinds = tuple("global" if isinstance(e, ir.Region) else getattr(e, "scope", "none") for e in ends)
    views = any(isinstance(end, ir.View) for end in ends)
    if kinds not in _COPIES or views:
        raise TileError("a copy has a tensor's tile on one side and a fragment on the other", "T.copy(x[i, j], tile)", where)
    if multicast and kinds != ("global", "shared"):
        raise TileError("only a load into shared memory is multicast", "the copy without multicast", where)
    policies = ["evict_first", "evict_normal", *["evict_last"] * (kinds == ("global", "shared"))]
    if eviction_policy not in policies:
        raise TileError(f"eviction_policy is {eviction_policy!r}", f"one of {', '.join(policies)}", where)
    stmt = ir.Copy(where, *ends, None, None, None if eviction_policy == "evict_normal" else eviction_policy, multicast)
    if stmt.region:
        _check_tensor(stmt)
    elif ends[0].dtype != ends[1].dtype or ends[0].shape != ends[1].shape:
        a, b = (f"{end.dtype}{list(end.shape)}" for end in ends)
        raise TileError(f"{ends[0].name} is {a} and {ends[1].name} {b}", "two tiles of one shape and dtype", where)
    _check_values(stmt, kinds, fill, absent)
    values = {"fill": fill, "absent": absent}
    values = {name: convert(to_expr(v), ends[1].dtype) for name, v in values.items() if v is not None}
    builder().emit(replace(stmt, **values))


_COPIES = (("global", "fragment"), ("fragment", "global"), ("global", "shared"), ("shared", "global"), ("fragment", "shared"))


def _check_tensor(stmt: ir.Copy) -> None:
    """The tensor's end of a copy and the other one fit."""
    tensor, tile = stmt.region.tensor, stmt.tile
    converts = tensor.dtype == "any" and tile is stmt.dst and (tile.dtype, tile.scope) == ("float32", "fragment")
    if tensor.dtype != tile.dtype and not converts:
        problem = f"{tile.name} is {tile.dtype} and {tensor.name} is {tensor.dtype}; a copy does not convert"
        raise TileError(problem, "a fragment of the tensor's dtype, and T.cast in T.Parallel", stmt.location)
    if len(tile.shape) > len(tensor.dims):
        problem = f"{tile.name} has {len(tile.shape)} dimensions and {tensor.name} {len(tensor.dims)}"
        raise TileError(problem, "a fragment of the tensor's last dimensions", stmt.location)
    if stmt.eviction and (tensor.dtype == "any" or (tile is stmt.src and tile.scope == "shared")):
        what = f'{tensor.name} is of dtype "any"; its copy' if tensor.dtype == "any" else "a store of shared memory"
        raise TileError(f"{what} has no eviction_policy", "the copy without it", stmt.location)


def _check_values(stmt: ir.Copy, kinds: tuple[str, str], fill, absent) -> None:
    """What is read outside a tensor, and in place of one."""
    loads = kinds == ("global", "fragment")
    if loads and fill is None:
        problem = "a copy from global memory says what lies outside the tensor"
        raise TileError(problem, "T.copy(x[i, j], tile, fill=0.0)", stmt.location)
    if not loads and fill is not None:
        into_shared = kinds == ("global", "shared")
        problem = "what lies outside the tensor is 0 in shared memory" if into_shared else "a store fills nothing"
        raise TileError(problem, "the copy without fill", stmt.location)
    optional = kinds[0] == "global" and stmt.src.tensor.dtype == "any"
    name = stmt.region.tensor.name if stmt.region else stmt.src.name
    if optional and absent is None:
        problem = f"{name} is optional; its copy says what is read where it was not passed"
        raise TileError(problem, "T.copy(x[i], tile, fill=0.0, absent=1.0)", stmt.location)
    if absent is not None and not optional:
        raise TileError(f"{name} is always given", "the copy without absent", stmt.location)
