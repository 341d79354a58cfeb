"""Importing: light, silent, without CUDA, and never a failure, whatever is wrong with the native library."""
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import tileops

USE = """
import torch
x = torch.randn(3, 4)
assert torch.allclose(tileops.softmax(x), torch.softmax(x, -1))
assert torch.allclose(torch.ops.tileops.softmax(x), torch.softmax(x, -1))
q, table = torch.randn(1, 3, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
pair = tileops.flash_attention(q, q, q)
merged = tileops.merge_attention(*pair, q, pair[1] - torch.inf)
for found in (merged, tileops.flash_attention_paged(q, q, q, table, table[0] + 3)):
    assert torch.allclose(found[0], pair[0], atol=1e-6) and torch.allclose(found[1], pair[1], atol=1e-6)
tileops.mla_decode(q, q[:, :, 0], table, table[0] + 3, 0.5, head_dim_v=4)
tileops.rms_norm(x, torch.ones(4)), tileops.rms_norm_silu(x.requires_grad_()).sum().backward()
print(tileops.status().reason)
"""


def test_import_is_light(run_python):
    """No wall-clock assertion: what would cost time must not be there."""
    done = run_python("""
import sys, torch
before = set(sys.modules)
import tileops
new = sorted(name for name in set(sys.modules) - before if not name.startswith("tileops"))
print(new)
heavy = ("torch._dynamo", "torch._inductor", "numpy", "sympy", "triton", "importlib.metadata", "tileops_dsl")
assert not [name for name in new if name.startswith(heavy)], new
assert not torch.cuda.is_initialized()
""")
    assert done.stderr == ""


def test_every_module_imports_without_a_gpu(run_python):  # B61
    done = run_python(f"""
import pkgutil, importlib, warnings
warnings.simplefilter("error")
import tileops
for module in pkgutil.walk_packages(tileops.__path__, "tileops."):
    if not module.name.endswith((".demo", "._C", ".integrations.transformers")):  # the last needs its host
        importlib.import_module(module.name)
{USE}
assert not torch.cuda.is_initialized()
""", CUDA_VISIBLE_DEVICES="")
    assert done.stderr == ""


@pytest.fixture
def copy_of_package(tmp_path):
    source = Path(tileops.__file__).parent
    shutil.copytree(source, tmp_path / "tileops", ignore=shutil.ignore_patterns("_C.so", "__pycache__", "demo.py"))
    return tmp_path


def test_missing_library(run_python, copy_of_package):
    done = run_python("import tileops" + USE, path=copy_of_package)
    library = copy_of_package / "tileops" / "_C.so"
    assert done.stdout.strip() == f"{library} does not exist: this is an install without kernels (TILEOPS_BUILD=none)"
    assert done.stderr == ""


@pytest.mark.parametrize("content", [b"not a library", b"\x7fELF" + bytes(60)], ids=["text", "cut short"])
def test_broken_library(run_python, copy_of_package, content):  # B59
    library = copy_of_package / "tileops" / "_C.so"
    library.write_bytes(content)
    done = run_python("import tileops" + USE, path=copy_of_package)
    reason = f"{library}, built for torch 2.10 or newer, does not load under torch {torch.__version__}: "
    assert done.stdout.startswith(reason)
    assert done.stderr == ""


def test_library_without_our_functions(run_python, copy_of_package):
    import _ctypes

    if not hasattr(_ctypes, "__file__"):
        pytest.skip("this Python has no shared library of its own at hand")
    shutil.copy(_ctypes.__file__, copy_of_package / "tileops" / "_C.so")
    done = run_python("import tileops" + USE, path=copy_of_package)
    assert "_C.so is of another version of tileops: " in done.stdout and "tileops_namespace" in done.stdout


OTHER_NAMESPACE = """
const char *tileops_namespace(void) { return "host_tileops"; }
const char *tileops_register(void) { return "it only has a name"; }
const char *tileops_status(void) { return "{}"; }
void tileops_set_knob(const char *name, const char *value) { (void)name; (void)value; }
"""


def test_namespace_is_the_librarys(run_python, copy_of_package, tmp_path):
    """A host that needs a namespace of its own builds the library for it; Python follows."""
    source = tmp_path / "other.c"
    source.write_text(OTHER_NAMESPACE)
    library = copy_of_package / "tileops" / "_C.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    program = """
import torch, tileops
x = torch.ones(2, 4)
print(torch.ops.host_tileops.softmax(x).sum().item(), tileops.softmax(x).sum().item(), hasattr(torch.ops.tileops, "softmax"))
"""
    assert run_python(program, path=copy_of_package).stdout.split() == ["2.0", "2.0", "False"]


def test_library_older_than_an_operator(run_python, copy_of_package, tmp_path):
    """Whoever adds an operator tries it before the build."""
    source = tmp_path / "older.c"
    older = OTHER_NAMESPACE.replace('"host_tileops"', '"tileops"').replace('"it only has a name"', "0")
    source.write_text(older)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", copy_of_package / "tileops" / "_C.so", source], check=True)
    done = run_python("import tileops" + USE + "print(tileops.status().loaded)", path=copy_of_package)
    assert done.stdout.split() == ["True"] and done.stderr == ""


def test_disabled(run_python):
    done = run_python("import tileops" + USE, TILEOPS_DISABLE_NATIVE="1")
    assert done.stdout.strip() == "TILEOPS_DISABLE_NATIVE was set when tileops was imported"


@pytest.mark.parametrize(("change", "reason"), [
    ("torch.version.hip = '6.4'", "this torch is built for ROCm 6.4, and the kernels are CUDA ones"),
    ("torch.__version__ = '2.9.1+cu130'",
     "torch 2.9.1+cu130 is older than 2.10, the oldest that the native library works with"),
])
def test_unsuitable_torch(run_python, change, reason):
    done = run_python(f"import torch\n{change}\nimport tileops" + USE)
    assert done.stdout.strip() == reason


def test_tileops_before_torch(run_python):
    run_python("import tileops\nimport torch" + USE)


def test_name_taken_by_another_library(run_python):
    """One plain sentence, and the functions still work: they call eager PyTorch without torch.ops."""
    done = run_python("""
import torch
other = torch.library.Library("tileops", "DEF")
other.define("rms_norm_silu(Tensor x) -> Tensor")
import tileops
x = torch.randn(3, 4, requires_grad=True)
y = tileops.softmax(x)
assert torch.allclose(y, torch.softmax(x, -1))
tileops.rms_norm(x).sum().backward()
assert str(tileops.explain("rms_norm_silu", x)) == "eager: x is on cpu"
out = torch.empty(3, 4)
with torch.no_grad():
    assert tileops.rms_norm_silu(x, out=out) is out
print(tileops.status().reason)
""")
    assert done.stdout.strip() == (
        "torch.ops.tileops.rms_norm_silu was already registered by another library; a second copy of tileops (one installed, "
        "one from a source tree?) is the usual cause; keep one of the two, in a process of its own"
    )
    assert done.stderr == ""


def test_foreign_distribution_is_named(run_python, tmp_path):
    info = tmp_path / "tileops-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tileops\nVersion: 0.1.0\n")
    done = run_python(f"""
import sys, torch
sys.path.append({str(tmp_path)!r})
other = torch.library.Library("tileops", "DEF")
other.define("softmax(Tensor x) -> Tensor")
import tileops
print(tileops.status().reason)
""")
    assert "the distribution `tileops` 0.1.0 (tile-ai/TileOPs) is installed" in done.stdout


def test_second_copy_in_one_process(run_python, copy_of_package):
    done = run_python(f"""
import sys, tileops
first = tileops
for name in [name for name in sys.modules if name.startswith("tileops")]:
    del sys.modules[name]
sys.path.insert(0, {str(copy_of_package)!r})
import tileops
assert tileops is not first
{USE}""")
    assert "was already registered by another library; a second copy of tileops" in done.stdout


def test_bad_knob_is_named(run_python):
    done = run_python("import tileops", check=False, TILEOPS_REQUIRE_NATIVE="true")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ValueError: TILEOPS_REQUIRE_NATIVE is 'true'; expected 1, 0 or nothing")
