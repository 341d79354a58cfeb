"""A check that recording needs: a loop body runs once, so a name that it rebinds would silently keep its first value."""

import ast
import functools
import inspect
import textwrap

from tileops_dsl.errors import TileError
from tileops_dsl.language.builder import author_frame, location

_LOOPS = ("Parallel", "serial")


def reject_rebinding() -> None:
    """Check the function that holds the line being recorded."""
    _check(author_frame().f_code)


@functools.cache
def _check(code) -> None:
    function = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    for loop in ast.walk(function):
        if not (isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and _word(loop.iter) in _LOOPS):
            continue
        before = {n.id for n in _stored(function) if n.lineno < loop.lineno}
        for name in (n for stmt in loop.body for n in _stored(stmt)):
            if name.id in before:
                raise TileError(
                    f"{name.id} is bound before the loop and again inside it; the loop body is recorded once",
                    "a fragment for what changes from one iteration to the next",
                    location(code.co_filename, code.co_firstlineno + name.lineno - 1),
                )


def _word(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _stored(node) -> list[ast.Name]:
    """Names that assignments bind (a loop's own variables are fresh each time)."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    loop_vars = {id(n) for loop in ast.walk(node) if isinstance(loop, ast.For) for n in ast.walk(loop.target)}
    return [n for n in names if id(n) not in loop_vars]
