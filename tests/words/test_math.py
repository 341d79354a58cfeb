"""The polynomial exp2: its coefficients are the best of their kind, and its error is what math.h states. Without a GPU."""

import re

import numpy as np
import pytest

from tileops_dsl import emulate

BOUND = 1.02e-4
TEXT = (emulate.ROOT / "csrc" / "include" / "tileops" / "math.h").read_text()
COEFFICIENTS = [float(c) for c in reversed(re.search(r"fmaf\(fmaf\(fmaf\((\S+)f, f, (\S+)f\), f, (\S+)f\)", TEXT).groups())]

KERNEL = """
#include <tileops/device.h>
namespace tileops {
struct Params { const void* x; void* y; int64_t n; };
TILEOPS_KERNEL(polynomial, Params, 32, 1) {
  Fragment<float, 1> v;
  for (int64_t i = thread_index(); i < p.n; i += 32) {
    load_global<1>(v, 0, global<float>(p.x), i, site(1));
    v[0] = exp2_polynomial(v[0]);
    store_global<1>(global<float>(p.y), i, v, 0, site(2));
  }
}
}  // namespace tileops
"""


def fitted() -> np.ndarray:
    """c of 1 + c1 f + c2 f^2 + c3 f^3 with the least greatest relative error on [-1/2, 1/2], by Lawson's algorithm."""
    f = np.linspace(-0.5, 0.5, 4001)
    powers, target = np.stack([f, f**2, f**3], 1) * 2.0 ** -f[:, None], 1 - 2.0**-f
    weights = np.ones_like(f)
    for _ in range(1500):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(powers * root[:, None], target * root, rcond=None)[0]
        weights *= np.abs(powers @ found - target)
        weights /= weights.sum()
    return found


@pytest.fixture
def polynomial(tmp_path):
    source = tmp_path / "polynomial.cu"
    source.write_text(KERNEL)
    params = [["x", "const void*", 1], ["y", "void*", 1], ["n", "int64_t", 1]]
    entry = {"threads": 32, "shared_bytes": 0, "params": params, "sites": {"1": "k.py:1", "2": "k.py:2"}}

    def run(x):
        x = np.asarray(x, np.float32)
        y = np.zeros_like(x)
        emulate.launch(entry, source, {"x": x, "y": y, "n": x.size}, 0, name="polynomial", grid=(1, 1))
        return y.astype(np.float64)

    return run


def test_the_coefficients_are_the_best():
    np.testing.assert_allclose(COEFFICIENTS, fitted(), rtol=2e-6)


def test_the_error_is_as_stated(polynomial):
    x = np.linspace(-126, 127.4, 1 << 17).astype(np.float32)
    error = np.abs(polynomial(x) / np.exp2(x.astype(np.float64)) - 1).max()
    assert 0.98 * BOUND < error <= BOUND


def test_exact_at_integers_zero_below_and_nan(polynomial):
    integers = np.arange(-126, 128)
    assert np.array_equal(polynomial(integers), np.exp2(integers.astype(np.float64)))
    assert not polynomial([-126.501, -127, -200, -1e30, -np.inf]).any()
    assert np.isnan(polynomial([np.nan])).all()


def test_the_emulator_has_the_same_coefficients():
    twin = (emulate.EMULATOR / "include" / "tileops" / "math.h").read_text()
    found = re.search(r"std::fma\(std::fma\(std::fma\((\S+)f, f, (\S+)f\), f, (\S+)f\)", twin)
    assert [float(c) for c in reversed(found.groups())] == COEFFICIENTS
