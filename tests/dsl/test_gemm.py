"""The generated matrix product: its text beside the one written by hand, what nvcc makes of it, what it computes."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tileops_dsl import configs, emulate, output

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
ROW = configs.load("gemm")[0]
SMALL = replace(ROW, tile=(128, 128, 64), stages=2, store_columns=32, group_size=1)  # a swizzle of 64 bytes for c
THREE = replace(ROW, tile=(192, 128, 32), stages=3, store_columns=64, group_size=2)  # three consumers, 64 bytes for a and b
WIDE = replace(ROW, tile=(128, 128, 128), stages=3)  # two boxes of K
HALF = replace(ROW, x="float16", y="float16", store_columns=128, stages=3)  # two boxes of c
TILES = {"tuned": ROW, "small": SMALL, "three": THREE, "wide": WIDE, "half": HALF}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Name -> (what was generated, its file)."""
    folder, found = tmp_path_factory.mktemp("gemm"), {}
    for name, row in TILES.items():
        kernel = output.compile_roles(row)
        path = folder / f"{name}.cu"
        path.write_text(output.roles_source(kernel))
        found[name] = kernel, path
    return found


# ---- the text

WORD = re.compile(r"\b([a-z]\w*)(<[\w:, ]*>)?\(")
# Calls that are no device words, and what the two texts spell differently: 1 / 0 and true / false.
NO_WORDS = {"if", "for", "min", "at", "site", "sizeof", "shared", "matrix_at", "global", "to_float"}


def words(text: str) -> list[str]:
    """The device words of the kernel in order, with their template arguments and the counts that they are given."""
    body = re.sub(r"//.*", "", text.split("TILEOPS_KERNEL(")[1])
    found = []
    for line in body.splitlines():
        for match in WORD.finditer(line):
            if match[1] in NO_WORDS:
                continue
            rest = line[match.end() :]
            counted = match[1] in ("init_barrier", "arrive_expect_bytes", "named_barrier_sync", "tma_load_multicast")
            numbers = re.findall(r", (\d+)(?=,)", rest.split(";")[0]) if counted else []
            found.append(" ".join([match[1] + (match[2] or ""), *numbers]))
    return found


def test_the_words_are_those_of_the_text_by_hand(kernels):
    """In order, with the same numbers."""
    assert words(kernels["tuned"][1].read_text()) == words((GOLDEN / "gemm.cu").read_text())


def test_the_operands_are_those_of_the_text_by_hand(kernels):
    pattern = r"matrix_at<[^>]*>\([^;]*\)"
    places = [re.findall(pattern, text) for text in (kernels["tuned"][1].read_text(), (GOLDEN / "gemm.cu").read_text())]
    assert places[0] == places[1] and len(places[0]) == 2


def test_the_last_activation_needs_no_comparison(kernels):
    """The scalar promises that there is no other: 32 registers would be copied for it."""
    compared = re.findall(r"p\.activation (..) (\d)", kernels["tuned"][1].read_text())
    assert compared == [("!=", "0"), ("==", "1"), ("==", "2"), ("==", "3")]


def test_parameters_are_those_of_the_text_by_hand(kernels):
    """So that one launcher serves both."""
    golden = (GOLDEN / "gemm.cu").read_text().split("struct gemm_params {")[1].split("};")[0]
    members = re.findall(r"^ *(?:const )?(\w+\*?) ([\w, ]+);", golden, re.M)
    expected = [(name, kind) for kind, names in members for name in names.split(", ")]
    assert [(name, ctype.removeprefix("const ")) for name, ctype, _ in kernels["tuned"][0].fields] == expected
    assert kernels["tuned"][0].config.name in (GOLDEN / "gemm.cu").read_text()


@pytest.mark.parametrize("name", TILES)
def test_each_site_is_mapped_and_used_once(kernels, name):
    kernel, path = kernels[name]
    numbers = re.findall(r"\bsite\((\d+)\)", path.read_text())
    assert sorted(map(int, numbers)) == sorted(map(int, kernel.entry["sites"])) == list(range(1, len(numbers) + 1))


def test_each_source_comment_is_a_line_of_the_program(kernels):
    program = (ROOT / "tileops_dsl" / "kernels" / "gemm.py").read_text().splitlines()
    quoted = re.findall(r"^ *// gemm\.py:(\d+): (.*)$", kernels["tuned"][1].read_text(), re.M)
    assert {int(number) for number, _ in quoted} >= set(range(22, 42)) | set(range(44, 48)) | set(range(49, 57)) - {34 + 8}
    for number, line in quoted:
        assert program[int(number) - 1].strip() == line


# ---- the report


def test_report(kernels):
    kernel = kernels["tuned"][0]
    for line in (
        "  full           4 stages             arrivals 1, bytes 49152",
        "  empty          4 stages             arrivals 4 (2 groups x 2 CTAs), bytes 0",
        "  residual_full  2 stages x 2 groups  arrivals 1, bytes 8192",
        "Registers of a thread: 40 for the producer; 232 for the consumer",
        "  b            64 x 128, 128 bytes",
        "Work of a CTA for 64 of K: 4194304 FLOP, 32768 bytes of a and b (128 FLOP a byte)",
        "  4096 x 4096 x 4096: 256 tiles of a cluster, 3.88 waves, 1.37e+11 FLOP, 1.07e+09 bytes loaded, 3.36e+07 stored",
    ):
        assert line in kernel.report.splitlines()
    assert kernel.entry["shared_bytes"] == 231520 and kernel.entry["threads"] == 384 and kernel.entry["cluster"] == 2


# ---- nvcc


@pytest.mark.parametrize("name", ["tuned", "three"])
def test_nvcc_makes_no_spill_and_serialises_nothing(kernels, name):
    sys.path.insert(0, str(GOLDEN))
    launch = pytest.importorskip("launch")
    from build_backend import checks, toolkit

    try:
        toolkit.find()
    except Exception:
        pytest.skip("needs nvcc")
    _, log = launch.compile_cubin(kernels[name][1])
    report = checks.Report(name, log, {})
    assert checks.parse_ptxas(log), "ptxas named no kernel"
    assert checks.register_problems(report) + checks.warning_problems(report) == []


# ---- what it computes

ACTIVATIONS = {
    0: lambda v: v,
    1: lambda v: np.maximum(v, 0),
    2: lambda v: 0.5 * v * (1 + np.vectorize(__import__("math").erf)(v * 0.5**0.5)),
    3: lambda v: 0.5 * v * (1 + np.tanh((2 / np.pi) ** 0.5 * (v + 0.044715 * v**3))),
    4: lambda v: v / (1 + np.exp(-v)),
}


def run(kernel: output.Generated, path: Path, shape, bias=None, activation=0, residual=False, ctas=2, seed=0, **more):
    """The largest error in units of what rounding the result allows."""
    rng = np.random.default_rng(seed)
    half = kernel.config.x == "float16"
    pack, unpack = (np.float16, np.float32) if half else (emulate.to_bf16, emulate.from_bf16)
    m, n, k = shape
    a, b, r = (pack(rng.standard_normal(size).astype(np.float32)) for size in ((m, k), (n, k), (m, n)))
    c, entry = np.zeros((m, n), a.dtype), kernel.entry
    v = rng.standard_normal(n).astype(np.float32)
    code = {None: 0, "bf16": 1, "f16": 2, "f32": 3}[bias]
    v = {0: v, 1: emulate.to_bf16(v), 2: v.astype(np.float16), 3: v}[code]
    arrays = {"a": a, "b": b, "c": c, "residual": r if residual else c}
    maps = {name: (array, entry["maps"][name]) for name, array in arrays.items()}
    values = [emulate.TensorMap(x, at["box"], at["swizzle"], writable=x is c) for x, at in maps.values()]
    values += [emulate.In(v) if bias else None, *map(emulate.I32, (m, n, k, code, activation, int(residual)))]
    emulate.launch_kernel(
        path, kernel.config.name, values, ctas, entry["threads"], entry["shared_bytes"], cluster=2, seed=seed, **more
    )
    exact = unpack(a).astype(np.float64) @ unpack(b).astype(np.float64).T
    exact += (emulate.from_bf16(v) if code == 1 else v.astype(np.float64)) if bias else 0
    exact = ACTIVATIONS[activation](exact) + (unpack(r) if residual else 0)
    bound = np.abs(exact) * (2**-10 if half else 2**-8) + 1e-3
    return np.max(np.abs(unpack(c) - exact) / bound)


@pytest.mark.parametrize("bias, activation, residual", [
    (None, 0, False), ("f32", 0, False), ("bf16", 3, False), (None, 0, True), ("f16", 4, True), (None, 2, True),
    ("f32", 1, False),
])  # fmt: skip
def test_epilogues(kernels, bias, activation, residual):
    assert run(*kernels["tuned"], (256, 512, 128), bias, activation, residual) < 1


@pytest.mark.parametrize("name", ["small", "three", "wide", "half"])
def test_other_tiles(kernels, name):
    assert run(*kernels[name], (520, 264, 328), "f32", 2, True) < 1


@pytest.mark.parametrize("shape", [(1, 8, 8), (264, 72, 640), (640, 136, 64)])
def test_shapes(kernels, shape):
    """Ragged edges, more iterations than stages, several tiles for each cluster, several clusters."""
    assert run(*kernels["small"], shape, "bf16", 0, True, ctas=4, seed=1) < 1


@pytest.mark.parametrize("seed", range(5))
def test_orders(kernels, seed):
    assert run(*kernels["small"], (512, 128, 320), "bf16", 4, True, seed=seed) < 1


def test_a_missing_wait_is_noticed(kernels):
    """The emulator watches: the text itself is checked, not only the plan behind it."""
    kernel, path = kernels["small"]
    waits = re.findall(r"\bwait\([^;]*site\((\d+)\)\)", path.read_text())
    assert len(waits) == 3
    for number in waits:
        with pytest.raises(emulate.EmulatorError):
            for seed in range(5):
                run(kernel, path, (512, 128, 640), "f32", 0, True, seed=seed, suppress=(int(number),))


def test_generate_writes_text_and_report(tmp_path):
    command = [sys.executable, "-m", "tileops_dsl.generate", f"--out={tmp_path}", "--only=gemm", f"--dump={tmp_path / 'ir'}"]
    subprocess.run(command, check=True, cwd=ROOT)
    assert (
        (tmp_path / "gemm_sm_90a_bf16.cu").read_text().startswith("// Generated by: python -m tileops_dsl.generate --only gemm")
    )
    assert (tmp_path / "gemm_sm_90a_bf16.txt").read_text().startswith(ROW.name)
    steps = [path.name.split(".")[1] for path in (tmp_path / "ir").iterdir()]
    assert set(steps) == {"record", "roles", "pipeline", "infer_layouts", "plan_shared_memory", "barriers", "budgets"}
