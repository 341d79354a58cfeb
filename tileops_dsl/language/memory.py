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
        """Whether an optional tensor (dtype "any") was passed."""
        if self.tensor.dtype != "any":
            raise TileError(f"{self.tensor.name} is always given", 'T.Tensor(dims, "any") for an optional tensor', here())
        code = ir.Var("int32", f"{self.tensor.name}_dtype")
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
    """A tile in registers, distributed over the CTA's threads. Elements are read and written in T.Parallel."""

    def __init__(self, buffer: ir.Buffer):
        self.buffer = buffer

    shape = property(lambda self: self.buffer.shape)
    dtype = property(lambda self: self.buffer.dtype)

    def __getitem__(self, indices) -> Value:
        return Value(ir.Load(self.buffer.dtype, self.buffer, self._indices(indices)))

    def __setitem__(self, indices, value) -> None:
        stored = convert(to_expr(value), self.buffer.dtype)
        builder().emit(ir.Store(here(), self.buffer, self._indices(indices), stored))

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
    where = here()
    name = re.match(r"(\w+) = T\.alloc_fragment\(", where.text)
    if not name:
        raise TileError("the fragment gets its name from the line that allocates it", "name = T.alloc_fragment(...)", where)
    if dtype not in ir.FLOATS:
        raise TileError(f"a fragment of {dtype!r}", f"one of {', '.join(ir.FLOATS)}", where)
    buffer = ir.Buffer(builder().declare(name[1]), "fragment", tuple(map(operator.index, shape)), dtype)
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


def copy(src, dst, *, fill=None, absent=None, eviction_policy: str = "evict_normal") -> None:
    """Copy a tile between global memory and a fragment; the fragment's shape is the tile's.

    The tile covers the tensor's last dimensions. What lies outside the tensor is not written, and reads as `fill`.
    `eviction_policy` "evict_first" marks data that may leave the caches before other data: for what is used once while
    something else waits there to be read again. (Where nothing waits, the mark costs bandwidth.)
    A tensor of dtype "any" is converted to the fragment's float32 and, where it was not passed, reads as `absent`;
    otherwise the dtypes are equal.
    """
    where = here()
    if eviction_policy not in ("evict_first", "evict_normal"):
        raise TileError(f"eviction_policy is {eviction_policy!r}", '"evict_first" or "evict_normal"', where)
    ends = [end.buffer if isinstance(end, Fragment) else end for end in (src, dst)]
    if [type(end) for end in ends] not in ([ir.Region, ir.Buffer], [ir.Buffer, ir.Region]):
        raise TileError("a copy has a tensor's tile on one side and a fragment on the other", "T.copy(x[i, j], tile)", where)
    loads = isinstance(ends[1], ir.Buffer)
    tile, region = (ends[1], ends[0]) if loads else (ends[0], ends[1])
    if region.tensor.dtype != tile.dtype and not (region.tensor.dtype == "any" and loads and tile.dtype == "float32"):
        raise TileError(
            f"{tile.name} is {tile.dtype} and {region.tensor.name} is {region.tensor.dtype}; a copy does not convert",
            "a fragment of the tensor's dtype, and T.cast in T.Parallel",
            where,
        )
    if len(tile.shape) > len(region.tensor.dims):
        raise TileError(
            f"{tile.name} has {len(tile.shape)} dimensions and {region.tensor.name} {len(region.tensor.dims)}",
            "a fragment of the tensor's last dimensions",
            where,
        )
    if region.tensor.dtype == "any" and eviction_policy != "evict_normal":
        problem = f'{region.tensor.name} is of dtype "any"; its copy has no eviction_policy'
        raise TileError(problem, "the copy without it", where)
    if loads == (fill is None):
        raise TileError(
            "a copy from global memory says what lies outside the tensor" if loads else "a store fills nothing",
            "T.copy(x[i, j], tile, fill=0.0)" if loads else "T.copy(tile, y[i, j])",
            where,
        )
    if (region.tensor.dtype == "any") == (absent is None):
        raise TileError(
            f"{region.tensor.name} is optional; its copy says what is read where it was not passed"
            if absent is None
            else f"{region.tensor.name} is always given",
            "T.copy(x[i], tile, fill=0.0, absent=1.0)" if absent is None else "the copy without absent",
            where,
        )
    values = [None if v is None else convert(to_expr(v), tile.dtype) for v in (fill, absent)]
    builder().emit(ir.Copy(where, *ends, *values, eviction_policy == "evict_first"))
