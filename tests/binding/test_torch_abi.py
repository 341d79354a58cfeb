"""The stable ABI: declarations and encodings against torch's headers, symbols against torch 2.10, and what is linked."""

import ctypes
import json
import re
import subprocess
import sys

import pytest
import torch


def shim_symbols(root, mark: str) -> set[str]:
    """The functions that csrc/torch_shim.h declares; mark: "" all, "weak" or "strong"."""
    text = re.sub(r"//.*", "", (root / "csrc" / "torch_shim.h").read_text())
    found = set()
    for declaration in text.split(";"):
        match = re.search(r"\b((?:aoti_)?torch_\w+)\(", declaration)
        if match and mark in ("", "weak" if "weak" in declaration else "strong"):
            found.add(match[1])
    return found


def floor_symbols(here) -> set[str]:
    return {line for line in (here / "torch_2_10_symbols.txt").read_text().split("\n") if line and line[0] != "#"}


def undefined(path) -> dict[str, str]:
    """Name -> nm letter (U strong, w weak), of what a shared library leaves to others."""
    rows = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True).stdout.split("\n")
    return {name.partition("@")[0]: letter for letter, name in (row.split() for row in rows if row)}


def test_declarations_compile_after_those_of_torch(shim_check):
    assert shim_check  # compiling it is the test


def test_a_differing_declaration_would_not_compile(binding, folder):
    wrong = folder / "wrong.cpp"
    declaration = 'extern "C" AOTITorchError aoti_torch_get_dim(AtenTensorHandle, int32_t*);'
    wrong.write_text(f"#include <torch/csrc/stable/library.h>\n{declaration}\n")
    with pytest.raises(AssertionError, match="aoti_torch_get_dim"):
        binding.compile(wrong, folder / "wrong.o", "-isystem", binding.torch_root / "include")


def test_encodings_are_those_of_torch(shim_check):
    assert shim_check.check_encodings() == 0


def test_strong_symbols_are_in_torch_2_10(binding):
    strong = shim_symbols(binding.root, "strong")
    assert strong and strong <= floor_symbols(binding.here)


def test_weak_symbols_are_those_that_torch_2_10_lacks(binding):
    weak = shim_symbols(binding.root, "weak")
    assert weak and not weak & floor_symbols(binding.here)


def test_library_leaves_only_declared_symbols_to_torch(binding, real_path):
    theirs = {name: letter for name, letter in undefined(real_path).items() if "torch" in name or "c10" in name}
    assert theirs.keys() <= shim_symbols(binding.root, "")
    assert {name for name, letter in theirs.items() if letter == "U"} <= floor_symbols(binding.here)
    assert {name for name, letter in theirs.items() if letter != "U"} <= shim_symbols(binding.root, "weak")


def test_library_needs_torch_and_no_cuda(real_path):
    dynamic = subprocess.run(["readelf", "-d", real_path], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", dynamic))
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    allowed = r"libtorch(_cpu)?\.so|libstdc\+\+\.so\.6|libgcc_s\.so\.1|lib(c|m|dl|pthread|rt)\.so\.\d|ld-linux-x86-64\.so\.2"
    assert all(re.fullmatch(allowed, name) for name in needed), needed


def test_library_exports_four_functions(real_path):
    rows = subprocess.run(["nm", "-D", "--defined-only", real_path], capture_output=True, text=True, check=True).stdout.split()
    assert set(rows[2::3]) == {"tileops_namespace", "tileops_register", "tileops_set_knob", "tileops_status"}


def test_registers_without_a_gpu(binding, real_path):
    library = binding.load(real_path)
    library.tileops_namespace.restype = ctypes.c_char_p
    assert library.tileops_namespace().decode() == binding.namespace + "_real"
    assert library.tileops_register() is None
    assert library.tileops_register() is None  # again: the same answer
    namespace = getattr(torch.ops, binding.namespace + "_real")
    for op in binding.operators:
        schemas = {str(getattr(getattr(namespace, op), name)._schema) for name in getattr(namespace, op).overloads()}
        assert len(schemas) == 2, schemas
        assert len(getattr(namespace, f"_eager_{op}").overloads()) == len(getattr(namespace, f"_explain_{op}").overloads()) == 1
    with pytest.raises(NotImplementedError, match="CPU"):
        namespace.softmax(torch.ones(2))


def test_status_is_json_and_starts_no_cuda(binding, real_path):
    status = json.loads(binding.load(real_path).tileops_status())
    assert status["targets"] == ["sm_90a", "portable"] and status["variants"] == 0 and status["devices"] == {}
    assert isinstance(status["driver"], int)
    assert bool(status["driver_message"]) == (status["driver"] < 13000)


SECOND = """
import ctypes, sys, torch
def register(path):
    library = ctypes.CDLL(path)
    library.tileops_register.restype = ctypes.c_char_p
    return (library.tileops_register() or b"").decode()
{before}
print("first:", register(sys.argv[1]))
print("second:", register(sys.argv[2]))
"""


def second_copy(real_path, folder, before: str) -> subprocess.CompletedProcess:
    copy = folder / "copy.so"
    copy.write_bytes(real_path.read_bytes())
    command = [sys.executable, "-c", SECOND.format(before=before), real_path, copy]
    return subprocess.run(command, capture_output=True, text=True)


def test_second_copy_is_one_sentence(binding, real_path, folder):
    done = second_copy(real_path, folder, "")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().split("\n")
    assert first == "first: "
    expected = "second: another copy of this library, or of the package it belongs to, has already defined "
    assert second.startswith(f"{expected}{binding.namespace}_real::_")


def test_foreign_owner_is_one_sentence_and_nothing_is_left_behind(binding, real_path, folder):
    space = binding.namespace + "_real"
    before = f'foreign = torch.library.Library("{space}", "FRAGMENT"); foreign.define("rms_norm(Tensor x) -> Tensor")'
    done = second_copy(real_path, folder, before)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.strip().split("\n"):  # the second copy meets the same: what the first had defined was taken back
        assert f": another library has already defined {space}::rms_norm; keep one of the two" in line
