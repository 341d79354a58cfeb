"""The generated matrix product: its text beside the one written by hand, what nvcc makes of it, what it computes."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tileops_dsl import emulate, output
from tileops_dsl.kernels import configs_of
from tileops_dsl.kernels.gemm_config import GemmConfig

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
ROW = GemmConfig("gemm", "sm_90a", "bfloat16", "bfloat16", (128, 256, 64), 4, 2, 8, 64)  # that of tests/golden/gemm.cu
SMALL = replace(ROW, tile=(128, 128, 64), stages=2, store_columns=32, group_size=1)  # a swizzle of 64 bytes for c
THREE = replace(ROW, tile=(192, 128, 32), stages=3, store_columns=64, group_size=2)  # three consumers, 64 bytes for a and b
WIDE = replace(ROW, tile=(128, 128, 128), stages=3)  # two boxes of K
HALF = replace(ROW, x="float16", y="float16", store_columns=128, stages=3)  # two boxes of c
ALONE = replace(ROW, tile=(64, 96, 64), cluster=1, store_columns=32)  # one consumer; three parts of c go round two stages
FOUR = replace(ROW, tile=(256, 96, 64), stages=3, cluster=4, group_size=1, store_columns=32)
TILES = {"tuned": ROW, "small": SMALL, "three": THREE, "wide": WIDE, "half": HALF, "alone": ALONE, "four": FOUR}
LAYOUTS = {"nt": (False, True), "nn": (False, False), "tn": (True, False), "tt": (True, True)}
for letters, (transpose_a, transpose_b) in LAYOUTS.items():
    TILES[letters] = replace(SMALL, tile=(128, 192, 64), transpose_a=transpose_a, transpose_b=transpose_b)
    TILES[f"{letters} to float32"] = replace(TILES[letters], x="float16", y="float32", cluster=1)
    TILES[f"tuned {letters}"] = replace(ROW, transpose_a=transpose_a, transpose_b=transpose_b)
TILES["alternate"] = replace(ROW, tile=(128, 128, 64), stages=5, alternate=True)
TILES["alternate alone"] = replace(ALONE, stages=3, alternate=True)  # 64 rows of a group
TILES["alternate tn to float32"] = replace(TILES["tn to float32"], tile=(128, 128, 64), stages=3, cluster=2, alternate=True)
ALTERNATE = [name for name, row in TILES.items() if row.alternate]
TILES["tall"] = replace(ROW, tile=(256, 128, 64), warps=8, stages=3, store_columns=16)  # 128 rows of a group
TILES["tuned to float32"] = replace(ROW, y="float32", store_columns=32)


class Kernels(dict):
    """Name of a tile -> (what was generated, its file), once it is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __missing__(self, name: str) -> tuple[output.Generated, Path]:
        kernel = output.compile_config(TILES[name])
        path = self.folder / f"{name.replace(' ', '_')}.cu"
        path.write_text(output.source_text([kernel]))
        (self.folder / f"{kernel.params}.h").write_text(output.params_header(kernel.params, kernel.fields))
        self[name] = kernel, path
        return self[name]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return Kernels(tmp_path_factory.mktemp("gemm"))


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
    golden = (GOLDEN / "gemm.cu").read_text().split("struct gemm_sm_90a_params {")[1].split("};")[0]
    members = re.findall(r"^ *(?:const )?(\w+\*?) ([\w, ]+);", golden, re.M)
    expected = [(name, kind) for kind, names in members for name in names.split(", ")]
    assert [(name, ctype.removeprefix("const ")) for name, ctype, _ in kernels["tuned"][0].fields] == expected
    assert kernels["tuned"][0].config.name in (GOLDEN / "gemm.cu").read_text()


@pytest.mark.parametrize("name", ["tuned", "alone", "tt to float32"])
def test_each_site_is_mapped_and_used_once(kernels, name):
    kernel, path = kernels[name]
    numbers = re.findall(r"\bsite\((\d+)\)", path.read_text())
    assert sorted(map(int, numbers)) == sorted(map(int, kernel.entry["sites"])) == list(range(1, len(numbers) + 1))


def test_each_source_comment_is_a_line_of_the_program(kernels):
    program = (ROOT / "tileops_dsl" / "kernels" / "gemm.py").read_text().splitlines()
    quoted = re.findall(r"^ *// gemm\.py:(\d+): (.*)$", kernels["tuned"][1].read_text(), re.M)
    names_only = {n for n, line in enumerate(program, 1) if re.match(r" *piece = | *for code", line)}
    kernel = next(n for n, line in enumerate(program, 1) if "T.Kernel(" in line)
    assert {int(number) for number, _ in quoted} == set(range(kernel, len(program) - 1)) - names_only
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


def test_report_of_groups_that_alternate(kernels):
    kernel = kernels["alternate"][0]
    for line in (
        "  empty          5 stages             arrivals 2 (1 group x 2 CTAs), bytes 0",
        "  residual_full  2 stages x 2 groups  arrivals 1, bytes 16384",
        "  named 3, 4: the turns of groups 1 and 2",
        "  c            64 x 128, 128 bytes",
    ):
        assert line in kernel.report.splitlines()
    assert "group 0 loads, 1, 2 take tiles in turn, 128 rows each" in kernel.text
    assert kernel.entry["threads"] == 384 and kernel.config.name == "gemm_sm_90a_bf16_bf16_128x128x64_nt_alt"


# ---- nvcc


@pytest.mark.parametrize("name", [
    "three", "alone", "tuned nt", "tuned nn", "tuned tn", "tuned tt", "tuned to float32", "tall", "alternate",
    "alternate tn to float32",
])  # fmt: skip
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
    rng, entry, config = np.random.default_rng(seed), kernel.entry, kernel.config
    *batch, m, n, k = shape
    items = batch[0] if batch else 1
    sizes = ((items, k, m) if config.transpose_a else (items, m, k), (items, n, k) if config.transpose_b else (items, k, n))
    a, b = (pack(rng.standard_normal(size), config.x) for size in sizes)
    c, r = pack(np.zeros((items, m, n)), config.y), pack(rng.standard_normal((items, m, n)), config.y)
    code, dtype = {None: (0, None), "bf16": (1, "bfloat16"), "f16": (2, "float16"), "f32": (3, "float32")}[bias]
    v = pack(rng.standard_normal(n), dtype or "float32")
    arrays = {"a": a, "b": b, "c": c, "residual": r if residual else c}
    maps = {name: (array, entry["maps"][name]) for name, array in arrays.items()}
    values = [emulate.TensorMap(x, (*at["box"], 1), at["swizzle"], writable=x is c) for x, at in maps.values()]
    values += [emulate.In(v) if bias else None, *map(emulate.I32, (items, m, n, k, code, activation, int(residual)))]
    launched = ctas, entry["threads"], entry["shared_bytes"]
    emulate.launch_kernel(path, config.name, values, *launched, cluster=entry["cluster"], seed=seed, **more)
    stored = (a, config.transpose_a), (b, config.transpose_b)
    a, b = (unpack(x).swapaxes(1, 2) if transposed else unpack(x) for x, transposed in stored)
    exact = ACTIVATIONS[activation](a @ b + (unpack(v) if bias else 0)) + (unpack(r) if residual else 0)
    bound = np.abs(exact) * {"bfloat16": 2**-8, "float16": 2**-10, "float32": 2**-16}[config.y] + 1e-3
    return np.max(np.abs(unpack(c) - exact) / bound)


def pack(values: np.ndarray, dtype: str) -> np.ndarray:
    return emulate.to_bf16(values) if dtype == "bfloat16" else values.astype(dtype)


def unpack(values: np.ndarray) -> np.ndarray:
    return (emulate.from_bf16(values) if values.dtype == np.uint16 else values).astype(np.float64)


@pytest.mark.parametrize("bias, activation, residual", [
    (None, 0, False), ("f32", 0, False), ("bf16", 3, False), (None, 0, True), ("f16", 4, True), (None, 2, True),
    ("f32", 1, False),
])  # fmt: skip
def test_epilogues(kernels, bias, activation, residual):
    assert run(*kernels["tuned"], (256, 512, 128), bias, activation, residual) < 1


@pytest.mark.parametrize("name", ["small", "three", "wide", "half", "alone", "four", "tall", *ALTERNATE])
def test_other_tiles(kernels, name):
    assert run(*kernels[name], (520, 264, 328), "f32", 2, True, ctas=4) < 1


@pytest.mark.parametrize("letters", LAYOUTS)
@pytest.mark.parametrize("suffix", ["", " to float32"])
def test_transposes(kernels, letters, suffix):
    """Two items that end in the middle of a tile, with fewer steps of K than stages and with more."""
    for depth in (8, 328):
        assert run(*kernels[letters + suffix], (2, 200, 264, depth), "bf16", 2, True, ctas=4, seed=depth) < 1


@pytest.mark.parametrize("letters", LAYOUTS)
def test_the_tuned_tile_transposed(kernels, letters):
    assert run(*kernels[f"tuned {letters}"], (3, 136, 264, 136), "f32", 0, True, ctas=4) < 1


@pytest.mark.parametrize("shape", [(1, 8, 8), (264, 72, 640), (640, 136, 64)])
def test_shapes(kernels, shape):
    """Ragged edges, more iterations than stages, several tiles for each cluster, several clusters."""
    assert run(*kernels["small"], shape, "bf16", 0, True, ctas=4, seed=1) < 1


@pytest.mark.parametrize("seed", range(5))
def test_orders(kernels, seed):
    assert run(*kernels["small"], (512, 128, 320), "bf16", 4, True, seed=seed) < 1


@pytest.mark.parametrize("tiles", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ALTERNATE)
def test_groups_take_tiles_in_turn(kernels, name, tiles):
    """So many a CTA, with fewer steps of K than stages and with more; several items; two CTAs or clusters."""
    rows, columns, _ = TILES[name].tile
    for depth in (72, 520):
        shape = tiles, rows * TILES[name].cluster * 2 - 8, columns - 8, depth
        assert run(*kernels[name], shape, "bf16", 4, True, ctas=2 * TILES[name].cluster, seed=depth) < 1


@pytest.mark.parametrize("name", ["alternate", "alternate alone"])
def test_a_missing_turn_is_noticed(kernels, name):
    kernel, path = kernels[name]
    turns = re.findall(r"named_barrier_(?:sync|arrive)\([^;]*, 256, site\((\d+)\)\)", path.read_text())
    assert len(turns) == 4  # given to the first, taken, given, taken at the end
    shape = (TILES[name].tile[0] * TILES[name].cluster * 3, TILES[name].tile[1], 448)
    for number in turns:
        with pytest.raises(emulate.EmulatorError):
            for seed in range(5):
                run(kernel, path, shape, ctas=TILES[name].cluster, seed=seed, suppress=(int(number),))


@pytest.mark.parametrize("name", ["small", "tn to float32", "alternate"])
def test_a_missing_wait_is_noticed(kernels, name):
    """The emulator watches: the text itself is checked, not only the plan behind it."""
    kernel, path = kernels[name]
    waits = re.findall(r"\b(?:wait|fence_async_shared)\((?:[^;]*, )?site\((\d+)\)\)", path.read_text())
    assert len(waits) == 4
    for number in waits:
        with pytest.raises(emulate.EmulatorError):
            for seed in range(5):
                run(kernel, path, (1024, 128, 640), "f32", 0, True, seed=seed, suppress=(int(number),))


def test_generate_writes_text_and_report(tmp_path):
    options = [f"--out={tmp_path}", "--only=gemm", "--target=sm_90a", "--build=smoke", f"--dump={tmp_path / 'ir'}"]
    subprocess.run([sys.executable, "-m", "tileops_dsl.generate", *options], check=True, cwd=ROOT)
    notice, name = "// Generated by: python -m tileops_dsl.generate --only gemm", configs_of("gemm")[0].name
    assert (tmp_path / f"{name}.cu").read_text().startswith(notice)
    assert (tmp_path / f"{name}.txt").read_text().startswith(name)
    steps = [path.name.split(".")[1] for path in (tmp_path / "ir").iterdir()]
    assert set(steps) == {"record", "roles", "pipeline", "infer_layouts", "plan_shared_memory", "barriers", "budgets"}
