"""Checks that recording needs: the body of a loop or of T.If runs once while recording, whatever happens at run time.

So a name that it rebinds would silently keep one value, and a statement that leaves T.If would silently drop the rest.
"""

import ast
import functools
import inspect
import textwrap

from tileops_dsl.errors import TileError
from tileops_dsl.language.builder import author_frame, location


def reject_rebinding() -> None:
    """Check the function that holds the line being recorded."""
    _check(author_frame().f_code)


@functools.cache
def _check(code) -> None:
    function = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    for block in ast.walk(function):
        word = _word(block)
        if word not in ("Parallel", "serial", "If", "Pipelined", "Persistent"):
            continue
        before = {n.id for n in _stored(function) if n.lineno < block.lineno}
        for name in (n for stmt in block.body for n in _stored(stmt)):
            if name.id in before:
                raise TileError(
                    f"{name.id} is bound before T.{word} and again inside it; the body is recorded once",
                    "a fragment for what changes at run time",
                    location(code.co_filename, code.co_firstlineno + name.lineno - 1),
                )
        for jump in (n for n in ast.walk(block) if word == "If" and isinstance(n, ast.Return | ast.Break | ast.Continue)):
            raise TileError(
                f"{type(jump).__name__.lower()} in T.If takes effect while recording, whatever the condition",
                "T.If around the statements that it shall skip",
                location(code.co_filename, code.co_firstlineno + jump.lineno - 1),
            )


def _word(block) -> str:
    """The word of the language that opens the block: of `for ... in T.serial(...)` or `with T.If(...)`."""
    call = block.iter if isinstance(block, ast.For) else block.items[0].context_expr if isinstance(block, ast.With) else None
    return getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""


def _stored(node) -> list[ast.Name]:
    """Names that assignments bind (a loop's own variables are fresh each time)."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    loop_vars = {id(n) for loop in ast.walk(node) if isinstance(loop, ast.For) for n in ast.walk(loop.target)}
    return [n for n in names if id(n) not in loop_vars]
