"""The gemm program without warp groups: what nvcc makes of it, what it computes, and that each wait and barrier is needed."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tileops_dsl import emulate, ir, output
from tileops_dsl.errors import TileError
from tileops_dsl.instruction_layouts import WarpAccumulators
from tileops_dsl.kernels import PROGRAMS, configs_of
from tileops_dsl.passes import run_passes
from tileops_dsl.passes.meaning import ways
from tileops_dsl.passes.simulate import Fault, simulate
from tileops_dsl.passes.verify import verify
from tileops_dsl.schedule import Operands, Retire, Sync
from tileops_dsl.targets import TARGETS

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
ROWS = [row for row in configs_of("gemm") if row.target == "portable"]
LAYOUTS = {"nt": (False, True), "nn": (False, False), "tn": (True, False), "tt": (True, True)}
TUNED = {
    letters: next(row for row in ROWS if (row.transpose_a, row.transpose_b) == turned) for letters, turned in LAYOUTS.items()
}
SMALL = replace(TUNED["nt"], tile=(64, 64, 32), warps=4, store_columns=16)
TILES = {
    **TUNED,
    "float32": next(row for row in ROWS if row.y == "float32" and row.vector > 1 and not row.transpose_b),
    "small": SMALL,
    "deep": replace(SMALL, tile=(32, 64, 128), store_columns=64),  # two boxes of K, one of c
    "half": replace(SMALL, x="float16", y="float16", transpose_a=True, transpose_b=False),
}
for letters, (transpose_a, transpose_b) in LAYOUTS.items():
    turned = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    TILES[f"{letters} elements"] = replace(SMALL, vector=1, **turned)
TILES["float32 elements"] = replace(TILES["tn elements"], y="float32")
ACTIVATIONS = {0: lambda v: v, 1: lambda v: np.maximum(v, 0), 4: lambda v: v / (1 + np.exp(-v))}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Name -> (what was generated, its file)."""
    folder, found = tmp_path_factory.mktemp("portable"), {}

    def get(name):
        if name not in found:
            kernel = output.compile_config(TILES[name])
            path = folder / f"{name.replace(' ', '_')}.cu"
            path.write_text(output.source_text([kernel]))
            (folder / f"{kernel.params}.h").write_text(output.params_header(kernel.params, kernel.fields))
            found[name] = kernel, path
        return found[name]

    return get


# ---- the text


@pytest.mark.parametrize("name", ["nt", "tn elements"])
def test_each_site_is_mapped_and_used_once(kernels, name):
    kernel, path = kernels(name)
    numbers = re.findall(r"\bsite\((\d+)\)", path.read_text())
    assert sorted(map(int, numbers)) == sorted(map(int, kernel.entry["sites"])) == list(range(1, len(numbers) + 1))


def test_parameters_and_manifest(kernels):
    entry = kernels("nt")[0].entry
    fields = [(name, kind, count) for name, kind, count in entry["params"]]
    assert fields == [
        *((name, "const void*", 1) for name in "ab"),
        ("c", "void*", 1),
        *((name, "const void*", 1) for name in ("bias", "residual")),
        *((name, "int32_t", 1) for name in ("batch", "m", "n", "k")),
        *((f"{name}_stride", "int64_t", 1 if name == "bias" else 3) for name in ("a", "b", "c", "bias", "residual")),
        *((name, "int32_t", 1) for name in ("bias_dtype", "activation", "has_residual")),
    ]
    assert (entry["threads"], entry["cluster"], entry["maps"], entry["vector"]) == (256, 1, {}, 8)
    assert all(output.compile_config(row).entry["shared_bytes"] <= 99 * 1024 for row in ROWS[:2] + ROWS[8:10])


def test_report(kernels):
    lines = kernels("nt")[0].report.splitlines()
    for line in (
        "   24576  b_tile       3 stages x 16384 bytes; shared 256 x 32, swizzle of 64 bytes",
        "  gemm.py:44: retire copy pending 1",
        "  acc 128 x f32, bias_part 1 x f32, out 16 x bf16",
        "Work of a CTA for 32 of K: 2097152 FLOP, 24576 bytes of a and b (85 FLOP a byte)",
    ):
        assert re.sub(r"py:\d+", "py", line) in [re.sub(r"py:\d+", "py", found) for found in lines]


@pytest.mark.parametrize("name", ["nt", "tn", "float32", "nt elements"])
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_nvcc_makes_no_spill(kernels, name, architecture):
    sys.path.insert(0, str(GOLDEN))
    launch = pytest.importorskip("launch")
    from build_backend import checks, toolkit

    try:
        toolkit.find()
    except Exception:
        pytest.skip("needs nvcc")
    path = kernels(name)[1]
    header = path.with_name(f"{kernels(name)[0].params}.h")
    whole = path.with_suffix(f".{architecture}.cu")  # the cache of cubins looks at one file
    whole.write_text(path.read_text().replace(f'#include "{header.name}"', header.read_text()))
    _, log = launch.compile_cubin(whole, f"arch=compute_{architecture},code=sm_{architecture}")
    report = checks.Report(name, log, {})
    assert checks.parse_ptxas(log), "ptxas named no kernel"
    assert checks.register_problems(report) + checks.warning_problems(report) == []


# ---- what it computes


def strided(values: np.ndarray, dtype: str, vector: int) -> np.ndarray:
    """The array with gaps between its rows, at an address that is aligned to `vector` elements and to no more."""
    values = emulate.to_bf16(values) if dtype == "bfloat16" else values.astype(dtype)
    items, rows, columns = values.shape
    pitch = columns + 3 if vector == 1 else (columns // 8 + 2) * 8
    storage = np.zeros(items * rows * pitch * values.itemsize + 192, np.uint8)
    start = -storage.ctypes.data % 128 + (16 if vector > 1 else values.itemsize)
    view = storage[start : start + items * rows * pitch * values.itemsize].view(values.dtype)
    view = view.reshape(items, rows, pitch)[..., :columns]
    view[...] = values
    return view


def unpack(values: np.ndarray) -> np.ndarray:
    return (emulate.from_bf16(values) if values.dtype == np.uint16 else values).astype(np.float64)


def run(generated, shape, bias=False, activation=0, residual=False, ctas=2, seed=0, shared_b=False, **more):
    """The largest error in units of what rounding the result allows. shared_b: one matrix for all items, by a stride of 0."""
    (kernel, path), (items, m, n, k) = generated, shape
    rng, config = np.random.default_rng(seed), kernel.config

    def matrix(dtype, *size):
        return strided(rng.standard_normal(size), dtype, config.vector)

    a = matrix(config.x, items, *((k, m) if config.transpose_a else (m, k)))
    b = matrix(config.x, 1 if shared_b else items, *((n, k) if config.transpose_b else (k, n)))
    b = np.broadcast_to(b, (items, *b.shape[1:]))
    c, r = matrix(config.y, items, m, n), matrix(config.y, items, m, n)
    v = rng.standard_normal(n).astype(np.float32)
    values = {"a": a, "b": b, "c": c, "bias": v if bias else None, "residual": r if residual else None, "bias_stride": 1}
    values |= {"batch": items, "m": m, "n": n, "k": k, "activation": activation}
    values |= {"bias_dtype": 3 * int(bias), "has_residual": int(residual)}
    strides = {"a": a, "b": b, "c": c, "residual": r}
    values |= {f"{name}_stride": [s // x.itemsize for s in x.strides] for name, x in strides.items()}
    folders = (*emulate.GENERATED, path.parent)
    emulate.launch(kernel.entry, path, values, seed, folders, name=config.name, grid=(ctas, 1), **more)
    a, b = (unpack(x).swapaxes(1, 2) if t else unpack(x) for x, t in ((a, config.transpose_a), (b, config.transpose_b)))
    exact = ACTIVATIONS[activation](a @ b + (v if bias else 0)) + (unpack(r) if residual else 0)
    bound = np.abs(exact) * {"bfloat16": 2**-8, "float16": 2**-10, "float32": 2**-16}[config.y] + 1e-3
    return np.max(np.abs(unpack(c) - exact) / bound)


@pytest.mark.parametrize("name", TUNED)
def test_tuned(kernels, name):
    """Ragged, more iterations than stages, several tiles for a CTA."""
    assert run(kernels(name), (1, 200, 264, 168), True, 4, True) < 1


@pytest.mark.parametrize("name", [name for name in TILES if name not in TUNED])
def test_batched(kernels, name):
    vector = TILES[name].vector
    shape = (3, 72, 88, 136) if vector > 1 else (3, 71, 85, 131)
    assert run(kernels(name), shape, True, 1, True, shared_b=True, seed=1) < 1


@pytest.mark.parametrize("bias, activation, residual", [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 4, 1)])
@pytest.mark.parametrize("name", ["small", "nn elements"])
def test_epilogues(kernels, name, bias, activation, residual):
    assert run(kernels(name), (1, 80, 136, 96), bias, activation, residual, seed=2) < 1


@pytest.mark.parametrize("shape", [(1, 8, 8, 8), (1, 64, 64, 32), (2, 8, 200, 40)])
def test_shapes(kernels, shape):
    """Fewer iterations than stages; an item that is smaller than a tile."""
    assert run(kernels("small"), shape, True, 0, True, ctas=4) < 1
    assert run(kernels("tt elements"), tuple(max(1, n - 1) for n in shape), True, 0, True, ctas=4) < 1


def test_a_result_of_any_width(kernels):
    """Rows of c end inside 16 bytes; of a and b they may not."""
    assert run(kernels("small"), (1, 70, 75, 64)) < 1


@pytest.mark.parametrize("seed", range(3))
def test_orders(kernels, seed):
    assert run(kernels("small"), (1, 200, 128, 264), True, 4, True, seed=seed) < 1


def test_a_missing_wait_is_noticed(kernels):
    """The emulator watches: the text itself is checked, not only the plan behind it."""
    generated = kernels("small")
    words = re.findall(r"\b(sync_threads|copy_wait|copy_commit)(?:<\d>)?\(site\((\d+)\)\)", generated[1].read_text())
    assert [word for word, _ in words].count("sync_threads") == 4 and len(words) == 10
    for word, number in words:
        try:
            left_out = {"suppress": (int(number),)}
            wrong = max(run(generated, (1, 200, 128, 264), True, 0, seed % 2, seed=seed, **left_out) for seed in range(6))
        except emulate.EmulatorError:
            continue
        assert word == "copy_commit" or wrong > 1, f"{word} at site {number} is not needed"


# ---- the plan


def compiled(config) -> ir.Kernel:
    return run_passes(PROGRAMS["gemm"](config), TARGETS["portable"])


def without(body, left_out):
    return tuple(replace(s, body=without(s.body, left_out)) if hasattr(s, "body") else s for s in body if s is not left_out)


@pytest.mark.parametrize("vector", [8, 1])
def test_no_wait_and_no_barrier_can_be_left_out(vector):
    kernel = compiled(replace(SMALL, vector=vector))
    (role,) = kernel.roles
    orders = [s for s in ir.walk(role.body) if isinstance(s, Retire | Sync)]
    assert len(orders) == (7 if vector > 1 else 4)
    for stmt in orders:
        assert is_noticed(replace(kernel, roles=(replace(role, body=without(role.body, stmt)),))), stmt


def is_noticed(kernel: ir.Kernel) -> bool:
    """Whether an order shows the fault."""
    for way in (w for w in ways(kernel) if w["activation"] == 0):
        for seed in range(12):
            try:
                simulate(kernel, way, seed)
            except Fault:
                return True
    return False


def test_operands_of_the_wrong_step_are_noticed():
    kernel = compiled(SMALL)
    (role,) = kernel.roles
    loaded = [s for s in ir.walk(role.body) if isinstance(s, Operands) and s.index is not None]
    changed = replace(kernel, roles=(replace(role, body=without(role.body, loaded[0])),))
    with pytest.raises(TileError, match="multiplies operands of another step"):
        verify(changed, TARGETS["portable"], ("barriers",))


def test_a_load_too_many_is_noticed():
    """The program's, of elements that go through registers, once more."""
    kernel = compiled(replace(SMALL, vector=1))
    (role,) = kernel.roles
    tiles = role.body[0]
    (first,) = (s for s in tiles.body if isinstance(s, ir.Serial))
    at = tiles.body.index(first)
    changed = replace(tiles, body=(*tiles.body[:at], first, *tiles.body[at:]))
    with pytest.raises(TileError, match="the roles do not do what the program does"):
        verify(replace(kernel, roles=(replace(role, body=(changed,)),)), TARGETS["portable"], ("schedule",))


def test_the_layout_of_warps():
    """Against a table written out: 32 x 32 of 1 x 2 warps; blocks of 8 columns alternate."""
    layout = WarpAccumulators(32, 32, 1, 2)
    assert layout.place((0, 0)) == ({0}, 0)
    assert layout.place((0, 8)) == ({32}, 0)
    assert layout.place((9, 3)) == ({5}, 3)
    assert layout.place((16, 0)) == ({0}, 4)
    assert layout.place((0, 17)) == ({0}, 9)
    assert layout.place((31, 31)) == ({63}, 15)
    with pytest.raises(ValueError, match="blocks of 16 rows and 8 columns"):
        WarpAccumulators(24, 32, 1, 2)


def two_products(kernel: ir.Kernel) -> ir.Kernel:
    *allocations, tiles = kernel.body
    loop = next(s for s in tiles.body if isinstance(s, ir.Pipelined))
    return replace(kernel, body=(*allocations, replace(tiles, body=(loop, *tiles.body))))


REFUSED = [
    ({"cluster": 2}, "portable has no clusters"),
    ({"alternate": True}, "256 threads of portable are to alternate"),
    ({"tile": (64, 64, 16)}, "a product of a multiple of 32 of K"),
    ({"stages": 2}, "in 3 stages or more"),
    ({"tile": (96, 64, 32)}, "16, 32, 64 or 128 rows and columns for each warp"),
    ({"vector": 4}, "promises 4 elements"),
    ({"tile": (32, 256, 32), "transpose_b": False, "vector": 1}, "threads do not divide"),
    ({"tile": (64, 128, 32), "store_columns": 16}, "a multiple of 32 columns"),
    ({"stages": 12}, "fewer stages or a smaller tile"),
]


def refused(change: dict, message: str) -> TileError:
    with pytest.raises(TileError, match=message) as caught:
        compiled(replace(SMALL, **change))
    return caught.value


@pytest.mark.parametrize("change, message", REFUSED)
def test_what_does_not_fit_is_refused(change, message):
    refused(change, message)


def test_a_late_product_is_refused():
    def late(stmt):
        body = {"body": tuple(map(late, stmt.body))} if hasattr(stmt, "body") else {}
        return replace(stmt, **body, **({"stage": 1} if isinstance(stmt, ir.Gemm) else {}))

    kernel = PROGRAMS["gemm"](SMALL)
    with pytest.raises(TileError, match="the loop is not loads and a product of a multiple of 32 of K"):
        run_passes(replace(kernel, body=tuple(map(late, kernel.body))), TARGETS["portable"])


def errors() -> list[TileError]:
    """One of each that the passes of this target raise."""
    found = [refused(change, message) for change, message in REFUSED]
    with pytest.raises(TileError, match="a_tile is not loaded by this loop, or used outside it") as caught:
        run_passes(two_products(PROGRAMS["gemm"](SMALL)), TARGETS["portable"])
    return [*found, caught.value]


def test_errors():
    assert len(errors()) == len(REFUSED) + 1
