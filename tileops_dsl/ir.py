"""The tile IR.

    Kernel    = (name, tensors, dims, scalars, grid, threads, body)
    Tensor    = (name, dims, dtype | "any", vector)         in global memory; strides are arguments
    Buffer    = (name, scope "fragment" | "shared", shape, dtype)

    Stmt      = Alloc(buffer)
              | Annotate(buffer, layout)
              | Fill(buffer, value)
              | Copy(Region, buffer, fill, absent) | Copy(buffer, Region)     global -> fragment, fragment -> global
              | Reduce(op, src, dst, clear)                           over the last dimension of a fragment
              | Parallel(vars, extents, Store*)                       element-wise over fragments
              | Store(buffer, indices, value)                         inside Parallel
              | Serial(var, extent, body)
              | If(condition, body)
    Region    = (tensor, origin)                            the tile that starts there, as large as the other side
    Expr      = Const(value) | Var(name) | Load(buffer, indices) | Call(op, args) | Cast(value)

Every node is a frozen dataclass; every Expr has a dtype; every Stmt has the Location of the line that wrote it.
Layouts and the shared-memory plan are tables beside the body (`Kernel.layouts`, `Kernel.shared`), filled by passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

FLOATS = {"float32": 4, "float16": 2, "bfloat16": 2}
INTS = {"int32": 4, "int64": 8}
DTYPES = {**FLOATS, **INTS, "bool": 1}

# op -> (arity, result): "float" works on float32, "int" on integers, "compare" gives bool, "any" keeps the operands' dtype.
OPS = {
    "add": (2, "any"), "sub": (2, "any"), "mul": (2, "any"), "div": (2, "float"), "floordiv": (2, "int"),
    "max": (2, "any"), "min": (2, "any"), "neg": (1, "any"),
    "exp2": (1, "float"), "rsqrt": (1, "float"), "reciprocal": (1, "float"),
    "lt": (2, "compare"), "le": (2, "compare"), "eq": (2, "compare"), "ne": (2, "compare"),
    "select": (3, "any"),
}  # fmt: skip


@dataclass(frozen=True)
class Location:
    """A line of a tile program."""

    file: str
    line: int
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Expr:
    dtype: str


@dataclass(frozen=True)
class Const(Expr):
    value: Any

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Var(Expr):
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Load(Expr):
    buffer: Buffer
    indices: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"{self.buffer.name}[{', '.join(map(str, self.indices))}]"


@dataclass(frozen=True)
class Call(Expr):
    op: str
    args: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})"


@dataclass(frozen=True)
class Cast(Expr):
    value: Expr

    def __str__(self) -> str:
        return f"{self.dtype}({self.value})"


@dataclass(frozen=True)
class Tensor:
    name: str
    dims: tuple[Var, ...]
    dtype: str
    vector: int

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.dims))}] vector {self.vector}"


@dataclass(frozen=True)
class Buffer:
    name: str
    scope: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}: {self.scope} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Region:
    tensor: Tensor
    origin: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"{self.tensor.name}[{', '.join(map(str, self.origin))}]"


@dataclass(frozen=True)
class Stmt:
    location: Location


@dataclass(frozen=True)
class Alloc(Stmt):
    buffer: Buffer


@dataclass(frozen=True)
class Annotate(Stmt):
    buffer: Buffer
    layout: Any


@dataclass(frozen=True)
class Fill(Stmt):
    buffer: Buffer
    value: Expr


@dataclass(frozen=True)
class Copy(Stmt):
    src: Region | Buffer
    dst: Region | Buffer
    fill: Expr | None
    absent: Expr | None  # the value of an optional tensor that was not passed
    evict_first: bool


@dataclass(frozen=True, eq=False)  # two equal ones, from one line of the program, are still two
class Reduce(Stmt):
    op: str
    src: Buffer
    dst: Buffer
    clear: bool


@dataclass(frozen=True)
class Store(Stmt):
    buffer: Buffer
    indices: tuple[Expr, ...]
    value: Expr


@dataclass(frozen=True)
class Parallel(Stmt):
    vars: tuple[Var, ...]
    extents: tuple[int, ...]
    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class Serial(Stmt):
    var: Var
    extent: Expr
    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class If(Stmt):
    condition: Expr
    body: tuple[Stmt, ...]


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
    layouts: dict[Buffer, Any] = field(default_factory=dict)
    shared: dict[Reduce, int] = field(default_factory=dict)  # byte offset of the exchange buffer of a reduction
    shared_bytes: int = 0


def walk(body: tuple[Stmt, ...]):
    """Every statement, outer before inner, in program order."""
    for stmt in body:
        yield stmt
        yield from walk(getattr(stmt, "body", ()))


def subexprs(expr: Expr):
    """The expression and all below it."""
    yield expr
    children = {Load: lambda e: e.indices, Call: lambda e: e.args, Cast: lambda e: (e.value,)}.get(type(expr))
    for child in children(expr) if children else ():
        yield from subexprs(child)


def as_numbers(expr: Expr):
    """The expression and all below it but the indices of loads."""
    if not isinstance(expr, Load):
        yield expr
        for child in expr.args if isinstance(expr, Call) else (expr.value,) if isinstance(expr, Cast) else ():
            yield from as_numbers(child)


def exprs_of(stmt: Stmt):
    """The expressions that a statement evaluates itself: not its loop variables, not those of its body."""
    for f in fields(stmt):
        if f.name in ("var", "vars"):
            continue
        value = getattr(stmt, f.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Expr):
                yield item
            elif isinstance(item, Region):
                yield from item.origin


def to_text(kernel: Kernel) -> str:
    """The kernel as text: what `generate --dump` writes after each pass."""
    lines = [
        f"kernel {kernel.name} threads {kernel.threads} min blocks {kernel.min_blocks} grid {', '.join(map(str, kernel.grid))}"
    ]
    lines += [f"  tensor {t}" for t in kernel.tensors]
    lines += [f"  scalar {s.name}: {s.dtype}" for s in (*kernel.dims, *kernel.scalars)]
    lines += [f"  layout {buffer.name}: {layout}" for buffer, layout in kernel.layouts.items()]
    lines += [f"  shared {offset}: {reduce.op} of {reduce.src.name}" for reduce, offset in kernel.shared.items()]
    lines += [f"  shared bytes {kernel.shared_bytes}"] if kernel.shared_bytes else []

    def block(body, indent):
        for stmt in body:
            lines.append(f"{indent}{_line(stmt)}  // {stmt.location}")
            block(getattr(stmt, "body", ()), indent + "  ")

    block(kernel.body, "  ")
    return "\n".join(lines) + "\n"


def _line(stmt: Stmt) -> str:
    match stmt:
        case Alloc(buffer=b):
            return f"alloc {b}"
        case Annotate(buffer=b, layout=layout):
            return f"annotate {b.name}: {layout}"
        case Fill(buffer=b, value=v):
            return f"fill {b.name} with {v}"
        case Copy(src=src, dst=dst, fill=fill, absent=absent):
            ends = [end.name if isinstance(end, Buffer) else str(end) for end in (src, dst)]
            values = (f" fill {fill}" if fill else "") + (f" absent {absent}" if absent else "")
            return f"copy {ends[0]} -> {ends[1]}{values}"
        case Reduce(op=op, src=src, dst=dst, clear=clear):
            return f"reduce {op} {src.name} -> {dst.name}" + ("" if clear else " (accumulate)")
        case Store(buffer=b, indices=indices, value=v):
            return f"{Load(b.dtype, b, indices)} = {v}"
        case Parallel(vars=names, extents=extents):
            return f"parallel {', '.join(map(str, names))} in {', '.join(map(str, extents))}"
        case Serial(var=var, extent=extent):
            return f"serial {var} in {extent}"
        case If(condition=condition):
            return f"if {condition}"
    raise TypeError(stmt)
