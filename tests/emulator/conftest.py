"""Runs hand-written kernels, in the style of the generated ones, on the emulator. All take the same parameters."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tileops_dsl import emulate

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "golden")]  # for golden_launch; for launch, gemm, ...

PARAMS = [["x", "const void*", 1], ["y", "void*", 1], ["n", "int64_t", 1], ["step", "int64_t", 2], ["scale", "float", 1]]
HEAD = """
#include <tileops/device.h>
namespace tileops {
struct Params { const void* x; void* y; int64_t n; int64_t step[2]; float scale; };
"""
SITES = {str(n): f"k.py:{n}" for n in range(1, 100)}


@pytest.fixture
def run_kernel(tmp_path):
    def run(text, kernel, x=None, y=None, *, threads=32, grid=(1, 1), shared=0, seed=0, n=0, step=(0, 0), scale=0.0, **more):
        source = tmp_path / "kernels.cu"
        source.write_text(f"{HEAD}{text}\n}}  // namespace tileops\n")
        entry = {"threads": threads, "shared_bytes": shared, "params": PARAMS, "sites": SITES}
        arrays = {"x": x, "y": y, "n": n, "step": step, "scale": scale}
        return emulate.launch(entry, source, arrays, seed, name=kernel, grid=grid, **more)

    return run


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def run_words(tmp_path):
    """Runs a kernel in the words of a target. values: the fields of its parameter struct."""

    def run(text, kernel, values, *, threads=128, grid=1, shared=49152, target="sm_90a", **more):
        source = tmp_path / "words.cu"
        source.write_text(f"#include <tileops/{target}.h>\nnamespace tileops {{\n{text}\n}}  // namespace tileops\n")
        return emulate.launch_kernel(source, kernel, values, grid, threads, shared, sites=SITES, **more)

    return run
