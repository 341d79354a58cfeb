// Kernels that each run one form of wgmma on tiles that the test has laid out; test_wgmma_gpu.py says what must come out.
#include "tileops/sm_90a.h"

namespace tileops {

struct product {
  const void* a;  // the bytes of the tile, or [128][4][registers] of A in registers
  const void* b;
  const void* c;  // [128][N / 2] registers, read where `accumulate` is not 0
  void* d;        // [128][N / 2] registers
  int32_t a_words, b_words, accumulate;
  int32_t a_step[4], b_step[4];  // where the four products of 32 bytes of K begin
};

constexpr int kB = 8192;  // the tile of B behind 64 x 128 bytes of A

TILEOPS_WORD void copy_in(int offset, const void* x, int words) {
  Fragment<uint32_t, 1> v;
  for (int i = thread_index(); i < words; i += 128) {
    load_global<1>(v, 0, global<uint32_t>(x), i, site(901));
    store_shared(shared<uint32_t>(offset), i, v[0], site(901));
  }
  fence_async_shared(site(902));
  sync_threads(site(903));
}

template <int N, typename A, typename B>
TILEOPS_WORD void products(const product& p, A a, B b) {
  Fragment<float, N / 2> d;
  copy_in(0, p.a, p.a_words);
  copy_in(kB, p.b, p.b_words);
  if (p.accumulate) load_global<N / 2>(d, 0, global<float>(p.c), thread_index() * (N / 2), site(1));
  wgmma_fence(site(2));
  wgmma<N>(d, 0, a + p.a_step[0], b + p.b_step[0], p.accumulate, site(3));
  TILEOPS_UNROLL
  for (int s = 1; s < 4; ++s) wgmma<N>(d, 0, a + p.a_step[s], b + p.b_step[s], 1, site(4));
  wgmma_commit(site(5));
  wgmma_wait<0>(site(6));
  fence_operand(d);
  store_global<N / 2>(global<float>(p.d), thread_index() * (N / 2), d, 0, site(7));
}

template <int N, typename T, typename B>
TILEOPS_WORD void products_of_registers(const product& p, B b) {
  constexpr int registers = 16 / sizeof(T);
  Fragment<float, N / 2> d;
  Fragment<T, 4 * registers> a;
  copy_in(kB, p.b, p.b_words);
  load_global<4 * registers>(a, 0, global<T>(p.a), thread_index() * 4 * registers, site(1));
  if (p.accumulate) load_global<N / 2>(d, 0, global<float>(p.c), thread_index() * (N / 2), site(1));
  wgmma_fence(site(2));
  wgmma<N>(d, 0, a, 0, b + p.b_step[0], p.accumulate, site(3));
  TILEOPS_UNROLL
  for (int s = 1; s < 4; ++s) wgmma<N>(d, 0, a, s * registers, b + p.b_step[s], 1, site(4));
  wgmma_commit(site(5));
  wgmma_wait<0>(site(6));
  fence_operand(d);
  fence_operand(a);
  store_global<N / 2>(global<float>(p.d), thread_index() * (N / 2), d, 0, site(7));
}

// Each operand: swizzle, major, stride, leading. test_words_build.py compares the strides with instruction_layouts.py.
#define OPERAND(T, offset, swizzle, major, stride, leading) \
  matrix_at<Swizzle::swizzle, Major::major, stride, leading>(shared<T>(offset))
#define SS(name, TA, TB, N, swizzle_a, major_a, stride_a, leading_a, swizzle_b, major_b, stride_b, leading_b)       \
  TILEOPS_KERNEL(name, product, 128, 1) {                                                                           \
    products<N>(p, OPERAND(TA, 0, swizzle_a, major_a, stride_a, leading_a),                                         \
                OPERAND(TB, kB, swizzle_b, major_b, stride_b, leading_b));                                          \
  }
#define RS(name, TA, TB, N, swizzle_b, major_b, stride_b, leading_b)                                    \
  TILEOPS_KERNEL(name, product, 128, 1) {                                                               \
    products_of_registers<N, TA>(p, OPERAND(TB, kB, swizzle_b, major_b, stride_b, leading_b));          \
  }

// A of 64 x 64, each way.
SS(ss_a_k_128, bf16, bf16, 128, k128, kK, 1024, 16, k128, kK, 1024, 16)
SS(ss_a_k_64, bf16, bf16, 128, k64, kK, 512, 16, k128, kK, 1024, 16)
SS(ss_a_k_32, bf16, bf16, 128, k32, kK, 256, 16, k128, kK, 1024, 16)
SS(ss_a_k_none, bf16, bf16, 128, kNone, kK, 128, 1024, k128, kK, 1024, 16)
SS(ss_a_mn_128, bf16, bf16, 128, k128, kMN, 1024, 8192, k128, kK, 1024, 16)
SS(ss_a_mn_64, bf16, bf16, 128, k64, kMN, 512, 4096, k128, kK, 1024, 16)
SS(ss_a_mn_32, bf16, bf16, 128, k32, kMN, 256, 2048, k128, kK, 1024, 16)
SS(ss_a_mn_none, bf16, bf16, 128, kNone, kMN, 1024, 128, k128, kK, 1024, 16)
// B of 64 x 128, each way.
SS(ss_b_k_64, bf16, bf16, 128, k128, kK, 1024, 16, k64, kK, 512, 16)
SS(ss_b_k_32, bf16, bf16, 128, k128, kK, 1024, 16, k32, kK, 256, 16)
SS(ss_b_k_none, bf16, bf16, 128, k128, kK, 1024, 16, kNone, kK, 128, 2048)
SS(ss_b_mn_128, bf16, bf16, 128, k128, kK, 1024, 16, k128, kMN, 1024, 8192)
SS(ss_b_mn_64, bf16, bf16, 128, k128, kK, 1024, 16, k64, kMN, 512, 4096)
SS(ss_b_mn_32, bf16, bf16, 128, k128, kK, 1024, 16, k32, kMN, 256, 2048)
SS(ss_b_mn_none, bf16, bf16, 128, k128, kK, 1024, 16, kNone, kMN, 1024, 128)
// Both transposed, other widths and dtypes. B of 64 x 96 in boxes of 64 columns takes the whole second box.
SS(ss_both_mn, f16, f16, 128, k128, kMN, 1024, 8192, k128, kMN, 1024, 8192)
SS(ss_n8, bf16, bf16, 8, k128, kK, 1024, 16, k128, kK, 1024, 16)
SS(ss_n96, f16, f16, 96, k128, kK, 1024, 16, k128, kMN, 1024, 8192)
SS(ss_n176, bf16, bf16, 176, k128, kK, 1024, 16, k128, kK, 1024, 16)
SS(ss_n256, bf16, bf16, 256, k128, kK, 1024, 16, k128, kK, 1024, 16)
// 64 x 128 by 128 x 128 of 8-bit elements.
SS(ss_e4m3_e4m3, e4m3, e4m3, 128, k128, kK, 1024, 16, k128, kK, 1024, 16)
SS(ss_e4m3_e5m2, e4m3, e5m2, 128, k128, kK, 1024, 16, k64, kK, 512, 16)
SS(ss_e5m2_e4m3, e5m2, e4m3, 128, k32, kK, 256, 16, k128, kK, 1024, 16)
SS(ss_e5m2_e5m2, e5m2, e5m2, 128, kNone, kK, 128, 1024, kNone, kK, 128, 2048)
RS(rs_bf16_k, bf16, bf16, 128, k128, kK, 1024, 16)
RS(rs_bf16_mn, bf16, bf16, 128, k128, kMN, 1024, 8192)
RS(rs_f16_mn, f16, f16, 64, k64, kMN, 512, 4096)
RS(rs_e4m3, e4m3, e4m3, 128, k128, kK, 1024, 16)
RS(rs_e5m2_e4m3, e5m2, e4m3, 128, k128, kK, 1024, 16)

}  // namespace tileops
