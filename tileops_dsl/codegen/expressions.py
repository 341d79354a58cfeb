"""Expressions as CUDA text."""

import math

from tileops_dsl import ir

CTYPES = {"float32": "float", "bfloat16": "bf16", "float16": "f16", "int32": "int", "int64": "int64_t", "bool": "bool"}
CODES = {"bfloat16": "kBf16", "float16": "kF16", "float32": "kF32"}  # of the dtype of a tensor of any
# The sign in C and how tightly it binds.
INFIX = {"mul": ("*", 3), "floordiv": ("/", 3), "add": ("+", 2), "sub": ("-", 2), "lt": ("<", 1), "le": ("<=", 1),
         "eq": ("==", 0), "ne": ("!=", 0), "mod": ("%", 3), "and_": ("&&", -1), "or_": ("||", -1)}  # fmt: skip


def text(expr: ir.Expr, register) -> str:
    """As an operand: in parentheses where an operator could take it apart."""
    code = statement(expr, register)
    return f"({code})" if isinstance(expr, ir.Call) and (expr.op == "select" or expr.op in INFIX) else code


def statement(expr: ir.Expr, register) -> str:
    """As a whole right-hand side. `register(buffer)` is the register number of the loop's element of a fragment."""
    match expr:
        case ir.Const(value=value):
            return _literal(value)
        case ir.Var(name=name):
            return name
        case ir.Load(buffer=buffer):
            return f"{ir.buffer_of(buffer).name}[{register(buffer)}]"
        case ir.Cast(dtype="float32", value=ir.Load(buffer=buffer)):
            return f"to_float({ir.buffer_of(buffer).name}, {register(buffer)})"
        case ir.Cast(dtype="float32", value=value) if value.dtype not in ir.INTS:
            return f"to_float({statement(value, register)})"
        case ir.Cast(dtype=dtype, value=value):
            word = "from_float" if dtype in ("bfloat16", "float16") else "static_cast"
            return f"{word}<{CTYPES[dtype]}>({statement(value, register)})"
        case ir.Call(op="select", args=(condition, a, b)):
            return f"{statement(condition, register)} ? {text(a, register)} : {text(b, register)}"
        case ir.Call(op="neg", args=(a,)):
            inner = text(a, register)
            return f"-({inner})" if inner.startswith("-") else f"-{inner}"  # "--" would decrement
        case ir.Call(op="not_", args=(a,)):
            return f"!{text(a, register)}"
        case ir.Call(op=op, args=(a, b)) if op in INFIX:
            return f"{text(a, register)} {INFIX[op][0]} {text(b, register)}"
        case ir.Call(op=op, args=args):
            return f"{'divide' if op == 'div' else op}({', '.join(statement(a, register) for a in args)})"
    raise TypeError(expr)


def _literal(value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if -(2**31) < value < 2**31 else f"int64_t{{{value}}}"
    if math.isinf(value):
        return "infinity()" if value > 0 else "-infinity()"
    return f"{value!r}f"
