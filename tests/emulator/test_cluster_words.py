"""Clusters, asynchronous copies, register budgets, matrices and votes: each word, and its misuse."""

import numpy as np
import pytest

from tileops_dsl.emulate import EmulatorError, In, Out, TensorMap

SEEDS = range(4)
TEXT = """
struct Pointers { const void* x; void* y; };
struct Boxes { tensor_map x, y; };
struct Box { tensor_map x; void* y; };
TILEOPS_WORD void store_one(void* y, int64_t at, float v, site s) {
  Fragment<float, 1> f;
  f[0] = v;
  store_global<1>(global<float>(y), at, f, 0, s);
}
TILEOPS_KERNEL(warps, Pointers, 64, 1) {  // what each lane gets from the words of a warp
  const int lane = lane_index(), t = thread_index();
  const auto put = [&](int row, float v) { store_one(p.y, row * 64 + t, v, site(1)); };
  put(0, static_cast<float>(shuffle(lane * 2, (lane + 5) % 32, site(2))));
  put(1, shuffle(lane * 0.5f, 3, site(3)));
  put(2, static_cast<float>(shuffle_xor(static_cast<uint32_t>(lane), 6, site(4))));
  put(3, all_of_warp(lane < 40, site(5)) + 2 * all_of_warp(lane != 7, site(6)));
  put(4, any_of_warp(lane == 7, site(7)) + 2 * any_of_warp(lane < 0, site(8)));
  put(5, static_cast<float>(ballot_of_warp(lane % 8 == 0, site(9))));
  put(6, elect_one(site(10)));
  put(7, static_cast<float>(warp_index() * 10 + warp_group_index()));
}
TILEOPS_KERNEL(budgets, Pointers, 384, 1) {
  if (warp_group_index() == 0) register_budget_decrease<24>(site(1));
  else register_budget_increase<240>(site(2));
}
TILEOPS_KERNEL(budgets_beyond, Pointers, 384, 1) {
  if (warp_group_index() == 0) register_budget_decrease<40>(site(1));
  else register_budget_increase<240>(site(2));
}
TILEOPS_KERNEL(budget_up, Pointers, 384, 1) { register_budget_decrease<232>(site(1)); }
TILEOPS_KERNEL(exchange, Pointers, 32, 1) {  // each CTA leaves its rank and thread in the next one's shared memory
  const int next = (cluster_rank() + 1) % cluster_size(), t = thread_index();
  store_shared_of_rank(shared<float>(0), t, next, static_cast<float>(cluster_rank() * 100 + t), site(1));
  cluster_arrive(site(2));
  cluster_wait(site(3));
  store_one(p.y, block_index_x() * 32 + t, load_shared(shared<float>(0), t, site(4)), site(5));
  store_one(p.y, 64 + block_index_x() * 32 + t, load_shared_of_rank(shared<float>(0), t, next, site(6)), site(7));
  cluster_sync(site(8));
}
TILEOPS_KERNEL(mailbox, Pointers, 32, 1) {  // the same by asynchronous stores, or by plain ones and an arrival
  const int next = (cluster_rank() + 1) % cluster_size(), t = thread_index();
  const auto full = shared<mbarrier>(128);
  if (t == 0) {
    init_barrier(full, 1, site(1));
    fence_barrier_init(site(2));
  }
  cluster_sync(site(3));
  if (t == 0) arrive_expect_bytes(full, 128, site(4));
  store_async_of_rank(shared<float>(0), t, next, static_cast<float>(cluster_rank() * 100 + t), full, site(5));
  wait_cluster(full, 0, site(6));
  store_one(p.y, block_index_x() * 32 + t, load_shared(shared<float>(0), t, site(7)), site(8));
  cluster_sync(site(9));
}
TILEOPS_KERNEL(plain_mailbox, Pointers, 32, 1) {
  const int next = (cluster_rank() + 1) % cluster_size(), t = thread_index();
  const auto full = shared<mbarrier>(128);
  if (t == 0) {
    init_barrier(full, 32, site(1));
    fence_barrier_init(site(2));
  }
  cluster_sync(site(3));
  store_shared_of_rank(shared<float>(0), t, next, 1.0f, site(4));
  arrive_at_rank(full, next, site(5));
  wait_cluster(full, 0, site(6));
  load_shared(shared<float>(0), t, site(7));
  cluster_sync(site(8));
}
TILEOPS_KERNEL(multicast, Boxes, 32, 1) {  // each CTA loads half of a tile into both; CTA r stores rows 8 r of it
  const auto full = shared<mbarrier>(2048);
  const int rank = cluster_rank();
  if (thread_index() == 0) {
    init_barrier(full, 1, site(1));
    fence_barrier_init(site(2));
  }
  cluster_sync(site(3));
  if (thread_index() == 0) {
    arrive_expect_bytes(full, 2048, site(4));
    tma_load_multicast(shared<float>(rank * 1024), p.x, at(0, rank * 8), full, 3, site(5));
    wait(full, 0, site(6));
    tma_store(p.y, at(0, rank * 8), shared<float>((1 - rank) * 1024), site(7));
    tma_reduce_add(p.y, at(0, rank * 8), shared<float>(rank * 1024), site(8));
    store_commit(site(9));
    store_wait<0>(site(10));
  }
  cluster_sync(site(11));
}
TILEOPS_KERNEL(bulk, Pointers, 32, 1) {  // 512 bytes there and back
  const auto full = shared<mbarrier>(512);
  if (thread_index() == 0) {
    init_barrier(full, 1, site(1));
    fence_barrier_init(site(2));
    arrive_expect_bytes(full, 512, site(3));
    bulk_load(shared<float>(0), global<float>(p.x), 0, 512, full, site(4));
    wait(full, 0, site(5));
    bulk_store(global<float>(p.y), 0, shared<float>(0), 512, site(6));
    store_commit(site(7));
    store_wait_read<0>(site(8));
  }
}
TILEOPS_KERNEL(copies, Pointers, 64, 1) {  // y = the copied x of the neighbour, in two groups; the second half of x is outside
  const int t = thread_index();
  copy_async<4>(shared<float>(0), t * 4, global<float>(p.x), t * 4, true, site(1));
  copy_commit(site(2));
  copy_async<4>(shared<float>(1024), t * 4, global<float>(p.x), t * 4 + 256, t < 32, site(3));
  copy_commit(site(4));
  copy_wait<1>(site(5));
  sync_threads(site(6));
  for (int i = 0; i < 4; ++i) store_one(p.y, t * 4 + i, load_shared(shared<float>(0), (t + 1) % 64 * 4 + i, site(7)), site(8));
  copy_wait<0>(site(9));
  sync_threads(site(10));
  for (int i = 0; i < 4; ++i) store_one(p.y, 256 + t * 4 + i, load_shared(shared<float>(1024), t * 4 + i, site(11)), site(12));
}
TILEOPS_KERNEL(parts, Pointers, 64, 1) {  // y = the first 5 - t of the thread's 4 elements, and zeros
  const int t = thread_index();
  copy_async_part<4>(shared<float>(0), t * 4, global<float>(p.x), t * 4, 5 - t, site(1));
  copy_commit(site(2));
  copy_wait<0>(site(3));
  for (int i = 0; i < 4; ++i) store_one(p.y, t * 4 + i, load_shared(shared<float>(0), t * 4 + i, site(4)), site(5));
}
TILEOPS_KERNEL(copies_arrive, Pointers, 64, 1) {
  const int t = thread_index();
  const auto full = shared<mbarrier>(1024);
  if (t == 0) init_barrier(full, 64, site(1));
  sync_threads(site(2));
  copy_async<4>(shared<float>(0), t * 4, global<float>(p.x), t * 4, true, site(3));
  arrive_after_copies(full, site(4));
  wait(full, 0, site(5));
  for (int i = 0; i < 4; ++i) store_one(p.y, t * 4 + i, load_shared(shared<float>(0), (t + 1) % 64 * 4 + i, site(6)), site(7));
  copy_commit(site(8));
  copy_wait<0>(site(9));
}
TILEOPS_KERNEL(matrices, Pointers, 32, 1) {  // four matrices as they are loaded; stored transposed and so loaded
  const int lane = thread_index();
  Fragment<bf16, 8> f;
  for (int i = 0; i < 8; ++i) f[i] = from_float<bf16>(static_cast<float>(lane * 8 + i));
  for (int i = 0; i < 8; ++i) store_shared(shared<bf16>(0), lane * 8 + i, f[i], site(1));
  sync_warp(site(2));
  load_matrix<4>(f, 0, shared<bf16>(0) + (lane + 8) % 32 * 8, site(3));
  for (int i = 0; i < 8; ++i) store_one(p.y, lane * 8 + i, to_float(f, i), site(4));
  store_matrix<4, true>(shared<bf16>(512) + lane * 8, f, 0, site(5));
  sync_warp(site(6));
  load_matrix<4, true>(f, 0, shared<bf16>(512) + (lane + 8) % 32 * 8, site(7));
  for (int i = 0; i < 8; ++i) store_one(p.y, 256 + lane * 8 + i, to_float(f, i), site(8));
}
"""


def start(run_words, kernel, values, threads=32, shared=4096, **more):
    text = TEXT.replace("struct Pointers", "}\n#include <tileops/copy_async_part.h>\nnamespace tileops {\nstruct Pointers", 1)
    return run_words(text, kernel, values, threads=threads, shared=shared, **more)


def pointers(n, rng=None):
    x = np.zeros(4, np.float32) if rng is None else rng.standard_normal(n).astype(np.float32)
    y = np.full(n, np.nan, np.float32)
    return y, x, [In(x), Out(y)]


def test_words_of_a_warp(run_words):
    lane = np.tile(np.arange(32), 2)
    for seed in SEEDS:
        y, _, values = pointers(8 * 64)
        start(run_words, "warps", values, threads=64, seed=seed)
        y = y.reshape(8, 64)
        assert np.array_equal(y[0], (lane + 5) % 32 * 2) and (y[1] == 1.5).all() and np.array_equal(y[2], lane ^ 6)
        assert (y[3] == 1).all() and (y[4] == 1).all() and (y[5] == 0x01010101).all()
        assert y[6, :32].sum() == y[6, 32:].sum() == 1
        assert np.array_equal(y[7], np.arange(64) // 32 * 10)


def test_register_budgets(run_words):
    for seed in SEEDS:
        start(run_words, "budgets", pointers(4)[2], threads=384, seed=seed)
    with pytest.raises(EmulatorError, match=r"deadlock.* wait for 72 more registers each at k.py:2 \(the CTA's pool has 256\)"):
        start(run_words, "budgets_beyond", pointers(4)[2], threads=384)
    with pytest.raises(EmulatorError, match="decreases its registers from 168 to 232; use the other word"):
        start(run_words, "budget_up", pointers(4)[2], threads=384)


def test_distributed_shared_memory(run_words):
    own, peer = np.arange(32), np.arange(32) + 100
    for seed in SEEDS:
        y, _, values = pointers(128)
        start(run_words, "exchange", values, grid=2, cluster=2, seed=seed)
        assert np.array_equal(y, np.concatenate([peer, own, own, peer]))
        y, _, values = pointers(64)
        start(run_words, "mailbox", values, grid=2, cluster=2, seed=seed)
        assert np.array_equal(y, np.concatenate([peer, own]))


def test_an_arrival_shows_no_writes_to_other_ctas(run_words):
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=r"CTA of rank \d wrote at k.py:4 without cluster_arrive after it") as caught:
            start(run_words, "plain_mailbox", pointers(4)[2], grid=2, cluster=2, seed=seed)
        assert caught.value.kind == "missing_release"


MISUSE = {
    ("exchange", "cluster_arrive@2 cluster_wait@3"): ("race", "unwritten_shared"),
    ("exchange", "cluster_arrive@8 cluster_wait@8"): ("in_flight_at_exit", "cluster"),
    ("mailbox", "fence_barrier_init@2"): ("missing_fence",),
    ("mailbox", "cluster_arrive@3 cluster_wait@3"): ("race", "barrier"),
    ("mailbox", "wait_cluster@6"): ("race", "unwritten_shared"),
    ("mailbox", "arrive_expect_bytes@4"): ("deadlock",),
    ("bulk", "wait@5"): ("unwritten_shared", "race"),
    ("bulk", "store_wait_read@8"): ("in_flight_at_exit",),
    ("copies", "copy_wait@5"): ("race", "unwritten_shared"),
    ("copies", "sync_threads@6"): ("race", "unwritten_shared"),
    ("copies", "copy_wait@9"): ("race", "unwritten_shared", "in_flight_at_exit"),
    ("copies", "copy_commit@2"): ("race", "unwritten_shared"),
    ("copies_arrive", "wait@5"): ("race", "unwritten_shared"),
    ("copies_arrive", "arrive_after_copies@4"): ("deadlock",),
    ("matrices", "sync_warp@2"): ("race", "unwritten_shared"),
    ("matrices", "sync_warp@6"): ("race", "unwritten_shared"),
}
THREADS = {"copies": 64, "copies_arrive": 64}


@pytest.mark.parametrize("kernel, words", MISUSE)
def test_a_missing_word_is_reported(run_words, rng, kernel, words):
    cluster = 2 if kernel in ("exchange", "mailbox") else 1
    for seed in SEEDS:
        with pytest.raises(EmulatorError) as caught:
            values = pointers(512, rng)[2]
            mutate = dict.fromkeys(words.split(), "suppress")
            start(run_words, kernel, values, THREADS.get(kernel, 32), grid=cluster, cluster=cluster, seed=seed, mutate=mutate)
        assert caught.value.kind in MISUSE[kernel, words]


def test_multicast_and_reduction(run_words, rng):
    for seed in SEEDS:
        x, y = rng.standard_normal((16, 32)).astype(np.float32), np.full((16, 32), np.nan, np.float32)
        values = [TensorMap(x, (32, 8), 128), TensorMap(y, (32, 8), 128, writable=True)]
        start(run_words, "multicast", values, grid=2, cluster=2, seed=seed)
        # Store and reduction are of one group: nothing says which is done first.
        swapped = np.concatenate([x[8:], x[:8]])
        done = np.isnan(y) | (y == swapped) | np.isclose(y, swapped + x)
        assert done.all()


def test_bulk_copies(run_words, rng):
    for seed in SEEDS:
        y, x, values = pointers(128, rng)
        start(run_words, "bulk", values, seed=seed)
        assert np.array_equal(x, y)


def test_copies_of_a_thread(run_words, rng):
    for seed in SEEDS:
        y, x, values = pointers(512, rng)
        start(run_words, "copies", values, threads=64, seed=seed)
        assert np.array_equal(y[:256], np.roll(x[:256], -4))
        assert np.array_equal(y[256:384], x[256:384]) and (y[384:] == 0).all()
        y, x, values = pointers(256, rng)
        start(run_words, "copies_arrive", values, threads=64, seed=seed)
        assert np.array_equal(y, np.roll(x, -4))


def test_parts_of_copies(run_words, rng):
    """From the fifth thread on nothing is read: its elements of x are outside of the buffer."""
    y, x, _ = pointers(256, rng)
    start(run_words, "parts", [In(x[:17].copy()), Out(y)], threads=64)
    wanted = np.arange(4) < 5 - np.arange(64)[:, None]
    assert np.array_equal(y.reshape(64, 4), np.where(wanted, x.reshape(64, 4), 0))


def test_matrices(run_words):
    y, _, values = pointers(512)
    start(run_words, "matrices", values)
    lane, m, e = np.ogrid[:32, :4, :2]
    inside = lane // 4 * 8 + lane % 4 * 2 + e
    assert np.array_equal(y[:256].reshape(32, 4, 2), (m + 1) % 4 * 64 + inside)
    assert np.array_equal(y[256:].reshape(32, 4, 2), (m + 2) % 4 * 64 + inside)


def test_grid_must_be_whole_clusters(run_words):
    with pytest.raises(ValueError, match="clusters of 2 CTAs for a grid of 3; expected 1 to 16 that divide it"):
        start(run_words, "exchange", pointers(4)[2], grid=3, cluster=2)
