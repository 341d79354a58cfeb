"""How a kernel is timed: graphs over rotating buffers larger than the L2 cache, contestants interleaved in one process.

Each contestant is a function of one input set. Its calls over all the sets are captured into one CUDA graph; every output stays
alive during the capture, so no call may write where an earlier call of the same graph wrote. A round replays each graph once,
in an order that rotates from round to round; all rounds of all contestants see the same state of the chip.
"""

from dataclasses import dataclass
from statistics import median

import torch

DEVICE = "cuda"
ROUNDS = 21
WARM_ROUNDS = 2
# A replay this long (0.5 ms at 4 TB/s) hides what an event pair and a graph launch cost, some 5 microseconds.
REPLAY_BYTES = 2 << 30
# More calls than the rotation needs stop paying here: at 256 calls even a 2 microsecond kernel fills 0.5 ms.
ENOUGH_CALLS = 256


def rotation(set_bytes, l2_bytes):
    """(sets, calls): how many distinct input sets, and how many calls in one graph.

    The sets together exceed twice the L2 cache, so that a buffer is evicted before it is used again.
    """
    if set_bytes <= 0 or l2_bytes <= 0:
        raise ValueError(f"rotation: set_bytes is {set_bytes} and l2_bytes {l2_bytes}; expected sizes above 0")
    sets = max(2, 2 * l2_bytes // set_bytes + 1)
    calls = max(sets, min(ENOUGH_CALLS, -(-REPLAY_BYTES // set_bytes)))
    return sets, calls


def orders(names, rounds):
    """The order of each round, rotated by one from round to round, so that nobody always goes first."""
    names = list(names)
    return [names[r % len(names) :] + names[: r % len(names)] for r in range(rounds)]


def ratio(theirs, ours):
    """How many times faster `ours` is: the median of the per-round ratios, which cancels what the chip does over time."""
    if len(theirs) != len(ours) or not ours:
        raise ValueError(f"ratio: {len(theirs)} and {len(ours)} rounds; expected the same number, at least 1")
    return median(t / o for t, o in zip(theirs, ours))


def interleave(replays, rounds=ROUNDS, warm=WARM_ROUNDS, synchronize=None):
    """{name: microseconds per call of each round}. A replay is anything with enqueue() -> pending and microseconds(pending).

    A round begins with an untimed replay: it keeps the device busy while the host launches the first timed one, which would
    otherwise be charged with its own launch.
    """
    synchronize = synchronize or torch.cuda.synchronize
    times = {name: [] for name in replays}
    for number, order in enumerate(orders(replays, warm + rounds)):
        replays[order[-1]].enqueue()
        pending = [(name, replays[name].enqueue()) for name in order]
        synchronize()
        if number >= warm:
            for name, token in pending:
                times[name].append(replays[name].microseconds(token))
    return times


class GraphReplay:
    """`calls` calls of fn over the rotating sets, as one graph. `outputs` are what the calls wrote, in call order."""

    def __init__(self, fn, sets, calls):
        self.calls = calls
        self.sets = sets
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for inputs in sets[:2] * 2:  # compile and load before the capture, which allows neither
                fn(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = [fn(*sets[call % len(sets)]) for call in range(calls)]

    def enqueue(self):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        return start, end

    def microseconds(self, pending):
        start, end = pending
        return start.elapsed_time(end) * 1e3 / self.calls

    def run_poisoned(self):
        """Fill the outputs with NaN and replay: what is then read was written by this graph."""
        for output in self.outputs:
            output.fill_(float("nan"))
        self.graph.replay()
        torch.cuda.synchronize()


def copy_words(set_bytes):
    """How many 4-byte words a copy has that reads half of set_bytes and writes as much, in whole units of 64 bytes."""
    return max(16, -(-set_bytes // 128) * 16)


@dataclass
class Measured:
    us: dict  # name -> median microseconds per call
    rounds: dict  # name -> microseconds per call of each round

    def ratio(self, theirs, ours):
        return ratio(self.rounds[theirs], self.rounds[ours])


def measure(replays, rounds=ROUNDS, synchronize=None):
    times = interleave(replays, rounds, synchronize=synchronize)
    return Measured({name: median(t) for name, t in times.items()}, times)


def l2_bytes(device=None):
    return torch.cuda.get_device_properties(device).L2_cache_size
