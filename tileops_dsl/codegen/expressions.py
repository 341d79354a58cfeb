"""Expressions as CUDA text."""

import math

from tileops_dsl import ir

CTYPES = {"float32": "float", "bfloat16": "bf16", "float16": "f16", "int32": "int", "int64": "int64_t", "bool": "bool"}
CODES = {"bfloat16": "kBf16", "float16": "kF16", "float32": "kF32"}  # of the dtype of a tensor of any
# The sign in C and how tightly it binds.
INFIX = {"mul": ("*", 3), "floordiv": ("/", 3), "add": ("+", 2), "sub": ("-", 2), "lt": ("<", 1), "le": ("<=", 1),
         "eq": ("==", 0), "ne": ("!=", 0)}  # fmt: skip


def text(expr: ir.Expr, register) -> str:
    """`register(buffer)` is the register number of the loop's element of a fragment."""
    match expr:
        case ir.Const(value=value):
            return _literal(value)
        case ir.Var(name=name):
            return name
        case ir.Load(buffer=buffer):
            return f"{ir.buffer_of(buffer).name}[{register(buffer)}]"
        case ir.Cast(dtype="float32", value=ir.Load(buffer=buffer)):
            return f"to_float({ir.buffer_of(buffer).name}, {register(buffer)})"
        case ir.Cast(dtype=dtype, value=value):
            return _cast(dtype, value.dtype, statement(value, register))
        case ir.Call(op="select", args=args):
            condition, a, b = (text(a, register) for a in args)
            return f"({_bare(condition)} ? {a} : {b})"
        case ir.Call(op="neg", args=(a,)):
            inner = text(a, register)
            return f"-({inner})" if inner.startswith("-") else f"-{inner}"  # "--" would decrement
        case ir.Call(op=op, args=(a, b)) if op in INFIX:
            return f"({text(a, register)} {INFIX[op][0]} {text(b, register)})"
        case ir.Call(op=op, args=args):
            return f"{'divide' if op == 'div' else op}({', '.join(statement(a, register) for a in args)})"
    raise TypeError(expr)


def statement(expr: ir.Expr, register) -> str:
    """The text of a whole right-hand side."""
    return _bare(text(expr, register))


def _cast(dtype: str, source: str, inner: str) -> str:
    if dtype == "float32":
        return f"static_cast<float>({inner})" if source in ir.INTS else f"to_float({inner})"
    if dtype in ir.FLOATS:
        return f"from_float<{CTYPES[dtype]}>({inner})"
    return f"static_cast<{CTYPES[dtype]}>({inner})"


def _bare(code: str) -> str:
    """Without the outermost parentheses, where they enclose all of it."""
    if not code.startswith("("):
        return code
    depth = 0
    for i, c in enumerate(code):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return code[1:-1] if i == len(code) - 1 else code
    return code


def _literal(value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if -(2**31) < value < 2**31 else f"int64_t{{{value}}}"
    if math.isinf(value):
        return "infinity()" if value > 0 else "-infinity()"
    return f"{value!r}f"
