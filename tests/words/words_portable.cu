// Kernels that each run one word or idiom of the portable target; test_portable_gpu.py says what must come out.
#include "tileops/copy_async_part.h"
#include "tileops/portable.h"

namespace tileops {

struct buffers {
  const void* x;
  const void* y;
  const void* z;
  void* out;
  int32_t n;
};

// `words` words of 4 bytes at a byte offset of shared memory, all of one value, from x or to out. Followed by a barrier.
TILEOPS_WORD void poison(int offset, int words, int threads) {
  for (int i = thread_index(); i < words; i += threads) store_shared(shared<uint32_t>(offset), i, 0xffffffffu, site(901));
  sync_threads(site(901));
}
TILEOPS_WORD void copy_in(int offset, const void* x, int words, int threads) {
  Fragment<uint32_t, 1> v;
  for (int i = thread_index(); i < words; i += threads) {
    load_global<1>(v, 0, global<uint32_t>(x), i, site(902));
    store_shared(shared<uint32_t>(offset), i, v[0], site(902));
  }
  sync_threads(site(902));
}
TILEOPS_WORD void copy_out(void* out, int offset, int words, int threads) {
  Fragment<uint32_t, 1> v;
  sync_threads(site(903));
  for (int i = thread_index(); i < words; i += threads) {
    v[0] = load_shared(shared<uint32_t>(offset), i, site(903));
    store_global<1>(global<uint32_t>(out), i, v, 0, site(903));
  }
}

// x[64 * V] to out through shared memory; the threads from n on fill with zeros.
#define COPY_ASYNC(name, V)                                                                                             \
  TILEOPS_KERNEL(name, buffers, 64, 1) {                                                                                \
    const int at = thread_index() * V;                                                                                  \
    poison(0, 32 * V, 64);                                                                                              \
    copy_async<V>(shared<bf16>(0), at, global<bf16>(p.x), static_cast<int64_t>(at), thread_index() < p.n, site(1));      \
    copy_commit(site(2));                                                                                               \
    copy_wait<0>(site(3));                                                                                              \
    copy_out(p.out, 0, 32 * V, 64);                                                                                     \
  }
COPY_ASYNC(copy_async_4, 2)
COPY_ASYNC(copy_async_8, 4)
COPY_ASYNC(copy_async_16, 8)

// x[64 * 8] to out through shared memory: of what thread t copies, the first n - t elements, and zeros behind them.
TILEOPS_KERNEL(copy_async_part_16, buffers, 64, 1) {
  const int at = thread_index() * 8;
  poison(0, 32 * 8, 64);
  copy_async_part<8>(shared<bf16>(0), at, global<bf16>(p.x), static_cast<int64_t>(at), p.n - thread_index(), site(1));
  copy_commit(site(2));
  copy_wait<0>(site(3));
  copy_out(p.out, 0, 32 * 8, 64);
}

// x[n][32 * 8] to out through a ring of 3 stages.
TILEOPS_KERNEL(copy_async_ring, buffers, 32, 1) {
  Fragment<float, 8> v;
  const int at = thread_index() * 8;
  TILEOPS_UNROLL
  for (int i = 0; i < 2; ++i) {
    copy_async<4>(shared<float>(i * 1024), at, global<float>(p.x), i * 256 + at, i < p.n, site(1));
    copy_async<4>(shared<float>(i * 1024), at + 4, global<float>(p.x), i * 256 + at + 4, i < p.n, site(2));
    copy_commit(site(3));
  }
  TILEOPS_NO_UNROLL
  for (int i = 0; i < p.n; ++i) {
    const int next = i + 2;
    copy_async<4>(shared<float>(next % 3 * 1024), at, global<float>(p.x), next * 256 + at, next < p.n, site(4));
    copy_async<4>(shared<float>(next % 3 * 1024), at + 4, global<float>(p.x), next * 256 + at + 4, next < p.n, site(5));
    copy_commit(site(6));
    copy_wait<2>(site(7));
    sync_warp(site(8));
    TILEOPS_UNROLL
    for (int j = 0; j < 8; ++j) v[j] = load_shared(shared<float>(i % 3 * 1024), (at + 8) % 256 + j, site(9));
    store_global<8>(global<float>(p.out), static_cast<int64_t>(i) * 256 + (at + 8) % 256, v, 0, site(10));
    sync_warp(site(11));
  }
}

// x[4][8][8] in shared memory; out[32][2 * count] registers.
#define LOAD_MATRIX(name, count, transposed)                                                   \
  TILEOPS_KERNEL(name, buffers, 32, 1) {                                                       \
    Fragment<bf16, 2 * count> f;                                                               \
    copy_in(0, p.x, 128, 32);                                                                  \
    load_matrix<count, transposed>(f, 0, shared<bf16>(0) + lane_index() * 8, site(1));          \
    store_global<2 * count>(global<bf16>(p.out), lane_index() * 2 * count, f, 0, site(2));     \
  }
LOAD_MATRIX(load_matrix_1, 1, false)
LOAD_MATRIX(load_matrix_2, 2, false)
LOAD_MATRIX(load_matrix_4, 4, false)
LOAD_MATRIX(load_matrix_1_transposed, 1, true)
LOAD_MATRIX(load_matrix_2_transposed, 2, true)
LOAD_MATRIX(load_matrix_4_transposed, 4, true)

// Registers of a: x[32][8], of b: y[32][4], of c: z[32][4]; of a b + c: out[32][4].
#define MMA(name, T)                                                            \
  TILEOPS_KERNEL(name, buffers, 32, 1) {                                        \
    Fragment<T, 8> a;                                                           \
    Fragment<T, 4> b;                                                           \
    Fragment<float, 4> d;                                                       \
    load_global<8>(a, 0, global<T>(p.x), lane_index() * 8, site(1));            \
    load_global<4>(b, 0, global<T>(p.y), lane_index() * 4, site(2));            \
    load_global<4>(d, 0, global<float>(p.z), lane_index() * 4, site(3));        \
    mma(d, 0, a, 0, b, 0, site(4));                                             \
    store_global<4>(global<float>(p.out), lane_index() * 4, d, 0, site(5));     \
  }
MMA(mma_bf16, bf16)
MMA(mma_f16, f16)

// One tile of each operand by load_matrix: x[16][16] rows of a, y[8][16] columns of b (n = 0) or y[16][8] rows (n = 1).
TILEOPS_KERNEL(mma_loaded, buffers, 32, 1) {
  Fragment<f16, 8> a;
  Fragment<f16, 4> b;
  Fragment<float, 4> d;
  const int lane = lane_index();
  copy_in(0, p.x, 128, 32);
  copy_in(512, p.y, 64, 32);
  load_matrix<4>(a, 0, shared<f16>(0) + lane % 16 * 16 + lane / 16 * 8, site(1));
  if (p.n == 0) load_matrix<2>(b, 0, shared<f16>(512) + lane % 8 * 16 + lane / 8 % 2 * 8, site(2));
  else load_matrix<2, true>(b, 0, shared<f16>(512) + lane % 16 * 8, site(3));
  fill<4>(d, 0, 0.0f);
  mma(d, 0, a, 0, b, 0, site(4));
  store_global<4>(global<float>(p.out), lane * 4, d, 0, site(5));
}

// out[128][2], in T, of x[128][2].
#define ROUND_PAIRS(name, T)                                                    \
  TILEOPS_KERNEL(name, buffers, 128, 1) {                                       \
    Fragment<float, 2> v;                                                       \
    Fragment<T, 2> f;                                                           \
    load_global<2>(v, 0, global<float>(p.x), thread_index() * 2, site(1));      \
    round_pair(f, 0, v[0], v[1]);                                               \
    store_global<2>(global<T>(p.out), thread_index() * 2, f, 0, site(2));       \
  }
ROUND_PAIRS(round_pairs_bf16, bf16)
ROUND_PAIRS(round_pairs_f16, f16)

// out[i] = f(x[i]) for i < n.
#define UNARY(name)                                                                                    \
  TILEOPS_KERNEL(unary_##name, buffers, 256, 1) {                                                      \
    Fragment<float, 1> v;                                                                              \
    for (int64_t i = block_index_x() * 256 + thread_index(); i < p.n; i += grid_size_x() * 256) {      \
      load_global<1>(v, 0, global<float>(p.x), i, site(1));                                            \
      v[0] = name(v[0]);                                                                               \
      store_global<1>(global<float>(p.out), i, v, 0, site(2));                                         \
    }                                                                                                  \
  }
UNARY(exp2)
UNARY(exp2_polynomial)
UNARY(log2)
UNARY(tanh)

}  // namespace tileops
