// MLA decode over a paged cache: O = softmax(scale Q K^T) V, one key/value head; V is the first 512 of the 576 columns of K.
// The first target text of the generator, written by hand; mla_combine.cu merges the pieces of requests that are split. Since then
// the program has a group that loads, and the values' products in the order of the pages (tileops_dsl/kernels/NOTES.md, "MLA
// decode"): comments that look like its statements are those of its first form.
//
// Tile: 64 rows (queries x heads) by 64 tokens (a page), two pages an iteration. Grid (row tiles, parts): a part is a piece of
// the concatenated pages of all requests. 256 threads, one CTA on a multiprocessor.
// Roles: two warp groups, both consumers and producers. Group 0 owns the scores of page 0 and the left half of O (columns
//   0..255), group 1 the scores of page 1 and the right half. Each half takes both tiles of P: its own from registers, the
//   other's from shared memory. The running maximum passes from group to group: m1 of the last iteration -> m0 -> m1.
//   A box (64 tokens x 64 columns) of a page is refilled by the group that knows that it has had its last reader.
//   If the pages are odd in number, the last one's partner lies outside the cache: TMA fills it with zeros, and it is masked.
// Shared memory (boxes of 64 columns, swizzle 128B):
//        0  Q            9 boxes x 64 rows    73728   box 8 becomes P1 once it is in registers; boxes 0..7 stage O
//    73728  K0, K1   2 x 9 boxes x 64 tokens 147456
//   221184  P0           1 box  x 64 rows      8192
//   229376  m0, factor0, m1, factor1, peak1, l0, l1   7 x 64 x f32
//   231168  barriers 19 x 8                     152   231320 bytes in all
// Registers of a thread: o 128 x f32, s 32 x f32 (scores, then P), p_tile 32 x bf16 (16), q_rope 32 x bf16 (16): 192 of 255.
// Barriers (arrivals):
//   q_full 2 (+ 40960 bytes by group 0: boxes 0..3 and 8; + 32768 by group 1: boxes 4..7)
//   full0[9], full1[9] 1 (+ 8192 bytes): boxes 0..3 and K0's box 8 by group 0, boxes 4..7 and K1's box 8 by group 1
//   named 1: m0 and factor0 are there, 2: m1 and factor1, 3: P0, 4: P1 (256 = 128 that wait + 128 that announce)
//   named 5: the end of a piece (256 wait); 6, 7: within group 0, 1 (128)
#include <tileops/sm_90a.h>

namespace tileops {

struct mla_decode_params {
  tensor_map q;                  // (576, rows, B), box (64, 64, 1)
  tensor_map kv;                 // (576, 64, pages), box (64, 64, 1)
  tensor_map out;                // (512, rows, B), box (64, 64, 1)
  float* lse;                    // [B, heads, queries], natural logarithm
  float* partial;                // [splits, rows, 512], normalised within the piece
  float* partial_lse;            // [splits, rows], base 2
  const int32_t* block_table;    // [B, table_stride]
  const int32_t* cache_seqlens;  // [B]
  const int32_t* parts;          // [parts, 8]: first request, its first page, last request, the end of its pages, first piece
  const int32_t* first_split;    // [B]: the place of a request's piece 0 among the splits
  int64_t table_stride;
  int32_t rows;                  // queries * heads
  int32_t heads;
  int32_t queries;
  int32_t causal;
  float scale_log2;              // scale * log2(e), positive
};

// with T.Kernel(T.ceildiv(rows, bm), parts, threads=256) as (tile, part):
TILEOPS_KERNEL(mla_decode, mla_decode_params, 256, 1) {
  constexpr int kBox = 64 * 128;  // bytes
  // q_tile, first = T.alloc_shared((bm, d), x, box=64), tile * bm
  // k0, k1 = T.alloc_shared((bn, d), x, box=64), T.alloc_shared((bn, d), x, box=64)
  // p0, p1 = T.alloc_shared((bm, bn), x), T.alloc_shared((bm, bn), x, alias=q_tile[:, rope])
  // o_tile = T.alloc_shared((bm, dv), x, alias=q_tile[:, 0:dv])
  constexpr int kQ = 0, kK0 = 9 * kBox, kK1 = 18 * kBox, kP0 = 27 * kBox, kP1 = 8 * kBox, kRows = 28 * kBox;
  constexpr int kMax0Ready = 1, kMax1Ready = 2, kP0Ready = 3, kP1Ready = 4, kEnd = 5, kGroup = 6;
  constexpr float kSlack = 8.0f;    // a maximum that is exceeded by no more than this stays: O is rarely rescaled
  constexpr float kNoMax = -1e30f;  // finite, so that a row that has seen no key has exp2(-inf - kNoMax) = 0
  // peak0, factor0, sums0, peak1, factor1, sums1, top1 = (T.alloc_shared(*row) for _ in range(7))
  const auto row_max0 = shared<float>(kRows), row_factor0 = shared<float>(kRows + 256);
  const auto row_max1 = shared<float>(kRows + 512), row_factor1 = shared<float>(kRows + 768);
  const auto row_peak1 = shared<float>(kRows + 1024), row_sums = shared<float>(kRows + 1280);
  const auto q_full = shared<mbarrier>(kRows + 1792);
  const auto full0 = q_full + 1, full1 = q_full + 10;

  const int group = warp_group_index();
  const int warp = warp_index() % 4;  // of the group; one thread of its warp 0 loads and stores
  const int lane = lane_index();
  const int tile_row = static_cast<int>(block_index_x()) * 64;
  const int row0 = warp * 16 + lane / 4;  // this thread's rows of the tile
  const int row1 = row0 + 8;
  const int column = lane % 4 * 2;  // and the first of its two columns of each 8
  // Where this lane's 16 bytes of four 8 x 8 matrices of a box lie; 16 columns further: ^ 32.
  const int matrix = (warp * 16 + lane / 8 % 2 * 8 + lane % 8) * 128 + (lane / 16 ^ lane % 8) * 16;
  // A row sees the keys below the length plus this. The first row of the tile sees the fewest.
  const int beyond0 = p.causal ? min((tile_row + row0) / p.heads + 1 - p.queries, 0) : 0;
  const int beyond1 = p.causal ? min((tile_row + row1) / p.heads + 1 - p.queries, 0) : 0;
  const int beyond_tile = p.causal ? tile_row / p.heads + 1 - p.queries : 0;
  const float scale_log2 = p.scale_log2;

  if (thread_index() == 0) {
    init_barrier(q_full, 2, site(1));
    TILEOPS_UNROLL
    for (int box = 0; box < 18; ++box) init_barrier(full0 + box, 1, site(2));
    fence_barrier_init(site(3));
    prefetch_tensor_map(p.q, site(4));
    prefetch_tensor_map(p.kv, site(5));
    prefetch_tensor_map(p.out, site(6));
  }
  sync_threads(site(7));

  const auto q_tile = matrix_at_offset<Swizzle::k128, Major::kK, 1024>(kQ);
  const auto k0_tile = matrix_at_offset<Swizzle::k128, Major::kK, 1024>(kK0);
  const auto k1_tile = matrix_at_offset<Swizzle::k128, Major::kK, 1024>(kK1);
  const auto p0_tile = matrix_at_offset<Swizzle::k128, Major::kK, 1024>(kP0);
  const auto p1_tile = matrix_at_offset<Swizzle::k128, Major::kK, 1024>(kP1);
  const auto v0_tile = matrix_at_offset<Swizzle::k128, Major::kMN, 1024, kBox>(kK0);
  const auto v1_tile = matrix_at_offset<Swizzle::k128, Major::kMN, 1024, kBox>(kK1);
  // with T.ws(0, 1):
  // o, o_half = T.alloc_fragment((bm, dv // 2), f32), T.alloc_fragment((bm, dv // 2), x)
  // s, p_half, late = T.alloc_fragment((bm, bn), f32), T.alloc_fragment((bm, bn), x), T.alloc_fragment((bm, bn), x)
  // peak, top, sums, factor, other = (T.alloc_fragment(*row) for _ in range(5))
  // q_rope, limit = T.alloc_fragment((bm, d - dv), x), T.alloc_fragment((bm,), "int32")
  Fragment<float, 128> o;
  Fragment<float, 32> s;
  Fragment<bf16, 32> p_tile, q_rope;
  Fragment<bf16, 8> columns;  // 16 of a row, on their way to shared memory
  Fragment<float, 2> values;
  Fragment<int32_t, 8> part;
  Fragment<int32_t, 1> length, page0, page1, split;
  load_global<8>(part, 0, p.parts, block_index_y() * 8, site(8));
  int phase = 0, q_phase = 0, request = part[0], begin = part[1], end = 0;
  int64_t slot = 0;  // of a piece of a split request
  float max0 = kNoMax, max1 = kNoMax, sum0 = 0.0f, sum1 = 0.0f;
  bool whole = true;

  // for request in T.Pipelined(schedule[part, 0], schedule[part, 2] + 1, num_stages=1):
  TILEOPS_NO_UNROLL
  for (;;) {
    // The first two pages of the next piece are loaded while the last one is stored.
    if (request <= part[2]) {
      // length = T.let("length", cache_seqlens[request])
      load_global<1>(length, 0, p.cache_seqlens, request, site(9));
      // begin = T.let("begin", T.if_then_else(request == schedule[part, 0], schedule[part, 1], 0))
      // blocks = T.max(T.ceildiv(length, bn), 1)
      // end = T.let("end", T.if_then_else(request == schedule[part, 2], schedule[part, 3], blocks))
      end = request == part[2] ? part[3] : length[0] > 64 ? (length[0] + 63) / 64 : 1;
      // place0, place1 = steps.blocks(config, block_table, request, i, end, length, page, unit, inverse)
      load_global<1>(page0, 0, p.block_table, request * p.table_stride + begin, site(10));
      load_global<1>(page1, 0, p.block_table, request * p.table_stride + min(begin + 1, end - 1), site(11));
      if (begin + 1 >= end) page1[0] = -1;
      if (warp == 0 && elect_one(site(12))) {
        // with T.ws(0):
        // steps.load(kv_cache, place0, k0, rope, left)
        // steps.load(kv_cache, place1, k1, left)
        // with T.ws(1):
        // steps.load(kv_cache, place1, k1, rope, right)
        // steps.load(kv_cache, place0, k0, right)
        arrive_expect_bytes(full0 + (group * 9 + 8), kBox, site(13));
        tma_load<L2::kEvictFirst>(shared<bf16>(kK0 + (group * 9 + 8) * kBox), p.kv,
                                  at(512, 0, group == 0 ? page0[0] : page1[0]), full0 + (group * 9 + 8), site(14));
        TILEOPS_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int box = group * 4 + i;
          arrive_expect_bytes(full0 + box, kBox, site(15));
          tma_load<L2::kEvictFirst>(shared<bf16>(kK0 + box * kBox), p.kv, at(box * 64, 0, page0[0]), full0 + box, site(16));
          arrive_expect_bytes(full1 + box, kBox, site(17));
          tma_load<L2::kEvictFirst>(shared<bf16>(kK1 + box * kBox), p.kv, at(box * 64, 0, page1[0]), full1 + box, site(18));
        }
      }
    }
    if (request > part[0]) {
      // for group, half, others in ((0, left, sums1), (1, right, sums0)):
      // with T.ws(group):
      // T.copy(others, other)
      // steps.normalise(o, top, other, peak, factor)
      sum0 += load_shared(row_sums, 64 - group * 64 + row0, site(19));
      sum1 += load_shared(row_sums, 64 - group * 64 + row1, site(20));
      const float inverse0 = sum0 > 0.0f ? reciprocal(sum0) : 0.0f, inverse1 = sum1 > 0.0f ? reciprocal(sum1) : 0.0f;
      const float lse0 = max0 + log2(sum0), lse1 = max1 + log2(sum1);
      TILEOPS_UNROLL
      for (int i = 0; i < 128; ++i) o[i] *= i / 2 % 2 ? inverse1 : inverse0;
      // with T.If(whole):
      // steps.assign(o_half, o)
      // T.copy(o_half, o_tile[:, half])
      if (whole) {
        TILEOPS_UNROLL
        for (int k = 0; k < 16; ++k) {
          TILEOPS_UNROLL
          for (int i = 0; i < 8; i += 2) round_pair(columns, i, o[k * 8 + i], o[k * 8 + i + 1]);
          store_matrix<4>(shared<bf16>(kQ + (group * 4 + k / 4) * kBox + (matrix ^ k % 4 * 32)), columns, 0, site(21));
        }
        fence_async_shared(site(22));
        named_barrier_sync(group == 0 ? kGroup : kGroup + 1, 128, site(23));
        if (warp == 0 && elect_one(site(24))) {
          TILEOPS_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int box = group * 4 + i;
            // T.copy(o_tile[:, half], out[request, first, half.start])
            tma_store(p.out, at(box * 64, tile_row, request - 1), shared<bf16>(kQ + box * kBox), site(25));
          }
          store_commit(site(26));
        }
      } else {
        // with T.If(~whole):
        // T.copy(o, partial[piece, first, half.start])
        const int64_t first = (slot * p.rows + tile_row + row0) * 512 + group * 256 + column;
        TILEOPS_UNROLL
        for (int i = 0; i < 128; i += 2) {
          if (tile_row + (i / 2 % 2 ? row1 : row0) < p.rows) {
            store_global<2>(p.partial, first + i / 2 % 2 * 4096 + i / 4 * 8, o, i, site(27));
          }
        }
      }
      // with T.ws(0):
      if (group == 0 && lane % 4 == 0) {
        TILEOPS_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int row = tile_row + (i == 0 ? row0 : row1);
          values[i] = i == 0 ? lse0 : lse1;
          // with T.If(~whole):
          // T.copy(factor, partial_lse[piece, first])
          if (row < p.rows && !whole) store_global<1>(p.partial_lse, slot * p.rows + row, values, i, site(28));
          values[i] *= 0.69314718f;
          // with T.If(whole):
          // for r in T.Parallel(bm):
          // lse[request, (first + r) % heads, (first + r) // heads] = factor[r] * 0.6931471805599453  # ln 2
          const int64_t head = static_cast<int64_t>(request - 1) * p.heads + row % p.heads;
          if (row < p.rows && whole) store_global<1>(p.lse, head * p.queries + row / p.heads, values, i, site(29));
        }
      }
    }
    if (request > part[2]) break;

    if (warp == 0 && elect_one(site(30))) {
      store_wait_read<0>(site(31));
      // with T.ws(0):
      // steps.load(q, (request, first), q_tile, left, rope)
      // with T.ws(1):
      // steps.load(q, (request, first), q_tile, right)
      arrive_expect_bytes(q_full, group == 0 ? 5 * kBox : 4 * kBox, site(32));
      TILEOPS_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int box = group * 4 + i;
        tma_load<L2::kEvictFirst>(shared<bf16>(kQ + box * kBox), p.q, at(box * 64, tile_row, request), q_full, site(33));
      }
      if (group == 0) tma_load<L2::kEvictFirst>(shared<bf16>(kP1), p.q, at(512, tile_row, request), q_full, site(34));
    }
    // with T.ws(0, 1):
    // steps.limits(limit, first, length, end * bn, heads, sq, causal)
    // fewest = T.let("fewest", T.min(length + steps.beyond(first, heads, sq, causal), end * bn))  # that a row sees
    const int limit0 = min(length[0] + beyond0, end * 64), limit1 = min(length[0] + beyond1, end * 64);
    const int limit_tile = min(length[0] + beyond_tile, end * 64);
    // T.fill(peak, -1e30)  # finite, so that a row that has seen no key has P = exp2(-inf + 1e30) = 0
    // T.fill(sums, 0.0)
    max0 = max1 = kNoMax;
    sum0 = sum1 = 0.0f;
    wait(q_full, q_phase, site(35));
    q_phase ^= 1;
    // T.copy(q_tile[:, rope], q_rope)
    TILEOPS_UNROLL
    for (int k = 0; k < 4; ++k) load_matrix<4>(q_rope, k * 8, shared<bf16>(kP1 + (matrix ^ k * 32)), site(36));

    // steps.scores(q_tile, q_rope, k0, s, rope, left, right)
    // steps.scores(q_tile, q_rope, k1, s, rope, right, left)
    // The first scores; the loops compute those of the next iteration. First the box that lands first.
    wait(full0 + (group * 9 + 8), phase, site(37));
    fence_operand(q_rope);
    wgmma_fence(site(38));
    TILEOPS_UNROLL
    for (int k = 0; k < 4; ++k) wgmma<64>(s, 0, q_rope, k * 8, k0_tile + ((group * 9 + 8) * kBox + k * 32), k > 0, site(39));
    TILEOPS_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int box = group * 4 ^ i;
      wait(full0 + (group * 9 + box), phase, site(40));
      wgmma_fence(site(41));
      TILEOPS_UNROLL
      for (int k = 0; k < 4; ++k) {
        wgmma<64>(s, 0, q_tile + (box * kBox + k * 32), k0_tile + ((group * 9 + box) * kBox + k * 32), 1, site(42));
      }
    }
    wgmma_commit(site(43));
    wgmma_wait<0>(site(44));
    fence_operand(s);
    phase ^= 1;
    // place0, place1 = steps.blocks(config, block_table, request, i, end, length, page, unit, inverse)
    load_global<1>(page0, 0, p.block_table, request * p.table_stride + min(begin + 2, end - 1), site(45));
    load_global<1>(page1, 0, p.block_table, request * p.table_stride + min(begin + 3, end - 1), site(46));
    if (begin + 3 >= end) page1[0] = -1;

    // with T.ws(0):
    // with T.ws(0):
    if (group == 0) {
      // for i in T.Pipelined(begin, end, 2, num_stages=1):
      TILEOPS_NO_UNROLL
      for (int page = begin; page < end; page += 2) {
        const int tokens = length[0] - page * 64;  // from this page on
        if (warp == 0 && page + 2 < end && elect_one(site(47))) {
          arrive_expect_bytes(full0 + 8, kBox, site(48));
          // steps.load(kv_cache, place0, k0, rope, left)
          tma_load<L2::kEvictFirst>(shared<bf16>(kK0 + 8 * kBox), p.kv, at(512, 0, page0[0]), full0 + 8, site(49));
        }

        // m0 = max(m1, S0), P0 = exp2(S0 - m0).
        // steps.maximum(s, top, i * bn, limit, fewest)
        if (page * 64 + 64 > limit_tile) {
          TILEOPS_UNROLL
          for (int i = 0; i < 32; ++i) {
            if (page * 64 + column + i / 4 * 8 + i % 2 >= (i / 2 % 2 ? limit1 : limit0)) s[i] = -infinity();
          }
        }
        float peak0 = max(s[0], s[1]), peak1 = max(s[2], s[3]);
        TILEOPS_UNROLL
        for (int i = 4; i < 32; i += 4) {
          peak0 = max(peak0, max(s[i], s[i + 1]));
          peak1 = max(peak1, max(s[i + 2], s[i + 3]));
        }
        peak0 = reduce_lanes<Max, 4>(peak0, site(50)) * scale_log2;
        peak1 = reduce_lanes<Max, 4>(peak1, site(51)) * scale_log2;
        peak0 = peak0 > max0 + kSlack ? peak0 : max0;
        peak1 = peak1 > max1 + kSlack ? peak1 : max1;
        if (lane % 4 == 0) {
          // steps.raise_maximum(top, peak, factor, scale_log2)
          // T.copy(peak, peak0)
          // T.copy(factor, factor0)
          store_shared(row_max0, row0, peak0, site(52));
          store_shared(row_max0, row1, peak1, site(53));
          store_shared(row_factor0, row0, exp2(max0 - peak0), site(54));
          store_shared(row_factor0, row1, exp2(max1 - peak1), site(55));
        }
        sync_warp(site(56));
        named_barrier_arrive(kMax0Ready, 256, site(57));
        // Read back, lest ptxas moves the exponentials before the announcement that the other group waits for.
        max0 = load_shared(row_max0, row0, site(58));
        max1 = load_shared(row_max0, row1, site(59));
        const float factor0 = load_shared(row_factor0, row0, site(60)), factor1 = load_shared(row_factor0, row1, site(61));
        // T.copy(peak0, peak)  # lest the exponentials run ahead of what group 1 waits for
        // steps.take(s, p_half, sums, peak, factor, scale_log2)
        sum0 *= factor0;
        sum1 *= factor1;
        TILEOPS_UNROLL
        for (int i = 0; i < 32; i += 4) {
          s[i] = exp2(fma(s[i], scale_log2, -max0));
          s[i + 1] = exp2(fma(s[i + 1], scale_log2, -max0));
          s[i + 2] = exp2(fma(s[i + 2], scale_log2, -max1));
          s[i + 3] = exp2(fma(s[i + 3], scale_log2, -max1));
          sum0 += s[i] + s[i + 1];
          sum1 += s[i + 2] + s[i + 3];
          round_pair(p_tile, i, s[i], s[i + 1]);
          round_pair(p_tile, i + 2, s[i + 2], s[i + 3]);
        }

        // O += P0 V0. Rows of V beyond the length may hold anything, and 0 * NaN is NaN.
        // with T.If(i > begin):  # before, o holds nothing
        // steps.rescale(o, factor)
        if (any_of_warp(factor0 != 1.0f || factor1 != 1.0f, site(62))) {
          TILEOPS_UNROLL
          for (int i = 0; i < 128; ++i) o[i] *= i / 2 % 2 ? factor1 : factor0;
        }
        // steps.clear_tail(k0, left, length - i * bn)
        if (tokens < 64) {
          TILEOPS_NO_UNROLL
          for (int i = tokens * 16 + lane; i < kBox / 8; i += 32) {
            store_shared(shared<uint64_t>(kK0 + warp * kBox), i, uint64_t{0}, site(63));
          }
          fence_async_shared(site(64));
          named_barrier_sync(kGroup, 128, site(65));
        }
        fence_operand(o);
        fence_operand(p_tile);
        wgmma_fence(site(66));
        // own0 = T.wgmma_gemm(p_half, k0[:, left], o, clear_accum=i == begin)
        TILEOPS_UNROLL
        for (int k = 0; k < 4; ++k) wgmma<256>(o, 0, p_tile, k * 8, v0_tile + k * 2048, k > 0 || page > begin, site(67));
        wgmma_commit(site(68));

        // P0 for the other half, against m1.
        // T.copy(factor1, other)
        // T.copy(peak1, peak)
        named_barrier_sync(kMax1Ready, 256, site(69));
        const float later0 = load_shared(row_factor1, row0, site(70)), later1 = load_shared(row_factor1, row1, site(71));
        max0 = load_shared(row_max1, row0, site(72));
        // steps.times(s, other)
        // steps.assign(late, s)
        // T.copy(late, p0)
        max1 = load_shared(row_max1, row1, site(73));
        TILEOPS_UNROLL
        for (int k = 0; k < 4; ++k) {
          TILEOPS_UNROLL
          for (int i = 0; i < 8; i += 4) {
            round_pair(columns, i, s[k * 8 + i] * later0, s[k * 8 + i + 1] * later0);
            round_pair(columns, i + 2, s[k * 8 + i + 2] * later1, s[k * 8 + i + 3] * later1);
          }
          store_matrix<4>(shared<bf16>(kP0 + (matrix ^ k * 32)), columns, 0, site(74));
        }
        fence_async_shared(site(75));
        named_barrier_arrive(kP0Ready, 256, site(76));
        // steps.scale(sums, other)
        sum0 *= later0;
        sum1 *= later1;

        // T.wait(own0)
        // steps.load(kv_cache, place0, k0, rope, left)
        // The left boxes of K0 are free.
        wgmma_wait<0>(site(77));
        fence_operand(o);
        fence_operand(p_tile);
        if (warp == 0 && page + 2 < end && elect_one(site(78))) {
          TILEOPS_UNROLL
          for (int box = 0; box < 4; ++box) {
            arrive_expect_bytes(full0 + box, kBox, site(79));
            tma_load<L2::kEvictFirst>(shared<bf16>(kK0 + box * kBox), p.kv, at(box * 64, 0, page0[0]), full0 + box, site(80));
          }
        }

        // O += P1 V1.
        // steps.rescale(o, other)
        if (any_of_warp(later0 != 1.0f || later1 != 1.0f, site(81))) {
          TILEOPS_UNROLL
          for (int i = 0; i < 128; ++i) o[i] *= i / 2 % 2 ? later1 : later0;
        }
        // steps.clear_tail(k1, left, length - i * bn - bn)
        if (tokens > 64 && tokens < 128) {
          TILEOPS_NO_UNROLL
          for (int i = (tokens - 64) * 16 + lane; i < kBox / 8; i += 32) {
            store_shared(shared<uint64_t>(kK1 + warp * kBox), i, uint64_t{0}, site(82));
          }
          fence_async_shared(site(83));
          named_barrier_sync(kGroup, 128, site(84));
        }
        fence_operand(o);
        // T.wgmma_gemm(p1, k1[:, left], o)
        named_barrier_sync(kP1Ready, 256, site(85));
        wgmma_fence(site(86));
        TILEOPS_UNROLL
        for (int k = 0; k < 4; ++k) wgmma<256>(o, 0, p1_tile + k * 32, v1_tile + k * 2048, 1, site(87));
        wgmma_commit(site(88));
        // steps.scores(q_tile, q_rope, k0, s, rope, left, right)
        // steps.load(kv_cache, place1, k1, left)
        // The next S0 behind it. After its first box P1 V1 is done: the left boxes of K1 are free.
        if (page + 2 < end) {
          wait(full0 + 8, phase, site(89));
          fence_operand(s);
          fence_operand(q_rope);
          wgmma_fence(site(90));
          TILEOPS_UNROLL
          for (int k = 0; k < 4; ++k) wgmma<64>(s, 0, q_rope, k * 8, k0_tile + (8 * kBox + k * 32), k > 0, site(91));
          wgmma_commit(site(92));
          wgmma_wait<1>(site(93));
          fence_operand(o);
          if (warp == 0 && elect_one(site(94))) {
            TILEOPS_UNROLL
            for (int box = 0; box < 4; ++box) {
              arrive_expect_bytes(full1 + box, kBox, site(95));
              tma_load<L2::kEvictFirst>(shared<bf16>(kK1 + box * kBox), p.kv, at(box * 64, 0, page1[0]),
                                        full1 + box, site(96));
            }
          }
          // place0, place1 = steps.blocks(config, block_table, request, i, end, length, page, unit, inverse)
          load_global<1>(page0, 0, p.block_table, request * p.table_stride + min(page + 4, end - 1), site(97));
          load_global<1>(page1, 0, p.block_table, request * p.table_stride + min(page + 5, end - 1), site(98));
          if (page + 5 >= end) page1[0] = -1;
          TILEOPS_UNROLL
          for (int box = 0; box < 8; ++box) {
            wait(full0 + box, phase, site(99));
            wgmma_fence(site(100));
            TILEOPS_UNROLL
            for (int k = 0; k < 4; ++k) {
              wgmma<64>(s, 0, q_tile + (box * kBox + k * 32), k0_tile + (box * kBox + k * 32), 1, site(101));
            }
          }
          wgmma_commit(site(102));
          phase ^= 1;
        }
        wgmma_wait<0>(site(105));
        fence_operand(s);
        fence_operand(o);
      }
    // with T.ws(1):
    // with T.ws(1):
    } else {
      // for i in T.Pipelined(begin, end, 2, num_stages=1):
      TILEOPS_NO_UNROLL
      for (int page = begin; page < end; page += 2) {
        const int tokens = length[0] - page * 64;  // from this page on
        if (warp == 0 && page + 2 < end && elect_one(site(106))) {
          arrive_expect_bytes(full1 + 8, kBox, site(107));
          // steps.load(kv_cache, place1, k1, rope, right)
          tma_load<L2::kEvictFirst>(shared<bf16>(kK1 + 8 * kBox), p.kv, at(512, 0, page1[0]), full1 + 8, site(108));
        }

        // m1 = max(m0, S1), P1 = exp2(S1 - m1).
        // steps.maximum(s, top, i * bn + bn, limit, fewest)
        if (page * 64 + 128 > limit_tile) {
          TILEOPS_UNROLL
          for (int i = 0; i < 32; ++i) {
            if (page * 64 + 64 + column + i / 4 * 8 + i % 2 >= (i / 2 % 2 ? limit1 : limit0)) s[i] = -infinity();
          }
        }
        float peak0 = max(s[0], s[1]), peak1 = max(s[2], s[3]);
        TILEOPS_UNROLL
        for (int i = 4; i < 32; i += 4) {
          peak0 = max(peak0, max(s[i], s[i + 1]));
          peak1 = max(peak1, max(s[i + 2], s[i + 3]));
        }
        peak0 = reduce_lanes<Max, 4>(peak0, site(109)) * scale_log2;
        peak1 = reduce_lanes<Max, 4>(peak1, site(110)) * scale_log2;
        // Through memory, lest ptxas moves the maximum behind the wait that it is to overlap.
        if (lane % 4 == 0) {
          store_shared(row_peak1, row0, peak0, site(111));
          store_shared(row_peak1, row1, peak1, site(112));
        }
        // T.copy(top, top1)  # through memory, lest ptxas moves the maximum behind the wait for peak0
        // T.copy(peak0, peak)
        // T.copy(top1, top)
        // steps.raise_maximum(top, peak, factor, scale_log2)
        named_barrier_sync(kMax0Ready, 256, site(113));
        max0 = load_shared(row_max0, row0, site(114));
        max1 = load_shared(row_max0, row1, site(115));
        peak0 = load_shared(row_peak1, row0, site(116));
        peak1 = load_shared(row_peak1, row1, site(117));
        peak0 = peak0 > max0 + kSlack ? peak0 : max0;
        peak1 = peak1 > max1 + kSlack ? peak1 : max1;
        if (lane % 4 == 0) {
          // T.copy(peak, peak1)
          // T.copy(factor, factor1)
          // T.copy(peak1, peak)
          store_shared(row_max1, row0, peak0, site(118));
          store_shared(row_max1, row1, peak1, site(119));
          store_shared(row_factor1, row0, exp2(max0 - peak0), site(120));
          store_shared(row_factor1, row1, exp2(max1 - peak1), site(121));
        }
        sync_warp(site(122));
        named_barrier_arrive(kMax1Ready, 256, site(123));
        max0 = load_shared(row_max1, row0, site(124));
        max1 = load_shared(row_max1, row1, site(125));
        // T.copy(factor0, other)
        // steps.scale(factor, other)
        const float factor0 = load_shared(row_factor0, row0, site(126)) * load_shared(row_factor1, row0, site(127));
        const float factor1 = load_shared(row_factor0, row1, site(128)) * load_shared(row_factor1, row1, site(129));
        // steps.take(s, p_half, sums, peak, factor, scale_log2)
        sum0 *= factor0;
        sum1 *= factor1;
        TILEOPS_UNROLL
        for (int i = 0; i < 32; i += 4) {
          s[i] = exp2(fma(s[i], scale_log2, -max0));
          s[i + 1] = exp2(fma(s[i + 1], scale_log2, -max0));
          s[i + 2] = exp2(fma(s[i + 2], scale_log2, -max1));
          s[i + 3] = exp2(fma(s[i + 3], scale_log2, -max1));
          sum0 += s[i] + s[i + 1];
          sum1 += s[i + 2] + s[i + 3];
          round_pair(p_tile, i, s[i], s[i + 1]);
          round_pair(p_tile, i + 2, s[i + 2], s[i + 3]);
        }
        // T.copy(p_half, p1)
        TILEOPS_UNROLL
        for (int k = 0; k < 4; ++k) store_matrix<4>(shared<bf16>(kP1 + (matrix ^ k * 32)), p_tile, k * 8, site(130));

        // O += P1 V1, O += P0 V0.
        // with T.If(i > begin):  # before, o holds nothing
        // steps.rescale(o, factor)
        if (any_of_warp(factor0 != 1.0f || factor1 != 1.0f, site(131))) {
          TILEOPS_UNROLL
          for (int i = 0; i < 128; ++i) o[i] *= i / 2 % 2 ? factor1 : factor0;
        }
        // steps.clear_tail(k0, right, length - i * bn)
        // steps.clear_tail(k1, right, length - i * bn - bn)
        if (tokens < 128 && tokens != 64) {
          TILEOPS_NO_UNROLL
          for (int i = (tokens > 64 ? tokens - 64 : tokens) * 16 + lane; i < kBox / 8; i += 32) {
            store_shared(shared<uint64_t>((tokens > 64 ? kK1 : kK0) + (4 + warp) * kBox), i, uint64_t{0}, site(132));
          }
          fence_async_shared(site(133));
          named_barrier_sync(kGroup + 1, 128, site(134));
        }
        fence_operand(o);
        fence_operand(p_tile);
        wgmma_fence(site(135));
        TILEOPS_UNROLL
        for (int k = 0; k < 4; ++k) {
          // own1 = T.wgmma_gemm(p_half, k1[:, right], o, clear_accum=i == begin)
          wgmma<256>(o, 0, p_tile, k * 8, v1_tile + (4 * kBox + k * 2048), k > 0 || page > begin, site(136));
        }
        wgmma_commit(site(137));
        fence_async_shared(site(138));
        // T.wgmma_gemm(p0, k0[:, right], o)
        named_barrier_sync(kP0Ready, 256, site(139));
        TILEOPS_UNROLL
        for (int k = 0; k < 4; ++k) wgmma<256>(o, 0, p0_tile + k * 32, v0_tile + (4 * kBox + k * 2048), 1, site(140));
        wgmma_commit(site(141));
        named_barrier_arrive(kP1Ready, 256, site(142));

        // T.wait(own1)
        // steps.load(kv_cache, place1, k1, rope, right)
        // The right boxes of K1 are free.
        wgmma_wait<1>(site(143));
        fence_operand(p_tile);
        if (warp == 0 && page + 2 < end && elect_one(site(144))) {
          TILEOPS_UNROLL
          for (int box = 4; box < 8; ++box) {
            arrive_expect_bytes(full1 + box, kBox, site(145));
            tma_load<L2::kEvictFirst>(shared<bf16>(kK1 + box * kBox), p.kv, at(box * 64, 0, page1[0]), full1 + box, site(146));
          }
        }
        // steps.scores(q_tile, q_rope, k1, s, rope, right, left)
        // steps.load(kv_cache, place0, k0, right)
        // The next S1 behind it. After its first box P0 V0 is done: the right boxes of K0 are free.
        if (page + 2 < end) {
          wait(full1 + 8, phase, site(147));
          fence_operand(s);
          fence_operand(q_rope);
          wgmma_fence(site(148));
          TILEOPS_UNROLL
          for (int k = 0; k < 4; ++k) wgmma<64>(s, 0, q_rope, k * 8, k1_tile + (8 * kBox + k * 32), k > 0, site(149));
          wgmma_commit(site(150));
          wgmma_wait<1>(site(151));
          fence_operand(o);
          if (warp == 0 && elect_one(site(152))) {
            TILEOPS_UNROLL
            for (int box = 4; box < 8; ++box) {
              arrive_expect_bytes(full0 + box, kBox, site(153));
              tma_load<L2::kEvictFirst>(shared<bf16>(kK0 + box * kBox), p.kv, at(box * 64, 0, page0[0]),
                                        full0 + box, site(154));
            }
          }
          // place0, place1 = steps.blocks(config, block_table, request, i, end, length, page, unit, inverse)
          load_global<1>(page0, 0, p.block_table, request * p.table_stride + min(page + 4, end - 1), site(155));
          load_global<1>(page1, 0, p.block_table, request * p.table_stride + min(page + 5, end - 1), site(156));
          if (page + 5 >= end) page1[0] = -1;
          TILEOPS_UNROLL
          for (int i = 0; i < 8; ++i) {
            const int box = i ^ 4;
            wait(full1 + box, phase, site(157));
            wgmma_fence(site(158));
            TILEOPS_UNROLL
            for (int k = 0; k < 4; ++k) {
              wgmma<64>(s, 0, q_tile + (box * kBox + k * 32), k1_tile + (box * kBox + k * 32), 1, site(159));
            }
          }
          wgmma_commit(site(160));
          phase ^= 1;
        }
        wgmma_wait<0>(site(163));
        fence_operand(s);
        fence_operand(o);
      }
    }

    // The piece is done when both groups are.
    // for group, mine in ((0, sums0), (1, sums1)):
    // with T.ws(group):
    // T.reduce_sum(sums, top)
    // T.copy(top, mine)
    sum0 = reduce_lanes<Sum, 4>(sum0, site(164));
    sum1 = reduce_lanes<Sum, 4>(sum1, site(165));
    if (lane % 4 == 0) {
      store_shared(row_sums, group * 64 + row0, sum0, site(166));
      store_shared(row_sums, group * 64 + row1, sum1, site(167));
    }
    // whole = T.let("whole", (begin == 0) & (end * bn >= length))
    whole = begin == 0 && end * 64 >= length[0];
    if (!whole) load_global<1>(split, 0, p.first_split, request, site(168));
    // earlier = T.if_then_else(request == schedule[part, 0], schedule[part, 4], 0)
    // piece = T.let("piece", first_split[request] + earlier)
    if (!whole) slot = split[0] + (request == part[0] ? part[4] : 0);
    ++request;
    begin = 0;
    named_barrier_sync(kEnd, 256, site(169));
  }
  if (warp == 0 && elect_one(site(170))) store_wait_read<0>(site(171));  // shared memory goes with the CTA
}

}  // namespace tileops
