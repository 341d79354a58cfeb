"""The kernel that lists the tiles of requests of different lengths, against numpy."""

from pathlib import Path

import lengths
import numpy as np
import pytest

from tileops_dsl import emulate
from tileops_dsl.emulate import I32, In, Out

SOURCE = Path(__file__).parents[2] / "csrc" / "kernels" / "attention_tiles.cu"


def listed(q, k, used, requests, queries=0, most=2**31 - 1, most_keys=2**31 - 1, lse_stride=0, rows=128, behind=0):
    rows_of_q = 0 if q is None else q[-1] + behind
    tiles, count = np.full((rows_of_q // rows + 2 * requests + 2, 8), -9, np.int32), np.full(1, -9, np.int32)
    index = [None if a is None else In(np.array(a, np.int32)) for a in (q, k, used)]
    values = [*index, Out(tiles), Out(count), *map(I32, (requests, queries, rows_of_q, most, most_keys, lse_stride, rows))]
    emulate.launch_kernel(SOURCE, "attention_tiles", values, 1, 256, 128)
    return tiles[: count[0]], count[0]


@pytest.mark.parametrize("case", [*lengths.LENGTHS, ([0, 0], [1, 2]), ([129] * 300, [n % 7 for n in range(300)])], ids=len)
def test_of_offsets(case):
    q, k = (np.cumsum([0, *part]) for part in case)
    found, _ = listed(q, k, None, len(case[0]))
    wanted = lengths.tiles_of(*case, 128, False)[: sum(-(-n // 128) for n in case[0])]
    assert (found == wanted).all()


def test_of_a_cache():
    """Requests have numbers, and keys in use; as many queries each, which fit a tile."""
    used = [5, 0, 700]
    found, count = listed(None, None, used, 3, queries=7, lse_stride=70)
    wanted = lengths.tiles_of([7] * 3, used, 128, True)
    wanted[:, 5] = 0, 70, 140
    assert count == 3 and (found == wanted).all()


def test_fewer_keys_in_use_and_the_rest_of_a_long_request():
    q, k = [0, 300, 310], [0, 40, 90]
    found, _ = listed(q, k, [40, 7], 2, most=200)
    of_first = [[128, 128, 200, 0, 40, 128, 0, 0], [0, 0, 200, 0, 40, 0, 0, 0], [200, 0, 100, 0, 0, 200, 0, 0]]
    assert found.tolist() == [*of_first, [300, 0, 10, 40, 7, 300, 0, 0]]
    for most, counts in ((30, [30, 7]), (45, [40, 7]), (5, [5, 5])):
        assert listed(q, k, [70, 7], 2, most_keys=most)[0][[0, -1], 4].tolist() == counts
    assert listed(None, None, [70, 7], 2, 10, most_keys=48)[0][:, 4].tolist() == [48, 7]


def test_rows_that_no_request_has():
    """They see no key."""
    found, _ = listed([2, 5, 7], [2, 5, 7], None, 2, behind=3)
    in_front, behind = [0, 0, 2, 0, 0, 0, 0, 0], [7, 0, 3, 0, 0, 7, 0, 0]
    assert found.tolist() == [in_front, behind, [2, 0, 3, 2, 3, 2, 0, 0], [5, 0, 2, 5, 2, 5, 0, 0]]
