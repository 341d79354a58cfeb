"""What keeps the compiler small, and which way imports go.

Lines are counted as tinygrad's sz.py and cloc do: those that hold code. Blank lines, comments and docstrings are free, lest the
budget be kept by explaining less (with them, and with what an import or a list is spread over, the compiler has 6,900 lines).
"""

import ast
import io
import token
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = ROOT / "tileops_dsl"
BUDGET = 6000  # lines of code without the kernels, and without what runs a kernel's text on the emulator
LONGEST = 500
DRIVERS = (
    "output.py",
    "generate.py",
    "emulate_program.py",
    "emulate_problems.py",
    "emulate_rows.py",
)  # what puts the compiler and the kernels together


CODE = (token.OP, token.NAME, token.NUMBER, token.STRING)


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def lines_of_code(path: Path) -> int:
    text = path.read_text()
    found = {
        n for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type in CODE for n in span(t.start[0], t.end[0])
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            found -= span(node.body[0].lineno, node.body[0].end_lineno)
    return len(found)


def span(first: int, last: int) -> set[int]:
    return set(range(first, last + 1))


def imported(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it; `from a import b` counts as a and a.b. Relative ones stay in the package."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def sources(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found
    return found


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_the_compiler_is_small():
    apart = (COMPILER / "kernels", *COMPILER.glob("emulate*.py"))
    counted = [path for path in sources(COMPILER) if not {path, *path.parents} & set(apart)]
    assert sum(lines_of_code(path) for path in counted) <= BUDGET


def test_code_is_counted(tmp_path):
    text = '"""Of a module,\n\nin three lines."""\n\nimport os\n\n\ndef f(a,\n      b):\n'
    text += '    "Says what."\n    # Why.\n    return """x\ny"""\n'
    (tmp_path / "module.py").write_text(text)
    assert lines_of_code(tmp_path / "module.py") == 5


@pytest.mark.parametrize("path", sources(COMPILER), ids=lambda path: str(path.relative_to(COMPILER)))
def test_no_file_is_long(path):
    assert lines(path) <= LONGEST


def test_what_runs_does_not_import_the_compiler():
    for path in sources(ROOT / "tileops"):
        assert not [name for name in imported(path) if is_in(name, "tileops_dsl")], path


def test_the_compiler_does_not_import_what_runs():
    for path in sources(COMPILER):
        assert not [name for name in imported(path) if is_in(name, "tileops") or is_in(name, "torch")], path


def test_the_compiler_does_not_import_the_kernels():
    users = []
    for path in sources(COMPILER):
        uses = [name for name in imported(path) if is_in(name, "tileops_dsl.kernels")]
        if uses and COMPILER / "kernels" not in path.parents:
            users.append(path.name)
    assert users and set(users) <= set(DRIVERS)


LAYERS = {  # each folder imports from these of the package, besides itself
    "ir.py": set(),
    "errors.py": {"ir"},
    "layouts.py": set(),
    "instruction_layouts.py": set(),
    "schedule.py": {"ir"},
    "plan.py": {"ir", "schedule", "layouts", "instruction_layouts"},
    "targets": set(),
    "language": {"ir", "errors"},
    "passes": {"ir", "errors", "layouts", "instruction_layouts", "schedule", "plan", "targets"},
    "codegen": {"ir", "errors", "layouts", "instruction_layouts", "schedule", "plan"},
    "configs.py": {"ir", "errors"},
    "kernels": {"language", "configs", "ir", "errors", "layouts"},
}


@pytest.mark.parametrize("part", LAYERS)
def test_layers(part):
    """Only absolute imports, so that `imported` sees all."""
    path = COMPILER / part
    for file in [path] if path.suffix else sources(path):
        assert "from ." not in file.read_text()
        parts = {name.split(".")[1] for name in imported(file) if name.startswith("tileops_dsl.")}
        assert parts <= LAYERS[part] | {part.removesuffix(".py")}, file


def test_device_code_knows_no_torch():
    headers = [path for path in sorted((ROOT / "csrc" / "include").rglob("*")) if path.is_file()]
    assert headers
    for path in headers:
        assert "torch" not in path.read_text().lower(), path
