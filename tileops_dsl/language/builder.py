"""What is being recorded, where the author wrote it, and what recording cannot follow."""

import ast
import contextlib
import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import textwrap
from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError

_LANGUAGE = os.path.dirname(__file__)


def author_frame():
    """The innermost frame outside the language: the tile program's."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename.startswith(_LANGUAGE) or frame.f_code.co_filename == contextlib.__file__):
        frame = frame.f_back
    return frame


def here() -> ir.Location:
    """The line of the tile program that is being recorded."""
    frame = author_frame()
    inner = outer = location(frame.f_code.co_filename, frame.f_lineno)
    while _current and frame and frame.f_code is not _current[-1].code:
        frame = frame.f_back
    if _current and frame:
        outer = location(frame.f_code.co_filename, frame.f_lineno)
    return inner if inner == outer else replace(inner, caller=outer)


def location(path: str, line: int) -> ir.Location:
    return ir.Location(os.path.basename(path), line, linecache.getline(path, line).strip())


class Builder:
    """The statements recorded so far: a stack of bodies, the innermost open loop last."""

    def __init__(self, code=None):
        self.code = code  # of the program
        self.groups: tuple[int, ...] = ()  # of T.ws
        self.bodies: list[list[ir.Stmt]] = [[]]
        self.names: dict[str, ir.Location] = {}
        self.loops: set[str] = set()
        self.reserved = RESERVED
        self.kernel: dict | None = None
        self.in_parallel = False
        self.in_run = False  # of T.Persistent(begin, end)

    def emit(self, stmt: ir.Stmt) -> None:
        if self.in_parallel != isinstance(stmt, ir.Store):
            inside = "only assignments to fragment elements can stand in T.Parallel", "this statement before or after the loop"
            outside = "a fragment element is assigned outside T.Parallel", "for i, j in T.Parallel(...): tile[i, j] = value"
            raise TileError(*(inside if self.in_parallel else outside), stmt.location)
        self.bodies[-1].append(stmt)

    def open(self) -> None:
        """The body of a loop or of T.If begins."""
        _reject_rebinding(author_frame().f_code)
        self.bodies.append([])

    def close(self) -> tuple[ir.Stmt, ...]:
        return tuple(self.bodies.pop())

    def declare(self, name: str, reserved: bool = True) -> str:
        """Take a name; two things of one kernel never share one, nor one that the generated text uses itself."""
        if reserved and name in self.reserved:
            raise TileError(f"{name} is a name of the generated text", f"another name, such as {name}_tile", here())
        if name in self.names:
            raise TileError(f"{name} is already the name of what line {self.names[name].line} made", "another name", here())
        self.names[name] = here()
        return name

    def loop_vars(self, where: ir.Location, count: int) -> tuple[ir.Var, ...]:
        """The author's names, as the line of the loop has them; a name that is taken gets a number."""
        written = re.match(r"for \(?([\w, ]+?)\)? in ", where.text)
        names = [name.strip() for name in written[1].split(",")] if written else []
        variables = []
        for name in names if len(names) == count else "ijkmn"[:count]:
            free = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
            variables.append(next(n for n in free if n not in self.loops | self.names.keys() | self.reserved))
            self.loops.add(variables[-1])
        return tuple(ir.Var("int32", name) for name in variables)


RESERVED = frozenset(
    "p r q c row col columns first head tail edge has_edge slot member thread before fill shared global site"
    " x y h own own_row box box_row place_0 place_1 place_2 place_3 group warp lane next value".split()  # with T.ws
)
# Those of kernels without a grid.
RESERVED_PERSISTENT = frozenset(
    "p q x a b col full empty group rank thread lane rows columns tiles first clusters tile place section height rest stage"
    " h round phase before steps pair shared global site own box chunk value".split()
)

_current: list[Builder] = []


def builder() -> Builder:
    if not _current:
        raise TileError("a word of the language is used outside a tile program", "@T.prim_func above the function", here())
    return _current[-1]


@contextlib.contextmanager
def recording(code):
    """Records the words that are called in its scope."""
    _current.append(Builder(code))
    try:
        yield _current[-1]
    finally:
        _current.pop()


@functools.cache
def _reject_rebinding(code) -> None:
    """The body of a loop or of T.If runs once while recording, whatever happens at run time.

    So a name that it rebinds would silently keep one value, and a statement that leaves T.If would silently drop the rest.
    """
    function = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]

    def reject(node, problem: str, instead: str):
        raise TileError(problem, instead, location(code.co_filename, code.co_firstlineno + node.lineno - 1))

    for block in ast.walk(function):
        word = _word(block)
        if word not in ("Parallel", "serial", "If", "Pipelined", "Persistent"):
            continue
        before = {n.id for n in _stored(function) if n.lineno < block.lineno}
        for name in (n for stmt in block.body for n in _stored(stmt) if n.id in before):
            problem = f"{name.id} is bound before T.{word} and again inside it; the body is recorded once"
            reject(name, problem, "a fragment for what changes at run time")
        for jump in (n for n in ast.walk(block) if word == "If" and isinstance(n, ast.Return | ast.Break | ast.Continue)):
            problem = f"{type(jump).__name__.lower()} in T.If takes effect while recording, whatever the condition"
            reject(jump, problem, "T.If around the statements that it shall skip")


def _word(block) -> str:
    """The word of the language that opens the block: of `for ... in T.serial(...)` or `with T.If(...)`."""
    call = block.iter if isinstance(block, ast.For) else block.items[0].context_expr if isinstance(block, ast.With) else None
    return getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""


def _stored(node) -> list[ast.Name]:
    """Names that assignments bind (a loop's own variables are fresh each time)."""
    fresh = {n for loop in ast.walk(node) if isinstance(loop, ast.For) for n in ast.walk(loop.target)}
    return [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n not in fresh]
