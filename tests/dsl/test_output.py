"""The generated files agree with each other and with C++."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tileops_dsl import emulate

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tileops_dsl" / "kernels"
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
OPS = ("softmax", "rms_norm", "rms_norm_silu")


@pytest.fixture(scope="module")
def kernel_texts(everything):
    """Kernel -> (its file, its text)."""
    found = {}
    for source in everything.manifest["sources"]:
        parts = re.split(r"^TILEOPS_KERNEL\((\w+), ", everything.files[source["file"]], flags=re.M)
        for name, text in zip(parts[1::2], parts[2::2]):
            assert name not in found
            found[name] = (source, text)
    return found


def test_each_kernel_is_in_the_file_that_the_manifest_names(everything, kernel_texts):
    kernels = everything.manifest["kernels"]
    assert set(kernel_texts) == set(kernels)
    files = {s["file"] for s in (*everything.manifest["sources"], *everything.manifest["with_roles"].values())}
    assert files == {name for name in everything.files if name.endswith(".cu")}
    for name, (source, _) in kernel_texts.items():
        entry = kernels[name]
        assert name in source["kernels"] and len(set(source["kernels"])) == len(source["kernels"])
        assert (entry["op"], entry["target"]) == (source["op"], source["target"])
        assert source["file"] == f"{entry['op']}_{entry['target']}_{SHORT[entry['x']]}.cu"
        assert name.startswith(f"{entry['op']}_{entry['target']}_{SHORT[entry['x']]}_{SHORT[entry['y']]}_v{entry['vector']}_")


def test_manifest_and_text(everything, kernel_texts):
    for name, entry in everything.manifest["kernels"].items():
        text = kernel_texts[name][1]
        assert text.startswith(f"{entry['op']}_params, {entry['threads']}, ")
        offsets = [int(n) for n in re.findall(r"shared<float>\((\d+)\)", text)]
        assert (entry["shared_bytes"] > max(offsets)) if offsets else entry["shared_bytes"] == 0
        assert entry["shared_bytes"] < 48 * 1024
        assert set(re.findall(r"p\.(\w+)", text)) <= {field for field, _, _ in entry["params"]}


def test_each_site_is_mapped_and_used_once(everything, kernel_texts):
    for name, entry in everything.manifest["kernels"].items():
        numbers = re.findall(r"\bsite\((\d+)\)", kernel_texts[name][1])
        assert numbers == list(entry["sites"]) == [str(n + 1) for n in range(len(numbers))]


def test_sites_are_lines_of_the_block_that_they_stand_in(everything, kernel_texts):
    for name, entry in everything.manifest["kernels"].items():
        line = None
        for text in kernel_texts[name][1].splitlines():
            if comment := re.match(r" *// (\w+\.py:\d+): ", text):
                line = comment[1]
            for number in re.findall(r"\bsite\((\d+)\)", text):
                assert entry["sites"][number] == line


def test_each_source_comment_is_a_line_of_the_program(everything, kernel_texts):
    programs = {path.name: path.read_text().splitlines() for path in PROGRAMS.glob("*.py")}
    seen = set()
    for _, text in kernel_texts.values():
        comments = re.findall(r"^ *// (\w+\.py):(\d+): (.*)$", text, flags=re.M)
        assert comments
        seen |= set(comments)
    for file, line, comment in seen:
        assert programs[file][int(line) - 1].strip() == comment
    assert {file for file, _, _ in seen} == {"softmax.py", "rms_norm.py"}


# ---- registry.cpp


def test_registry_rows(everything):
    """One row a kernel, in the manifest's order, with its numbers."""
    row = r'^    \{"(\w+)", "(\w+)", (.*), reinterpret_cast<const void\*>\((\w+)\)\},$'
    rows = re.findall(row, everything.files["registry.cpp"], re.M)
    assert [name for _, name, _, _ in rows] == list(everything.manifest["kernels"])
    for op, name, numbers, symbol in rows:
        entry = everything.manifest["kernels"][name]
        dtypes = [f"DType::{SHORT[entry[end]]}" for end in "xy"]
        flags = ["true" if entry[flag] else "false" for flag in ("lanes_on_rows", "shifted")]
        sizes = [str(entry[key]) for key in ("max_cols", "rows_per_block", "threads", "shared_bytes")]
        expected = [f"Target::{entry['target']}", *dtypes, str(entry["vector"]), *flags, *sizes]
        assert (op, symbol, numbers.split(", ")) == (entry["op"], name, expected)
    assert f"const int row_variant_count = {len(rows)};" in everything.files["registry.cpp"]


def run_cpp(tmp_path, text: str, *flags: str) -> str:
    (tmp_path / "program.cpp").write_text(text)
    command = ["g++", "-std=c++17", "-Wall", "-Werror", "-Wno-invalid-offsetof", *flags, "program.cpp", "-o", "program"]
    subprocess.run(command, check=True, cwd=tmp_path)
    return subprocess.run(["./program"], check=True, cwd=tmp_path, capture_output=True, text=True).stdout


def test_registry_compiles(smoke, tmp_path):
    """With kernels of the declared type; and its rows have the manifest's numbers in C++ as well."""
    kernels = smoke.manifest["kernels"]
    stubs = "\n".join(f'extern "C" void {name}(tileops::{entry["op"]}_params) {{}}' for name, entry in kernels.items())
    headers = "\n".join(f'#include "{op}_params.h"' for op in OPS)
    text = f"""#include <stdio.h>
        {headers}
        #include "{smoke.path}/registry.cpp"
        {stubs}
        int main() {{
          for (int i = 0; i < tileops::row_variant_count; ++i) {{
            const tileops::RowVariant& v = tileops::row_variants[i];
            printf("%s %s %d %d %d\\n", v.op, v.name, v.vector, v.rows_per_block, v.threads);
          }}
        }}"""
    printed = run_cpp(tmp_path, text, f"-I{smoke.path}", f"-I{ROOT / 'csrc'}").splitlines()
    keys = ("vector", "rows_per_block", "threads")
    assert printed == [f"{k['op']} {name} {' '.join(str(k[key]) for key in keys)}" for name, k in kernels.items()]


# ---- headers


@pytest.mark.parametrize("op", OPS)
def test_parameter_struct(smoke, tmp_path, op):
    """Size and offsets in C++ are those of the bytes that the emulator passes."""
    params = next(entry["params"] for entry in smoke.manifest["kernels"].values() if entry["op"] == op)
    prints = "".join(f'printf("%zu ", offsetof(tileops::{op}_params, {field}));' for field, _, _ in params)
    text = f'#include <stddef.h>\n#include <stdio.h>\n#include "{op}_params.h"\n'
    text += f'int main() {{ {prints} printf("%zu", sizeof(tileops::{op}_params)); }}'
    *offsets, size = map(int, run_cpp(tmp_path, text, f"-I{smoke.path}").split())
    zeros = {field: None if ctype.endswith("*") else [0] * count for field, ctype, count in params}
    assert len(emulate.pack(params, zeros)) == size
    for (field, ctype, count), offset in zip(params, offsets, strict=True):
        if not ctype.endswith("*"):
            packed = emulate.pack(params, {**zeros, field: [1] * count})
            first = next(i for i, byte in enumerate(packed) if byte)
            assert first == offset + (2 if ctype == "float" else 0), field  # 1.0f begins with two zero bytes
    assert offsets[0] == 0 and params[0][0] == "x"


@pytest.mark.parametrize("op, fields", [
    ("softmax", "x y outer inner cols x_stride y_stride"),
    ("rms_norm", "x weight y outer inner cols x_stride weight_stride y_stride weight_dtype eps weight_offset round"),
    ("rms_norm_silu", "x weight y outer inner cols x_stride weight_stride y_stride weight_dtype eps round"),
])  # fmt: skip
def test_parameters(smoke, op, fields):
    """The fields that csrc/<op>.cpp fills in; only y is written."""
    params = next(entry["params"] for entry in smoke.manifest["kernels"].values() if entry["op"] == op)
    assert [field for field, _, _ in params] == fields.replace("round", "round_before_weight").split()
    assert [field for field, ctype, _ in params if ctype == "void*"] == ["y"]


SCHEMAS = [
    "softmax(Tensor x, int dim=-1, *, ScalarType? dtype=None) -> Tensor",
    "softmax.out(Tensor x, int dim=-1, *, ScalarType? dtype=None, Tensor(a!) out) -> Tensor(a!)",
    "_eager_softmax(Tensor x, int dim=-1, *, ScalarType? dtype=None) -> Tensor",
    "_explain_softmax(Tensor x, int dim=-1, *, ScalarType? dtype=None) -> str",
]


def test_schemas(smoke, everything, tmp_path):
    """Each schema as C++ reads it."""
    text = '#include <stdio.h>\n#include "schemas.h"\nint main() { for (const char* s : tileops::schemas) puts(s); }'
    printed = run_cpp(tmp_path, text, f"-I{smoke.path}", "-Wno-unused-variable").splitlines()
    signatures = json.loads((ROOT / "tileops" / "schemas.json").read_text())
    assert printed[:4] == SCHEMAS and len(printed) == 4 * len(signatures)
    for op, signature in signatures.items():
        assert f"{op}{signature}" in printed and f"_eager_{op}{signature}" in printed
    assert 'build_targets = "sm_90a,portable";' in everything.files["schemas.h"]
