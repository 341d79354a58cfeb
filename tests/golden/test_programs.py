"""The tile programs of the golden kernels: their words are in the table of tileops_dsl/DESIGN.md; the texts quote them.

A golden text says of each block which program line it comes from: `// gemm.py:30: acc = T.alloc_fragment(...)`.
"""

import ast
import re
from pathlib import Path

import pytest

import tileops_dsl.language
from tileops_dsl.kernels import MODULES

HERE = Path(__file__).parent
DESIGN = Path(tileops_dsl.__file__).parent / "DESIGN.md"
LONGEST = {"gemm": 70, "flash_attention": 205, "mla_decode": 140}  # lines; attention: also of lengths and of pages
KERNELS = {name: Path(MODULES[name].__file__) for name in ("softmax", "rms_norm", *LONGEST)}
PROGRAMS = {name: KERNELS[name] for name in LONGEST}
QUOTED = [name for name in LONGEST if name != "mla_decode"]  # whose text by hand is of an earlier form
MACROS = {"mla_decode": [Path(MODULES["attention"].__file__)]}
QUOTE = re.compile(r"^ *// (\w+)\.py:(\d+): (.*)$", re.MULTILINE)
ROW = re.compile(r"^\| `T\.(\w+)[^`]*` \|.*\| (standard|expert) \| ([\w, -]*) \|$", re.MULTILINE)


def words(path: Path) -> set[str]:
    """The names that a program takes from the language."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "T"}


def statements(path: Path) -> dict[int, str]:
    """The first line of each statement in T.Kernel, but for those under `if config.<option>:`, which no text by hand has.

    Of `if not config.<option>:` the statements below it are there, without it.
    """
    text = path.read_text()
    kernel = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.With) and "T.Kernel" in ast.unparse(n.items[0]))
    optional = [n for n in ast.walk(kernel) if isinstance(n, ast.If) and ast.unparse(n.test).startswith("config.")]
    without = [n for n in ast.walk(kernel) if isinstance(n, ast.If) and ast.unparse(n.test).startswith("not config.")]
    left_out = {*without, *optional, *(n for branch in optional for stmt in branch.body for n in ast.walk(stmt))}
    lines = {n.lineno for n in ast.walk(kernel) if isinstance(n, ast.stmt) and n not in left_out}
    return {number: text.splitlines()[number - 1].strip() for number in sorted(lines)}


def quotes(program: str) -> dict[Path, list[tuple[int, str]]]:
    """The lines of a program that each golden text quotes."""
    found = {path: QUOTE.findall(path.read_text()) for path in sorted(HERE.glob("*.cu"))}
    lines = {path: [(int(number), line) for name, number, line in rows if name == program] for path, rows in found.items()}
    return {path: rows for path, rows in lines.items() if rows}


@pytest.mark.parametrize("source", [PROGRAMS[name] for name in QUOTED], ids=lambda path: path.stem)
def test_quoted_lines_are_the_program(source):
    name, source = source.stem, source.read_text().splitlines()
    for path, rows in quotes(name).items():
        for number, line in rows:
            assert number <= len(source) and line == source[number - 1].strip(), f"{path.name} quotes line {number}"


@pytest.mark.parametrize("program", QUOTED)
def test_each_statement_is_in_a_text(program):
    texts = quotes(program)
    assert texts, f"no text in {HERE} quotes {program}.py"
    quoted = {number for rows in texts.values() for number, _ in rows}
    missing = {number: line for number, line in statements(PROGRAMS[program]).items() if number not in quoted}
    assert missing == {}, f"statements of {program}.py that {', '.join(p.name for p in texts)} do not quote"


@pytest.mark.parametrize("program", LONGEST)
def test_programs_are_short(program):
    assert len(PROGRAMS[program].read_text().splitlines()) <= LONGEST[program]


def test_each_word_says_what_it_means():
    language = tileops_dsl.language
    assert all(getattr(language, word).__doc__ for word in language.__all__)
    assert len(set(language.__all__)) == len(language.__all__)


def test_the_word_table_says_who_uses_what():
    rows = ROW.findall(DESIGN.read_text())
    table = {word: set() if users == "-" else set(users.split(", ")) for word, _, users in rows}
    used = {name: words(path).union(*map(words, MACROS.get(name, []))) for name, path in KERNELS.items()}
    assert {word: {name for name in used if word in used[name]} for word in table} == table
    assert set().union(*used.values()) <= set(table)
