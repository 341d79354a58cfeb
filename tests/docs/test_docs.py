"""The pages of docs say what is so: quoted lines are in the files, commands run and print what is shown, links lead on."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_backend import operators, toolkit
from build_backend.errors import BuildError

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^<!-- (from (?P<file>\S+)|run|prints) -->\n```\w*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def quotes(page: Path) -> list[tuple[str, str]]:
    """(file, the text that is said to be in it)."""
    return [(block["file"], block["text"]) for block in BLOCK.finditer(page.read_text()) if block["file"]]


def commands(page: Path) -> list[tuple[str, str]]:
    """(shell commands, what they are said to print, or "")."""
    blocks = [block for block in BLOCK.finditer(page.read_text()) if not block["file"]]
    found = []
    for block, following in zip(blocks, [*blocks[1:], None]):
        if block[1] == "run":
            found.append((block["text"], following["text"] if following and following[1] == "prints" else ""))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_quoted_lines_are_in_the_files(page):
    for file, text in quotes(page):
        assert text in (ROOT / file).read_text(), f"{page.name} quotes what {file} does not say:\n{text}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_links_and_files_exist(page):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    assert links and not [link for link in links if not (page.parent / link).exists()]
    named = re.findall(r"`((?:csrc|tests|tileops|tileops_dsl|configs|benchmarks)/[\w/.]+)`", text)
    assert not [name for name in named if not (ROOT / name).exists() and name != "csrc/generated"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources in which commands may write."""
    root = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "generated", "*.so")
    for folder in ("tileops", "tileops_dsl", "build_backend", "configs", "csrc", "benchmarks", "tests"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def shell(tree: Path, command: str) -> str:
    command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command, flags=re.MULTILINE)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(tree), "TILEOPS_DISABLE_NATIVE": "1"}
    done = subprocess.run(["bash", "-euc", command], cwd=tree, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


NEW = ("tileops/ops/merge_attention.py", "tileops_dsl/kernels/merge_attention.py", "csrc/merge_attention.cpp")
WRITTEN = ("tileops/ops/__init__.py", "configs/merge_attention.json")


def test_three_files_name_the_new_operator():
    """Apart from tests, pages and what commands write."""
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no git here")
    files = [name for name in tracked.stdout.split() if not name.startswith("tests/") and not name.endswith((".md", ".png"))]
    naming = {name for name in files if (ROOT / name).exists() and "merge_attention" in (ROOT / name).read_text() + name}
    measured = {"configs/workloads.json", "benchmarks/contestants.py", "benchmarks/results/h200.jsonl"}
    assert naming - measured == {*NEW, *WRITTEN}


def test_commands_write_the_rest(tree):
    """From a tree without the operator: three files, and the two commands of the page."""
    for name in (*NEW, "configs/merge_attention.json"):
        (tree / name).unlink()
    shell(tree, "python -m build_backend.operators")
    assert "merge_attention" not in (tree / WRITTEN[0]).read_text()
    shell(tree, "python -c 'import tileops; assert not hasattr(tileops, \"merge_attention\")'")
    assert "merge_attention" not in shell(tree, "python -m tileops_dsl.generate --build smoke --out out && cat out/*")
    for name in NEW:
        shutil.copy(ROOT / name, tree / name)
    shell(tree, "python -m build_backend.operators\npython -m benchmarks.row_configs")
    assert all((tree / name).read_text() == (ROOT / name).read_text() for name in WRITTEN)
    generated = shell(tree, "python -m tileops_dsl.generate --build smoke --out out && cat out/*")
    assert "BoxedKernel merge_attention, merge_attention_out, explain_merge_attention;" in generated


def test_the_class_of_one_result_compiles(tmp_path):
    page = (ROOT / "docs" / "add_an_operator.md").read_text()
    shown = re.search(r"^<!-- compiles -->\n```cpp\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    uses = f'constexpr const char* kOp = "scaled_sum";\n{shown}void run(StableIValue* s) {{ call_op_out<ScaledSum>(s); }}'
    source = tmp_path / "scaled_sum.cpp"
    source.write_text(f'#include "ops.h"\n#include "results_op.h"\nnamespace tileops {{\n{uses}\n}}\n')
    try:
        cuda = toolkit.find().include
    except BuildError as error:
        pytest.skip(f"needs the headers of CUDA: {error}")
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-isystem", cuda]
    command = ["g++", *flags, "-I", ROOT / "csrc", "-I", ROOT / "csrc" / "include", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_readme_has_a_row_of_each_operator():
    rows = re.findall(r"^\| `(\w+)\(", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == list(operators.schemas()), "the table of operators in README.md has a row for each, and no other"


def test_written_files_are_up_to_date():
    assert (ROOT / WRITTEN[0]).read_text() == operators.module(), "run python -m build_backend.operators"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_commands_run_and_print_what_is_shown(tree, page):
    for command, expected in commands(page):
        printed = shell(tree, command)
        assert expected in printed, f"{command}\n{printed}"
        assert "pytest" not in command or re.search(r"\b\d+ passed|SKIPPED .* needs nvcc", printed)


def test_three_files_have_the_new_word(tree):
    """Without what the page shows of it the compiler knows nothing of it, nor do the headers of mathematics."""
    page = ROOT / "docs" / "add_a_tile_primitive.md"
    shown = [(file, text) for file, text in quotes(page) if not file.startswith("tests/")]
    assert len({file for file, _ in shown}) == len(shown) == 3
    before = {file: (tree / file).read_text() for file, _ in shown}
    for file, text in shown:
        (tree / file).write_text(before[file].replace(text, "").replace('"log2", ', ""))
    sources = [*(tree / "tileops_dsl").rglob("*.py"), *(tree / "csrc").rglob("math.h")]
    naming = [path for path in sources if re.search(r"(?<!math\.)(?<!std::)\blog2\b(?! of)", path.read_text())]
    assert len(sources) > 40 and {path.parent.name for path in naming} == {"kernels"}
    for file, text in before.items():
        (tree / file).write_text(text)


@pytest.mark.parametrize(("text", "problem"), [
    ("x = 1\n", "tileops/ops/new_op.py declares no operator"),
    ('_op = register("newop(Tensor x) -> Tensor", f, g)\n', r"tileops/ops/new_op.py declares newop\(Tensor x\) -> Tensor"),
    ('register("new_op(Tensor x) -> Tensor", f, g)\n' * 2, "tileops/ops/new_op.py declares new_op"),
])  # fmt: skip
def test_an_operator_that_is_not_declared_once(tmp_path, monkeypatch, text, problem):
    monkeypatch.setattr(operators, "OPS", tmp_path)
    (tmp_path / "new_op.py").write_text(text)
    with pytest.raises(operators.BuildError, match=problem) as caught:
        operators.schemas()
    assert 'expected _op = register("new_op(Tensor x, ...) -> Tensor", ...), once' in str(caught.value)
