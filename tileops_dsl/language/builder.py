"""What is being recorded, and where the author wrote it."""

import contextlib
import linecache
import os
import re
import sys

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
    return location(frame.f_code.co_filename, frame.f_lineno)


def location(path: str, line: int) -> ir.Location:
    return ir.Location(os.path.basename(path), line, linecache.getline(path, line).strip())


class Builder:
    """The statements recorded so far: a stack of bodies, the innermost open loop last."""

    def __init__(self):
        self.bodies: list[list[ir.Stmt]] = [[]]
        self.names: dict[str, ir.Location] = {}
        self.loops: set[str] = set()
        self.reserved = RESERVED
        self.kernel: dict | None = None

    def emit(self, stmt: ir.Stmt) -> None:
        if isinstance(stmt, ir.Store) != self.in_parallel:
            raise TileError(*_PLACE[self.in_parallel], stmt.location)
        self.bodies[-1].append(stmt)

    in_parallel = False

    def open(self) -> None:
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

    def loop_vars(self, dtype: str, where: ir.Location, count: int) -> tuple[ir.Var, ...]:
        """The author's names, as the line of the loop has them; a name that is taken gets a number."""
        written = re.match(r"for \(?([\w, ]+?)\)? in ", where.text)
        names = [name.strip() for name in written[1].split(",")] if written else []
        return tuple(self._loop_var(dtype, name) for name in (names if len(names) == count else "ijkmn"[:count]))

    def _loop_var(self, dtype: str, name: str) -> ir.Var:
        unique, number = name, 1
        while unique in self.loops or unique in self.names or unique in self.reserved:
            number += 1
            unique = f"{name}_{number}"
        self.loops.add(unique)
        return ir.Var(dtype, unique)


RESERVED = frozenset(
    "p r q c row col columns first head tail edge has_edge slot member thread before fill shared global site".split()
)
# Those of kernels without a grid.
RESERVED_PERSISTENT = frozenset(
    "p q x a b col full empty group rank thread lane rows columns tiles first clusters tile section height rest stage phase"
    " before steps shared global site".split()
)

_PLACE = {
    True: ("only assignments to fragment elements can stand in T.Parallel", "this statement before or after the loop"),
    False: ("a fragment element is assigned outside T.Parallel", "for i, j in T.Parallel(...): tile[i, j] = value"),
}

_current: list[Builder] = []


def builder() -> Builder:
    if not _current:
        raise TileError("a word of the language is used outside a tile program", "@T.prim_func above the function", here())
    return _current[-1]


class recording:
    """Records the words that are called in its scope."""

    def __enter__(self) -> Builder:
        _current.append(Builder())
        return _current[-1]

    def __exit__(self, *exc) -> None:
        _current.pop()
