"""Modes, toolkit discovery and object names, without compiling."""

from dataclasses import replace
from pathlib import Path

import pytest

from build_backend import hooks, mode, native, objects, toolkit
from build_backend.errors import BuildError


def none_visible():
    return []


@pytest.mark.parametrize(
    ("setting", "gpus", "expected", "targets"),
    [
        ("", [], "none", []),
        ("", [(7, 5)], "none", []),
        ("", [(9, 0)], "local", ["portable", "sm_90a"]),
        ("none", [(9, 0)], "none", []),
        ("smoke", [], "smoke", ["portable", "sm_90a"]),
        ("all", [], "all", ["portable", "sm_90a"]),
        ("local", [(8, 6)], "local", ["portable"]),
    ],
)
def test_mode(setting, gpus, expected, targets):
    plan = mode.plan({"TILEOPS_BUILD": setting}, lambda: gpus)
    assert (plan.mode, sorted(plan.gencode)) == (expected, targets)


@pytest.mark.parametrize(
    ("gpus", "portable"),
    [
        ([(8, 6), (8, 9)], ["arch=compute_80,code=sm_80"]),
        ([(9, 0)], ["arch=compute_90,code=sm_90"]),
        ([(10, 3)], ["arch=compute_100f,code=sm_100f"]),
        ([(12, 1), (8, 0)], ["arch=compute_80,code=sm_80", "arch=compute_120,code=[sm_120,compute_120]"]),
        ([(13, 0)], ["arch=compute_120,code=compute_120"]),
    ],
)
def test_local_builds_what_the_present_gpus_run(gpus, portable):
    assert list(mode.local_gencode(gpus)["portable"]) == portable


def test_unknown_mode_is_refused():
    with pytest.raises(BuildError, match="TILEOPS_BUILD is 'fast'; expected one of none, smoke, local, all"):
        mode.plan({"TILEOPS_BUILD": "fast"}, none_visible)


@pytest.mark.parametrize(("gpus", "seen"), [([], "no GPU"), ([(7, 5)], "7.5")])
def test_local_without_a_gpu_is_refused(gpus, seen):
    text = f"TILEOPS_BUILD=local: found {seen}; there are kernels for compute capability 8.x, 9.0, 10.x and from 12.0 on. "
    text += "Use TILEOPS_BUILD=none"
    with pytest.raises(BuildError, match=text):
        mode.plan({"TILEOPS_BUILD": "local"}, lambda: gpus)


def fake_nvcc(folder: Path, version: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    here = folder / "bin"
    nvcc.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release 13.0, V{version}"\necho "#$ _HERE_={here}" >&2\n')
    nvcc.chmod(0o755)
    return nvcc


def test_toolkit_order_and_versions(tmp_path):
    home = fake_nvcc(tmp_path / "home", "13.0.88")
    old = fake_nvcc(tmp_path / "old", "12.9.86")
    packages = fake_nvcc(tmp_path / "site" / "nvidia" / "cu13", "13.0.48")
    path = f"{home.parent}:/usr/bin:/bin"
    assert toolkit.find_installed({"PATH": path}).version == "13.0.88"
    assert toolkit.find_installed({"PATH": path}).root == tmp_path / "home"
    assert toolkit.find_installed({"PATH": f"{old.parent}:/usr/bin:/bin"}) is None
    assert toolkit.find_installed({"PATH": ""}) is None
    assert toolkit.find_in_packages([tmp_path / "site"]).nvcc == packages
    with pytest.raises(BuildError, match=r"CUDA_HOME is .*old, which holds no nvcc of CUDA 13; correct it, or unset it$"):
        toolkit.find_installed({"CUDA_HOME": str(tmp_path / "old"), "PATH": path})


def test_pip_is_asked_for_nvcc_only_where_it_is_needed(monkeypatch):
    monkeypatch.setenv("TILEOPS_BUILD", "none")
    assert hooks.native_requires() == []
    monkeypatch.setenv("TILEOPS_BUILD", "all")
    monkeypatch.setattr(toolkit, "find_installed", lambda: object())
    assert hooks.native_requires() == ["ninja"]
    monkeypatch.setattr(toolkit, "find_installed", lambda: None)
    assert hooks.native_requires() == ["ninja", *toolkit.PYPI_PACKAGES]
    assert all("==" in package for package in toolkit.PYPI_PACKAGES)


def test_no_toolkit_says_what_to_do(monkeypatch):
    monkeypatch.setattr(toolkit, "find_installed", lambda: None)
    monkeypatch.setattr(toolkit, "find_in_packages", lambda: None)
    with pytest.raises(BuildError, match=r"no nvcc of CUDA 13 .* `pip install nvidia-cuda-nvcc==13.0.88 .*TILEOPS_BUILD=none"):
        toolkit.find()


def test_no_cpp_compiler_says_what_to_do():
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: /nowhere/g\+\+ does not run. Install g\+\+, set CXX"):
        native.compiler_version("/nowhere/g++")


def test_namespace_option():
    assert native.namespace_flags({}) == ()
    assert native.namespace_flags({"TILEOPS_NAMESPACE": "host_tileops"}) == ("-DTILEOPS_NAMESPACE=host_tileops",)
    with pytest.raises(BuildError, match="TILEOPS_NAMESPACE is 'a-b'; expected a C identifier"):
        native.namespace_flags({"TILEOPS_NAMESPACE": "a-b"})


def unit(folder: Path, **changes) -> objects.Unit:
    return replace(objects.Unit("cxx", folder / "a.cpp", ("-O2",), (f"-I{folder}",), "g++ 12"), **changes)


def sources(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.cpp").write_text('#include "b.h"\n#include <stdint.h>\nint a() { return b; }\n')
    (folder / "b.h").write_text('#ifdef NEVER\n#  include "c.h"\n#endif\nconstexpr int b = 1;\n')
    (folder / "c.h").write_text("\n")
    (folder / "unrelated.h").write_text("\n")
    return folder


def test_object_name_follows_content_only(tmp_path):
    here, there = sources(tmp_path / "here"), sources(tmp_path / "there")
    before = objects.key(unit(here), [here])
    assert objects.key(unit(there), [there]) == before  # not the folder
    (here / "unrelated.h").write_text("// changed\n")
    assert objects.key(unit(here), [here]) == before
    (here / "c.h").write_text("// changed\n")  # an include that may be active
    assert objects.key(unit(here), [here]) != before
    for change in ({"flags": ("-O3",)}, {"compiler": "g++ 13"}, {"rule": "cuda"}):
        assert objects.key(unit(there, **change), [there]) != before


def test_an_existing_object_is_not_rebuilt(tmp_path, monkeypatch):
    folder, store = sources(tmp_path / "s"), tmp_path / "store"

    def build():
        return objects.compile_all([unit(folder)], [folder], store, Path("nvcc"), "g++")

    first = build()[folder / "a.cpp"]
    made = first.stat().st_mtime_ns
    (store / ".ninja_log").unlink()  # as in a store that came from elsewhere
    (folder / "a.cpp").touch()
    assert build()[folder / "a.cpp"] == first and first.stat().st_mtime_ns == made
    (folder / "b.h").write_text("constexpr int b = 2;\n")
    assert build()[folder / "a.cpp"] != first


def test_a_compile_error_and_a_missing_ninja_are_plain(tmp_path, monkeypatch, capfd):
    folder = sources(tmp_path / "s")
    (folder / "a.cpp").write_text("int a( {\n")
    with pytest.raises(BuildError, match="a source failed to compile; ninja printed the compiler's message above"):
        objects.compile_all([unit(folder)], [folder], tmp_path / "o", Path("nvcc"), "g++")
    assert "a.cpp:1" in capfd.readouterr().out
    monkeypatch.setattr(objects.shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(BuildError, match="ninja is not on PATH: `pip install ninja`"):
        objects.compile_all([unit(folder)], [folder], tmp_path / "o", Path("nvcc"), "g++")
