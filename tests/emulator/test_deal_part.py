"""T.deal, part by part, against the rule in Python, and what the rule promises; the configurations of the merge."""

import itertools
from pathlib import Path

import deals
import mla_decode
import numpy as np
import pytest

from tileops_dsl import emulate
from tileops_dsl.emulate import I32, In, Out
from tileops_dsl.kernels import MODULES, configs_of

OVERHEAD = 5


def dealt(lengths, parts, most=0, heads=1, seen=2**31 - 1, **more):
    """What the parts find (first, begin, behind, last, end), and what they note of items in several of them."""
    found, pieces = np.full((parts, 5), -9, np.int32), np.full((min(len(lengths) * heads, parts), 4), -9, np.int32)
    numbers = map(I32, (len(lengths), heads, parts, seen, OVERHEAD, most))
    values = [In(np.array(lengths, np.int32)), Out(found), Out(pieces), *numbers]
    emulate.launch_kernel(Path(__file__).parent / "deal.cu", "deal", values, parts, 128, 288, **more)
    return found, pieces


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


def blocks_of(lengths):
    return [max(1, -(-n // 64)) for n in lengths]


def check(blocks, parts, found, pieces, most=0):
    """Every block once, in order, in the parts of the rule. The notes are of all items that lie in several parts."""
    wanted = deals.starts(blocks, parts, OVERHEAD, most)
    for (first, begin, behind, last, end), (start, stop) in zip(found.tolist(), itertools.pairwise(wanted), strict=True):
        assert ((first, begin), (last, end)) == (start, stop) and behind == last + (end > 0)
    spans, at = list(deals.spans(blocks, parts, OVERHEAD, most)), (0, 0)
    for _, item, start, stop in spans:
        assert (item, start) == at and start < stop and start % 2 == 0
        at = (item, stop) if stop < blocks[item] else (item + 1, 0)
    assert at == (len(blocks), 0)
    inside = {item: [part for part, other, *_ in spans if other == item] for item in range(len(blocks))}
    split = sorted([item, own[0], len(own)] for item, own in inside.items() if len(own) > 1)
    assert sorted(row[:3] for row in pieces.tolist() if row[2]) == split
    assert all(own == list(range(own[0], own[-1] + 1)) for own in inside.values())
    assert not most or max(map(len, inside.values())) <= most
    return [sum(stop - start + OVERHEAD for part, _, start, stop in spans if part == n) for n in range(parts)], len(split)


@pytest.mark.parametrize("name", CASES)
def test_parts(name):
    """As even as a schedule that fills part after part, but for the front of a piece or so."""
    lengths, parts = CASES[name]
    costs, split = check(blocks_of(lengths), parts, *dealt(lengths, parts))
    other, _ = mla_decode.schedule(lengths, parts)
    blocks = blocks_of(lengths)
    costs_of_other = []
    for first, begin, last, end, *_ in other:
        taken = [(begin if r == first else 0, end if r == last else blocks[r]) for r in range(first, last + 1)]
        costs_of_other.append(sum(stop - start + OVERHEAD for start, stop in taken))
    assert max(costs) <= max(costs_of_other) + 2
    if "whole" in name or "two" in name:
        assert split == 0
    if "pieces" in name:
        assert split == len(lengths) and max(costs) == 32 + OVERHEAD


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_bounded_pieces(name, most):
    """No request in more pieces than allowed."""
    lengths, parts = CASES[name]
    check(blocks_of(lengths), parts, *dealt(lengths, parts, most), most)


@pytest.mark.parametrize("parts", [1, 7, 12, 40])
def test_heads_and_windows(parts):
    """Each head of a request is an item; of its blocks count those from the one on in which the first seen key lies."""
    lengths, seen = [1000, 90, 0, 3000], 200
    blocks = [max(-(-n // 64) - max(n - seen, 0) // 64, 1) for n in lengths for _ in range(3)]
    check(blocks, parts, *dealt(lengths, parts, heads=3, seen=seen))


def test_a_missing_barrier_is_noticed():
    with pytest.raises(emulate.EmulatorError, match="which no thread of the block has written yet"):
        dealt([9000, 5, 700], 7, mutate={"sync_threads@1": "suppress"})


def test_random_lengths():
    """Of any kind: more or fewer requests than parts, some far longer than a part."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        lengths = (rng.integers(0, 64 * 30, rng.integers(1, 40)) * rng.choice([1, 1, 1, 20])).tolist()
        parts, most, heads = int(rng.integers(1, 50)), int(rng.integers(0, 4)), int(rng.integers(1, 4))
        blocks = [count for count in blocks_of(lengths) for _ in range(heads)]
        check(blocks, parts, *dealt(lengths, parts, most, heads), most)


def test_the_configs_are_those_of_the_program():
    rows = [row for target in ("sm_90a", "portable") for row in MODULES["mla_combine"].configs(target)]
    assert [row.name for row in configs_of("mla_combine")] == [row.name for row in rows]
