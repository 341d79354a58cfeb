// c[M, N] = a[M, K] b[N, K]^T, bfloat16 with float32 accumulation. The target text of the generator, written by hand.
//
// Tile 128 x 256 x 64, 4 stages; 3 warp groups: group 0 loads, groups 1 and 2 multiply, 64 rows x 256 columns each.
// Cluster of 2 CTAs with the same columns: each loads half of the b tile into both. Persistent; tiles in groups of 8 clusters
// of rows. The epilogue stores sub-tiles of 64 columns by TMA while the loads of the next tile run.
//
// Shared memory            bytes            Barriers         arrivals  expected bytes  phases
//       0  a tiles     4 x 16384            full  x 4               1           49152  1 per 64 of K
//   65536  b tiles     4 x 32768            empty x 4   2 groups x 2 CTAs              1 per 64 of K
//  196608  c tiles     2 groups x 2 x 8192  named 1, 2: the 128 threads of a consumer group
//  229376  full, empty 8 x 8
// Registers of a thread: 40 in group 0; 232 in groups 1 and 2: acc 128 x f32, c_tile 8 x bf16.
#include <tileops/sm_90a.h>

namespace tileops {

struct gemm_params {
  tensor_map a, b, c;  // boxes of 64 x 128, 64 x 128 and 64 x 64, swizzle of 128 bytes
  int32_t m, n, k;
};

TILEOPS_KERNEL(gemm_sm_90a_bf16_bf16_128x256x64, gemm_params, 384, 1) {
  constexpr int kStages = 4, kGroup = 8;
  const int group = warp_group_index();
  const int rank = cluster_rank();
  const auto a_tile = shared<bf16>(0);
  const auto b_tile = shared<bf16>(65536);
  const auto full = shared<mbarrier>(229376);
  const auto empty = shared<mbarrier>(229408);
  if (thread_index() == 0) {
    TILEOPS_UNROLL
    for (int s = 0; s < kStages; ++s) {
      init_barrier(full + s, 1, site(1));
      init_barrier(empty + s, 4, site(1));
    }
    fence_barrier_init(site(1));
  }
  cluster_sync(site(1));

  // Tiles of the cluster: 256 rows of c, of which each CTA has 128.
  const int rows = (p.m + 255) / 256;
  const int columns = (p.n + 255) / 256;
  const int tiles = rows * columns;
  const int steps = (p.k + 63) / 64;
  const int first = static_cast<int>(block_index_x()) / 2;
  const int clusters = static_cast<int>(grid_size_x()) / 2;

  if (group == 0) {
    register_budget_decrease<40>(site(2));
    if (warp_index() == 0 && elect_one(site(3))) {
      int stage = 0, phase = 0;
      TILEOPS_NO_UNROLL
      for (int tile = first; tile < tiles; tile += clusters) {
        const int section = tile / (kGroup * columns);
        const int height = min(rows - section * kGroup, kGroup);
        const int rest = tile - section * kGroup * columns;
        const int row = ((section * kGroup + rest % height) * 2 + rank) * 128;
        const int column = rest / height * 256;
        TILEOPS_NO_UNROLL
        for (int k = 0; k < steps; ++k) {
          wait(empty + stage, phase ^ 1, site(4));
          arrive_expect_bytes(full + stage, 49152, site(5));
          tma_load(a_tile + stage * 8192, p.a, at(k * 64, row), full + stage, site(5));
          tma_load_multicast(b_tile + stage * 16384 + rank * 8192, p.b, at(k * 64, column + rank * 128), full + stage, 3, site(6));
          if (++stage == kStages) { stage = 0; phase ^= 1; }
        }
      }
    }
    sync_warp(site(3));
  } else {
    register_budget_increase<232>(site(2));
    const int thread = thread_index() % 128;
    const int lane = thread % 32;
    const auto c_tile = shared<bf16>(196608) + (group - 1) * 8192;
    const auto c_row = c_tile + (thread / 32 * 16 + lane % 16) * 64;
    Fragment<float, 128> acc;
    Fragment<bf16, 8> out;
    int stage = 0, phase = 0, slot = 0;
    TILEOPS_NO_UNROLL
    for (int tile = first; tile < tiles; tile += clusters) {
      const int section = tile / (kGroup * columns);
      const int height = min(rows - section * kGroup, kGroup);
      const int rest = tile - section * kGroup * columns;
      const int row = ((section * kGroup + rest % height) * 2 + rank) * 128;
      const int column = rest / height * 256;
      int before = 0;
      TILEOPS_NO_UNROLL
      for (int k = 0; k < steps; ++k) {
        wait(full + stage, phase, site(7));
        const auto a = matrix_at<Swizzle::k128, Major::kK, 1024>(a_tile + stage * 8192 + (group - 1) * 4096);
        const auto b = matrix_at<Swizzle::k128, Major::kK, 1024>(b_tile + stage * 16384);
        wgmma_fence(site(8));
        TILEOPS_UNROLL
        for (int q = 0; q < 4; ++q) wgmma<256>(acc, 0, a + q * 32, b + q * 32, k + q > 0, site(8));
        wgmma_commit(site(8));
        wgmma_wait<1>(site(8));
        if (k > 0 && thread < 2) arrive_at_rank(empty + before, thread, site(9));
        before = stage;
        if (++stage == kStages) { stage = 0; phase ^= 1; }
      }
      wgmma_wait<0>(site(8));
      fence_operand(acc);
      if (thread < 2) arrive_at_rank(empty + before, thread, site(9));

      TILEOPS_UNROLL
      for (int e = 0; e < 4; ++e) {
        if (thread == 0) store_wait_read<1>(site(10));
        named_barrier_sync(group, 128, site(10));
        TILEOPS_UNROLL
        for (int j = 0; j < 4; ++j) {
          TILEOPS_UNROLL
          for (int i = 0; i < 8; i += 2) round_pair(out, i, acc[e * 32 + j * 8 + i], acc[e * 32 + j * 8 + i + 1]);
          store_matrix<4>(c_row + slot * 4096 + ((j * 2 + lane / 16) ^ lane % 8) * 8, out, 0, site(11));
        }
        fence_async_shared(site(11));
        named_barrier_sync(group, 128, site(12));
        if (thread == 0) {
          tma_store(p.c, at(column + e * 64, row + (group - 1) * 64), c_tile + slot * 4096, site(12));
          store_commit(site(12));
        }
        slot ^= 1;
      }
    }
    if (thread == 0) store_wait<0>(site(12));
  }
  cluster_sync(site(13));
}

}  // namespace tileops
