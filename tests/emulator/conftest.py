"""Runs hand-written kernels, in the style of the generated ones, on the emulator. All take the same parameters."""

import numpy as np
import pytest

from tileops_dsl import emulate

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
