"""Objects named by what is in them, and the build.ninja that makes those that do not exist yet.

An object's name ends in a hash of its source, of every header that it can include, of its flags and of its compiler. An
unchanged source therefore finds its object, whatever the clocks say, the mode was, or the folder is called.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError

INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    """One source to compile. `flags` decide what comes out and are part of the name; `paths` (-I, -isystem) are not."""

    rule: str  # cuda | cxx
    source: Path
    flags: tuple[str, ...]
    paths: tuple[str, ...]
    compiler: str  # name and version


def headers(source: Path, folders: list[Path]) -> list[Path]:
    """Every file of the project that `source` can include, whatever is #ifdef'd. Toolkit headers follow from its version."""
    found, todo = {}, [source]
    while todo:
        file = todo.pop()
        for name in INCLUDE.findall(file.read_text()):
            path = next((p for folder in (file.parent, *folders) if (p := folder / name).is_file()), None)
            if path and path.resolve() not in found:
                found[path.resolve()] = name
                todo.append(path)
    return sorted(found, key=lambda path: (found[path], path))


def key(unit: Unit, folders: list[Path]) -> str:
    digest = hashlib.sha256()
    for text in (unit.rule, unit.compiler, *unit.flags):
        digest.update(text.encode() + b"\0")
    for file in (unit.source, *headers(unit.source, folders)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def object_path(unit: Unit, folders: list[Path], store: Path) -> Path:
    return store / f"{unit.source.stem}-{key(unit, folders)}.o"


def escape(text) -> str:
    """One argument of a shell command, as the value of a ninja variable."""
    return shlex.quote(str(text)).replace("$", "$$")


def ninja_text(units: list[tuple[Unit, Path]], nvcc: Path, cxx: str) -> str:
    """`generator` on the rules: a changed path in a command line must not make ninja rebuild; the object's name decides."""
    script = Path(__file__).with_name("nvcc_object.py")
    lines = [
        "ninja_required_version = 1.3",
        "rule cuda",
        f"  command = {escape(sys.executable)} {escape(script)} $src $out {escape(nvcc)} $flags",
        "  description = nvcc $name",
        "  generator = 1",
        "rule cxx",
        f"  command = {escape(cxx)} $flags -c $src -o $out.part && mv $out.part $out",
        "  description = c++ $name",
        "  generator = 1",
    ]
    for unit, path in units:
        target = str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
        lines += [
            f"build {target}: {unit.rule}",
            f"  src = {escape(unit.source)}",
            f"  name = {unit.source.name}",
            f"  flags = {' '.join(map(escape, (*unit.flags, *unit.paths)))}",
        ]
    return "\n".join(lines) + "\n"


def find_ninja() -> str:
    """PATH, or beside the running Python: a virtual environment need not be activated."""
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if ninja is None:
        raise BuildError("ninja is not on PATH: `pip install ninja` (pip does so itself unless --no-build-isolation is given)")
    return ninja


def compile_all(
    units: list[Unit], folders: list[Path], store: Path, nvcc: Path, cxx: str, keep_going: bool = False
) -> dict[Path, Path]:
    """Builds what is missing in `store`; source -> object. With keep_going, sources that fail are left out."""
    store.mkdir(parents=True, exist_ok=True)
    paths = [(unit, object_path(unit, folders, store)) for unit in units]
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (store / "build.ninja").write_text(ninja_text(paths, nvcc, cxx))
        jobs = str(len(os.sched_getaffinity(0)))  # ninja itself would run two more
        failures = "0" if keep_going else "1"  # that ninja stops after; 0: none
        done = subprocess.run([find_ninja(), "-j", jobs, "-k", failures], cwd=store)
        if done.returncode and not keep_going:
            raise BuildError("a source failed to compile; ninja printed the compiler's message above")
    return {unit.source: path for unit, path in paths if path.exists()}
