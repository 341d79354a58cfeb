"""Builds what these tests load, once per session: the plain C++ parts, and the library over a made-up and over a real CUDA."""

import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from build_backend.operators import schemas

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
# Of the operators here, so that the package itself can live in the same process.
NAMESPACE = "tileops_binding_test"
NO_KERNELS = """
#include "kernels/attention_tiles_params.h"
#include "variant.h"
extern "C" void attention_tiles(tileops::attention_tiles_params) {}
namespace tileops {
extern const RowVariant row_variants[] = {RowVariant()};
extern const int row_variant_count = 0;
extern const ProductVariant product_variants[] = {ProductVariant()};
extern const int product_variant_count = 0;
extern const ProductMeasurement product_measurements[] = {ProductMeasurement()};
extern const int product_measurement_count = 0;
extern const AttentionVariant attention_variants[] = {AttentionVariant()};
extern const int attention_variant_count = 0;
extern const AttentionMeasurement attention_measurements[] = {AttentionMeasurement()};
extern const int attention_measurement_count = 0;
extern const DecodeVariant decode_variants[] = {DecodeVariant()};
extern const int decode_variant_count = 0;
extern const MlaVariant mla_variants[] = {MlaVariant()};
extern const int mla_variant_count = 0;
}
"""
FLAGS = "-std=c++17 -O1 -Wall -Wextra -Werror -fPIC -fvisibility=hidden".split()


def run(*command) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


class Binding:
    """What the tests use of this file, which cannot be imported."""

    root, here, namespace = ROOT, HERE, NAMESPACE
    torch_root = Path(torch.__file__).parent
    operators = tuple(schemas())

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
    inputs = [*objects, "-Wl,--no-as-needed", *stubs, "-Wl,--as-needed", *flags]
    run("g++", "-shared", "-o", target, *inputs, f"-Wl,--version-script={script}")
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
    objects = binding_objects(folder / "fake", flags, sorted(HERE.glob("fake_*.cpp")))
    return link(folder / "fake", folder / "fake" / "fake.so", objects, "-ldl", exports="fake_*;")


@pytest.fixture(scope="session")
def fake_library(fake_path) -> ctypes.CDLL:
    library = load(fake_path)
    library.fake_set.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.fake_get.argtypes, library.fake_get.restype = [ctypes.c_char_p], ctypes.c_int64
    library.fake_last_kernel.restype = library.fake_last_launch.restype = ctypes.c_char_p
    library.fake_encodes.restype = ctypes.c_int64
    library.fake_refuses_columns.argtypes, library.fake_refuses_columns.restype = [ctypes.c_int64], ctypes.c_char_p
    assert library.tileops_register() is None
    return library


@pytest.fixture(scope="session")
def real_path(folder, cuda, generated) -> Path:
    """The library over the real static CUDA runtime, with an empty table of kernels."""
    registry = folder / "no_kernels.cpp"
    registry.write_text(NO_KERNELS)
    objects = binding_objects(folder / "real", binding_flags(cuda, generated, NAMESPACE + "_real"), [registry])
    runtime = next(p for p in (cuda / "lib64", cuda / "lib") if (p / "libcudart_static.a").exists())
    libraries = ["-L", runtime, "-lcudart_static", "-ldl", "-lpthread", "-lrt"]
    return link(folder / "real", folder / "real" / "real.so", objects, *libraries)


@pytest.fixture(scope="session")
def row_probe(folder) -> ctypes.CDLL:
    target = folder / "row_probe.so"
    sources = [HERE / "row_probe.cpp", CSRC / "row_problem.cpp", CSRC / "gemm_problem.cpp"]
    run("g++", *FLAGS, "-fvisibility=default", "-shared", "-I", CSRC, *sources, "-o", target)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="session")
def shim_check(folder) -> ctypes.CDLL:
    """torch's headers and ours in one file."""
    root = Path(torch.__file__).parent
    target = folder / "shim_check.so"
    libraries = root / "lib"
    torch_flags = ["-isystem", root / "include", "-L", libraries, "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    run("g++", *FLAGS, "-DTORCH_STABLE_ONLY", "-shared", "-I", CSRC, HERE / "shim_check.cpp", *torch_flags, "-o", target)
    return ctypes.CDLL(str(target))


class Fake:
    def __init__(self, library, ops):
        self.library, self.ops = library, ops

    def set(self, **values):
        for name, value in values.items():
            self.library.fake_set(name.encode(), value)

    def get(self, name):
        return self.library.fake_get(name.encode())

    def knobs(self, **values):
        for name, value in values.items():
            self.library.tileops_set_knob(name.encode(), value.encode())

    def status(self):
        return json.loads(self.library.tileops_status())

    def kernel(self, call):
        """Runs the call; the kernel that it launched, or "eager"."""
        before = self.get("launches")
        call()
        return self.library.fake_last_kernel().decode() if self.get("launches") > before else "eager"


def eager_softmax(x, dim=-1, *, dtype=None):
    assert not torch.is_grad_enabled()
    return torch.softmax(x.float(), dim).to(dtype or x.dtype)


def eager_rms_norm(x, weight=None, eps=1e-6, *, dim=-1, weight_offset=0.0, round_before_weight=False):
    assert not torch.is_grad_enabled()
    if weight is not None and weight.numel() == 3:
        raise KeyError("from the eager twin")
    y = torch.nn.functional.rms_norm(x.float().movedim(dim, -1), x.shape[dim : dim + 1 or None], None, eps)
    y = y if weight is None else y * (weight.float() + weight_offset)
    return y.movedim(-1, dim).to(x.dtype)


ACTIVATIONS = (lambda z: z, torch.relu, F.gelu, functools.partial(F.gelu, approximate="tanh"), F.silu)


def eager_gemm(a, b, bias=None, *, activation=0, residual=None, out_dtype=None, scale_a=None, scale_b=None):
    assert not torch.is_grad_enabled()
    if a.shape[-1] == 3:
        raise KeyError("from the eager twin")
    z = torch.matmul(a.float(), b.float())
    y = ACTIVATIONS[activation](z if bias is None else z + bias)
    return (y if residual is None else y + residual).to(out_dtype or a.dtype)


MADE_UP = {"softmax": eager_softmax, "rms_norm": eager_rms_norm, "gemm": eager_gemm}
WITHOUT = ("rms_norm_silu",)  # a missing twin is an error: test_calls.py


def packages_own(op, *args, **kwargs):
    """The twin of the package, which registers under another namespace."""
    import tileops

    assert not torch.is_grad_enabled()
    return getattr(tileops.ops, op).__globals__["_op"].twin(*args, **kwargs)


@pytest.fixture(scope="module")
def fake_ops(fake_library, binding):
    twins = torch.library.Library(binding.namespace, "FRAGMENT")
    for op in schemas():
        if op not in WITHOUT:
            twin = MADE_UP.get(op) or functools.partial(packages_own, op)
            twins.impl(f"_eager_{op}", twin, "CompositeExplicitAutograd")
    yield getattr(torch.ops, binding.namespace)
    twins._destroy()


@pytest.fixture
def fake(fake_library, fake_ops):
    fake = Fake(fake_library, fake_ops)
    yield fake
    fake.set(launch_error=0, current_device=0)
    fake.knobs(force="", log="", require_native="", disable_native="")
