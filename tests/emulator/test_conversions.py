"""bf16 and f16 of the emulator are torch's, bit by bit; a NaN only has to stay a NaN."""

import numpy as np
import pytest
import torch

from tileops_dsl.emulate import from_bf16, to_bf16

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16}
TEXT = "\n".join(
    f"""TILEOPS_KERNEL(widen_{t}, Params, 128, 1) {{
  Fragment<{t}, 8> h;
  Fragment<float, 8> f;
  const int64_t at = (block_index_x() * 128 + thread_index()) * 8;
  load_global<8>(h, 0, global<{t}>(p.x), at, site(1));
  for (int i = 0; i < 8; ++i) f[i] = to_float(h[i]);
  store_global<8>(global<float>(p.y), at, f, 0, site(2));
}}
TILEOPS_KERNEL(round_{t}, Params, 128, 1) {{
  Fragment<{t}, 8> h;
  Fragment<float, 8> f;
  const int64_t at = (block_index_x() * 128 + thread_index()) * 8;
  load_global<8>(f, 0, global<float>(p.x), at, site(1));
  for (int i = 0; i < 8; ++i) h[i] = from_float<{t}>(f[i]);
  store_global<8>(global<{t}>(p.y), at, h, 0, site(2));
}}"""
    for t in TORCH
)
ALL = np.arange(65536, dtype=np.uint32).astype(np.uint16)


def as_torch(bits, dtype):
    return torch.from_numpy(bits.view(np.int16)).view(TORCH[dtype])


def float_inputs():
    """Around each value of both types: exact, halfway, and one float either side of halfway; and random bits."""
    rng = np.random.default_rng(3)
    bits = [rng.integers(0, 2**32, 65536, dtype=np.uint32)]
    for exact in (as_torch(ALL, "bf16"), as_torch(ALL, "f16")):
        values = exact.float().numpy()
        with np.errstate(invalid="ignore", over="ignore"):  # NaN, and inf - inf
            halfway = ((values.astype(np.float64) + np.roll(values, -1)) / 2).astype(np.float32).view(np.uint32)
        bits += [values.view(np.uint32), halfway, halfway + np.uint32(1), halfway - np.uint32(1)]
    special = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 65519.996, 65520, -65520, 3.4028235e38, 1e-45, 2**-25, 2**-24])
    bits.append(np.resize(special, 65536).view(np.uint32))
    return np.concatenate(bits).view(np.float32)


def same(got, want):
    """Equal bits, or both NaN."""
    nan = np.isnan(want)
    return np.array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan]) and np.isnan(got[nan]).all()


@pytest.mark.parametrize("dtype", TORCH)
def test_every_value_widens_as_in_torch(run_kernel, dtype):
    y = np.zeros(65536, np.float32)
    run_kernel(TEXT, f"widen_{dtype}", ALL, y, threads=128, grid=(64, 1))
    assert same(y, as_torch(ALL, dtype).float().numpy())


@pytest.mark.parametrize("dtype", TORCH)
def test_floats_round_as_in_torch(run_kernel, dtype):
    x = float_inputs()
    y = np.zeros(x.shape, np.uint16)
    run_kernel(TEXT, f"round_{dtype}", x, y, threads=128, grid=(x.size // 1024, 1))
    want = torch.from_numpy(x).to(TORCH[dtype])
    nan = torch.isnan(want).numpy()
    assert np.array_equal(y[~nan], want.view(torch.int16).numpy().view(np.uint16)[~nan])
    assert (y[nan] == 0x7FFF).all()


def test_numpy_helpers_are_the_same_conversion():
    x = float_inputs()
    want = torch.from_numpy(x).bfloat16().float().numpy()
    assert same(from_bf16(to_bf16(x)), want)
    assert same(from_bf16(ALL), as_torch(ALL, "bf16").float().numpy())
