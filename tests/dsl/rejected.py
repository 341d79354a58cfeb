"""Tile programs that must be rejected: what the message says, and that it points at the line marked `# here`."""

import ast
import importlib.util
import inspect
import traceback
from pathlib import Path

import pytest

import tileops_dsl
import tileops_dsl.language as T
from tileops_dsl.errors import TileError
from tileops_dsl.passes import run_passes
from tileops_dsl.targets import TARGETS

PACKAGE = Path(tileops_dsl.__file__).parent


def neighbour(name: str):
    """Another test file of this folder: its name may exist in other folders too."""
    spec = importlib.util.spec_from_file_location(f"dsl_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(function):
    """The kernel of a tile program after all passes."""
    return run_passes(T.prim_func(function), TARGETS["sm_90a"])


def error_of(program) -> TileError:
    with pytest.raises(TileError) as caught:
        record(program)
    return caught.value


def rejected(problem: str, instead: str):
    """The decorated program becomes a test of the whole message; {line} in `problem` is the line marked `# there`."""

    def decorate(program):
        lines, first = inspect.getsourcelines(program)

        def marked(mark):
            return next((first + i for i, text in enumerate(lines) if text.rstrip().endswith(mark)), None)

        def test():
            line = marked("# here")
            where = f"{Path(inspect.getsourcefile(program)).name}:{line}"
            expected = problem.replace("{line}", str(marked("# there")))
            source = lines[line - first].strip()
            assert str(error_of(program)) == f"{where}: {expected}\n    {source}\n    Instead: {instead}"

        test.__name__, test.program = program.__name__, program
        return test

    return decorate


def programs_of(module) -> list:
    """Those of its tests that are made by `rejected`."""
    tests = [test for name, test in vars(module).items() if name.startswith("test_")]
    return [test.program for test in tests if hasattr(test, "program")]


def raising_lines(folder: str) -> dict[tuple[str, int], range]:
    """(file, first line) -> the lines of each statement of tileops_dsl/<folder> that raises a TileError."""
    found = {}
    for path in sorted((PACKAGE / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else node
            raises = isinstance(node, ast.Raise) and "TileError" in ast.dump(call)
            if raises or (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require"):
                found[f"{folder}/{path.name}", node.lineno] = range(node.lineno, node.end_lineno + 1)
    return found


def untested(folder: str, errors) -> set[tuple[str, int]]:
    """The statements of the folder that raised none of the errors."""
    lines = raising_lines(folder)
    for error in errors:
        for frame in traceback.extract_tb(error.__traceback__):
            for statement, span in list(lines.items()):
                if frame.filename == str(PACKAGE / statement[0]) and frame.lineno in span:
                    del lines[statement]
    return set(lines)
