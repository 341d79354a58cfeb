"""The frame of a tile program: its parameters, its grid, and the run that records it."""

import inspect
from contextlib import contextmanager
from dataclasses import dataclass

from tileops_dsl import ir
from tileops_dsl.errors import TileError, require
from tileops_dsl.language.builder import RESERVED_PERSISTENT, builder, here, location, recording
from tileops_dsl.language.memory import TensorArg
from tileops_dsl.language.scalar import Value, to_expr

__all__ = [  # the words of this file
    "Kernel", "Scalar", "Tensor", "annotate_dependent_launch", "annotate_min_blocks_per_sm", "deal", "dynamic", "let",
    "prim_func", "print",
]  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A parameter: a strided tensor of run-time extents, or constant ones (Python integers).

    `dtype` "any" is an optional tensor of any float dtype, converted when it is copied. `vector` > 1 is a promise of the
    caller: unit stride in the last dimension, whose extent, like the address and the other strides, is a multiple of it
    (shifted layouts: only that the rows of all tensors lie alike in their vectors; lanes on rows: the same of the last
    dimension but one). `optional`: may not be passed; is copied only under T.If(x.given). In a kernel without a grid the last
    dimension has unit stride always.
    """

    dims: tuple
    dtype: str
    vector: int = 1
    optional: bool = False


@dataclass(frozen=True)
class Scalar:
    """A parameter: a number that is the same for all threads ("float32" or "int32"); `below` promises 0 <= it < below."""

    dtype: str
    below: int | None = None


def dynamic(names: str, dtype: str = "int64"):
    """Extents known at run time: outer, inner = T.dynamic("outer, inner"). Use "int32" for one that fits."""
    dims = tuple(Value(ir.Var(dtype, name.strip())) for name in names.split(","))
    for dim in dims:
        dim.declared = dims  # the order of the parameters
    return dims if len(dims) > 1 else dims[0]


@contextmanager
def Kernel(*grid, threads: int, cluster: tuple[int, int] = (1, 1)):
    """with T.Kernel(blocks_x, blocks_y, threads=n) as (bx, by): the work of one CTA of the grid.

    Without a grid: one wave of CTAs, which share out the tiles of T.Persistent; with one, T.Persistent(begin, end) has those of
    a CTA. `threads` are those that hold fragments.
    A `cluster` takes so many neighbouring tiles of each direction at a time.
    """
    b, where = builder(), here()
    require(b.kernel is None, "a second T.Kernel in one program", "one program for each kernel", where)
    require(threads % 32 == 0 and 32 <= threads <= 1024, f"{threads} threads", "a multiple of 32, at most 1024", where)
    if cluster != (1, 1) and (grid or cluster[1] != 1 or not 1 <= cluster[0] <= 8):
        raise TileError(f"a cluster of {cluster}", "cluster=(n, 1) with n <= 8, in a kernel without a grid", where)
    if not grid:
        b.reserved = RESERVED_PERSISTENT
    grid = tuple(map(to_expr, grid))
    blocks = tuple(ir.Var(extent.dtype, f"block_{'xyz'[i]}") for i, extent in enumerate(grid))
    b.kernel = {"blocks": blocks, "grid": grid, "threads": threads, "cluster": cluster, "location": where}
    yield Value(blocks[0]) if len(blocks) == 1 else tuple(map(Value, blocks))


def annotate_min_blocks_per_sm(blocks: int) -> None:
    """How many CTAs must fit on a multiprocessor: bounds the registers of a thread."""
    builder().kernel["min_blocks"] = blocks


def annotate_dependent_launch() -> None:
    """The kernel is launched while the one before it on the stream still runs, and waits for its end before it reads."""
    builder().kernel["dependent"] = True


def deal(lengths, pieces, part, parts, *, block: int, overhead: int, heads=1, seen=2**31 - 1, most_pieces=0, notes=True):
    """first, begin, behind, last, end = T.deal(...): the part's blocks of keys, nearly as many as any other's.

    An item is a request, or one of its `heads`. `lengths` int32 [requests], in keys, of which the last `seen` count (those
    before do not as far as they fill blocks); a piece of an item costs `overhead` blocks besides its own. A part has the items
    from `first` up to `behind`, the first from block `begin` on, and of item `last` the blocks before `end`. One lies
    in at most `most_pieces` parts (0: any number). CTAs where `notes` holds write `pieces` int32 [min(items, parts), 4]: an
    item, the first part that has blocks of it, and in how many it lies, 0 if in one. Rules: include/tileops/deal_part.h.
    """
    b, where = builder(), here()
    first = b.kernel["grid"] and not b.bodies[0] and "deal" not in b.kernel
    require(first, "T.deal behind something else, or without a grid", "T.deal first in a kernel with a grid", where)
    numbers = {"part": part, "parts": parts, "heads": heads, "seen": seen, "most_pieces": most_pieces, "notes": notes}
    tensors = {"lengths": lengths.tensor, "pieces": pieces.tensor}
    exprs = {name: to_expr(number) for name, number in numbers.items()}
    b.kernel["deal"] = ir.Deal(where, **tensors, **exprs, block=block, overhead=overhead)
    return tuple(map(Value, ir.Deal.RESULTS))


def let(name: str, value: Value) -> Value:
    """The number of a tile, which gets a name in the generated text; in kernels with T.Persistent or T.ws."""
    b, expr = builder(), to_expr(value)
    of_groups = any(isinstance(stmt, ir.On) for body in b.bodies for stmt in body)
    if not isinstance(expr, ir.Call | ir.Element) or (b.kernel["grid"] and not of_groups and not b.in_run):
        instead = "T.let of an expression, in a kernel with T.Persistent or T.ws"
        raise TileError(f"{name} is not computed once for a tile", instead, here())
    b.kernel.setdefault("named", {})[expr] = b.declare(name)
    return value


def print(value) -> None:
    """A line from one thread, for debugging: a number of the kernel; or an element of a fragment, as in T.print(tile[3, 5]).

    A number comes from the first of the threads that hold fragments, an element from a thread that holds it: on the emulator,
    and on the GPU, where products of such a kernel wait for each other (ptxas C7510). No kernel of the library has one.
    """
    expr, where = to_expr(value), here()
    element = isinstance(expr, ir.Load) and isinstance(expr.buffer, ir.Buffer) and expr.buffer.scope == "fragment"
    inside = element and all(isinstance(i, ir.Const) and i.value in range(n) for i, n in zip(expr.indices, expr.buffer.shape))
    if ir.loads(expr) and not inside:
        raise TileError(f"{expr} is no element of a fragment at constant indices", "T.print(tile[0, 0]), or a number", where)
    builder().emit(ir.Print(where, expr))


def prim_func(function) -> ir.Kernel:
    """Record the tile program `function`; its annotated arguments become the kernel's parameters, under their names.

    One whose annotation is None is left out: other configurations of the program have it.
    """
    where = location(inspect.getsourcefile(function), function.__code__.co_firstlineno)
    every = inspect.get_annotations(function)
    specs = {name: spec for name, spec in every.items() if spec is not None}
    for name, spec in specs.items():
        require(isinstance(spec, Tensor | Scalar), f"parameter {name} is {spec!r}", "T.Tensor(...) or T.Scalar(...)", where)
    of_tensors = {name: spec for name, spec in specs.items() if isinstance(spec, Tensor)}
    shapes = {name: tuple(map(to_expr, t.dims)) for name, t in of_tensors.items()}
    tensors = {name: ir.Tensor(name, shapes[name], t.dtype, t.vector, t.optional) for name, t in of_tensors.items()}
    scalars = {name: ir.Var(spec.dtype, name) for name, spec in specs.items() if name not in tensors}
    declared = [d.expr for t in of_tensors.values() for dim in t.dims for d in getattr(dim, "declared", ())]
    dims = tuple(dict.fromkeys(dim for dim in declared if dim in sum(shapes.values(), ())))
    with recording(function.__code__) as b:
        for name in (*(dim.name for dim in dims), *specs):
            b.declare(name, reserved=name not in tensors)
        arguments = {name: TensorArg(tensors[name]) if name in tensors else Value(scalars[name]) for name in specs}
        function(*map(arguments.get, every))
    require(b.kernel is not None, "the program has no T.Kernel", "with T.Kernel(blocks, threads=n) as block: ...", where)
    require(len(b.bodies) == 1, "a loop was left by break or return", "T.If in the loop", where)
    parameters = tuple(tensors.values()), dims, tuple(scalars.values())
    below = {name: specs[name].below for name in scalars if specs[name].below}
    return ir.Kernel(function.__name__, *parameters, body=tuple(b.bodies[0]), below=below, **b.kernel)
