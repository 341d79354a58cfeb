"""The emulator notices each kind of fault, and says where, what and what to do."""

import numpy as np
import pytest

from tileops_dsl.emulate import EmulatorError

# Each kernel has one fault; x and y are float arrays of 64.
FAULTS = """
void store_one(void* y, int64_t v) {
  Fragment<float, 1> f;
  f[0] = static_cast<float>(v);
  store_global<1>(global<float>(y), 0, f, 0, site(59));
}
TILEOPS_KERNEL(read_outside, Params, 32, 1) {
  Fragment<float, 4> f;
  load_global<4>(f, 0, global<float>(p.x), thread_index() * 4, site(31));
}
TILEOPS_KERNEL(read_before, Params, 32, 1) {
  Fragment<float, 1> f;
  load_global<1>(f, 0, global<float>(p.x), thread_index() - 1, site(31));
}
TILEOPS_KERNEL(read_null, Params, 32, 1) {
  Fragment<float, 1> f;
  load_global<1>(f, 0, global<float>(static_cast<const void*>(nullptr)), thread_index(), site(31));
}
TILEOPS_KERNEL(read_elsewhere, Params, 32, 1) {
  Fragment<float, 1> f;
  load_global<1>(f, 0, global<float>(static_cast<const void*>(&p)), 0, site(31));
}
TILEOPS_KERNEL(write_outside, Params, 32, 1) {
  Fragment<float, 2> f;
  fill<2>(f, 0, 1.0f);
  store_global<2>(global<float>(p.y), thread_index() * 2 + 2, f, 0, site(32));
}
TILEOPS_KERNEL(write_input, Params, 32, 1) {
  Fragment<float, 1> f;
  fill<1>(f, 0, 1.0f);
  store_global<1>(global<float>(const_cast<void*>(p.x)), thread_index(), f, 0, site(33));
}
TILEOPS_KERNEL(misaligned_global, Params, 32, 1) {
  Fragment<float, 4> f;
  load_global<4>(f, 0, global<float>(p.x), 2, site(34));
}
TILEOPS_KERNEL(misaligned_register, Params, 32, 1) {
  Fragment<float, 8> f;
  load_global<4>(f, 2, global<float>(p.x), 0, site(34));
}
TILEOPS_KERNEL(misaligned_shared, Params, 32, 1) { store_shared(shared<float>(6), 0, 1.0f, site(34)); }
TILEOPS_KERNEL(unwritten_register, Params, 32, 1) {
  Fragment<float, 2> f;
  load_global<1>(f, 0, global<float>(p.x), 0, site(35));
  f[0] = f[0] + f[1];
}
TILEOPS_KERNEL(unwritten_copy, Params, 32, 1) {
  Fragment<float, 2> f;
  const auto copy = f;
  f[0] = copy[1];
}
TILEOPS_KERNEL(store_unwritten, Params, 32, 1) {
  Fragment<float, 2> f;
  f[0] = 1.0f;
  store_global<2>(global<float>(p.y), thread_index() * 2, f, 0, site(36));
}
TILEOPS_KERNEL(register_index, Params, 32, 1) {
  Fragment<float, 2> f;
  load_global<2>(f, 0, global<float>(p.x), 0, site(37));
  f[static_cast<int>(p.n)] = 1.0f;
}
TILEOPS_KERNEL(load_past_fragment, Params, 32, 1) {
  Fragment<float, 2> f;
  load_global<2>(f, 2, global<float>(p.x), 0, site(37));
}
TILEOPS_KERNEL(unwritten_shared, Params, 32, 1) {
  if (thread_index() == 3) load_shared(shared<float>(16), 1, site(38));
}
TILEOPS_KERNEL(shared_outside, Params, 32, 1) { store_shared(shared<float>(0), thread_index() * 4, 1.0f, site(39)); }
TILEOPS_KERNEL(shared_before, Params, 32, 1) { load_shared(shared<float>(0), -1, site(39)); }
TILEOPS_KERNEL(race_write_write, Params, 32, 1) { store_shared(shared<float>(0), 1, 1.0f, site(40)); }
TILEOPS_KERNEL(race_read_write, Params, 64, 1) {  // the loop lacks a barrier before its store
  Fragment<float, 1> v;
  v[0] = static_cast<float>(thread_index());
  for (int i = 0; i < 2; ++i) {
    store_shared(shared<float>(0), thread_index(), v[0], site(41));
    sync_threads(site(42));
    v[0] = load_shared(shared<float>(0), 63 - thread_index(), site(43));
  }
}
TILEOPS_KERNEL(race_read_after_write, Params, 32, 1) {  // a shuffle orders no memory
  if (thread_index() == 0) store_shared(shared<float>(0), 0, 1.0f, site(41));
  shuffle_xor(0.0f, 1, site(44));
  if (thread_index() == 9) load_shared(shared<float>(0), 0, site(43));
}
TILEOPS_KERNEL(race_two_readers, Params, 32, 1) {  // one of the readers writes, it may have been the first or the last
  if (thread_index() == 0) store_shared(shared<float>(0), 0, 1.0f, site(41));
  sync_threads(site(42));
  if (thread_index() < 2) load_shared(shared<float>(0), 0, site(43));
  shuffle_xor(0.0f, 1, site(44));
  if (thread_index() == 1) store_shared(shared<float>(0), 0, 1.0f, site(45));
}
TILEOPS_KERNEL(exchange, Params, 64, 1) {  // without fault
  Fragment<float, 1> v;
  v[0] = 1.0f;
  for (int i = 0; i < 2; ++i) {
    store_shared(shared<float>(0), thread_index(), v[0], site(46));
    sync_threads(site(47));
    v[0] = load_shared(shared<float>(0), 63 - thread_index(), site(48));
    sync_threads(site(49));
  }
}
TILEOPS_KERNEL(early_return, Params, 64, 1) {
  if (thread_index() >= 40) return;
  sync_threads(site(50));
}
TILEOPS_KERNEL(two_barriers, Params, 64, 1) {
  if (thread_index() % 2 == 0) sync_threads(site(51));
  else sync_threads(site(52));
}
TILEOPS_KERNEL(barrier_or_shuffle, Params, 64, 1) {
  if (thread_index() == 35) sync_threads(site(53));
  else shuffle_xor(1.0f, 1, site(54));
}
TILEOPS_KERNEL(two_masks, Params, 32, 1) { shuffle_xor(1.0f, thread_index() < 16 ? 1 : 2, site(55)); }
TILEOPS_KERNEL(mask_outside, Params, 32, 1) { shuffle_xor(1.0f, 32, site(56)); }
TILEOPS_KERNEL(divide_by_zero, Params, 32, 1) {
  if (thread_index() == 5) store_one(p.y, 7 / (p.n - 2));
}
TILEOPS_KERNEL(raw_pointer, Params, 32, 1) {
  shuffle_xor(1.0f, 1, site(58));
  if (thread_index() == 5) store_one(p.y, *reinterpret_cast<const volatile int*>(p.n * 8));
}
TILEOPS_KERNEL(part_of_a_warp, Params, 40, 1) { if (thread_index() >= 32) shuffle_xor(1.0f, 1, site(57)); }
"""

# kernel: kind, message after "<kernel>: block (0, 0), " (a regular expression, with # for a number)
CASES = {
    "read_outside": ("out_of_bounds", "thread #, at k.py:31: reads elements #..# of x, which has 64; bound the access"),
    "read_before": ("out_of_bounds", "thread 0, at k.py:31: reads element -1 of x, which has 64"),
    "read_null": ("out_of_bounds", "thread #, at k.py:31: reads through a null pointer"),
    "read_elsewhere": ("out_of_bounds", "thread #, at k.py:31: reads through a pointer into no buffer of this launch"),
    "write_outside": ("out_of_bounds", "thread 31, at k.py:32: writes elements 64..65 of y, which has 64"),
    "write_input": ("read_only", "thread #, at k.py:33: writes element # of x, which this launch only reads"),
    "misaligned_global": ("misaligned", "thread #, at k.py:34: reads elements 2..5 of x in accesses of 16 bytes, but"),
    "misaligned_register": ("misaligned", "thread #, at k.py:34: moves 16 bytes at once from or to register 2"),
    "misaligned_shared": ("misaligned", "thread #, at k.py:34: writes shared bytes 6..9, but the offset"),
    "unwritten_register": ("unwritten_register", "thread #, at or after k.py:35: reads a register of a fragment before"),
    "unwritten_copy": ("unwritten_register", "thread #, before its first word: reads a register of a fragment before"),
    "store_unwritten": ("unwritten_register", "thread #, at or after k.py:36: reads register 1 of a fragment before"),
    "register_index": ("register_index", "thread #, at or after k.py:37: uses register 2 of a fragment of 2"),
    "load_past_fragment": ("register_index", "thread #, at or after k.py:37: uses register 3 of a fragment of 2"),
    "unwritten_shared": ("unwritten_shared", "thread 3, at k.py:38: reads shared bytes 20..23, which no thread"),
    "shared_outside": ("out_of_bounds", "thread #, at k.py:39: writes shared bytes #..# of the 256 that this launch has"),
    "shared_before": ("out_of_bounds", "thread #, at k.py:39: reads shared bytes -4..-1 of the 256"),
    "race_write_write": ("race", "thread #, at k.py:40: writes shared bytes 4..7, which thread # wrote at k.py:40 with no"),
    "race_read_write": (
        "race",
        "thread #, at k.py:(41: writes .* reads at k.py:43|43: reads .* wrote at k.py:41) with no barrier",
    ),
    "race_read_after_write": ("race", "thread 9, at k.py:43: reads shared bytes 0..3, which thread 0 wrote at k.py:41 with no"),
    "race_two_readers": ("race", "thread 1, at k.py:45: writes shared bytes 0..3, which thread 0 reads at k.py:43 with no"),
    "early_return": (
        "deadlock",
        "at k.py:50: deadlock: threads 0-39 wait at the barrier of k.py:50; threads 40-63 have returned; all threads",
    ),
    "two_barriers": (
        "diverged",
        "at k.py:51: threads meet in different barriers: "
        "threads 0, 2, .* wait at the barrier of k.py:51; threads 1, 3, .* wait at the barrier of k.py:52; put the one",
    ),
    "barrier_or_shuffle": (
        "deadlock",
        "at k.py:54: deadlock: threads 0-31 have returned; "
        r"threads 32-34, 36-63 wait in the shuffle of k.py:54 \(lane mask 1\); threads 35 wait at the barrier of k.py:53",
    ),
    "two_masks": ("diverged", r"at k.py:55: threads meet in different shuffles: threads 0-15 .*\(lane mask 1\); threads 16-31"),
    "mask_outside": ("shuffle", "thread #, at k.py:56: shuffles with lane mask 32; a warp has lanes 0 to 31"),
    "divide_by_zero": ("crash", "thread 5, before its first word: divides an integer by zero"),
    "raw_pointer": ("crash", "thread 5, at or after k.py:58: accesses memory by no word, or leaves its stack"),
    "part_of_a_warp": ("shuffle", "thread #, at k.py:57: shuffles in the last warp, which has 8 lanes; launch a multiple"),
}
THREADS = {
    "race_read_write": 64,
    "exchange": 64,
    "early_return": 64,
    "two_barriers": 64,
    "barrier_or_shuffle": 64,
    "part_of_a_warp": 40,
}


def launch(run_kernel, kernel, **more):
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    return run_kernel(FAULTS, kernel, x, y, threads=THREADS.get(kernel, 32), shared=256, n=2, **more)


@pytest.mark.parametrize("kernel", CASES)
def test_fault(run_kernel, kernel):
    kind, message = CASES[kernel]
    pattern = rf"^{kernel}: block \(0, 0\), " + message.replace("#", r"\d+")
    for seed in range(5):
        with pytest.raises(EmulatorError, match=pattern) as caught:
            launch(run_kernel, kernel, seed=seed)
        assert (caught.value.kind, caught.value.kernel, caught.value.block) == (kind, kernel, (0, 0))


@pytest.mark.parametrize("site", [47, 49])
def test_a_suppressed_barrier_is_noticed(run_kernel, site):
    launch(run_kernel, "exchange")
    for seed in range(5):
        with pytest.raises(EmulatorError, match=r"k.py:4[68]: (reads|writes) shared bytes") as caught:
            launch(run_kernel, "exchange", suppress=[site], seed=seed)
        assert caught.value.kind in (("race", "unwritten_shared") if site == 47 else ("race",))


def test_the_emulator_works_on_after_a_fault(run_kernel):
    with pytest.raises(EmulatorError):
        launch(run_kernel, "early_return")
    assert launch(run_kernel, "exchange")["barriers"] == 4


GAPS = """
TILEOPS_KERNEL(gaps, Params, 32, 1) {
  Fragment<float, 1> f;
  load_global<1>(f, 0, global<float>(p.x), thread_index(), site(60));
}
"""


def test_reading_between_the_elements_of_a_strided_array(run_kernel):
    with pytest.raises(
        EmulatorError, match=r"at k.py:60: reads the gap between two elements of x, at byte .*check the strides"
    ):
        run_kernel(GAPS, "gaps", np.ones(64, np.float32)[::2])


def test_a_neighbouring_buffer_is_not_ones_own(run_kernel):
    both = np.ones(128, np.float32)
    with pytest.raises(EmulatorError, match=r"writes elements 64..65 of y, which has 64"):
        run_kernel(FAULTS, "write_outside", both[64:], both[:64])


def test_block_of_the_fault(run_kernel):
    text = """
    TILEOPS_KERNEL(one_block, Params, 32, 1) {
      Fragment<float, 1> f;
      if (block_index_x() == 3 && block_index_y() == 1) load_global<1>(f, 0, global<float>(p.x), 999, site(61));
    }"""
    with pytest.raises(EmulatorError, match=r"one_block: block \(3, 1\), thread \d+, at k.py:61"):
        run_kernel(text, "one_block", np.ones(64, np.float32), grid=(5, 2))
