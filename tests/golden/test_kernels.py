"""The golden kernels against float64, and against themselves: 50 runs without a changed bit."""

from pathlib import Path

import gemm
import launch
import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no GPU of capability 9.0")]
HERE = Path(__file__).parent
# (M, N, K): one tile, ragged in each dimension, less than a K step, more tiles than the GPU has clusters.
GEMMS = [(256, 256, 64), (128, 256, 128), (1, 8, 8), (300, 264, 200), (1000, 1016, 1000), (4096, 8192, 256), (2048, 1024, 4096)]


def normal(rng, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=rng, device="cuda", dtype=dtype)


def assert_close(found, exact, eager):
    """At most twice the error of the same-dtype eager result, plus one unit in the last place of the largest value."""
    floor = exact.abs().max().item() * 2.0**-9
    limit = 2 * (eager.double() - exact).abs().max().item() + floor
    assert (found.double() - exact).abs().max().item() <= limit


@pytest.fixture(scope="module")
def gemm_kernel():
    return launch.load(HERE / "gemm.cu", gemm.NAME)


@pytest.mark.parametrize("m, n, k", GEMMS)
def test_gemm(gemm_kernel, rng, m, n, k):
    a, b = normal(rng, m, k), normal(rng, n, k)
    assert_close(gemm.gemm(gemm_kernel, a, b), a.double() @ b.double().T, a @ b.T)


def test_gemm_is_deterministic(gemm_kernel, rng):
    a, b = normal(rng, 1024, 2048), normal(rng, 2048, 2048)
    first = gemm.gemm(gemm_kernel, a, b)
    assert all(torch.equal(gemm.gemm(gemm_kernel, a, b), first) for _ in range(50))


def test_gemm_of_one_hot_rows_copies_columns(gemm_kernel, rng):
    b = normal(rng, 512, 512)
    assert torch.equal(gemm.gemm(gemm_kernel, torch.eye(512, device="cuda", dtype=b.dtype), b), b.T)
