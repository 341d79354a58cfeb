"""Builds tileops/_C.so: generate, compile, check, link."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from . import checks, link, objects, toolkit
from .errors import BuildError
from .mode import Plan

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
GENERATED = CSRC / "generated"
LARGEST_LIBRARY = 40_000_000  # bytes; the wheel deflates it further

# No fast-math: a result must not depend on how a kernel was compiled.
CUDA_FLAGS = tuple("-std=c++17 -O3 --compress-mode=size -cudart static -Xptxas -v -Xcompiler -fPIC,-fvisibility=hidden".split())
CXX_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")


def generate(plan: Plan) -> dict:
    """Runs the compiler of tile programs; its manifest says what there is to build."""
    command = [sys.executable, "-m", "tileops_dsl.generate", "--out", GENERATED, "--build", plan.mode]
    if len(plan.gencode) == 1:
        command += ["--target", *plan.gencode]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise BuildError(f"the generator failed (its message is above): {' '.join(map(str, command[1:]))}")
    return json.loads((GENERATED / "manifest.json").read_text())


def namespace_flags(environ=os.environ) -> tuple[str, ...]:
    """TILEOPS_NAMESPACE: another operator namespace than `tileops`, for a host that needs one of its own."""
    name = environ.get("TILEOPS_NAMESPACE", "")
    if not name:
        return ()
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise BuildError(f"TILEOPS_NAMESPACE is {name!r}; expected a C identifier, such as mylib_tileops")
    return (f"-DTILEOPS_NAMESPACE={name}",)


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def compiler_version(cxx: str) -> str:
    try:
        return subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        raise BuildError(f"no C++ compiler: {cxx} does not run. Install g++, set CXX, or use TILEOPS_BUILD=none") from None


def sources(plan: Plan, manifest: dict) -> list[dict]:
    """What nvcc compiles: entries of the manifest, and kernels by hand, which have no tiles and the names of their files."""
    target = "portable" if "portable" in plan.gencode else next(iter(plan.gencode))
    by_hand = [{"path": f, "target": target, "kernels": [f.stem]} for f in sorted((CSRC / "kernels").glob("*.cu"))]
    return [{**entry, "path": GENERATED / entry["file"]} for entry in manifest["sources"]] + by_hand


def units(plan: Plan, manifest: dict, cuda: toolkit.Toolkit, cxx: str, cxx_version: str) -> list[objects.Unit]:
    include = ("-I", str(CSRC / "include"), "-I", str(GENERATED))
    host = ("-ccbin", cxx) if "CXX" in os.environ else ()
    found = []
    for entry in sources(plan, manifest):
        gencode = [flag for code in plan.gencode[entry["target"]] for flag in ("-gencode", code)]
        paths = (*include, "-L", str(cuda.cudart.parent), *host)  # -L: nvcc from PyPI looks in lib64, but has lib
        compiler = f"nvcc {cuda.version}, {cxx_version}"
        found.append(objects.Unit("cuda", entry["path"], (*CUDA_FLAGS, *gencode), paths, compiler))
    paths = ("-I", str(CSRC), *include, "-isystem", str(cuda.include))
    for source in [*sorted(CSRC.glob("*.cpp")), *sorted(GENERATED.glob("*.cpp"))]:
        flags = (*CXX_FLAGS, *namespace_flags())
        found.append(objects.Unit("cxx", source, flags, paths, f"{cxx_version}, cuda {cuda.version}"))
    return found


def archs(gencode: tuple[str, ...]) -> list[str]:
    """Architectures that get machine code, hence a report: sm_120 of 'arch=compute_120,code=[sm_120,compute_120]'."""
    return [arch for code in gencode for arch in re.findall(r"\b(sm_\w+)", code)]


def source_problems(plan: Plan, manifest: dict, source: dict, built: Path) -> list[str]:
    """What the checks say of the object of a .cu; `source`: its kernels and target."""
    report = checks.Report(**json.loads(built.with_suffix(".json").read_text()))
    is_product = "tile" in manifest["kernels"].get(source["kernels"][0], {})
    limit = checks.MAX_PRODUCT_BYTES if is_product else checks.MAX_CODE_BYTES
    return checks.problems(report, source["kernels"], archs(plan.gencode[source["target"]]), limit)


def kernel_problems(plan: Plan, manifest: dict, built: dict[Path, Path]) -> list[str]:
    return [
        problem
        for source in sources(plan, manifest)
        for problem in source_problems(plan, manifest, source, built[source["path"]])
    ]


def build(plan: Plan, target: Path) -> None:
    compiler_version(compiler()), toolkit.find()  # what is missing is said before the generator works
    build_from(generate(plan), plan, target)


def compile_units(plan: Plan, manifest: dict, rules=("cuda", "cxx"), keep_going: bool = False) -> dict[Path, Path]:
    """Source -> object. TILEOPS_OBJECTS: elsewhere, to share objects between checkouts."""
    store = Path(os.environ.get("TILEOPS_OBJECTS") or ROOT / "build" / "objects").resolve()
    cuda, cxx = toolkit.find(), compiler()
    found = [unit for unit in units(plan, manifest, cuda, cxx, compiler_version(cxx)) if unit.rule in rules]
    return objects.compile_all(found, [CSRC, CSRC / "include", GENERATED], store, cuda.nvcc, cxx, keep_going)


def build_from(manifest: dict, plan: Plan, target: Path) -> None:
    """`target` is written only if every kernel passes its checks."""
    built = compile_units(plan, manifest)
    checks.require(kernel_problems(plan, manifest, built))
    link.link(compiler(), list(built.values()), toolkit.find().cudart, CSRC / "exports.map", ROOT / "build" / "link", target)
    if target.stat().st_size > LARGEST_LIBRARY:
        size = target.stat().st_size / 1e6
        target.unlink()
        raise BuildError(f"{target.name} has {size:.0f} MB; the limit is {LARGEST_LIBRARY / 1e6:.0f}: drop rows of configs/")
    print(f"tileops: {target.name}, mode {plan.mode}, {len(manifest['kernels'])} kernels, {target.stat().st_size / 1e6:.2f} MB")
