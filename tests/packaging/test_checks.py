"""What fails a build, on recorded compiler output and on a kernel that really spills."""

import json
import subprocess
from pathlib import Path

import pytest

from build_backend import checks, link, native, nvcc_object, objects, toolkit, wheel_tag
from build_backend.errors import BuildError
from build_backend.mode import Plan

RECORDED = Path(__file__).parent / "recorded"
NVCC = toolkit.find_installed()
SEVERAL = ("arch=compute_80,code=sm_80", "arch=compute_120,code=[sm_120,compute_120]")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc of CUDA 13 in CUDA_HOME or PATH")


def report(name: str, code_bytes=None) -> checks.Report:
    return checks.Report("toy.cu", (RECORDED / name).read_text(), code_bytes or {})


def test_clean_output_passes():
    sizes = {arch: {"k1": 384, "k2": 10112} for arch in ("sm_80", "sm_120")}
    assert checks.problems(report("clean.txt", sizes), ["k1", "k2"], ["sm_80", "sm_120"]) == []


@pytest.mark.parametrize(("entry", "limit"), [({}, checks.MAX_CODE_BYTES), ({"tile": [1]}, checks.MAX_PRODUCT_BYTES)])
def test_a_product_may_have_more_code(tmp_path, entry, limit):
    manifest, plan = {"kernels": {"k1": entry}}, Plan("local", {"portable": ("arch=compute_80,code=sm_80",)})
    for size, refused in ((limit, False), (limit + 1, True)):
        found = {"source": "toy.cu", "log": (RECORDED / "clean.txt").read_text(), "code_bytes": {"sm_80": {"k1": size}}}
        (tmp_path / "toy.json").write_text(json.dumps(found))
        said = native.source_problems(plan, manifest, {"kernels": ["k1"], "target": "portable"}, tmp_path / "toy.o")
        assert [f"above the limit of {limit}" in problem for problem in said] == [True] * refused


def test_spill_is_named():
    (problem,) = checks.register_problems(report("spills.txt"))
    assert problem.startswith("k2 (toy.cu, sm_80): spills registers, 740 bytes of stores and 772 of loads; use a smaller tile")


def test_stack_frame_without_spill_is_named():
    (problem,) = checks.register_problems(report("wgmma.txt"))
    assert problem.startswith("stack (toy.cu, sm_90a): keeps 128 bytes in local memory; index register tiles")


def test_serialised_wgmma_and_ignored_setmaxnreg_are_named():
    setmaxnreg, injected, serialised = checks.warning_problems(report("wgmma.txt"))
    assert setmaxnreg.startswith("one of stack, _Z6helperfi, regs, serial (toy.cu): ptxas says '(C7508)")
    assert setmaxnreg.endswith("let the roles' register budgets add up to it")
    assert injected.startswith("serial (toy.cu): ptxas says '(C7517) warpgroup.wait is injected")
    assert serialised.startswith("serial (toy.cu): ptxas says '(C7511)")
    assert "must not be disturbed until its wait" in serialised


def test_code_size_is_named():
    (problem,) = checks.size_problems(report("clean.txt", {"sm_80": {"k1": 100, "k2": 101}}), limit=100)
    assert problem.startswith("k2 (toy.cu, sm_80): 101 bytes of machine code, above the limit of 100; roll an unrolled loop")


@pytest.mark.parametrize(
    ("kernels", "archs", "expected"),
    [
        (["k1", "k3"], ["sm_80"], "k3 (toy.cu, sm_80): no register use"),
        (["k1"], ["sm_80", "sm_90"], "k1 (toy.cu, sm_90): no register use"),
        (["k2"], ["sm_80"], "k2 (toy.cu, sm_80): no code size"),
    ],
)
def test_a_kernel_that_no_check_saw_fails(kernels, archs, expected):
    sizes = {"sm_80": {"k1": 384, "k3": 384}, "sm_90": {"k1": 384}}
    (problem,) = checks.missing_problems(report("clean.txt", sizes), kernels, archs)
    assert problem.startswith(expected)


def test_require_lists_every_problem():
    with pytest.raises(BuildError, match=r"2 kernel check\(s\) failed:\n  one\n  two"):
        checks.require(["one", "two"])


def test_code_size_is_read_from_section_headers():
    assert nvcc_object.text_sections((RECORDED / "cubin_sections.txt").read_text()) == {"k1": 0x180, "k2": 0x2780}


def test_architectures_with_machine_code():
    assert native.archs(("arch=compute_100f,code=sm_100f", *SEVERAL)) == ["sm_100f", "sm_80", "sm_120"]


def test_manylinux_from_symbol_versions():
    listing = (RECORDED / "versions_2_34.txt").read_text()
    assert wheel_tag.newest(listing) == {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 21), "CXXABI": (1, 3, 9), "GCC": (3, 0)}
    assert wheel_tag.manylinux(listing) == (2, 34)
    assert wheel_tag.manylinux(listing.replace("GLIBC_2.34", "GLIBC_2.17")) == (2, 28)
    assert wheel_tag.manylinux(listing.replace("GLIBCXX_3.4.21", "GLIBCXX_3.4.30")) == (2, 35)
    assert wheel_tag.manylinux(listing.replace("GLIBC_2.34", "GLIBC_2.99")) is None


def test_older_version_of_a_moved_symbol():
    moved = "T dlsym@@GLIBC_2.34\nT dlsym@GLIBC_2.2.5\nT two@@GLIBC_2.34\nT two@GLIBC_2.2.5\nT two@GLIBC_2.3.4\n"
    listing = moved + "T read@@GLIBC_2.2.5\nT new@@GLIBC_2.35\nT old@GLIBC_2.2.5\n"
    assert link.older_versions(listing) == {"dlsym": "GLIBC_2.2.5", "two": "GLIBC_2.3.4"}


SPILLING = """
extern "C" __global__ void greedy(const float* x, float* y, int n) {
  float a[40];
  for (int j = 0; j < 40; j++) a[j] = x[threadIdx.x * 40 + j];
  __syncthreads();
  for (int r = 0; r < n; r++)
    for (int j = 0; j < 40; j++) a[j] = a[j] * a[(j + 7) % 40] + x[r];
  for (int j = 0; j < 40; j++) y[threadIdx.x * 40 + j] = a[j];
}
"""


@needs_nvcc
def test_a_spilling_kernel_fails_the_build_also_from_the_cache(tmp_path, monkeypatch):
    generated = tmp_path / "csrc" / "generated"
    generated.mkdir(parents=True)
    (generated / "greedy.cu").write_text(SPILLING)
    source = {"file": "greedy.cu", "op": "toy", "target": "portable", "kernels": ["greedy"]}
    monkeypatch.setattr(native, "ROOT", tmp_path)
    monkeypatch.setattr(native, "CSRC", tmp_path / "csrc")
    monkeypatch.setattr(native, "GENERATED", generated)
    monkeypatch.setattr(native, "generate", lambda plan: {"sources": [source], "kernels": {"greedy": {}}})
    monkeypatch.setattr(native, "CUDA_FLAGS", (*native.CUDA_FLAGS, "-maxrregcount=16"))
    monkeypatch.delenv("TILEOPS_OBJECTS", raising=False)
    for _ in range(2):
        with pytest.raises(BuildError, match=r"greedy \(greedy.cu, sm_80\): spills registers"):
            native.build(Plan("smoke", {"portable": ("arch=compute_80,code=sm_80",)}), tmp_path / "_C.so")
        assert not (tmp_path / "_C.so").exists()
    assert len(list((tmp_path / "build" / "objects").glob("*.o"))) == 1


@needs_nvcc
def test_report_of_one_and_of_several_architectures(tmp_path):
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void k(float* x) { x[threadIdx.x] = 1.f; }\n')
    for codes in (("arch=compute_90a,code=sm_90a",), SEVERAL):
        gencode = [flag for code in codes for flag in ("-gencode", code)]
        unit = objects.Unit("cuda", source, (*native.CUDA_FLAGS, *gencode), (), f"nvcc {NVCC.version}")
        built = objects.compile_all([unit], [], tmp_path / "objects", NVCC.nvcc, "g++")[source]
        found = checks.Report(**json.loads(built.with_suffix(".json").read_text()))
        assert checks.problems(found, ["k"], native.archs(codes)) == []
        assert sorted(found.code_bytes) == sorted(native.archs(codes))


def test_an_operator_without_a_binding(tmp_path):
    """Linking a shared library does not notice; loading it would."""
    source, library = tmp_path / "table.cpp", tmp_path / "table.so"
    source.write_text("""namespace tileops {
        void there(unsigned long*) {}
        void gelu(unsigned long*), gelu_out(unsigned long*);
        extern void (*const kernels[])(unsigned long*) = {there, gelu, gelu_out};
    }""")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(BuildError, match=r"csrc does not define gelu, gelu_out; .* expected csrc/<op>.cpp with the functions"):
        link.require_operators(library)
    source.write_text("namespace tileops { void there(unsigned long*) {} }")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    link.require_operators(library)
