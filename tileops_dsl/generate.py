"""Write the CUDA sources: python -m tileops_dsl.generate [options]

--out DIR      where to (csrc/generated)
--only OP      one operator; without it, all that the library has
--target T     sm_90a or portable (repeatable); without it, both
--build MODE   smoke: one bfloat16 kernel per operator and target; all (or local): every row of configs/
--dump DIR     the IR after each pass that changed it, one file per kernel and pass
--diff REV     generate at the git revision REV as well, and print what differs; exit 1 if anything does

The output is deterministic: <op>_<target>_<dtype>.cu (the row kernels of one dtype of x) and <op>_params.h, <kernel>.cu (a
product), its schedule in a .txt beside it and <op>_<target>_params.h, registry.cpp (the tables of csrc/variant.h), schemas.h
and manifest.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tileops_dsl import output
from tileops_dsl.kernels import LIBRARY, PROGRAMS
from tileops_dsl.targets import TARGETS

ROOT = Path(__file__).parent.parent


def main(argv: list[str] | None = None) -> int:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("python -m tileops_dsl.generate", description=__doc__, formatter_class=form)
    parser.add_argument("--out", type=Path, default=ROOT / "csrc" / "generated")
    parser.add_argument("--only", action="append", choices=list(PROGRAMS))
    parser.add_argument("--target", action="append", choices=list(TARGETS))
    parser.add_argument("--build", default="all", choices=["smoke", "local", "all"])
    parser.add_argument("--dump", type=Path, metavar="DIR")
    parser.add_argument("--diff", metavar="REV")
    arguments = parser.parse_args(argv)
    if arguments.diff:
        return print_diff(arguments)
    ops, targets = arguments.only or LIBRARY, arguments.target or list(TARGETS)
    write(arguments.out, output.generate(ops, targets, arguments.build, partial(dump, arguments.dump)))
    return 0


def dump(directory: Path | None, kernel: str, step: str, text: str) -> None:
    """A kernel after a pass that changed it."""
    if directory:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{kernel}.{step}.txt").write_text(text)


def write(directory: Path, files: dict[str, str]) -> None:
    """Files that did not change keep their time; of those that an earlier run wrote, what is no longer generated goes."""
    directory.mkdir(parents=True, exist_ok=True)
    manifest = directory / "manifest.json"
    earlier = json.loads(manifest.read_text()) if manifest.exists() else {"sources": []}
    names = set()
    for source in earlier["sources"]:
        file = source["file"]
        names |= {file, file.replace(".cu", ".txt"), f"{source.get('params')}.h"}  # an older manifest has none
    for name in names - set(files):
        (directory / name).unlink(missing_ok=True)
    for name, text in files.items():
        path = directory / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def print_diff(arguments: argparse.Namespace) -> int:
    """The generator of REV runs in a copy of REV's tree."""
    options = [f"--build={arguments.build}"]
    options += [f"--{key}={value}" for key in ("only", "target") for value in getattr(arguments, key) or ()]
    with tempfile.TemporaryDirectory() as scratch:
        tree, old, new = (Path(scratch) / name for name in ("tree", "old", "new"))
        tree.mkdir()
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", arguments.diff], capture_output=True)
        if archive.returncode:
            sys.exit(f"--diff {arguments.diff}: {archive.stderr.decode().strip()}; name a revision of this repository")
        subprocess.run(["tar", "-x", "-C", str(tree)], check=True, input=archive.stdout)
        for directory, out in ((tree, old), (ROOT, new)):
            subprocess.run([sys.executable, "-m", "tileops_dsl.generate", f"--out={out}", *options], check=True, cwd=directory)
        return subprocess.run(["diff", "-ruN", str(old), str(new)]).returncode


if __name__ == "__main__":
    sys.exit(main())
