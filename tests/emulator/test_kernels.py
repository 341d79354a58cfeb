"""Every kind of schedule of every operator, as generated, against float64: all edges of shapes, strides and arguments."""

import functools
import itertools
import re

import numpy as np
import pytest
import torch

from tileops_dsl import emulate, output
from tileops_dsl.emulate_rows import decode, emulate_row, encode, error_bound, reference
from tileops_dsl.kernels import configs_of

DTYPES = ("bfloat16", "float16", "float32")
KINDS = {
    "passes": lambda c: c.vector > 1 and not (c.shifted or c.looped or c.lanes_on_rows) and c.passes > 1,
    "warps": lambda c: c.vector > 1 and not (c.shifted or c.looped or c.lanes_on_rows) and c.threads_per_row > 32,
    "looped": lambda c: c.vector > 1 and not (c.shifted or c.lanes_on_rows) and c.looped,
    "shifted": lambda c: c.shifted and not c.looped,
    "shifted_looped": lambda c: c.shifted and c.looped,
    "elements": lambda c: c.vector == 1 and not (c.lanes_on_rows or c.looped),
    "elements_looped": lambda c: c.vector == 1 and not c.lanes_on_rows and c.looped,
    "lanes_on_rows": lambda c: c.lanes_on_rows and not c.looped and c.vector == 1,
    "lanes_on_rows_looped": lambda c: c.lanes_on_rows and c.looped and c.vector == 1,
    "rows_vectorised": lambda c: c.lanes_on_rows and not c.looped and c.vector > 1,
    "rows_vectorised_looped": lambda c: c.lanes_on_rows and c.looped and c.vector > 1,
}
CASES = [*itertools.product(("softmax", "rms_norm", "rms_norm_silu"), [(d, d) for d in DTYPES], KINDS)]
CASES += [("softmax", ("bfloat16", "float32"), "warps"), ("softmax", ("float32", "float16"), "elements_looped")]


@pytest.fixture(autouse=True, scope="module")
def compile_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "compile_config", functools.cache(output.compile_config))
        yield


def smallest(op, dtypes, kind):
    """The row of that kind with the smallest tile."""
    rows = [c for c in configs_of(op) if c.target == "sm_90a" and (c.x, c.y) == dtypes and KINDS[kind](c)]
    return min(rows, key=lambda c: (c.tile[0] * c.tile[1], c.threads))


def place(shape, dtype, order, pad=0, gap=1, offset=0):
    """An array of NaNs. order: axes, outermost first. gap: the innermost stride; pad: elements between rows.
    offset: elements from an address that is a multiple of 64 bytes."""
    strides, step = [0] * len(shape), gap
    for axis in reversed(order):
        strides[axis] = step
        step = step * shape[axis] + pad * (axis == order[-1])
    nan = encode(np.nan, dtype)
    storage = np.full(step + offset + 64, nan, nan.dtype)
    start = -storage.ctypes.data % 64 // storage.itemsize + offset
    return np.lib.stride_tricks.as_strided(storage[start:], shape, [s * storage.itemsize for s in strides])


def placements(config):
    """Arguments of place() that the kernel must serve: dense, padded, permuted, off the alignment."""
    v = config.vector
    if config.lanes_on_rows and v > 1:  # and the vectors of rows are aligned
        return [{"order": (0, 2, 1)}, {"order": (0, 2, 1), "pad": v}, {"order": (2, 0, 1), "offset": v}]
    if config.lanes_on_rows:  # rows have unit stride: transposed, padded, of a larger tensor
        return [{"order": (0, 2, 1)}, {"order": (0, 2, 1), "pad": 3}, {"order": (2, 0, 1), "offset": 1}]
    if config.shifted:
        return [{"order": (0, 1, 2), "offset": o, "pad": p} for o, p in ((0, 0), (1, 0), (v - 1, 1), (2, v + 3))]
    if v > 1:
        return [{"order": (0, 1, 2)}, {"order": (0, 1, 2), "pad": v}, {"order": (1, 0, 2), "offset": v}]
    return [{"order": (0, 1, 2), "offset": 1}, {"order": (0, 1, 2), "pad": 3, "gap": 2}, {"order": (0, 2, 1)}]


def row_lengths(config):
    v, block = config.column_vector, config.tile[1]
    if config.shifted or v == 1:
        edges = [1, v - 1, v, v + 1, 2 * v + 1]
        edges += [block - 1, block, block + 1, 3 * block - 1] if config.looped else [config.max_cols - 1, config.max_cols]
    else:
        edges = [v, 2 * v]
        edges += [block, block + v, 3 * block - v] if config.looped else [block - v, block]
    return sorted({n for n in edges if n > 0 and (config.looped or n <= config.max_cols)})


def problems(config):
    """(shape, placements of x and y), each length with each; rows that fill no tile, and two outer batches."""
    rows = config.tile[0]
    v = config.vector if config.lanes_on_rows else 1  # rows come in whole vectors then
    inner = itertools.cycle([rows + v, v, max(rows - v, 2)])
    outer = itertools.cycle([2, 1])
    places = placements(config)
    for cols, (i, of_x) in itertools.product(row_lengths(config), enumerate(places)):
        of_y = of_x if config.shifted else places[(i + 1) % len(places)]  # shifted rows of x and y lie alike in their vectors
        yield (next(outer), next(inner), cols), (of_x, of_y)


def arguments(config, n):
    """The n-th choice of weight (dtype, gap), rounding and offset."""
    if config.op == "softmax":
        return None, {}
    weights = [None, *((dtype, 1) for dtype in DTYPES), *[("float32", 3)] * (config.column_vector == 1)]
    choices = [*itertools.product(weights, (0, 1), (0.0, 1.0))]
    weight, rounded, offset = choices[n * 7 % len(choices)]  # 7: prime to the number of choices, so that all come
    scalars = {"eps": 1e-5, "round_before_weight": rounded}
    return weight, scalars | ({"weight_offset": offset} if config.op == "rms_norm" else {})


def exact(config, x, weight, scalars):
    """The least and the greatest result in float64: they differ where round_before_weight may round either way."""
    if not scalars.get("round_before_weight"):
        y = reference(config.op, x, weight, **scalars)
        return y, y
    normed, ends = reference("rms_norm", x, eps=scalars["eps"]), []
    for slack in (1 - 4e-6, 1 + 4e-6):
        v = decode(encode(normed * slack, config.x), config.x) if config.x != "float32" else normed
        v = v if weight is None else v * (weight + scalars.get("weight_offset", 0.0))
        ends.append(v / (1 + np.exp(-v)) if config.op == "rms_norm_silu" else v)
    return np.minimum(*ends), np.maximum(*ends)


def run(config, x, places, n=0, seed=0, suppress=()):
    """Launches on the values x; returns y and the bounds of what is right, after the checks that hold for any launch."""
    choice, scalars = arguments(config, n)
    weight = stored_weight = None
    if choice:
        stored_weight = place((x.shape[2],), choice[0], (0,), gap=choice[1], offset=int(config.shifted))
        stored_weight[...] = encode(np.random.default_rng(n).standard_normal(x.shape[2]), choice[0])
        weight = decode(stored_weight, choice[0])
    stored, y = place(x.shape, config.x, **places[0]), place(x.shape, config.y, **places[1])
    stored[...] = encode(x, config.x)
    before = stored.copy()
    more = {"weight": stored_weight, "weight_dtype": choice and choice[0]} if scalars else {}
    report = emulate_row(config, stored, y, seed=seed, suppress=suppress, **more, **scalars)
    assert (report["buffers"]["y"]["unwritten"], report["buffers"]["y"]["rewritten"]) == (0, 0)
    assert report["buffers"]["x"]["bytes_read"] == (2 if config.looped else 1) * x.size * stored.itemsize
    assert (stored.view(f"u{stored.itemsize}") == before.view(f"u{stored.itemsize}")).all()
    return decode(y, config.y), *exact(config, decode(stored, config.x), weight, scalars)


def within(config, y, low, high):
    """Whether each result lies within its bound; NaN where NaN belongs."""
    with np.errstate(invalid="ignore"):
        return (y >= low - error_bound(config, low)) & (y <= high + error_bound(config, high)) | np.isnan(y) & np.isnan(low)


@pytest.mark.parametrize("op, dtypes, kind", CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_against_float64(op, dtypes, kind):
    config = smallest(op, dtypes, kind)
    for n, (shape, places) in enumerate(problems(config)):
        x = np.random.default_rng(n).standard_normal(shape)
        y, low, high = run(config, x, places, n, seed=n)
        assert within(config, y, low, high).all(), f"{config.name}: {shape}, {places}, {arguments(config, n)}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_softmax_of_rows_that_are_not_finite(kind, dtype):
    """As torch.softmax: NaN for a row of -inf, and for one with +inf or NaN; 0 for -inf next to a number."""
    config = smallest("softmax", (dtype, dtype), kind)
    for cols in {row_lengths(config)[0], row_lengths(config)[-1]}:
        x = np.random.default_rng(cols).standard_normal((2, 8, cols))
        x[:, 0] = -np.inf
        x[0, 1, cols // 2], x[1, 1, 0] = np.inf, np.inf
        x[0, 2, cols - 1], x[1, 2, cols // 2] = np.nan, np.nan
        x[0, 3, cols // 2 :], x[1, 3, : cols // 2] = -np.inf, -np.inf
        with np.errstate(invalid="ignore"):
            y, _, _ = run(config, x, placements(config)[-1:] * 2, seed=cols)
        expected = torch.softmax(torch.from_numpy(decode(encode(x, config.x), config.x)), -1).numpy()
        assert np.isnan(expected[:, :3]).all() and not np.isnan(expected[:, 4:]).any()
        assert within(config, y, expected, expected).all(), f"{config.name}: {cols}"


# ---- barriers


def barriers(kernel):
    """Sites whose word holds a barrier."""
    sites = re.findall(r"(?:reduce_members<|sync_threads\().*site\((\d+)\)", kernel.text)
    return [int(site) for site in sites]


def is_noticed(launch):
    """Whether a mutant is reported, or its result is wrong, for some seed."""
    for seed in range(8):
        try:
            if not launch(seed):
                return True
        except emulate.EmulatorError as fault:
            assert fault.kind in ("race", "unwritten_shared", "diverged", "deadlock")
            return True
    return False


@pytest.mark.parametrize(
    "kind", ["warps", "looped", "shifted_looped", "elements_looped", "lanes_on_rows", "lanes_on_rows_looped"]
)
@pytest.mark.parametrize("op", ["softmax", "rms_norm", "rms_norm_silu"])
def test_each_barrier_is_needed(op, kind):
    config = smallest(op, ("bfloat16", "bfloat16"), kind)
    sites = barriers(output.compile_config(config))
    assert len(sites) == (2 if op == "softmax" else 1)
    x = np.random.default_rng(0).standard_normal((1, config.tile[0], config.tile[1]))

    def launch(seed, suppress=()):
        return within(config, *run(config, x, placements(config)[:1] * 2, seed=seed, suppress=suppress)).all()

    assert not is_noticed(launch)
    for site in sites:
        assert is_noticed(functools.partial(launch, suppress=(site,))), f"{config.name}: site {site}"
