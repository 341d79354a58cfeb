"""The generated files agree with each other and with C++."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from build_backend import operators
from build_backend.measured import Measured
from tileops_dsl import configs, emulate, output
from tileops_dsl.errors import TileError
from tileops_dsl.kernels import configs_of

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tileops_dsl" / "kernels"
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
OPS = ("softmax", "rms_norm", "rms_norm_silu")
MLA = ("mla_decode", "mla_decode_few")
ATTENTION_FLAGS = ("causal", "lengths", "paged", "window", "sinks", "softcap", "longest_first")


def rows(manifest: dict) -> dict[str, dict]:
    """Without products and attention, whose texts have tests of their own (test_gemm.py, emulator/test_attention.py)."""
    return {name: entry for name, entry in manifest["kernels"].items() if "rows_per_block" in entry}


def products(manifest: dict) -> dict[str, dict]:
    return {name: entry for name, entry in manifest["kernels"].items() if entry["op"] == "gemm"}


def attentions(manifest: dict) -> dict[str, dict]:
    return {name: entry for name, entry in manifest["kernels"].items() if entry["op"] == "flash_attention"}


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
    files = {source["file"] for source in everything.manifest["sources"]}
    assert files == {name for name in everything.files if name.endswith(".cu")}
    for name, (source, _) in kernel_texts.items():
        entry = kernels[name]
        assert name in source["kernels"] and len(set(source["kernels"])) == len(source["kernels"])
        assert (entry["op"], entry["target"]) == (source["op"], source["target"])
        begin = f"{entry['op']}_{entry['target']}_{SHORT[entry['x']]}"
        if "tile" in entry:
            tile = "x".join(map(str, entry["tile"]))
            assert source["file"] == f"{name}.cu" and source["kernels"] == [name]
            assert everything.files[f"{name}.txt"].startswith(f"{name}\n")
        if name in products(everything.manifest):
            layout = f"{'nt'[entry['transpose_a']]}{'nt'[entry['transpose_b']]}"
            assert name.startswith(f"{begin}_{SHORT[entry['y']]}_{tile}_{layout}")
        elif name in attentions(everything.manifest):
            dv = f"x{entry['head_dim_v']}" * (entry["head_dim_v"] != entry["tile"][2])
            flags = [flag for flag in ATTENTION_FLAGS if entry[flag]]
            mask = ["full"] * (not (entry["causal"] or entry["window"]))
            assert name == "_".join([f"{begin}_{tile}{dv}", *mask, *flags])
        elif entry["op"] == "attention_decode":
            dv = f"x{entry['head_dim_v']}" * (entry["head_dim_v"] != entry["tile"][2])
            assert name == f"{begin}_{tile}{dv}" + "_softcap" * entry["softcap"]
        elif entry["op"] in MLA:
            assert name == f"{begin}_{tile}" + f"_u{entry['unit']}" * (entry["unit"] > 0)
        else:
            assert source["file"] == f"{begin}.cu"
            assert name.startswith(f"{begin}_{SHORT[entry['y']]}_v{entry['vector']}_")


def test_manifest_and_text(everything, kernel_texts):
    for name, entry in rows(everything.manifest).items():
        text = kernel_texts[name][1]
        assert text.startswith(f"{entry['op']}_params, {entry['threads']}, ")
        offsets = [int(n) for n in re.findall(r"shared<float>\((\d+)\)", text)]
        assert (entry["shared_bytes"] > max(offsets)) if offsets else entry["shared_bytes"] == 0
        assert entry["shared_bytes"] < 48 * 1024
        assert set(re.findall(r"p\.(\w+)", text)) <= {field for field, _, _ in entry["params"]}


def test_each_site_is_mapped_and_used_once(everything, kernel_texts):
    for name, entry in rows(everything.manifest).items():
        numbers = re.findall(r"\bsite\((\d+)\)", kernel_texts[name][1])
        assert numbers == list(entry["sites"]) == [str(n + 1) for n in range(len(numbers))]


def test_sites_are_lines_of_the_block_that_they_stand_in(everything, kernel_texts):
    for name, entry in rows(everything.manifest).items():
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
    assert {"softmax.py", "rms_norm.py", "merge_attention.py"} <= {file for file, _, _ in seen}


# ---- registry.cpp

ROW = r'^    \{"(\w+)", "(\w+)", (.*), reinterpret_cast<const void\*>\((\w+)\)\},$'


def test_registry_rows(everything):
    """One row a kernel, in the manifest's order, with its numbers."""
    table = everything.files["registry.cpp"].partition("const ProductVariant")[0]
    found = re.findall(ROW, table, re.M)
    assert [name for _, name, _, _ in found] == list(rows(everything.manifest))
    for op, name, numbers, symbol in found:
        entry = everything.manifest["kernels"][name]
        dtypes = [f"DType::{SHORT[entry[end]]}" for end in "xy"]
        flags = ["true" if entry[flag] else "false" for flag in ("lanes_on_rows", "shifted")]
        sizes = [str(entry[key]).lower() for key in ("max_cols", "rows_per_block", "paced", "threads", "shared_bytes")]
        expected = [f"Target::{entry['target']}", *dtypes, str(entry["vector"]), *flags, *sizes]
        assert (op, symbol, numbers.split(", ")) == (entry["op"], name, expected)
    assert f"const int row_variant_count = {len(found)};" in table


def test_registry_of_products(everything):
    table = everything.files["registry.cpp"].partition("const ProductVariant")[2].partition("const ProductMeasurement")[0]
    found = re.findall(ROW, table, re.M)
    assert [name for _, name, _, _ in found] == list(products(everything.manifest)) and found
    for op, name, numbers, symbol in found:
        entry = everything.manifest["kernels"][name]
        dtypes = [f"DType::{SHORT[entry[end]]}" for end in "xy"]
        flags = ["true" if entry[flag] else "false" for flag in ("transpose_a", "transpose_b")]
        sizes = [entry["vector"], *entry["tile"], entry["cluster"], entry["threads"], entry["shared_bytes"]]
        maps = [entry["maps"][tensor] for tensor in ("a", "b", "c", "residual") if entry.get("maps")]
        boxes = ", ".join(f"{{{', '.join(map(str, (*m['box'], m['swizzle'])))}}}" for m in maps)
        expected = ", ".join([f"Target::{entry['target']}", *dtypes, *flags, *map(str, sizes), f"{{{boxes}}}"])
        assert (op, symbol, numbers) == (entry["op"], name, expected)
    assert f"const int product_variant_count = {len(found)};" in table


def test_registry_of_attention(everything):
    table = everything.files["registry.cpp"].partition("const AttentionVariant")[2].partition("const AttentionMeasurement")[0]
    found = re.findall(ROW, table, re.M)
    assert [name for _, name, _, _ in found] == list(attentions(everything.manifest)) and found
    for op, name, numbers, symbol in found:
        entry = everything.manifest["kernels"][name]
        sizes = [*entry["tile"], entry["head_dim_v"], entry["threads"], entry["shared_bytes"]]
        boxes = ", ".join(f"{{{', '.join(map(str, (*m['box'], m['swizzle'])))}}}" for m in entry["maps"].values())
        flags = [str(entry[flag]).lower() for flag in ATTENTION_FLAGS]
        what = [f"Target::{entry['target']}", f"DType::{SHORT[entry['x']]}", *flags]
        assert (op, symbol, numbers) == (entry["op"], name, ", ".join([*what, *map(str, sizes), f"{{{boxes}}}"]))
        mapped = ["q", "k", "v", *["out"] * (not entry["lengths"])] if entry["target"] == "sm_90a" else []
        assert list(entry["maps"]) == mapped
    assert f"const int attention_variant_count = {len(found)};" in table


def test_registry_of_mla(everything):
    table = everything.files["registry.cpp"].partition("const MlaVariant")[2].partition("const DecodeVariant")[0]
    found = re.findall(ROW, table, re.M)
    assert [name for _, name, _, _ in found] == [n for n, k in everything.manifest["kernels"].items() if k["op"] in MLA]
    for op, name, numbers, symbol in found:
        entry = everything.manifest["kernels"][name]
        boxes = ", ".join(f"{{{', '.join(map(str, (*m['box'], m['swizzle'])))}}}" for m in entry["maps"].values())
        sizes = map(str, (*entry["tile"], entry["unit"], entry["threads"], entry["shared_bytes"]))
        what = [f"Target::{entry['target']}", f"DType::{SHORT[entry['x']]}", *sizes, f"{{{boxes}}}"]
        assert (op, symbol, numbers) == (entry["op"], name, ", ".join(what))
        if entry["target"] == "portable":
            assert entry["maps"] == {}
            continue
        assert entry["maps"]["kv_cache"].get("rows") == ("unit" if entry["unit"] == 1 else None)
        assert list(entry["maps"]) == ["q", "kv_cache", *["out"] * (op == "mla_decode")]
    assert found and f"const int mla_variant_count = {len(found)};" in table


def test_registry_of_decode(everything):
    table = everything.files["registry.cpp"].partition("const DecodeVariant")[2].partition("const MlaVariant")[0]
    found = re.findall(ROW, table, re.M)
    decode = [n for n, k in everything.manifest["kernels"].items() if k["op"] == "attention_decode"]
    assert [name for _, name, _, _ in found] == decode and found
    for op, name, numbers, symbol in found:
        entry = everything.manifest["kernels"][name]
        boxes = ", ".join(f"{{{', '.join(map(str, (*m['box'], m['swizzle'])))}}}" for m in entry["maps"].values())
        sizes = map(str, (*entry["tile"], entry["head_dim_v"]))
        softcap = str(entry["softcap"]).lower()
        what = [f"Target::{entry['target']}", f"DType::{SHORT[entry['x']]}", *sizes, softcap]
        what += [str(entry["threads"]), str(entry["shared_bytes"]), f"{{{boxes}}}"]
        assert (op, symbol, numbers) == (entry["op"], name, ", ".join(what))
        assert list(entry["maps"]) == ["q", "k", "v"] * (entry["target"] == "sm_90a")
    assert f"const int decode_variant_count = {len(found)};" in table


def test_measurements_are_rows_of_the_registry():
    row = replace(next(row for row in configs_of("gemm") if row.target == "sm_90a"), measured=())
    problems = (
        Measured("NVIDIA H200", 512, 256, 64, 1.5, 2.0, batch=3),
        Measured("NVIDIA H200", 64, 256, 64, 1.0, 2.0, epilogue="bias+gelu"),
    )
    other = replace(row, tile=(64, 64, 64), cluster=1, measured=problems)
    text = output.files_of([output.compile_config(row), output.compile_config(other)], ["sm_90a"])["registry.cpp"]
    table = re.findall(r"^    (\{.*\}),$", text.partition("const ProductMeasurement")[2].partition("const Attention")[0], re.M)
    assert table == [
        '{1, "NVIDIA H200", 1536, 256, 64, false, 1.5, 2.0}',
        '{1, "NVIDIA H200", 64, 256, 64, true, 1.0, 2.0}',
        "{}",
    ]


def test_measurements_of_attention_are_rows_of_the_registry(monkeypatch, tmp_path):
    """As a configuration file has them."""
    problem = {"gpu": "NVIDIA H200", "batch_heads": 32, "sq": 512, "sk": 1024, "us": 1.5, "baseline_us": 2.0}
    row = {"target": "sm_90a", "x": "float16", "y": "float16", "tile": [64, 64, 64], "stages": 2}
    row |= {"measured": [problem, problem | {"window": 128, "head_dim": 40, "head_dim_v": 48}]}
    (tmp_path / "flash_attention.json").write_text(json.dumps([{**row, "causal": True, "measured": []}, row]))
    monkeypatch.setattr(configs, "CONFIGS", tmp_path)
    text = output.generate(["flash_attention"], ["sm_90a"], "all")["registry.cpp"]
    table = text.partition("const AttentionMeasurement")[2].partition("const Mla")[0]
    table = re.findall(r"^    (\{.*\}),$", table, re.M)
    ends = "0, 0, 0, 1.5, 2.0", "128, 40, 48, 1.5, 2.0"
    assert table == [f'{{1, "NVIDIA H200", 32, 512, 1024, {end}}}' for end in ends] + ["{}"]


@pytest.mark.parametrize(
    ("epilogue", "fused"), [("none", False), ("bias", False), ("gelu", True), ("bias+gelu_tanh", True), ("bias+residual", True)]
)
def test_what_is_more_than_cublas_does(epilogue, fused):
    assert Measured("GPU", 1, 1, 1, 1.0, 1.0, epilogue=epilogue).fused == fused


def test_an_operator_without_rows_names_the_command_that_writes_them():
    text = r"configs/nothing.json, which .* is missing\n    Instead: python -m benchmarks.row_configs"
    with pytest.raises(TileError, match=text):
        configs.load("nothing", configs.Config)


def test_two_rows_of_one_name_are_refused():
    kernel = output.compile_config(next(row for row in configs_of("softmax") if row.target == "portable"))
    with pytest.raises(TileError, match=rf"configs/softmax.json has two rows for the kernel {kernel.config.name}"):
        output.files_of([kernel, kernel], ["portable"])


def run_cpp(tmp_path, text: str, *flags: str) -> str:
    (tmp_path / "program.cpp").write_text(text)
    command = ["g++", "-std=c++17", "-Wall", "-Werror", "-Wno-invalid-offsetof", *flags, "program.cpp", "-o", "program"]
    subprocess.run(command, check=True, cwd=tmp_path)
    return subprocess.run(["./program"], check=True, cwd=tmp_path, capture_output=True, text=True).stdout


def test_registry_compiles(smoke, tmp_path):
    """With kernels of the declared type; and its rows have the manifest's numbers in C++ as well."""
    kernels = smoke.manifest["kernels"]
    params = {name: source["params"] for source in smoke.manifest["sources"] for name in source["kernels"]}
    stubs = "\n".join(f'extern "C" void {name}(tileops::{params[name]}) {{}}' for name in kernels)
    headers = "\n".join(f'#include "{path.name}"' for path in smoke.path.glob("*_params.h"))
    text = f"""#include <stdio.h>
        {headers}
        #include "{smoke.path}/registry.cpp"
        {stubs}
        int main() {{
          for (int i = 0; i < tileops::row_variant_count; ++i) {{
            const tileops::RowVariant& v = tileops::row_variants[i];
            printf("%s %s %d %d %d\\n", v.op, v.name, v.vector, v.rows_per_block, v.threads);
          }}
          for (int i = 0; i < tileops::product_variant_count; ++i) {{
            const tileops::ProductVariant& v = tileops::product_variants[i];
            printf("%s %s %d %d %d\\n", v.op, v.name, v.bn, v.maps[0].columns, v.shared_bytes);
          }}
          for (int i = 0; i < tileops::attention_variant_count; ++i) {{
            const tileops::AttentionVariant& v = tileops::attention_variants[i];
            printf("%s %s %d %d %d\\n", v.op, v.name, v.head_dim, v.maps[3].rows, v.shared_bytes);
          }}
        }}"""
    folders = (smoke.path, ROOT / "csrc", ROOT / "csrc" / "include")
    printed = run_cpp(tmp_path, text, *(f"-I{folder}" for folder in folders)).splitlines()
    numbers = [(name, (k["vector"], k["rows_per_block"], k["threads"])) for name, k in rows(smoke.manifest).items()]
    for name, k in products(smoke.manifest).items():
        columns = k["maps"]["a"]["box"][0] if k.get("maps") else 0
        numbers.append((name, (k["tile"][1], columns, k["shared_bytes"])))
    for name, k in attentions(smoke.manifest).items():
        rows_of_out = k["maps"]["out"]["box"][1] if "out" in k["maps"] else 0
        numbers.append((name, (k["tile"][2], rows_of_out, k["shared_bytes"])))
    assert printed == [f"{kernels[name]['op']} {name} {' '.join(map(str, values))}" for name, values in numbers]


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
    """Each schema as C++ reads it; and the functions that serve them, which are the files of csrc."""
    text = '#include <stdio.h>\n#include "schemas.h"\nint main() { for (const char* s : tileops::schemas) puts(s); }'
    # the functions are not needed: without optimisation the table of them would be kept
    flags = ("-O1", "-Wno-unused-variable", f"-I{ROOT / 'csrc'}")
    printed = run_cpp(tmp_path, text, f"-I{smoke.path}", *flags).splitlines()
    schemas = operators.schemas().values()
    first = printed.index(SCHEMAS[0])
    assert printed[first : first + 4] == SCHEMAS and len(printed) == 4 * len(schemas)
    assert {*schemas, *(f"_eager_{schema}" for schema in schemas)} <= set(printed)
    assert 'build_targets = "sm_90a,portable";' in everything.files["schemas.h"]
