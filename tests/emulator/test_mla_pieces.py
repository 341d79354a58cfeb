"""What mla_decode needs besides its kernel: the schedule, against one made in Python, and the merge of pieces, in float64."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from tileops_dsl import emulate
from tileops_dsl.emulate import I32, In, Out
from tileops_dsl.emulate_rows import decode, emulate_rows, encode, error_bound
from tileops_dsl.kernels import MODULES, configs_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "golden"))
import mla_decode  # noqa: E402

ROWS = [row for row in configs_of("mla_combine") if row.target == "sm_90a"]


def dealt(lengths, parts, page=64, most=0):
    """What the kernel writes: its parts, where the pieces of requests lie, and which are split."""
    split_requests = np.full(parts, -9, np.int32)
    schedule, first_split = np.full((parts, 8), -9, np.int32), np.full(len(lengths) + 1, -9, np.int32)
    numbers = map(I32, (len(lengths), parts, page, most))
    values = [In(np.array(lengths, np.int32)), Out(schedule), Out(first_split), Out(split_requests), *numbers]
    source, shared_bytes = ROOT / "csrc" / "kernels" / "mla_schedule.cu", 8192 + 32 + (parts + 1) * 16
    emulate.launch_kernel(source, "mla_schedule", values, 1, 256, shared_bytes)
    found = np.flatnonzero(np.diff(first_split))
    assert split_requests.tolist() == [*found, *[-1] * (parts - len(found))]
    return schedule, first_split


CASES = {
    "one": ([9000], 20),
    "empty": ([0, 0, 0], 4),
    "mixed": ([1, 5000, 0, 63, 640, 64, 65], 12),
    "more requests than parts": ([64 * n % 1000 for n in range(77)], 5),
    "one part": ([300, 5], 1),
    "equal": ([4096] * 64, 66),
    "more than shared memory holds": ([64 * (n % 7) for n in range(2500)], 66),
    "short": ([5], 132),
}


@pytest.mark.parametrize("name", CASES)
def test_schedule(name):
    lengths, parts = CASES[name]
    schedule, first_split = dealt(lengths, parts)
    wanted, wanted_first = mla_decode.schedule(lengths, parts)
    for part, other in zip(schedule.tolist(), wanted, strict=True):
        assert part == other or (part[0] > part[2] and other[0] > other[2])  # without work
    assert first_split.tolist() == wanted_first


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_bounded_pieces(name, most):
    """Every page once, in order, and no request in more pieces than allowed."""
    lengths, parts = CASES[name]
    schedule, first_split = dealt(lengths, parts, most=most)
    pages, pieces, at = [max(1, -(-n // 64)) for n in lengths], [0] * len(lengths), (0, 0)
    for first, begin, last, end, piece, *_ in schedule.tolist():
        for request in range(first, last + 1):
            start, stop = begin if request == first else 0, end if request == last else pages[request]
            assert (request, start) == at and start < stop and (request != first or piece == pieces[request])
            pieces[request] += 1
            at = (request, stop) if stop < pages[request] else (request + 1, 0)
    assert at == (len(lengths), 0) and max(pieces) <= most
    assert np.diff(first_split).tolist() == [n * (n > 1) for n in pieces]


@pytest.mark.parametrize("config", ROWS, ids=lambda config: config.name)
def test_combine(config):
    """Requests in 0, 1, 3 and 2 pieces; some pieces have no key, and one request none in any."""
    rng, counts, (outer, inner) = np.random.default_rng(0), [0, 3, 0, 2, 4], (2, 7)
    splits, first_split = sum(counts), np.cumsum([0, *counts]).astype(np.int32)
    partial = rng.standard_normal((splits, outer, inner, 512)).astype(np.float32)
    lse = (4 * rng.standard_normal((splits, outer, inner))).astype(np.float32)
    lse[0, :, 1::2] = lse[3:5, 0, :3] = lse[5:9, 1] = -np.inf
    partial[lse == -np.inf] = 0.0
    out, total = encode(np.full((5, outer, inner, 512), np.nan), config.y), np.full((5, inner, outer), np.nan, np.float32)
    values = {"partial": partial, "partial_lse": lse, "first_split": first_split, "out": out, "lse": total.transpose(0, 2, 1)}
    values |= {"split_requests": np.array([1, 3, 4, -1], np.int32), "requests": 5}
    values |= {"splits": splits, "entries": 6, "batch": 4, "outer": outer, "inner": inner, "cols": 512}
    emulate_rows(config, values, 1)
    found = decode(out, config.y)
    for request, (first, last) in enumerate(itertools.pairwise(first_split)):
        if first == last:  # written by mla_decode
            assert np.isnan(found[request]).all() and np.isnan(total[request]).all()
            continue
        own = lse[first:last].astype(np.float64)
        peak = np.maximum(own.max(0), -1e300)
        weights = np.exp2(own - peak)
        sums = weights.sum(0)
        wanted = (weights[..., None] * partial[first:last]).sum(0) / np.where(sums == 0, 1, sums)[..., None]
        assert (np.abs(found[request] - wanted) <= error_bound(config, wanted) + 2e-6).all()
        none = sums == 0
        wanted_lse = (peak + np.log2(np.where(none, 1, sums))) * np.log(2)
        assert (total[request].T[none] == -np.inf).all() and not found[request][none].any()
        assert np.abs(total[request].T[~none] - wanted_lse[~none]).max() <= 2e-6


def test_the_configs_are_those_of_the_program():
    rows = [row for target in ("sm_90a", "portable") for row in MODULES["mla_combine"].configs(target)]
    assert [row.name for row in configs_of("mla_combine")] == [row.name for row in rows]
