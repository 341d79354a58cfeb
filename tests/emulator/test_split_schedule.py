"""The kernel that makes the schedule of mla_decode, against one in Python; the configurations of the merge."""

from pathlib import Path

import mla_decode
import numpy as np
import pytest

from tileops_dsl import emulate
from tileops_dsl.emulate import I32, In, Out
from tileops_dsl.kernels import MODULES, configs_of

ROOT = Path(__file__).parents[2]


def dealt(lengths, parts, most=0, heads=1, seen=2**31 - 1):
    """What the kernel writes: its parts, where the pieces of items lie, and which are split."""
    split_requests = np.full(parts, -9, np.int32)
    schedule, first_split = np.full((parts, 8), -9, np.int32), np.full(len(lengths) * heads + 1, -9, np.int32)
    numbers = map(I32, (len(lengths) * heads, parts, heads, 64, seen, mla_decode.OVERHEAD, most))
    values = [In(np.array(lengths, np.int32)), Out(schedule), Out(first_split), Out(split_requests), *numbers]
    source, shared_bytes = ROOT / "csrc" / "kernels" / "split_schedule.cu", 3 * 32 * 4 + (parts + 1) * 16
    emulate.launch_kernel(source, "split_schedule", values, 1, 1024, shared_bytes)
    found = np.flatnonzero(np.diff(first_split))
    assert split_requests.tolist() == [*found, *[-1] * (parts - len(found))]
    return schedule, first_split


CASES = {
    "one": ([9000], 20),
    "empty": ([0, 0, 0], 4),
    "mixed": ([1, 5000, 0, 63, 640, 64, 65], 12),
    "more requests than parts": ([64 * n % 1000 for n in range(77)], 5),
    "one part": ([300, 5], 1),
    "equal, whole": ([4096] * 64, 66),
    "equal, two in a part": ([4096] * 128, 66),
    "equal, in pieces": ([4096] * 32, 66),
    "equal, neither": ([4096] * 96, 66),
    "nearly equal": ([4096 - 64 * (n % 3) for n in range(64)], 132),
    "more than threads": ([64 * (n % 7) for n in range(2500)], 66),
    "short": ([5], 132),
    "fewer blocks than parts": ([5000], 132),
    "the same, mixed": ([1, 5000, 0, 63, 640], 132),
}


def work(lengths, parts, schedule, first_split):
    """The pages, and what its pieces cost, of each part; every page once, in order. The pieces of each request."""
    pages, pieces, at, cost = [max(1, -(-n // 64)) for n in lengths], [0] * len(lengths), (0, 0), []
    for first, begin, last, end, piece, *_ in schedule:
        cost.append(0)
        for request in range(first, last + 1):
            start, stop = begin if request == first else 0, end if request == last else pages[request]
            assert (request, start) == at and start < stop and (request != first or piece == pieces[request])
            assert start % 2 == 0
            cost[-1] += stop - start + mla_decode.OVERHEAD
            pieces[request] += 1
            at = (request, stop) if stop < pages[request] else (request + 1, 0)
    assert at == (len(lengths), 0) and len(cost) == parts
    assert np.diff(first_split).tolist() == [n * (n > 1) for n in pieces]
    return cost, pieces


@pytest.mark.parametrize("name", CASES)
def test_schedule(name):
    """As even as one that fills part after part, but for the front of a piece or so."""
    lengths, parts = CASES[name]
    schedule, first_split = dealt(lengths, parts)
    cost, _ = work(lengths, parts, schedule.tolist(), first_split)
    other, _ = work(lengths, parts, *mla_decode.schedule(lengths, parts))
    assert max(cost) <= max(other) + 2
    if "whole" in name or "two" in name:
        assert first_split[-1] == 0
    if "pieces" in name:
        assert first_split[-1] == 2 * len(lengths) and max(cost) == 32 + mla_decode.OVERHEAD


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_bounded_pieces(name, most):
    """No request in more pieces than allowed."""
    lengths, parts = CASES[name]
    schedule, first_split = dealt(lengths, parts, most=most)
    _, pieces = work(lengths, parts, schedule.tolist(), first_split)
    assert max(pieces) <= most


def test_heads_and_windows():
    """Each head of a request is an item; of its blocks count those from the one on in which the first seen key lies."""
    lengths, seen = [1000, 90, 0, 3000], 200
    blocks = [max(-(-n // 64) - max(n - seen, 0) // 64, 1) for n in lengths for _ in range(3)]
    found = dealt(lengths, 7, heads=3, seen=seen)
    wanted = dealt([64 * count for count in blocks], 7)
    assert all((a == b).all() for a, b in zip(found, wanted, strict=True))


def test_the_configs_are_those_of_the_program():
    rows = [row for target in ("sm_90a", "portable") for row in MODULES["mla_combine"].configs(target)]
    assert [row.name for row in configs_of("mla_combine")] == [row.name for row in rows]
