"""Builds what these tests load, once per session: the pure C++ parts, the library over a made-up CUDA, and the library over the real runtime."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
# Of the operators here, so that the package itself can live in the same process.
NAMESPACE = "tileops_binding_test"
FLAGS = "-std=c++17 -O1 -Wall -Wextra -Werror -fPIC -fvisibility=hidden".split()


def run(*command) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


class Binding:
    """What the tests use of this file, which cannot be imported."""

    root, here, namespace = ROOT, HERE, NAMESPACE
    torch_root = Path(torch.__file__).parent
    operators = tuple(json.loads((ROOT / "tileops" / "schemas.json").read_text()))

    def compile(self, source: Path, output: Path, *flags) -> Path:
        return compile_cpp(source, output, *flags)

    def load(self, path: Path) -> ctypes.CDLL:
        return load(path)


@pytest.fixture(scope="session")
def binding() -> Binding:
    return Binding()


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("binding")


@pytest.fixture(scope="session")
def cuda() -> Path:
    """The toolkit: its headers are needed for anything that launches."""
    nvcc = shutil.which("nvcc")
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and Path(nvcc).resolve().parents[1]):
        if home and (Path(home) / "include" / "cuda_runtime_api.h").exists():
            return Path(home)
    pytest.skip("no CUDA toolkit (set CUDA_HOME)")


@pytest.fixture(scope="session")
def generated(folder) -> Path:
    out = folder / "generated"
    run(sys.executable, "-m", "tileops_dsl.generate", "--out", out, "--build", "smoke")
    return out


def compile_cpp(source: Path, output: Path, *flags) -> Path:
    run("g++", *FLAGS, *flags, "-I", CSRC, "-c", source, "-o", output)
    return output


def binding_flags(cuda: Path, generated: Path, namespace: str) -> list:
    return ["-I", CSRC / "include", "-I", generated, "-isystem", cuda / "include", f"-DTILEOPS_NAMESPACE={namespace}"]


def binding_objects(folder: Path, flags: list, extra=()) -> list[Path]:
    folder.mkdir()
    sources = [*sorted(CSRC.glob("*.cpp")), *extra]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda s: compile_cpp(s, folder / f"{s.stem}.o", *flags), sources))


def link(folder: Path, target: Path, objects: list[Path], *flags, exports: str = "") -> Path:
    """As the build does: against empty libraries of torch's names."""
    stubs = []
    for name in ("libtorch.so", "libtorch_cpu.so"):
        stubs.append(folder / name)
        run("g++", "-shared", "-nostdlib", "-x", "c", "/dev/null", f"-Wl,-soname,{name}", "-o", folder / name)
    script = folder / "exports.map"
    script.write_text((CSRC / "exports.map").read_text().replace("global:", f"global: {exports}"))
    run("g++", "-shared", "-o", target, *objects, "-Wl,--no-as-needed", *stubs, "-Wl,--as-needed", *flags, f"-Wl,--version-script={script}")
    return target


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    library.tileops_register.restype = ctypes.c_char_p
    library.tileops_status.restype = ctypes.c_char_p
    library.tileops_set_knob.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    return library


@pytest.fixture(scope="session")
def fake_path(folder, cuda, generated) -> Path:
    flags = binding_flags(cuda, generated, NAMESPACE)
    objects = binding_objects(folder / "fake", flags, [HERE / "fake_cuda.cpp"])
    return link(folder / "fake", folder / "fake" / "fake.so", objects, "-ldl", exports="fake_*;")


@pytest.fixture(scope="session")
def fake_library(fake_path) -> ctypes.CDLL:
    library = load(fake_path)
    library.fake_set.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.fake_get.argtypes, library.fake_get.restype = [ctypes.c_char_p], ctypes.c_int64
    library.fake_last_kernel.restype = ctypes.c_char_p
    assert library.tileops_register() is None
    return library


@pytest.fixture(scope="session")
def real_path(folder, cuda, generated) -> Path:
    """The library over the real static CUDA runtime, with an empty table of kernels."""
    registry = folder / "no_kernels.cpp"
    registry.write_text(
        '#include "variant.h"\nnamespace tileops {\nextern const RowVariant row_variants[] = {{}};\nextern const int row_variant_count = 0;\n}\n'
    )
    objects = binding_objects(folder / "real", binding_flags(cuda, generated, NAMESPACE + "_real"), [registry])
    runtime = next(p for p in (cuda / "lib64", cuda / "lib") if (p / "libcudart_static.a").exists())
    return link(folder / "real", folder / "real" / "real.so", objects, "-L", runtime, "-lcudart_static", "-ldl", "-lpthread", "-lrt")


@pytest.fixture(scope="session")
def row_probe(folder) -> ctypes.CDLL:
    target = folder / "row_probe.so"
    run("g++", *FLAGS, "-fvisibility=default", "-shared", "-I", CSRC, HERE / "row_probe.cpp", CSRC / "row_problem.cpp", "-o", target)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="session")
def shim_check(folder) -> ctypes.CDLL:
    """torch's headers and ours in one file."""
    root = Path(torch.__file__).parent
    target = folder / "shim_check.so"
    torch_flags = ["-isystem", root / "include", "-L", root / "lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    run("g++", *FLAGS, "-DTORCH_STABLE_ONLY", "-shared", "-I", CSRC, HERE / "shim_check.cpp", *torch_flags, "-o", target)
    return ctypes.CDLL(str(target))
