// Kernels that each run one word or idiom of the sm_90a target; test_words_gpu.py says what must come out.
// words_portable.cu has those of every GPU, words_wgmma.cu the matrix products.
#include "tileops/sm_90a.h"
#include "tileops/async_copy.h"

namespace tileops {

struct buffers {
  const void* x;
  void* out;
  int32_t n;
};

struct boxes {
  tensor_map map;
  const void* x;
  void* out;
  int32_t words;  // of a box, 4 bytes each
  int32_t at[4];
};

constexpr int kBarrier = 16384;  // behind the boxes

// `words` words of 4 bytes at a byte offset of shared memory, from x or to out, or all of one value. Followed or preceded by
// a barrier; what is written there can be read or overwritten by asynchronous copies.
TILEOPS_WORD void copy_in(int offset, const void* x, int words) {
  Fragment<uint32_t, 1> v;
  for (int i = thread_index(); i < words; i += 128) {
    load_global<1>(v, 0, global<uint32_t>(x), i, site(901));
    store_shared(shared<uint32_t>(offset), i, v[0], site(901));
  }
  fence_async_shared(site(902));
  sync_threads(site(902));
}
TILEOPS_WORD void poison(int offset, int words) {
  for (int i = thread_index(); i < words; i += 128) store_shared(shared<uint32_t>(offset), i, 0xffffffffu, site(903));
  fence_async_shared(site(904));
  sync_threads(site(904));
}
TILEOPS_WORD void copy_out(void* out, int64_t at, int offset, int words) {
  Fragment<uint32_t, 1> v;
  sync_threads(site(905));
  for (int i = thread_index(); i < words; i += 128) {
    v[0] = load_shared(shared<uint32_t>(offset), i, site(905));
    store_global<1>(global<uint32_t>(out), at + i, v, 0, site(905));
  }
}
TILEOPS_WORD void one_barrier(shared_ptr<mbarrier> b, int arrivals) {
  if (thread_index() == 0) {
    init_barrier(b, arrivals, site(906));
    fence_barrier_init(site(906));
  }
  sync_threads(site(906));
}

// x[32][2 * count] registers; out[4][8][8] as they lie in shared memory.
#define STORE_MATRIX(name, count, transposed)                                                                    \
  TILEOPS_KERNEL(name, buffers, 128, 1) {                                                                        \
    Fragment<bf16, 2 * count> f;                                                                                 \
    poison(0, 128);                                                                                              \
    if (warp_index() == 0) {                                                                                     \
      load_global<2 * count>(f, 0, global<bf16>(p.x), lane_index() * 2 * count, site(1));                        \
      store_matrix<count, transposed>(shared<bf16>(0) + lane_index() * 8, f, 0, site(2));                        \
    }                                                                                                            \
    copy_out(p.out, 0, 0, 128);                                                                                  \
  }
STORE_MATRIX(store_matrix_1, 1, false)
STORE_MATRIX(store_matrix_2, 2, false)
STORE_MATRIX(store_matrix_4, 4, false)
STORE_MATRIX(store_matrix_1_transposed, 1, true)
STORE_MATRIX(store_matrix_2_transposed, 2, true)
STORE_MATRIX(store_matrix_4_transposed, 4, true)

// out[128][2] = exp2_pair(x[128][2])
TILEOPS_KERNEL(exp2_pairs, buffers, 128, 1) {
  Fragment<bf16, 2> f;
  load_global<2>(f, 0, global<bf16>(p.x), thread_index() * 2, site(1));
  exp2_pair(f, 0);
  store_global<2>(global<bf16>(p.out), thread_index() * 2, f, 0, site(2));
}

// x[256] integers; out[256][12]: indices, election, votes on x != 0, values of other lanes.
TILEOPS_KERNEL(warp_words, buffers, 256, 1) {
  Fragment<int32_t, 12> v;
  Fragment<int32_t, 1> x;
  load_global<1>(x, 0, global<int32_t>(p.x), thread_index(), site(1));
  v[0] = thread_index();
  v[1] = warp_index();
  v[2] = warp_group_index();
  v[3] = lane_index();
  v[4] = elect_one(site(2));
  v[5] = all_of_warp(x[0] != 0, site(3));
  v[6] = any_of_warp(x[0] != 0, site(4));
  v[7] = static_cast<int32_t>(ballot_of_warp(x[0] != 0, site(5)));
  v[8] = shuffle(x[0], 5, site(6));
  v[9] = static_cast<int32_t>(shuffle(static_cast<float>(x[0]), lane_index() ^ 3, site(7)));
  v[10] = static_cast<int32_t>(shuffle_xor(static_cast<uint32_t>(x[0]), 8, site(8)));
  v[11] = static_cast<int32_t>(shuffle_xor(static_cast<float>(x[0]), 17, site(9)));
  store_global<12>(global<int32_t>(p.out), thread_index() * 12, v, 0, site(10));
}

// Warp group 0 hands n values to group 1 through one buffer; out[128] = sums of what thread (t + 37) % 128 handed over.
TILEOPS_KERNEL(named_barriers, buffers, 256, 1) {
  const auto buffer = shared<int32_t>(0);
  const int thread = thread_index() % 128;
  if (warp_group_index() == 0) {
    TILEOPS_NO_UNROLL
    for (int i = 0; i < p.n; ++i) {
      named_barrier_sync(2, 256, site(1));
      store_shared(buffer, thread, i * 128 + thread, site(2));
      named_barrier_arrive(1, 256, site(3));
    }
    named_barrier_sync(2, 256, site(4));
  } else {
    Fragment<int32_t, 1> sum;
    sum[0] = 0;
    named_barrier_arrive(2, 256, site(5));
    TILEOPS_NO_UNROLL
    for (int i = 0; i < p.n; ++i) {
      named_barrier_sync(1, 256, site(6));
      sum[0] += load_shared(buffer, (thread + 37) % 128, site(7));
      named_barrier_arrive(2, 256, site(8));
    }
    store_global<1>(global<int32_t>(p.out), thread, sum, 0, site(9));
  }
}

// Groups 1 and 2 hold 200 of x[256][200] each: more than the 168 registers they start with. out[256] = sum of (i + 1) x[t][i].
TILEOPS_KERNEL(register_budgets, buffers, 384, 1) {
  if (warp_group_index() == 0) {
    register_budget_decrease<24>(site(1));
  } else {
    register_budget_increase<240>(site(2));
    Fragment<float, 200> f;
    Fragment<float, 1> sum;
    const int thread = thread_index() - 128;
    load_global<200>(f, 0, global<float>(p.x), thread * 200, site(3));
    fence_operand(f);  // all of them at one time
    fence_operand(f);
    sum[0] = 0.0f;
    TILEOPS_UNROLL
    for (int i = 0; i < 200; ++i) sum[0] = fma(f[i], static_cast<float>(i + 1), sum[0]);
    store_global<1>(global<float>(p.out), thread, sum, 0, site(4));
  }
}

// out[128][8]: test_wait for parities 1 and 0 on a fresh barrier, after the first phase and after the second.
TILEOPS_KERNEL(barrier_phases, buffers, 128, 1) {
  Fragment<int32_t, 8> v;
  const auto b = shared<mbarrier>(0);
  fill<8>(v, 0, 0);
  one_barrier(b, 128);
  TILEOPS_UNROLL
  for (int phase = 0; phase < 3; ++phase) {
    v[2 * phase] = test_wait(b, 1, site(1));
    v[2 * phase + 1] = test_wait(b, 0, site(1));
    sync_threads(site(2));
    if (phase == 2) break;
    arrive(b, site(3));
    wait(b, phase, site(4));
    sync_threads(site(5));
  }
  store_global<8>(global<int32_t>(p.out), thread_index() * 8, v, 0, site(6));
}

// x[128 * 8] to out, each thread its neighbour's: the threads from n on have copied zeros.
TILEOPS_KERNEL(arrivals_after_copies, buffers, 128, 1) {
  const auto b = shared<mbarrier>(kBarrier);
  Fragment<bf16, 8> v;
  const int at = thread_index() * 8;
  poison(0, 512);
  one_barrier(b, 128);
  copy_async<8>(shared<bf16>(0), at, global<bf16>(p.x), at, thread_index() < p.n, site(1));
  arrive_after_copies(b, site(2));
  wait(b, 0, site(3));
  TILEOPS_UNROLL
  for (int i = 0; i < 8; ++i) v[i] = load_shared(shared<bf16>(0), (at + 8) % 1024 + i, site(4));
  store_global<8>(global<bf16>(p.out), (at + 8) % 1024, v, 0, site(5));
}

// The box at p.at to out.
#define TMA_LOAD(name, hint, ...)                                                      \
  TILEOPS_KERNEL(name, boxes, 128, 1) {                                                \
    const auto b = shared<mbarrier>(kBarrier);                                         \
    poison(0, p.words);                                                                \
    one_barrier(b, 1);                                                                 \
    if (thread_index() == 0) {                                                         \
      prefetch_tensor_map(p.map, site(1));                                             \
      arrive_expect_bytes(b, p.words * 4, site(2));                                    \
      tma_load<L2::hint>(shared<bf16>(0), p.map, at(__VA_ARGS__), b, site(3));         \
    }                                                                                  \
    wait(b, 0, site(4));                                                               \
    copy_out(p.out, 0, 0, p.words);                                                    \
  }
TMA_LOAD(tma_load_2d, kEvictNormal, p.at[0], p.at[1])
TMA_LOAD(tma_load_3d, kEvictFirst, p.at[0], p.at[1], p.at[2])
TMA_LOAD(tma_load_4d, kEvictLast, p.at[0], p.at[1], p.at[2], p.at[3])

// x, a box as it lies in shared memory, to the box at p.at; the shared memory is overwritten as soon as it has been read.
#define TMA_STORE(name, word, T, ...)                                       \
  TILEOPS_KERNEL(name, boxes, 128, 1) {                                     \
    copy_in(0, p.x, p.words);                                               \
    if (thread_index() == 0) {                                              \
      word(p.map, at(__VA_ARGS__), shared<T>(0), site(1));                  \
      store_commit(site(2));                                                \
      store_wait_read<0>(site(3));                                          \
    }                                                                       \
    sync_threads(site(4));                                                  \
    poison(0, p.words);                                                     \
    if (thread_index() == 0) store_wait<0>(site(5));                        \
  }
TMA_STORE(tma_store_2d, tma_store, bf16, p.at[0], p.at[1])
TMA_STORE(tma_store_3d, tma_store, bf16, p.at[0], p.at[1], p.at[2])
TMA_STORE(tma_store_4d, tma_store, bf16, p.at[0], p.at[1], p.at[2], p.at[3])
TMA_STORE(tma_reduce_add_2d, tma_reduce_add, float, p.at[0], p.at[1])
TMA_STORE(tma_reduce_add_3d, tma_reduce_add, float, p.at[0], p.at[1], p.at[2])
TMA_STORE(tma_reduce_add_4d, tma_reduce_add, float, p.at[0], p.at[1], p.at[2], p.at[3])

// Clusters of 2: each CTA loads one box into both. out[CTA][2 * words]: box r lies where `rank` r loaded it.
#define TMA_MULTICAST(name, ...)                                                                                      \
  TILEOPS_KERNEL(name, boxes, 128, 1) {                                                                               \
    const auto b = shared<mbarrier>(kBarrier);                                                                        \
    const int rank = cluster_rank();                                                                                  \
    poison(0, 2 * p.words);                                                                                           \
    one_barrier(b, 1);                                                                                                \
    cluster_sync(site(1));                                                                                            \
    if (thread_index() == 0) {                                                                                        \
      arrive_expect_bytes(b, 2 * p.words * 4, site(2));                                                               \
      tma_load_multicast<L2::kEvictNormal>(shared<bf16>(rank * p.words * 4), p.map, at(__VA_ARGS__), b, 3, site(3));  \
    }                                                                                                                 \
    wait_cluster(b, 0, site(4));                                                                                      \
    copy_out(p.out, block_index_x() * 2 * p.words, 0, 2 * p.words);                                                   \
    cluster_sync(site(5));                                                                                            \
  }
TMA_MULTICAST(tma_multicast_2d, p.at[0], p.at[1] + 8 * rank)
TMA_MULTICAST(tma_multicast_3d, p.at[0], p.at[1], p.at[2] + rank)
TMA_MULTICAST(tma_multicast_4d, p.at[0], p.at[1], p.at[2], p.at[3] + rank)

// n bytes of x, from byte 32 on, to out from byte 16 on.
TILEOPS_KERNEL(bulk_copies, buffers, 128, 1) {
  const auto b = shared<mbarrier>(kBarrier);
  one_barrier(b, 1);
  if (thread_index() == 0) {
    arrive_expect_bytes(b, p.n, site(1));
    bulk_load(shared<bf16>(0), global<bf16>(p.x), 16, p.n, b, site(2));
    wait(b, 0, site(3));
    bulk_store(global<bf16>(p.out), 8, shared<bf16>(0), p.n, site(4));
    store_commit(site(5));
    store_wait<0>(site(6));
  }
}

// x to the tensor of the map by ordinary stores (8 rows of 64 bf16, no swizzle), and from there to out by TMA.
TILEOPS_KERNEL(global_fence, boxes, 128, 1) {
  const auto b = shared<mbarrier>(kBarrier);
  Fragment<uint32_t, 2> v;
  load_global<2>(v, 0, global<uint32_t>(p.x), thread_index() * 2, site(1));
  store_global<2>(global<uint32_t>(p.out), thread_index() * 2, v, 0, site(2));
  fence_async_global(site(3));
  one_barrier(b, 1);
  if (thread_index() == 0) {
    arrive_expect_bytes(b, p.words * 4, site(4));
    tma_load(shared<bf16>(0), p.map, at(0, 0), b, site(5));
  }
  wait(b, 0, site(6));
  copy_out(p.out, p.words, 0, p.words);
}

// Clusters of any size: what the next CTA of the cluster sends, in each way. out[CTA][128][8].
TILEOPS_KERNEL(cluster_words, buffers, 128, 1) {
  Fragment<float, 8> v;
  const auto own = shared<float>(0), stored = shared<float>(512), sent = shared<float>(1024);
  const auto data = shared<mbarrier>(1536), arrivals = shared<mbarrier>(1544);
  const int thread = thread_index(), rank = cluster_rank(), size = cluster_size();
  const int before = (rank + size - 1) % size, after = (rank + 1) % size;
  const float mine = static_cast<float>(block_index_x() * 1000 + thread);
  store_shared(own, thread, mine, site(1));
  one_barrier(data, 1);
  one_barrier(arrivals, 128 * size);
  cluster_sync(site(2));
  fill<8>(v, 0, 0.0f);
  v[0] = static_cast<float>(rank);
  v[1] = static_cast<float>(size);
  v[2] = load_shared_of_rank(own, thread, after, site(3));
  store_shared_of_rank(stored, 127 - thread, before, mine, site(4));
  if (thread == 0) arrive_expect_bytes(data, 512, site(5));
  store_async_of_rank(sent, thread ^ 1, before, mine, data, site(6));
  wait_cluster(data, 0, site(7));
  v[3] = load_shared(sent, thread, site(8));
  v[5] = test_wait(arrivals, 0, site(9));
  cluster_sync(site(10));
  v[4] = load_shared(stored, thread, site(11));
  TILEOPS_NO_UNROLL
  for (int r = 0; r < size; ++r) arrive_at_rank(arrivals, r, site(12));
  wait_cluster(arrivals, 0, site(13));
  v[5] += 2.0f * test_wait(arrivals, 0, site(14));
  store_global<8>(global<float>(p.out), (block_index_x() * 128 + thread) * 8, v, 0, site(15));
  cluster_sync(site(16));
}

}  // namespace tileops
