"""The tile IR.

    Kernel    = (name, tensors, dims, scalars, grid, cluster, threads, body)
    Tensor    = (name, dims, dtype | "any", vector, optional)       in global memory; strides are arguments
    Buffer    = (name, scope "fragment" | "shared", shape, dtype, box, alias, common)   box: columns with edges of their own;
                                                            common: groups exchange through it (passes/exchange.py)
    View      = (buffer, origin, shape)                     a part; Tile = Buffer | View

    Stmt      = Alloc(buffer)
              | Annotate(buffer, layout)
              | Fill(buffer, value)
              | Copy(src, dst, fill, absent)                          between Regions and buffers, and from a fragment to shared
              | Gemm(a, b, c, transposes, policy, clear, stage)       c (+)= a b; stage 1: issued one iteration later
              | Reduce(op, src, dst, clear, partial, dim)             over the last dimension, or the first; partial: of each
                                                                      thread's share
              | Parallel(vars, extents, Store*)                       element-wise over tiles
              | Store(tile | tensor, indices, value)                  inside Parallel
              | Serial(var, extent, body)
              | Pipelined(var, extent, num_stages, pending, body, start, step)  a Serial whose copies run ahead
              | Persistent(vars, extents, group_size, body, alternate)        the tiles of one CTA
              | Persistent((var,), (end,), .., start)                 the same, where each CTA of the grid knows its run of them
              | If(condition, body)
              | On(groups, body)                                      of these warp groups, each on its own fragments
              | Wait(of, pending)                                     until that Copy or Gemm of the group is finished
              | Print(value)                                          a line from one thread
    Region    = (tensor, origin, stop)                      the tile that starts there, as large as the other side; rows from
                                                            `stop` on are not stored
    Expr      = Const(value) | Var(name) | Load(tile, indices) | Call(op, args) | Cast(value)
              | Element(tensor, indices)                      a number in global memory, the same for all threads
              | BoxRow(rows)                                  in the place of a load: of each box of so many rows, its first one
              | AnyOf(test)                                   whether it holds for an element that the warp has

Every node is a frozen dataclass; every Expr has a dtype; every Stmt has the Location of the line that wrote it.
Layouts and the shared-memory plan are tables beside the body (`Kernel.layouts`, `Kernel.shared`), filled by passes. The body
stays as recorded; what each role of it does is `Kernel.roles`, in the nodes of schedule.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import UnionType
from typing import Any

FLOATS = {"float32": 4, "float16": 2, "bfloat16": 2}
INTS = {"int32": 4, "int64": 8}
DTYPES = {**FLOATS, **INTS, "bool": 1}

# op -> (arity, result): "float" works on float32, "int" on integers, "compare" gives bool, "any" keeps the operands' dtype.
# language/scalar.py adds the functions of float32, such as exp2.
OPS = {
    "add": (2, "any"), "sub": (2, "any"), "mul": (2, "any"), "div": (2, "float"), "floordiv": (2, "int"),
    "mod": (2, "int"), "and_": (2, "logic"), "or_": (2, "logic"), "not_": (1, "logic"),
    "max": (2, "any"), "min": (2, "any"), "neg": (1, "any"),
    "lt": (2, "compare"), "le": (2, "compare"), "eq": (2, "compare"), "ne": (2, "compare"),
    "select": (3, "any"),
}  # fmt: skip


@dataclass(frozen=True)
class Location:
    """A line of a tile program."""

    file: str
    line: int
    text: str = field(default="", compare=False)
    caller: Location | None = None  # of a macro: where the program calls it

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Expr:
    dtype: str
    children = property(lambda self: exprs_of(self))  # the expressions that it is made of

    def __init_subclass__(cls):
        dataclass(frozen=True)(cls)

    def __str__(self) -> str:
        return self._text

    @cached_property  # the checks ask again and again
    def _text(self) -> str:
        match self:
            case Var(name=name):
                return name
            case Call(op=op, args=args):
                return f"{op}({_listed(args)})"
            case Load(buffer=of, indices=indices) | Element(tensor=of, indices=indices):
                return f"{of.name}[{_listed(indices)}]"
            case Cast(dtype=name, value=of):
                return f"{name}({of})"
            case AnyOf(test=test):
                return f"any_of({test})"
            case BoxRow(rows=rows):
                return f"box_row({rows})"
        return str(self.value)


class Const(Expr):
    value: Any


class Var(Expr):
    name: str


class Load(Expr):
    buffer: Tile
    indices: tuple[Expr, ...]


class Call(Expr):
    op: str
    args: tuple[Expr, ...]


class Cast(Expr):
    value: Expr


class Element(Expr):
    tensor: Tensor
    indices: tuple[Expr, ...]


class BoxRow(Expr):
    rows: Expr


ZERO = Const("int32", 0)
EACH = Var("int32", "each")  # in AnyOf: the index of every element


class AnyOf(Expr):
    test: Expr


def _listed(parts: tuple) -> str:
    return ", ".join(map(str, parts))


@dataclass(frozen=True)
class Tensor:
    name: str
    dims: tuple[Var | Const, ...]
    dtype: str
    vector: int
    optional: bool = False
    shape = property(lambda self: self.dims)
    # The parameter that says whether an optional tensor was passed: not 0 if it was.
    flag = property(lambda self: f"has_{self.name}" if self.optional else f"{self.name}_dtype" if self.dtype == "any" else None)
    given = property(lambda self: call("ne", Var("int32", self.flag), 0))  # whether it was passed

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{_listed(self.dims)}] vector {self.vector}{' optional' * self.optional}"


@dataclass(frozen=True)
class Buffer:
    name: str
    scope: str
    shape: tuple[int, ...]
    dtype: str
    box: int | None = None
    alias: View | Buffer | None = None  # the tile lies over it
    common: bool = False  # groups exchange through it: each writes its part, all read

    def __str__(self) -> str:
        over = f" over {self.alias.name}" if self.alias else ""
        return f"{self.name}: {self.scope} {self.dtype}{list(self.shape)}{f' box {self.box}' * bool(self.box)}{over}"


@dataclass(frozen=True)
class View:
    """A part of a tile, in its own coordinates from `origin` on; rows that begin at a run-time one end with the tile."""

    buffer: Buffer
    origin: tuple[Expr, ...]
    shape: tuple[int, ...]

    scope = property(lambda self: self.buffer.scope)
    dtype = property(lambda self: self.buffer.dtype)

    @property
    def name(self) -> str:
        return f"{self.buffer.name}[{', '.join(f'{o}:+{n}' for o, n in zip(self.origin, self.shape, strict=True))}]"


Tile = Buffer | View


def buffer_of(tile: Tile) -> Buffer:
    return tile.buffer if isinstance(tile, View) else tile


@dataclass(frozen=True)
class Region:
    tensor: Tensor
    origin: tuple[Expr, ...]
    stop: Expr | None = None

    def __str__(self) -> str:
        return f"{self.tensor.name}[{_listed(self.origin)}]" + f" up to {self.stop}" * (self.stop is not None)


@dataclass(frozen=True, eq=False)  # two equal ones, from one line of the program, are still two
class Stmt:
    location: Location

    def __init_subclass__(cls):
        dataclass(frozen=True, eq=False)(cls)

    def __str__(self) -> str:
        """Its kind and its fields, without its body: what `generate --dump` shows."""
        named = [(f, getattr(self, f.name)) for f in fields(self) if f.name not in ("location", "body")]
        own = [f"{f.name}={_text(v)}" for f, v in named if v is not None and v is not False and v != f.default]
        return " ".join([type(self).__name__.lower(), *own])


def _text(value) -> str:
    if isinstance(value, Stmt):
        return f"({value})"
    return ",".join(map(_text, value)) if isinstance(value, tuple) else str(getattr(value, "name", value))


class Alloc(Stmt):
    buffer: Buffer

    def __str__(self) -> str:
        return f"alloc {self.buffer}"


class Annotate(Stmt):
    buffer: Buffer
    layout: Any


class Fill(Stmt):
    buffer: Buffer
    value: Expr


class Copy(Stmt):
    src: Region | Buffer
    dst: Region | Buffer
    fill: Expr | None
    absent: Expr | None  # the value of an optional tensor that was not passed
    eviction: str | None  # "evict_first", "evict_last": leaves the caches before other data, or after it
    multicast: bool = False  # each CTA of the cluster loads a part into all

    # The end in global memory, if there is one, and the other one.
    region = property(lambda self: next((end for end in (self.src, self.dst) if isinstance(end, Region)), None))
    tile = property(lambda self: self.dst if isinstance(self.src, Region) else self.src)
    # What tells boxes of rows apart that are loaded from places of their own, if they are.
    box_row = property(lambda self: next((e for e in subexprs(self) if isinstance(e, BoxRow)), None))


class Gemm(Stmt):
    a: Tile
    b: Tile
    c: Tile  # of T.wgmma_gemm perhaps some columns of an accumulator
    transpose_a: bool
    transpose_b: bool
    policy: str
    clear: Expr  # whether c starts from zero
    stage: int = 0


class Reduce(Stmt):
    op: str
    src: Buffer  # [M, N]; or [M], the partial sums that are added up
    dst: Buffer
    clear: bool
    partial: bool = False
    dim: int = -1


class Store(Stmt):
    buffer: Tile | Tensor
    indices: tuple[Expr, ...]
    value: Expr

    def __str__(self) -> str:
        return f"{Load(self.buffer.dtype, self.buffer, self.indices)} = {self.value}"


class Parallel(Stmt):
    vars: tuple[Var, ...]
    extents: tuple[int, ...]
    body: tuple[Stmt, ...]


class Serial(Stmt):
    var: Var
    extent: Expr
    body: tuple[Stmt, ...]


class Pipelined(Stmt):
    var: Var
    extent: Expr
    num_stages: int
    pending: int  # products that may be unfinished when the next iteration begins
    body: tuple[Stmt, ...]
    start: Expr = ZERO
    step: int = 1
    turns: bool = False  # groups issue their products one after the other


class Persistent(Stmt):
    vars: tuple[Var, ...]
    extents: tuple[Expr, ...]
    group_size: int  # rows of tiles (of clusters) that are visited together
    body: tuple[Stmt, ...]
    alternate: bool = False  # the groups of threads take whole tiles in turn
    zigzag: bool = False  # a CTA takes a column's last tile and its first, or the second of both ends, ...
    start: Expr | None = None  # of a run, which each CTA of the grid has for itself
    section: Expr | None = None  # of so many rows of tiles, all last columns come first


class If(Stmt):
    condition: Expr
    body: tuple[Stmt, ...]
    name: str = ""  # of what the condition is here, for AnyOf further down


class On(Stmt):
    groups: tuple[int, ...]
    body: tuple[Stmt, ...]


class Wait(Stmt):
    of: Copy | Gemm
    pending: int  # later operations of the group, up to it, that may be unfinished


class Print(Stmt):
    value: Expr  # a number, or an element of a fragment at constant indices


@dataclass(frozen=True)
class Deal:
    """T.deal: the CTA finds its part of all blocks of keys before anything else."""

    location: Location
    lengths: Tensor
    pieces: Tensor
    part: Expr
    parts: Expr
    heads: Expr
    block: int
    overhead: int
    seen: Expr
    most_pieces: Expr
    notes: Expr
    offset: int = 0  # in shared memory

    BYTES = 288  # of shared memory, see csrc/include/tileops/deal_part.h
    RESULTS = tuple(Var("int32", f"dealt_{name}") for name in ("first", "begin", "behind", "last", "end"))
    PLACES = (0, 1, 7, 4, 5)  # of these in shared memory


@dataclass(frozen=True)
class Kernel:
    name: str
    tensors: tuple[Tensor, ...]
    dims: tuple[Var, ...]
    scalars: tuple[Var, ...]
    blocks: tuple[Var, ...]
    grid: tuple[Expr, ...]
    threads: int
    body: tuple[Stmt, ...]
    location: Location
    min_blocks: int = 1  # CTAs that must fit on a multiprocessor: bounds the registers
    cluster: tuple[int, int] = (1, 1)
    below: dict[str, int] = field(default_factory=dict)  # what scalars promise: 0 <= scalar < below
    deal: Deal | None = None
    dependent: bool = False  # launched while the kernel before it still runs
    named: dict[Expr, str] = field(default_factory=dict)  # numbers of a tile that have a name in the text
    layouts: dict[Buffer, Any] = field(default_factory=dict)
    shared: dict[Reduce | Buffer, int] = field(default_factory=dict)  # byte offset of a tile, or of a reduction's exchange
    shared_bytes: int = 0
    roles: tuple = ()  # schedule.Role; none: all threads do the same
    rings: tuple = ()  # schedule.Ring
    barriers: tuple = ()  # schedule.Barrier
    ctas = property(lambda self: self.cluster[0] * self.cluster[1])  # of a cluster
    # Names of the numbers that it is given.
    parameters = property(lambda self: {v.name for v in (*self.dims, *self.scalars)} | {t.flag for t in self.tensors})


def call(op: str, *operands: Expr | int) -> Call:
    """An operation on numbers of int32, or a comparison of two."""
    args = tuple(Const("int32", operand) if isinstance(operand, int) else operand for operand in operands)
    return Call("bool" if OPS[op][1] == "compare" else "int32", op, args)


def walk(body: tuple[Stmt, ...], kind: type | UnionType = Stmt):
    """Every statement (of that kind), outer before inner, in program order."""
    for stmt in body:
        if isinstance(stmt, kind):
            yield stmt
        yield from walk(getattr(stmt, "body", ()), kind)


def subexprs(node: Stmt | Expr):
    """The expression and all below it, or all that the statement evaluates itself."""
    if isinstance(node, Expr):
        yield node
    for child in exprs_of(node):
        yield from subexprs(child)


def loads(node: Stmt | Expr) -> list[Load]:
    return [e for e in subexprs(node) if isinstance(e, Load)]


def replaced(node, table: dict):
    """An expression, or what holds some (a tuple, a Region, a View, a statement), with others in place of some of them."""
    if isinstance(node, tuple):
        return tuple(replaced(n, table) for n in node)
    if isinstance(node, Expr | View) and node in table:
        return table[node]
    if isinstance(node, Expr | Region | View | Stmt):
        return replace(node, **{f.name: replaced(getattr(node, f.name), table) for f in fields(node)})
    return node


def as_numbers(expr: Expr):
    """The expression and all below it but the indices of loads."""
    if not isinstance(expr, Load):
        yield expr
        for child in expr.children:
            yield from as_numbers(child)


def exprs_of(node: Stmt | Expr):
    """The expressions that it evaluates itself: of a statement not its loop variables, not those of its body."""
    for value in (value for name, value in vars(node).items() if name not in ("var", "vars")):
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Expr):
                yield item
            elif isinstance(item, Region | View):
                yield from item.origin
                yield from (stop for stop in [getattr(item, "stop", None)] if stop is not None)


def to_text(kernel: Kernel) -> str:
    """The kernel as text: what `generate --dump` writes after each pass."""
    grid = (_listed(kernel.grid) or "wave") + f" cluster {_listed(kernel.cluster)}" * (kernel.ctas > 1)
    lines = [f"kernel {kernel.name} threads {kernel.threads} min blocks {kernel.min_blocks} grid {grid}"]
    lines += [f"  tensor {t}" for t in kernel.tensors]
    lines += [f"  scalar {s.name}: {s.dtype}" for s in (*kernel.dims, *kernel.scalars)]
    lines += [f"  {kernel.deal}"] if kernel.deal else []
    lines += [f"  layout {buffer.name}: {layout}" for buffer, layout in kernel.layouts.items()]
    for owner, offset in kernel.shared.items():
        lines.append(f"  shared {offset}: " + (owner.name if isinstance(owner, Buffer) else f"{owner.op} of {owner.src.name}"))
    lines += [f"  shared bytes {kernel.shared_bytes}"] if kernel.shared_bytes else []
    lines += [f"  {line}" for table in (kernel.rings, kernel.barriers) for line in map(str, table)]

    def block(body, indent):
        for stmt in body:
            lines.append(f"{indent}{stmt}  // {stmt.location}")
            block(getattr(stmt, "body", ()), indent + "  ")

    for role in kernel.roles:
        lines.append(f"  {role}")
        block(role.body, "    ")
    block(kernel.body if not kernel.roles else (), "  ")
    return "\n".join(lines) + "\n"
