// c[M, N] = activation(a[M, K] b[N, K]^T + bias) + residual for each item of a batch, bfloat16 with float32 accumulation. The
// target text of the generator, written by hand.
//
// Tile 128 x 256 x 64, 4 stages; 3 warp groups: group 0 loads, groups 1 and 2 multiply, 64 rows x 256 columns each.
// Cluster of 2 CTAs with the same columns: each loads half of the b tile into both. Persistent; tiles in groups of 8 clusters
// of rows. The epilogue stores sub-tiles of 64 columns by TMA while the loads of the next tile run.
//
// Shared memory            bytes            Barriers         arrivals  expected bytes  phases
//       0  a tiles     4 x 16384            full  x 4               1           49152  1 per 64 of K
//   65536  b tiles     4 x 32768            empty x 4   2 groups x 2 CTAs              1 per 64 of K
//  196608  c tiles     2 groups x 2 x 8192  named 1, 2: the 128 threads of a consumer group
//  229376  full, empty 8 x 8           residual x 2 a group  1        8192  1 per sub-tile
//  229440  residual    2 groups x 2 x 8
//  229504  bias tiles  2 groups x 1024
// Registers of a thread: 40 in group 0; 232 in groups 1 and 2: acc 128 x f32, bias_part 2 x f32, out 8 x bf16.
// The activations stand there for every accumulator, 40 KB of which one branch runs: a loop would move registers, and each
// instruction for an element counts. The bias is loaded before the main loop, which covers its latency, and the first two
// residual tiles too.
#include <tileops/sm_90a.h>

namespace tileops {

struct gemm_sm_90a_params {
  tensor_map a, b, c, residual;  // boxes of 64 x 128, 64 x 128, 64 x 64 and 64 x 64 of one item, swizzle of 128 bytes
  const void* bias;
  int32_t batch, m, n, k;
  int32_t bias_dtype;  // kNone without
  int32_t activation;  // 0 none, 1 relu, 2 gelu, 3 gelu_tanh, 4 silu
  int32_t has_residual;
};

// gemm.py:34: with T.Kernel(threads=config.threads, cluster=(config.cluster, 1)):
TILEOPS_KERNEL(gemm_sm_90a_bf16_bf16_128x256x64_nt, gemm_sm_90a_params, 384, 1) {
  constexpr int kStages = 4, kGroup = 8;
  const int group = warp_group_index();
  const int rank = cluster_rank();
  // gemm.py:35: a_tile = T.alloc_shared(of_a(bm, bk), config.x)
  const auto a_tile = shared<bf16>(0);
  // gemm.py:36: b_tile = T.alloc_shared(of_b(bk, bn), config.x)
  const auto b_tile = shared<bf16>(65536);
  const auto full = shared<mbarrier>(229376);
  const auto empty = shared<mbarrier>(229408);
  if (thread_index() == 0) {
    TILEOPS_UNROLL
    for (int s = 0; s < kStages; ++s) {
      init_barrier(full + s, 1, site(1));
      init_barrier(empty + s, 4, site(1));
      init_barrier(shared<mbarrier>(229440) + s, 1, site(1));
    }
    fence_barrier_init(site(1));
  }
  cluster_sync(site(1));

  // Tiles of the cluster: 256 rows of c, of which each CTA has 128.
  const int rows = (p.m + 255) / 256;
  const int columns = (p.n + 255) / 256;
  const int tiles = p.batch * rows * columns;
  const int steps = (p.k + 63) / 64;
  const int first = static_cast<int>(block_index_x()) / 2;
  const int clusters = static_cast<int>(grid_size_x()) / 2;

  if (group == 0) {
    register_budget_decrease<40>(site(2));
    if (warp_index() == 0 && elect_one(site(3))) {
      int stage = 0, phase = 0;
      // gemm.py:42: for item, row, column in T.Persistent((batch, T.ceildiv(m, bm), T.ceildiv(n, bn)), **order):
      TILEOPS_NO_UNROLL
      for (int tile = first; tile < tiles; tile += clusters) {
        const int item = tile / (rows * columns);
        const int place = tile % (rows * columns);
        const int section = place / (kGroup * columns);
        const int height = min(rows - section * kGroup, kGroup);
        const int rest = place - section * kGroup * columns;
        const int row = ((section * kGroup + rest % height) * 2 + rank) * 128;
        const int column = rest / height * 256;
        // gemm.py:44: for i in T.Pipelined(T.ceildiv(k, bk), num_stages=config.stages, pending=1):
        TILEOPS_NO_UNROLL
        for (int k = 0; k < steps; ++k) {
          // gemm.py:45: T.copy(a[(item, *of_a(row * bm, i * bk))], a_tile)
          wait(empty + stage, phase ^ 1, site(4));
          arrive_expect_bytes(full + stage, 49152, site(5));
          tma_load(a_tile + stage * 8192, p.a, at(k * 64, row, item), full + stage, site(5));
          // gemm.py:46: T.copy(b[(item, *of_b(i * bk, column * bn))], b_tile, multicast=config.cluster > 1)
          tma_load_multicast(b_tile + stage * 16384 + rank * 8192, p.b, at(k * 64, column + rank * 128, item), full + stage, 3, site(6));
          if (++stage == kStages) { stage = 0; phase ^= 1; }
        }
      }
    }
    sync_warp(site(3));
  } else {
    register_budget_increase<232>(site(2));
    const int thread = thread_index() % 128;
    const int lane = thread % 32;
    // gemm.py:37: c_tile = T.alloc_shared((bm, sub), config.y)
    const auto c_tile = shared<bf16>(196608) + (group - 1) * 8192;
    const int c_offset = (thread / 32 * 16 + lane % 16) * 64;
    // gemm.py:38: bias_row = T.alloc_shared((bn,), "float32")
    const auto bias_tile = shared<float>(229504) + (group - 1) * 256;
    const auto residual_full = shared<mbarrier>(229440) + (group - 1) * 2;
    // gemm.py:39: acc = T.alloc_fragment((bm, bn), "float32")
    Fragment<float, 128> acc;
    // gemm.py:41: out = T.alloc_fragment((bm, sub), config.y)
    Fragment<bf16, 8> out;
    // gemm.py:40: bias_part = T.alloc_fragment((bn,), "float32")
    Fragment<float, 2> bias_part;
    int stage = 0, phase = 0, residual_phase = 0;
    // gemm.py:42: for item, row, column in T.Persistent((batch, T.ceildiv(m, bm), T.ceildiv(n, bn)), **order):
    TILEOPS_NO_UNROLL
    for (int tile = first; tile < tiles; tile += clusters) {
      const int item = tile / (rows * columns);
      const int place = tile % (rows * columns);
      const int section = place / (kGroup * columns);
      const int height = min(rows - section * kGroup, kGroup);
      const int rest = place - section * kGroup * columns;
      const int row = ((section * kGroup + rest % height) * 2 + rank) * 128;
      const int column = rest / height * 256;
      // gemm.py:59: with T.If(residual.given):
      // gemm.py:60: T.copy(residual[item, row * bm, column * bn + e * sub], c_tile)
      if (p.has_residual != 0 && thread == 0) {
        store_wait_read<0>(site(13));
        TILEOPS_UNROLL
        for (int e = 0; e < 2; ++e) {
          arrive_expect_bytes(residual_full + e, 8192, site(14));
          tma_load(c_tile + e * 4096, p.residual, at(column + e * 64, row + (group - 1) * 64, item), residual_full + e, site(14));
        }
      }
      // gemm.py:43: T.copy(bias[column * bn], bias_part, fill=0.0, absent=0.0)
      TILEOPS_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int col = column + thread + i * 128;
        if (col >= p.n) fill<1>(bias_part, i, 0.0f);
        else if (p.bias_dtype == kBf16) load_global_as_float<1>(bias_part, i, global<bf16>(p.bias), col, site(19));
        else if (p.bias_dtype == kF16) load_global_as_float<1>(bias_part, i, global<f16>(p.bias), col, site(20));
        else if (p.bias_dtype == kF32) load_global_as_float<1>(bias_part, i, global<float>(p.bias), col, site(21));
      }
      int before = 0;
      // gemm.py:44: for i in T.Pipelined(T.ceildiv(k, bk), num_stages=config.stages, pending=1):
      TILEOPS_NO_UNROLL
      for (int k = 0; k < steps; ++k) {
        // gemm.py:47: T.gemm(a_tile, b_tile, acc, **transposes, policy=T.GemmWarpPolicy.FullRow, clear_accum=i == 0)
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

      // gemm.py:48: with T.If(bias.given):
      if (p.bias_dtype != kNone) {
        // gemm.py:49: T.copy(bias_part, bias_row)
        TILEOPS_UNROLL
        for (int i = 0; i < 2; ++i) store_shared(bias_tile, thread + i * 128, bias_part[i], site(15));
        named_barrier_sync(group, 128, site(15));
        // gemm.py:50: for r, j in T.Parallel(bm, bn):
        // gemm.py:51: acc[r, j] = acc[r, j] + bias_row[j]
        TILEOPS_UNROLL
        for (int i = 0; i < 128; ++i) acc[i] = acc[i] + load_shared(bias_tile, i / 4 * 8 + lane % 4 * 2 + i % 2, site(16));
      }

      // gemm.py:52: with T.If(activation != 0):
      if (p.activation != 0) {
        // gemm.py:53: for code, function in ACTIVATIONS.items():
        // gemm.py:54: with T.If(activation == code):
        if (p.activation == 1) {
          // gemm.py:55: for r, j in T.Parallel(bm, bn):
          // gemm.py:56: acc[r, j] = function(acc[r, j])
          TILEOPS_UNROLL
          for (int i = 0; i < 128; ++i) acc[i] = relu(acc[i]);
        } else if (p.activation == 2) {
          // gemm.py:55: for r, j in T.Parallel(bm, bn):
          // gemm.py:56: acc[r, j] = function(acc[r, j])
          TILEOPS_UNROLL
          for (int i = 0; i < 128; ++i) acc[i] = gelu(acc[i]);
        } else if (p.activation == 3) {
          // gemm.py:55: for r, j in T.Parallel(bm, bn):
          // gemm.py:56: acc[r, j] = function(acc[r, j])
          TILEOPS_UNROLL
          for (int i = 0; i < 128; ++i) acc[i] = gelu_tanh(acc[i]);
        } else {
          // gemm.py:55: for r, j in T.Parallel(bm, bn):
          // gemm.py:56: acc[r, j] = function(acc[r, j])
          TILEOPS_UNROLL
          for (int i = 0; i < 128; ++i) acc[i] = silu(acc[i]);
        }
      }

      // gemm.py:57: for e in T.Pipelined(bn // sub, num_stages=2):
      // gemm.py:58: piece = acc[:, e * sub : e * sub + sub]
      TILEOPS_UNROLL
      for (int e = 0; e < 4; ++e) {
        // gemm.py:59: with T.If(residual.given):
        // gemm.py:60: T.copy(residual[item, row * bm, column * bn + e * sub], c_tile)
        if (thread == 0 && p.has_residual == 0) store_wait_read<1>(site(10));
        named_barrier_sync(group, 128, site(10));
        if (p.has_residual != 0) {
          wait(residual_full + e % 2, (residual_phase >> e % 2) & 1, site(17));
          residual_phase ^= 1 << e % 2;
        }
        TILEOPS_UNROLL
        for (int j = 0; j < 4; ++j) {
          const auto c_row = c_tile + e % 2 * 4096 + c_offset + ((j * 2 + lane / 16) ^ lane % 8) * 8;
          // gemm.py:61: for r, j in T.Parallel(bm, sub):
          // gemm.py:62: piece[r, j] = piece[r, j] + c_tile[r, j]
          if (p.has_residual != 0) {
            load_matrix<4>(out, 0, c_row, site(18));
            TILEOPS_UNROLL
            for (int i = 0; i < 8; ++i) acc[e * 32 + j * 8 + i] = acc[e * 32 + j * 8 + i] + to_float(out, i);
          }
          // gemm.py:63: for r, j in T.Parallel(bm, sub):
          // gemm.py:64: out[r, j] = piece[r, j]
          TILEOPS_UNROLL
          for (int i = 0; i < 8; i += 2) round_pair(out, i, acc[e * 32 + j * 8 + i], acc[e * 32 + j * 8 + i + 1]);
          // gemm.py:65: T.copy(out, c_tile)
          store_matrix<4>(c_row, out, 0, site(11));
        }
        // gemm.py:66: T.copy(c_tile, c[item, row * bm, column * bn + e * sub])
        fence_async_shared(site(11));
        named_barrier_sync(group, 128, site(12));
        if (thread == 0) {
          tma_store(p.c, at(column + e * 64, row + (group - 1) * 64, item), c_tile + e % 2 * 4096, site(12));
          store_commit(site(12));
          // gemm.py:60: T.copy(residual[item, row * bm, column * bn + e * sub], c_tile)
          if (p.has_residual != 0 && e < 2) {
            store_wait_read<0>(site(13));
            arrive_expect_bytes(residual_full + e, 8192, site(14));
            tma_load(c_tile + e * 4096, p.residual, at(column + e * 64 + 128, row + (group - 1) * 64, item), residual_full + e, site(14));
          }
        }
      }
    }
    if (thread == 0) store_wait<0>(site(12));
  }
  cluster_sync(site(13));
}

}  // namespace tileops
