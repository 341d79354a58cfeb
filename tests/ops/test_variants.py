"""Every row kernel that was compiled, forced by name on the edges of what it serves.

compute-sanitizer --tool racecheck python -m pytest tests/ops/test_variants.py -k small     the subset for a sanitizer
"""

import json
from pathlib import Path

import pytest
import torch
from merge_reference import check as check_merged
from merge_reference import sides
from ops_reference import check, normal

import tileops

MANIFEST = Path(tileops.__file__).parent.parent / "csrc" / "generated" / "manifest.json"
EVERY = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.exists() else {}
KERNELS = {name: kernel for name, kernel in EVERY.items() if "rows_per_block" in kernel}  # gemm: test_gemm_kernels.py
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def lengths(kernel: dict) -> list[int]:
    """Row lengths at the edges: the shortest, around a vector, the longest; several tiles where there is no longest."""
    along_columns = not (kernel["shifted"] or kernel["lanes_on_rows"])
    vector, step = kernel["vector"], kernel["vector"] if along_columns else 1
    longest = kernel["max_cols"] or 3 * kernel["threads"] * max(vector, 8)
    found = {step, vector, 2 * vector, longest // 2, longest - step, longest}
    found |= {1, vector - 1, vector + 1} if step == 1 else set()
    shortest = max(step, 2 if kernel["shifted"] or kernel["lanes_on_rows"] else 1)  # a single column has no direction
    return sorted(n // step * step for n in found if shortest <= n <= longest)


def rows_like(kernel: dict, rows: int, cols: int) -> tuple[torch.Tensor, int]:
    """x as the kernel wants it, and the dim of its rows: aligned, anywhere in a vector, with gaps, or lying across."""
    dtype = DTYPES[kernel["x"]]
    if kernel["lanes_on_rows"]:
        return normal(2, cols, rows, dtype=dtype, device="cuda", seed=cols), 1
    if kernel["shifted"]:
        return normal(rows * cols + 5, dtype=dtype, device="cuda", seed=cols)[5:].view(rows, cols), -1
    if kernel["vector"] == 1:
        return normal(rows, 2 * cols + 1, dtype=dtype, device="cuda", seed=cols)[:, 1::2], -1
    return normal(rows, cols, dtype=dtype, device="cuda", seed=cols), -1


def arguments(kernel: dict, cols: int, seed: int) -> dict:
    if kernel["op"] == "softmax":
        return {"dtype": DTYPES[kernel["y"]]}
    weight = None if seed == 0 else normal(cols, dtype=list(DTYPES.values())[seed % 3], device="cuda", seed=seed)
    options = {"weight": weight, "round_before_weight": seed % 2 == 1}
    return options | ({"weight_offset": 1.0} if kernel["op"] == "rms_norm" and seed > 1 else {})


def run(name: str, rows: int, cols: int, seed: int) -> None:
    kernel = KERNELS[name]
    if kernel["op"] == "merge_attention":
        args = sides((3, rows, 2, cols), DTYPES[kernel["x"]], "cuda")
        check_merged(args, tileops.merge_attention(*args))
        return
    x, dim = rows_like(kernel, rows, cols)
    if kernel["shifted"]:  # eligible only into rows that lie alike: a result of our own, at the same distance from alignment
        storage = torch.full((x.numel() + 5,), torch.nan, dtype=x.dtype, device="cuda")
        out = storage[5:].view(x.shape)
        function = getattr(tileops, kernel["op"])
        check(kernel["op"], x, dim=dim, run=lambda *a, **k: function(*a, **k, out=out), **arguments(kernel, cols, seed))
        assert storage[:5].isnan().all()
    else:
        check(kernel["op"], x, dim=dim, **arguments(kernel, cols, seed))


def rows_step(kernel: dict) -> int:
    """What the number of rows is a multiple of."""
    return kernel["vector"] if kernel["lanes_on_rows"] else 1


def runs_here(name: str) -> bool:
    return KERNELS[name]["target"] == "portable" or torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize("name", KERNELS)
def test_edges(name):
    if not runs_here(name):
        pytest.skip(f"{name} is for another GPU")
    rows_per_block = KERNELS[name]["rows_per_block"]
    with tileops.knobs.scope(force=name, require_native=True):
        for seed, cols in enumerate(lengths(KERNELS[name])):
            run(name, 2 * rows_per_block + rows_step(KERNELS[name]), cols, seed)
        if not KERNELS[name]["lanes_on_rows"]:  # a single row has no direction
            run(name, 1, lengths(KERNELS[name])[-1], 3)


def small(names):
    """One kernel of each kind for a sanitizer, which slows them down a hundredfold."""
    kinds = {}
    for name in names:
        k = KERNELS[name]
        several = k["threads"] > 32 * k["rows_per_block"]
        kinds.setdefault(
            (k["op"], k["target"], k["vector"] > 1, k["shifted"], k["lanes_on_rows"], k["max_cols"], several), name
        )
    chosen = {}
    for kind, name in kinds.items():
        chosen.setdefault((*kind[:5], kind[5] == 0, kind[6]), name)
    return list(chosen.values())


@pytest.mark.parametrize("name", small(KERNELS))
def test_small(name):
    if not runs_here(name):
        pytest.skip(f"{name} is for another GPU")
    with tileops.knobs.scope(force=name, require_native=True):
        for seed, cols in enumerate(lengths(KERNELS[name])[-3:]):
            run(name, KERNELS[name]["rows_per_block"] + rows_step(KERNELS[name]), cols, seed)
