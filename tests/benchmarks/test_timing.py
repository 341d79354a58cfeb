"""How a time is taken: the rotation, the order, the ratios. Nothing here reads a clock."""

import pytest

from benchmarks import timing

L2 = 60 << 20
MB = 1 << 20


@pytest.mark.parametrize("set_bytes", [24 << 10, 1 * MB, 16 * MB, 120 * MB, 134 * MB, 2147 * MB])
def test_the_sets_are_larger_than_twice_the_cache_and_all_are_called(set_bytes):
    sets, calls = timing.rotation(set_bytes, L2)
    assert sets >= 2
    assert sets * set_bytes > 2 * L2
    assert (sets - 1) * set_bytes <= 2 * L2 or sets == 2, "no more memory than that takes"
    assert calls >= sets


def test_a_replay_is_long_enough_to_hide_its_launch():
    assert timing.rotation(16 * MB, L2) == (8, 128)
    assert timing.rotation(2048 * MB, L2) == (2, 2)
    sets, calls = timing.rotation(1 * MB, L2)
    assert (sets, calls) == (121, timing.ENOUGH_CALLS)


@pytest.mark.parametrize(("set_bytes", "l2"), [(0, L2), (-1, L2), (MB, 0)])
def test_rotation_refuses_sizes_that_mean_nothing(set_bytes, l2):
    with pytest.raises(ValueError, match="expected sizes above 0"):
        timing.rotation(set_bytes, l2)


def test_the_order_rotates_so_that_each_goes_first_equally_often():
    orders = timing.orders("abc", 6)
    assert ["".join(order) for order in orders] == ["abc", "bca", "cab"] * 2


def test_a_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_medians():
    ours, theirs = [1.0, 10.0, 100.0], [3.0, 20.0, 100.0]
    assert timing.ratio(theirs, ours) == 2.0
    drifting = [1.0, 2.0, 4.0, 8.0]  # the chip slows down: both contestants see it
    assert timing.ratio([1.5 * t for t in drifting], drifting) == 1.5


@pytest.mark.parametrize(("theirs", "ours"), [([1.0], [1.0, 2.0]), ([], [])])
def test_a_ratio_needs_the_same_rounds(theirs, ours):
    with pytest.raises(ValueError, match="expected the same number"):
        timing.ratio(theirs, ours)


class Recorded:
    """A contestant whose n-th replay takes n times `unit`."""

    def __init__(self, name, unit, log):
        self.name, self.unit, self.log, self.count = name, unit, log, 0

    def enqueue(self):
        self.log.append(self.name)
        self.count += 1
        return self.count * self.unit

    def microseconds(self, pending):
        self.log.append("read")
        return pending


def test_rounds_are_interleaved_warm_ones_dropped_and_times_read_after_the_wait():
    log = []
    replays = {"a": Recorded("a", 1.0, log), "b": Recorded("b", 2.0, log)}
    times = timing.interleave(replays, rounds=3, warm=1, synchronize=lambda: log.append("wait"))
    assert log[:4] == ["b", "a", "b", "wait"], "the warm round is not read"
    assert log[4:16] == ["a", "b", "a", "wait", "read", "read", "b", "a", "b", "wait", "read", "read"]
    assert times == {"a": [3.0, 4.0, 6.0], "b": [6.0, 10.0, 12.0]}, "the replay that leads a round in is not counted"


@pytest.mark.parametrize("set_bytes", [1, 100, 24 << 10, 537 * MB])
def test_a_copy_moves_the_bytes_of_the_workload_in_whole_wide_accesses(set_bytes):
    words = timing.copy_words(set_bytes)
    assert words % 16 == 0
    assert set_bytes <= 2 * 4 * words <= max(set_bytes + 128, 128)
