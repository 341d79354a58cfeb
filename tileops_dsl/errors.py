"""The one exception of the compiler: it names the tile program's line and what to write instead."""

from tileops_dsl.ir import Location


class TileError(Exception):
    """A tile program that cannot be compiled.

    `problem` says what and why, `instead` what to write; both are shown under the source line.
    """

    def __init__(self, problem: str, instead: str, location: Location | None = None):
        self.problem, self.instead, self.location = problem, instead, location
        called = f", called at {location.caller}" if location and location.caller else ""
        where = f"{location}{called}: " if location else ""
        source = f"\n    {location.text}" if location and location.text else ""
        super().__init__(f"{where}{problem}{source}\n    Instead: {instead}")


def require(holds: bool, problem: str, instead: str, location: Location | None = None) -> None:
    """The error where it does not hold."""
    if not holds:
        raise TileError(problem, instead, location)
