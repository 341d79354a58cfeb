"""Scalar values: Python operators on them build expressions. Arithmetic on 16-bit values is done in float32."""

import math

from tileops_dsl import ir
from tileops_dsl.errors import TileError, require
from tileops_dsl.language.builder import here

__all__ = [  # the words of this file
    "cast", "ceildiv", "exp2", "gelu", "gelu_tanh", "if_then_else", "infinity", "log2", "max", "min",
    "reciprocal", "relu", "rsqrt", "silu", "tanh",
]  # fmt: skip


def _infix(op: str):
    """The methods of an operator: of the operand on its left, and of the one on its right."""
    return lambda a, b: call(op, a, b), lambda b, a: call(op, a, b)


class Value:
    """A run-time number of the kernel, or a condition: + - * / // %, comparisons, & | ~; no truth value while recording."""

    def __init__(self, expr: ir.Expr):
        self.expr = expr

    __add__, __radd__ = _infix("add")
    __sub__, __rsub__ = _infix("sub")
    __mul__, __rmul__ = _infix("mul")
    __truediv__, __rtruediv__ = _infix("div")
    __floordiv__, __rfloordiv__ = _infix("floordiv")
    __mod__, __rmod__ = _infix("mod")
    __and__, __rand__ = _infix("and_")
    __or__, __ror__ = _infix("or_")
    __lt__, __gt__ = _infix("lt")
    __le__, __ge__ = _infix("le")
    __eq__, __ne__ = _infix("eq")[0], _infix("ne")[0]

    def __neg__(self):
        return call("neg", self)

    def __invert__(self):
        return call("not_", self)

    __hash__ = None

    def __bool__(self):
        problem = f"{self.expr} is known only at run time; Python's if, while, and, or and chained comparisons need it now"
        instead = "T.if_then_else(condition, a, b) for a value, `with T.If(condition):` for statements"
        raise TileError(problem, instead, here())

    def __index__(self):
        problem = f"{self.expr} is known only at run time; range() and sizes need a Python integer"
        raise TileError(problem, "for k in T.serial(extent): ...", here())


def to_expr(value) -> ir.Expr:
    """The expression of a Python number or of a Value."""
    if isinstance(value, Value):
        return value.expr
    if isinstance(value, bool):
        return ir.Const("bool", value)
    if isinstance(value, int):
        return ir.Const("int32" if -(2**31) <= value < 2**31 else "int64", value)
    if isinstance(value, float):
        return ir.Const("float32", value)
    raise TileError(f"{value!r} is not a number of the kernel", "a Python number, a dimension or a fragment element", here())


def convert(expr: ir.Expr, dtype: str) -> ir.Expr:
    if expr.dtype == dtype:
        return expr
    if isinstance(expr, ir.Const) and expr.dtype in ir.INTS and dtype in (*ir.INTS, "float32"):
        return ir.Const(dtype, float(expr.value) if dtype == "float32" else expr.value)
    narrow = expr.dtype in ir.FLOATS and "float32" not in (expr.dtype, dtype)  # a 16-bit float converts to float32 only
    return ir.Cast(dtype, ir.Cast("float32", expr) if narrow else expr)


def call(op: str, *args) -> Value:
    """An operation on converted operands: 16-bit floats become float32, integers follow the wider operand."""
    exprs = [to_expr(a) for a in args]
    kind = ir.OPS[op][1]
    conditions = len(exprs) if kind == "logic" else op == "select"
    condition, operands = exprs[:conditions], exprs[conditions:]
    for one in condition:
        require(one.dtype == "bool", f"{one} is {one.dtype}, not a condition", "a comparison, such as i < n", here())
    dtypes = {e.dtype for e in operands}
    of_floats = bool(dtypes & ir.FLOATS.keys())
    require("bool" not in dtypes, f"{op} of a condition", "T.if_then_else(condition, a, b)", here())
    require(kind != "int" or not of_floats, f"{op} of a float", "an integer, or / for a quotient", here())
    if kind == "logic":
        return Value(ir.Call("bool", op, tuple(condition)))
    dtype = "float32" if kind == "float" or of_floats else "int64" if "int64" in dtypes else "int32"
    operands = [convert(e, dtype) for e in operands]
    return Value(ir.Call("bool" if kind == "compare" else dtype, op, (*condition, *operands)))


def cast(value, dtype: str) -> Value:
    """The value rounded to `dtype` (to nearest, ties to even)."""
    known = (*ir.FLOATS, *ir.INTS)
    require(dtype in known, f"there is no dtype {dtype!r}", f"one of {', '.join(known)}", here())
    return Value(convert(to_expr(value), dtype))


def _function(name: str, result: str):
    """Declares a word: a float32 value in, a float32 out, computed by the device word of the same name."""
    ir.OPS[name] = (1, "float")

    def word(value) -> Value:
        return call(name, value)

    word.__name__, word.__doc__ = name, result
    return word


exp2 = _function("exp2", "2 to the power of a float32 value.")
log2 = _function("log2", "The logarithm of a float32 value to base 2: -inf of 0, NaN of less.")
rsqrt = _function("rsqrt", "One over the square root of a float32 value.")
reciprocal = _function("reciprocal", "One over a float32 value, 1 ulp (a division with / is correctly rounded and slower).")
relu = _function("relu", "The value where it is positive, 0 where it is negative; a NaN stays.")
gelu = _function("gelu", "v Phi(v), Phi the normal distribution: error at most 1.2e-7 (1 + |v|).")
gelu_tanh = _function("gelu_tanh", "The tanh form of gelu.")
silu = _function("silu", "v sigmoid(v).")
tanh = _function("tanh", "The hyperbolic tangent, one instruction: relative error 2^-11.")


def max(a, b) -> Value:
    """The larger value, of floats or of integers; a NaN gives way to a number."""
    return call("max", a, b)


def min(a, b) -> Value:
    """The smaller value, of floats or of integers; a NaN gives way to a number."""
    return call("min", a, b)


def if_then_else(condition, a, b) -> Value:
    """a where the condition holds, b elsewhere; both are evaluated."""
    return call("select", condition, a, b)


def infinity() -> float:
    """The float32 infinity."""
    return math.inf


def ceildiv(a, b):
    """a / b rounded up, for a >= 1 when a is a run-time value."""
    return (a - 1) // b + 1
