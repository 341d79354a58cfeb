"""merge_attention's kernels, as generated, against float64: empty sides, strides of all six tensors, every kind of tile."""

import functools
import itertools

import numpy as np
import pytest

from tileops_dsl import output
from tileops_dsl.emulate_rows import decode, emulate_rows, encode, error_bound
from tileops_dsl.kernels import MODULES, configs_of

ROWS = [row for row in configs_of("merge_attention") if row.target == "sm_90a"]


@pytest.fixture(autouse=True, scope="module")
def compile_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "compile_config", functools.cache(output.compile_config))
        yield


def spread(shape, order, gap, dtype):
    """An array of NaNs whose axes lie in `order`, outermost first, the innermost with that stride."""
    strides, step = [0] * len(shape), gap
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    storage = encode(np.full(step + 16, np.nan), dtype)
    start = -storage.ctypes.data % 16 // storage.itemsize
    return np.lib.stride_tricks.as_strided(storage[start:], shape, [s * storage.itemsize for s in strides])


def exact(out_a, lse_a, out_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    safe = np.where(lse == -np.inf, 0.0, lse)
    shares = [np.exp(side - safe)[..., None] for side in (lse_a, lse_b)]
    return sum(np.where(w == 0, 0.0, out * w) for out, w in zip((out_a, out_b), shares)), lse


def launch(config, shape, orders=((0, 1, 2), (0, 1, 2, 3)), gap=1, poison=True, seed=0):
    """Runs it on seeded values; returns the results and what float64 makes of them."""
    rng, values = np.random.default_rng(seed), {}
    for name in ("out_a", "out_b", "out"):
        values[name] = spread(shape, orders[1], gap, config.x)
    for name in ("lse_a", "lse_b", "lse"):
        values[name] = spread(shape[:3], orders[0], 1, "float32")
    for side in "ab":
        values[f"out_{side}"][...] = encode(rng.standard_normal(shape), config.x)
        values[f"lse_{side}"][...] = 3 * rng.standard_normal(shape[:3])
    if poison:
        values["lse_a"][..., 0::4] = values["lse_b"][..., 1::4] = -np.inf
        values["lse_a"][..., 2::8] = values["lse_b"][..., 2::8] = -np.inf
        for side in "ab":
            values[f"out_{side}"][values[f"lse_{side}"] == -np.inf] = encode(np.nan, config.x)
    extents = dict(zip(("batch", "outer", "inner", "cols"), shape))
    report = emulate_rows(config, values | extents, seed)
    assert all(report["buffers"][name]["unwritten"] == report["buffers"][name]["rewritten"] == 0 for name in ("out", "lse"))
    sides = [decode(values[f"out_{s}"], config.x) if w else values[f"lse_{s}"].astype(np.float64) for s in "ab" for w in (1, 0)]
    return decode(values["out"], config.y), values["lse"], *exact(*sides)


def check(config, *args, **more):
    out, lse, wanted, wanted_lse = launch(config, *args, **more)
    assert (np.abs(out - wanted) <= error_bound(config, wanted) + 1e-6).all()
    empty = wanted_lse == -np.inf
    assert (lse[empty] == -np.inf).all() and not out[empty].any()
    assert np.abs(lse[~empty] - wanted_lse[~empty]).max() <= 1e-6


def lengths(config):
    longest = config.max_cols or 2 * config.tile[1] + config.vector
    return sorted({config.vector, config.tile[1] - config.vector, longest})


@pytest.mark.parametrize("config", ROWS, ids=lambda config: config.name)
def test_edges(config):
    rows = config.tile[0]
    for cols, inner in zip(lengths(config), itertools.cycle((rows + 1, 1, 2 * rows))):
        check(config, (2, 2, inner, cols))


@pytest.mark.parametrize("config", ROWS[:1] + ROWS[4:5], ids=lambda config: config.name)
def test_strides(config):
    gap = 1 if config.vector > 1 else 3
    for of_lse, of_out in itertools.product(((2, 0, 1), (1, 2, 0)), ((2, 1, 0, 3), (1, 0, 2, 3))):
        check(config, (2, 3, 5, 16), orders=(of_lse, of_out), gap=gap)


def test_an_empty_side_changes_nothing():
    config = ROWS[0]
    out, lse, wanted, wanted_lse = launch(config, (1, 1, 16, 64))
    one = np.isfinite(wanted_lse[0, 0]) & np.isin(np.arange(16) % 8, (0, 1, 4, 5))
    assert one.sum() == 8 and (out[0, 0, one] == wanted[0, 0, one]).all()
    assert (lse[0, 0, one] == wanted_lse[0, 0, one].astype(np.float32)).all()


def test_nan_and_infinity_spoil_their_row_only():
    for bad in (np.nan, np.inf):
        config, shape = ROWS[0], (1, 1, 16, 64)
        values = {name: encode(np.ones(shape), config.x) for name in ("out_a", "out_b", "out")}
        values |= {name: np.zeros(shape[:3], np.float32) for name in ("lse_a", "lse_b", "lse")}
        values["lse_b"][0, 0, 3] = bad
        emulate_rows(config, values | dict(zip(("batch", "outer", "inner", "cols"), shape)))
        spoiled = np.isnan(decode(values["out"], config.x)).all(-1)[0, 0]
        assert list(np.flatnonzero(spoiled)) == list(np.flatnonzero(np.isnan(values["lse"][0, 0]))) == [3]


def test_the_configs_are_those_of_the_program():
    rows = [row for target in ("sm_90a", "portable") for row in MODULES["merge_attention"].configs(target)]
    assert [row.name for row in configs_of("merge_attention")] == [row.name for row in rows]
