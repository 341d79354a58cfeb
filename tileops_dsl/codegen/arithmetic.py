"""Index arithmetic and conditions of kernels with roles: parameters are read where they are used, few parentheses."""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.codegen.expressions import INFIX, text


def arithmetic(kernel: ir.Kernel, expr: ir.Expr, outer: int = -1) -> str:
    """In C's precedence; `outer` is that of the operator around it."""
    if isinstance(expr, ir.Call) and expr.op in ("max", "min"):
        return f"{expr.op}({', '.join(arithmetic(kernel, a) for a in expr.args)})"
    if not (isinstance(expr, ir.Call) and expr.op in INFIX):
        return text(with_parameters(kernel, expr), None)
    sign, level = INFIX[expr.op]
    left, right = expr.args
    if expr.op in ("add", "sub") and right == ir.Const("int32", 0):
        return arithmetic(kernel, left, outer)
    chained = isinstance(right, ir.Call) and right.op == expr.op and expr.op in ("add", "mul")
    code = f"{arithmetic(kernel, left, level)} {sign} {arithmetic(kernel, right, level if chained else level + 1)}"
    return f"({code})" if level < outer else code


def with_parameters(kernel: ir.Kernel, expr: ir.Expr) -> ir.Expr:
    """With p.x for the parameter x."""
    names = kernel.parameters
    used = {e for e in ir.subexprs(expr) if isinstance(e, ir.Var) and e.name in names}
    return ir.replaced(expr, {e: replace(e, name=f"p.{e.name}") for e in used})


def ceil_divided(extent: ir.Expr, by: int) -> ir.Expr:
    """ceil(extent / by): of a quotient that is rounded up already, one division."""
    if by == 1:
        return extent
    one = ir.Const("int32", 1)
    match extent:
        case ir.Call(op="add", args=(ir.Call(op="floordiv", args=(a, ir.Const(value=n))), ir.Const(value=1))):
            return replace(extent, args=(replace(extent.args[0], args=(a, ir.Const("int32", n * by))), one))
    last = ir.Call("int32", "sub", (extent, one))
    return ir.Call("int32", "add", (ir.Call("int32", "floordiv", (last, ir.Const("int32", by))), one))
