"""The library that the tuner measures with: the package as it is, in a copy of the tree, with the candidates for its kernels.

The copy is built as every library is (build_backend), so a candidate is launched by the code that will launch it when shipped.
One that does not generate, does not compile or fails the build's checks is left out, with the reason.

`python -m benchmarks.tune_library try|link SM` runs in the copy: `try` compiles the kernels and writes why which of them fail,
`link` builds the library.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from build_backend import mode, native, objects
from tileops_dsl import output
from tileops_dsl.kernels import LIBRARY, configs_of

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("tileops", "tileops_dsl", "csrc", "build_backend", "benchmarks", "configs")
FAILURES = "failures.json"


@dataclass(frozen=True)
class Library:
    tree: Path  # whose package `tileops` has the library
    failures: dict  # kernel -> why it is not in there


def generate(rows):
    """{row: its kernel, or the text of the error}."""
    workers = max(1, min(len(rows), len(os.sched_getaffinity(0))))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return dict(zip(rows, pool.map(_generate, rows)))


def _generate(row):
    try:
        return output.compile_config(row)
    except Exception as fault:  # whatever it is, it is this candidate's
        return f"{type(fault).__name__}: {str(fault).splitlines()[0]}"


def key(kernel):
    """A hash of all that decides the machine code: the kernel's text and every device header that it can include."""
    text, folder = output.source_text([kernel]), ROOT / "csrc" / "include"
    included = [folder / name for name in objects.INCLUDE.findall(text) if (folder / name).is_file()]
    files = {path for first in included for path in (first.resolve(), *objects.headers(first, [folder]))}
    parts = [text.encode(), *(path.read_bytes() for path in sorted(files))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def build(kernels, gpu, tree):
    """The library of these kernels; one that exists with the same content is taken as it is."""
    target = kernels[0].config.target
    kernels = [*kernels, *others(kernels[0].config.op, target)]
    stamp = content(output.files_of(kernels, [target]))
    found = tree / FAILURES
    if found.exists() and (known := json.loads(found.read_text()))["stamp"] == stamp and (tree / "tileops" / "_C.so").exists():
        return Library(tree, known["failures"])
    copy_tree(tree)
    write_generated(tree, kernels, target)
    run_in(tree, "try", gpu)
    failures = json.loads(found.read_text())["failures"]
    write_generated(tree, [k for k in kernels if k.config.name not in failures], target)
    run_in(tree, "link", gpu)
    found.write_text(json.dumps({"stamp": stamp, "failures": failures}))
    return Library(tree, failures)


def others(op, target):
    """One kernel of each other operator: the library's host code includes the parameter structs of all."""
    rows = [next((row for row in configs_of(other) if row.target == target), None) for other in LIBRARY if other != op]
    return [output.compile_config(row) for row in rows if row]


def content(files):
    """A hash of all that the tree is made of, the generated files included."""
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode())
    for path in sorted(path for part in PARTS if part != "configs" for path in (ROOT / part).rglob("*")):
        if path.suffix in (".py", ".cpp", ".h", ".json", ".map") and not {"generated", "emulator"} & set(path.parts):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def copy_tree(tree):
    """Everything anew, except what earlier builds left in tree/build."""
    for part in PARTS:
        shutil.rmtree(tree / part, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "generated", "results", "emulator")
        shutil.copytree(ROOT / part, tree / part, ignore=ignored)


def write_generated(tree, kernels, target):
    folder = tree / "csrc" / "generated"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in output.files_of(kernels, [target]).items():
        (folder / name).write_text(text)


def run_in(tree, what, gpu):
    """What nvcc says goes to the build's log."""
    store = os.environ.get("TILEOPS_OBJECTS") or ROOT / "build" / "objects"
    major, minor = gpu.capability
    log = tree / f"{what}.log"
    with log.open("w") as lines:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.tune_library", what, f"{major}.{minor}"],
            cwd=tree,
            env={**os.environ, "TILEOPS_OBJECTS": str(store)},
            stdout=lines,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        raise SystemExit(f"tune: building the candidates' library failed; the end of {log}:\n{log.read_text()[-2000:]}")


def main(what, capability):
    """In the copy."""
    manifest = json.loads((native.GENERATED / "manifest.json").read_text())
    targets = {source["target"] for source in manifest["sources"]}
    gencode = mode.local_gencode([tuple(map(int, capability.split(".")))])
    plan = mode.Plan("local", {target: gencode[target] for target in targets})
    if what == "link":
        native.build_from(manifest, plan, ROOT / "tileops" / "_C.so")
    else:
        (ROOT / FAILURES).write_text(json.dumps({"stamp": "", "failures": faults(plan, manifest)}))


def faults(plan, manifest):
    """{kernel: what its compilation or the build's checks say}; a fault of a source with several kernels is each one's."""
    built = native.compile_units(plan, manifest, rules=("cuda",), keep_going=True)
    found = {}
    for source in manifest["sources"]:
        path, said = native.GENERATED / source["file"], ["nvcc refuses it: see try.log"]
        if path in built:
            said = native.source_problems(plan, manifest, source, built[path])
        if said:
            found |= dict.fromkeys(source["kernels"], said[0])
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
