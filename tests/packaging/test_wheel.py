"""The wheel: what is in it, what its library asks of a machine, and that it works where it is installed."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from build_backend import toolkit, wheel_tag

ROOT = Path(__file__).resolve().parents[2]
CHECK = Path(__file__).with_name("check_install.py")
OBJECTS = str(ROOT / "build" / "objects")
pytestmark = pytest.mark.slow
full = pytest.mark.skipif(
    os.environ.get("TILEOPS_TEST_WHEEL") != "full", reason="downloads gigabytes; TILEOPS_TEST_WHEEL=full runs it, as CI does"
)


def gcc_version() -> int:
    """Of the compiler that builds the library; 0 for another one."""
    shown = subprocess.run([*os.environ.get("CXX", "g++").split(), "-dumpversion"], capture_output=True, text=True).stdout
    return int(shown.split(".")[0]) if shown[:1].isdigit() else 0


def run(*command, cwd=None, env=None) -> str:
    """Runs a command to its end; what it printed is in the failure."""
    environ = {k: v for k, v in {**os.environ, **(env or {})}.items() if v is not None}
    into = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environ, **into)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}"
    return done.stdout


def pip_wheel(source: Path, out: Path, **env) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", out, source, cwd=out, env=env)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """A copy of what git would take, so that no build of this test touches the tree or finds its leftovers."""
    copy = tmp_path_factory.mktemp("tree") / "tileops"
    leftovers = shutil.ignore_patterns(".*", "build", "dist", "generated", "*.egg-info", "__pycache__", "*.so", "results")
    shutil.copytree(ROOT, copy, ignore=leftovers)
    return copy


@pytest.fixture(scope="session")
def sdist(tree, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    script = "import sys; from build_backend import hooks; hooks.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", script, out, cwd=tree, env={"TILEOPS_BUILD": "none"})
    (found,) = out.glob("*.tar.gz")
    return found


@pytest.fixture(scope="session")
def wheel(sdist, tmp_path_factory) -> Path:
    """Built from the sdist, as a user's pip would; unchanged objects come from the tree's store."""
    return pip_wheel(sdist, tmp_path_factory.mktemp("wheel"), TILEOPS_BUILD="smoke", TILEOPS_OBJECTS=OBJECTS)


@pytest.fixture(scope="session")
def unpacked(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def library(unpacked) -> Path:
    return unpacked / "tileops" / "_C.so"


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def modules() -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / "tileops").rglob("*.py")}


def test_wheel_ships_the_package_only(wheel):
    assert wheel.name == f"tileops_kernels-0.1.0-py3-none-linux_{platform.machine()}.whl"
    shipped = {name for name in names(wheel) if ".dist-info/" not in name}
    assert shipped == modules() | {"tileops/_C.so"}


def test_wheel_requires_torch_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("tileops_kernels-0.1.0.dist-info/METADATA").decode()
    required = [line for line in re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE) if "extra ==" not in line]
    assert required == ["torch>=2.10"]


def test_wheel_without_kernels_is_pure(sdist, tmp_path):
    wheel = pip_wheel(sdist, tmp_path, TILEOPS_BUILD="none")
    assert wheel.name == "tileops_kernels-0.1.0-py3-none-any.whl"
    assert {name for name in names(wheel) if ".dist-info/" not in name} == modules()


def test_sdist_holds_the_sources_and_nothing_built(sdist):
    with tarfile.open(sdist) as archive:
        found = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"setup.py", "build_backend/hooks.py", "csrc/include/tileops/device.h", "csrc/exports.map"} <= found
    assert {"tileops/ops/softmax.py", "docs/index.md", "tileops_dsl/generate.py", "tests/packaging/test_wheel.py"} <= found
    assert {"benchmarks", "configs"} <= found
    assert not [name for name in found if name.startswith("csrc/generated") or name.endswith((".so", ".o", ".pyc"))]


@pytest.mark.skipif(gcc_version() > 12, reason="libstdc++ of GCC 13 and later puts newer symbols into what it compiles")
def test_library_runs_on_the_platforms_that_torch_runs_on(library):
    assert wheel_tag.platform_tag(library) == f"manylinux_2_28_{platform.machine()}"


def test_library_needs_no_cuda_and_no_python(library):
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", run("readelf", "-d", library)))
    torch = {"libtorch.so", "libtorch_cpu.so"}
    system = "libstdc++.so.6 libgcc_s.so.1 libm.so.6 libc.so.6 ld-linux-x86-64.so.2 libdl.so.2 libpthread.so.0 librt.so.1"
    assert torch <= needed <= torch | set(system.split())


def test_library_exports_our_functions_only(library):
    exported = [line.split()[-1] for line in run("nm", "-D", "--defined-only", library).splitlines()]
    assert sorted(exported) == ["tileops_namespace", "tileops_register", "tileops_set_knob", "tileops_status"]


def test_every_undefined_symbol_is_known(library):
    """A strong symbol that the oldest torch lacks would stop the library from loading there; a weak one reads as NULL."""
    listed = (ROOT / "tests" / "binding" / "torch_2_10_symbols.txt").read_text().splitlines()
    oldest = {line for line in listed if not line.startswith("#")}
    unknown = []
    for line in run("nm", "-D", "--undefined-only", library).splitlines():
        kind, symbol = line.split()
        name, _, version = symbol.partition("@")
        system = re.match(r"(GLIBC|GLIBCXX|CXXABI|GCC)_", version.lstrip("@")) is not None
        ours = name.startswith(("aoti_torch_", "torch_"))
        toolchain = name in {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__cxa_finalize"}
        if not (system or (kind == "U" and name in oldest) or (kind == "w" and (ours or toolchain))):
            unknown.append(line)
    assert not unknown, f"neither in torch 2.10 nor in glibc, libstdc++ or libgcc: {unknown}"


def test_unpacked_wheel_works_without_a_gpu(unpacked, tmp_path):
    run(sys.executable, CHECK, unpacked, 1, cwd=tmp_path, env={"PYTHONPATH": str(unpacked), "CUDA_VISIBLE_DEVICES": ""})


def check_in_fresh_environment(folder: Path, *install) -> None:
    """Installs into a new environment (without pip's cache and bytecode: gigabytes, minutes), checks it, and removes it."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", environment)
    try:
        python = environment / "bin" / "python"
        run(python, "-m", "pip", "install", "-q", "--no-cache-dir", "--no-compile", *install)
        print(run(python, CHECK, environment, 1, cwd=folder, env={"PYTHONPATH": None, "CUDA_VISIBLE_DEVICES": ""}))
    finally:
        shutil.rmtree(environment)


@full
def test_wheel_on_the_oldest_torch(wheel, tmp_path):
    check_in_fresh_environment(tmp_path, wheel, "torch==2.10.0")


@full
def test_wheel_on_the_newest_torch(wheel, tmp_path):
    check_in_fresh_environment(tmp_path, wheel)


@full
def test_wheel_built_with_the_toolkit_from_pypi(sdist, tmp_path):
    """No nvcc on PATH, and an object store of its own, so that everything is compiled by what pip installed."""
    path = [folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "nvcc").exists()]
    assert toolkit.find_installed({"PATH": os.pathsep.join(path)}) is None
    out = tmp_path / "out"
    out.mkdir()
    store = str(tmp_path / "objects")
    wheel = pip_wheel(sdist, out, TILEOPS_BUILD="smoke", TILEOPS_OBJECTS=store, PATH=os.pathsep.join(path), CUDA_HOME=None)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    run(sys.executable, CHECK, tmp_path / "unpacked", 1, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "unpacked")})
