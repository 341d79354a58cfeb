// FlashAttention forward with a causal mask: O = softmax(scale Q K^T) V and the LSE of each row. Query i sees the keys
// j <= i + Sk - Sq; a row that sees none gives 0 and -inf. Head dimension 128, bf16, any lengths.
//
// Tile: 128 queries of one head, key blocks of 128, from the last to the first; those that the mask cuts come first.
// Persistent and dynamic: the producer takes the next tile from a counter and hands it on in shared memory, with Q. Tiles are
// in sections of heads whose keys and values fit L2, in a section the longest first and the heads fastest, so that the last
// tiles to finish are short ones and what runs together reads the same keys. The last CTA leaves the counter at 0.
// Roles: warp group 0 loads (one thread); warp groups 1 and 2 each compute 64 of the 128 rows.
//   A consumer issues S(i) = Q K(i)^T and behind it O += P(i+1) V(i+1), and does the softmax of S(i) while the latter runs.
//   The two consumers take turns at issuing, so that the products of one fill the softmax of the other.
// Shared memory, 196712 bytes (boxes of 64 columns, swizzle of 128 bytes):
//        0  Q        2 groups x 2 boxes x 64 rows      32768
//    32768  K        2 stages x 2 boxes x 128 rows     65536
//    98304  V        2 stages x 2 boxes x 128 rows     65536
//   163840  O        2 groups x 2 boxes x 64 rows      32768
//   196608  barriers 12 x 8                               96
//   196704  tile     2 numbers                             8
// Registers of a thread: 24 in group 0; 240 in groups 1 and 2, of which s 64 x f32, o 64 x f32, p 64 x bf16: 160.
// Barriers (arrivals):
//   q_full[2] 1 (+16384 bytes, or none: no more tiles), q_empty[2] 4 (the warps of consumer 0, 1, after the tile's last S)
//   k_full[2], v_full[2] 1 (+32768 bytes), k_empty[2], v_empty[2] 8 (the consumer warps)
//   named 1, 2: the turn of consumer 0, 1 (256 = 128 that wait + 128 that hand it over); named 3, 4: one consumer (128)
#include <tileops/sm_90a.h>

namespace tileops {

struct flash_attention_causal_params {
  tensor_map q, o;   // (D, H, Sq, B), box (64, 1, 64, 1)
  tensor_map k, v;   // (D, Hk, Sk, B), box (64, 1, 128, 1)
  float* lse;        // [B, H, Sq]
  int32_t* counter;  // 0 before and after
  int32_t seqlen_q, seqlen_k;
  int32_t heads, heads_per_kv;  // of queries; and how many share a head of keys and values
  int32_t tiles_m, tiles;       // blocks of 128 queries; the same times heads and batches, at least the CTAs
  int32_t section;              // heads (of all batches) whose keys and values fit L2
  float scale_log2;             // scale * log2(e), positive
};

// flash_attention.py:52: with T.Kernel(threads=config.threads):
TILEOPS_KERNEL(flash_attention_causal, flash_attention_causal_params, 384, 1) {
  constexpr int kBlockN = 128;
  constexpr int kBoxQ = 64 * 64, kBoxKV = kBlockN * 64, kBoxO = 64 * 64, kTileKV = 2 * kBoxKV;  // elements
  // flash_attention.py:53: q_tile = T.alloc_shared((bm, d), config.x)
  const auto q_tiles = shared<bf16>(0);
  // flash_attention.py:54: k_tile = T.alloc_shared((bn, d), config.x)
  const auto k_tiles = shared<bf16>(32768);
  // flash_attention.py:55: v_tile = T.alloc_shared((bn, dv), config.x)
  const auto v_tiles = shared<bf16>(98304);
  // flash_attention.py:57: o_tile = T.alloc_shared((bm, sub), config.x, alias=q_tile if config.o_over_q else None)
  const auto o_tiles = shared<bf16>(163840);
  const auto q_full = shared<mbarrier>(196608);
  const auto q_empty = shared<mbarrier>(196624);
  const auto k_full = shared<mbarrier>(196640);
  const auto k_empty = shared<mbarrier>(196656);
  const auto v_full = shared<mbarrier>(196672);
  const auto v_empty = shared<mbarrier>(196688);
  const auto next_tiles = shared<int32_t>(196704);
  const int first_tile = static_cast<int>(block_index_x());
  const int ctas = static_cast<int>(grid_size_x());

  if (thread_index() == 0) {
    TILEOPS_UNROLL
    for (int i = 0; i < 2; ++i) {
      init_barrier(q_full + i, 1, site(1));
      init_barrier(q_empty + i, 4, site(2));
      init_barrier(k_full + i, 1, site(3));
      init_barrier(k_empty + i, 8, site(4));
      init_barrier(v_full + i, 1, site(5));
      init_barrier(v_empty + i, 8, site(6));
    }
    fence_barrier_init(site(7));
  }
  sync_threads(site(8));

  if (warp_group_index() == 0) {
    // Producer. Its order is the one in which the consumers need the tiles: K(n-1), Q, K(n-2), V(n-1), ..., K(0), V(1), V(0).
    register_budget_decrease<24>(site(9));
    if (warp_index() == 0 && elect_one(site(10))) {
      int k_stage = 0, v_stage = 0;
      int k_parity = 1, v_parity = 1, q_parity = 1;  // of the phases that empty a tile: the first waits pass
      Fragment<int32_t, 1> zero;
      zero[0] = 0;
      int tile = first_tile;
      // flash_attention.py:67: blocks_of_all = tile_count[0] if config.lengths else T.ceildiv(sq, bm)
      // flash_attention.py:68: order = {"longest_first": section} if config.longest_first else {"zigzag": hides_rows}
      // flash_attention.py:69: for batch, head, block in T.Persistent((batches, heads, blocks_of_all), **order):
      TILEOPS_NO_UNROLL
      while (tile < p.tiles) {
        int next = 0;
        const int section = tile / (p.section * p.tiles_m);
        const int width = min(p.section, p.tiles / p.tiles_m - section * p.section);
        const int place = tile - section * p.section * p.tiles_m;
        // flash_attention.py:74: token, row, q_len, first_key, k_len = block * bm, block * bm, sq, None, sk
        const int m = (p.tiles_m - 1 - place / width) * 128;
        const int head = (section * p.section + place % width) % p.heads;
        const int batch = (section * p.section + place % width) / p.heads;
        // flash_attention.py:75: kv_head = head // (heads // kv_heads)
        const int kv_head = head / p.heads_per_kv;
        // flash_attention.py:79: seen = T.min(row + bm + k_len - q_len, k_len) if config.causal else k_len  # keys that the last row sees
        const int keys = min(p.seqlen_k, m + 128 + p.seqlen_k - p.seqlen_q);  // that the last row sees
        // flash_attention.py:80: blocks = T.max(T.ceildiv(seen, bn), 1)  # a tile that sees no key has one block, all masked
        const int blocks = keys > 0 ? (keys + kBlockN - 1) / kBlockN : 1;  // a tile that sees no key has one block, all masked
        // flash_attention.py:91: for i in T.Pipelined(blocks, num_stages=config.stages, turns=config.turns):
        TILEOPS_NO_UNROLL
        for (int block = blocks; block >= 0; --block) {
          // flash_attention.py:92: key = (of_step(i) if config.window else blocks - 1 - i) * bn
          // flash_attention.py:96: of_page, place = batch, first_key + key if config.lengths else key
          // flash_attention.py:97: T.copy(k[of_page, kv_head, place, 0], k_tile, eviction_policy="evict_last")
          if (block > 0) {
            const auto k_tile = k_tiles + k_stage * kTileKV;
            const int row = (block - 1) * kBlockN;
            wait(k_empty + k_stage, k_parity, site(11));
            arrive_expect_bytes(k_full + k_stage, 2 * kTileKV, site(12));
            tma_load<L2::kEvictLast>(k_tile, p.k, at(0, kv_head, row, batch), k_full + k_stage, site(13));
            tma_load<L2::kEvictLast>(k_tile + kBoxKV, p.k, at(64, kv_head, row, batch), k_full + k_stage, site(14));
            k_stage ^= 1;
            k_parity ^= k_stage == 0;
          }
          // flash_attention.py:85: T.copy(q[batch, head, token, 0], q_tile, eviction_policy="evict_first")
          if (block == blocks) {
            TILEOPS_UNROLL
            for (int g = 0; g < 2; ++g) {
              const auto q_tile = q_tiles + g * 2 * kBoxQ;
              wait(q_empty + g, q_parity, site(15));
              store_shared(next_tiles, g, tile, site(16));
              arrive_expect_bytes(q_full + g, 4 * kBoxQ, site(17));
              tma_load<L2::kEvictFirst>(q_tile, p.q, at(0, head, m + g * 64, batch), q_full + g, site(18));
              tma_load<L2::kEvictFirst>(q_tile + kBoxQ, p.q, at(64, head, m + g * 64, batch), q_full + g, site(19));
            }
            q_parity ^= 1;
          } else {
            if (block == 0) next = ctas + fetch_add(p.counter, 0, 1, site(20));  // the wait hides it
            // flash_attention.py:98: T.copy(v[of_page, kv_head, place, 0], v_tile, eviction_policy="evict_last")
            const auto v_tile = v_tiles + v_stage * kTileKV;
            const int row = block * kBlockN;
            wait(v_empty + v_stage, v_parity, site(21));
            arrive_expect_bytes(v_full + v_stage, 2 * kTileKV, site(22));
            tma_load<L2::kEvictLast>(v_tile, p.v, at(0, kv_head, row, batch), v_full + v_stage, site(23));
            tma_load<L2::kEvictLast>(v_tile + kBoxKV, p.v, at(64, kv_head, row, batch), v_full + v_stage, site(24));
            v_stage ^= 1;
            v_parity ^= v_stage == 0;
          }
        }
        if (next == p.tiles - 1 + ctas) store_global<1>(p.counter, 0, zero, 0, site(25));
        tile = next;
      }
      TILEOPS_UNROLL
      for (int g = 0; g < 2; ++g) {
        wait(q_empty + g, q_parity, site(26));
        store_shared(next_tiles, g, -1, site(27));
        arrive(q_full + g, site(28));
      }
    }
  } else {
    register_budget_increase<240>(site(29));
    const int group = warp_group_index() - 1;
    const int thread = thread_index() % 128;
    const int lane = thread % 32;
    const auto q = matrix_at<Swizzle::k128, Major::kK, 1024>(q_tiles + group * 2 * kBoxQ);
    const auto k_blocks = matrix_at<Swizzle::k128, Major::kK, 1024>(k_tiles);
    const auto v = matrix_at<Swizzle::k128, Major::kMN, 1024, 2 * kBoxKV>(v_tiles);
    const auto o_tile = o_tiles + group * 2 * kBoxO;
    const auto o_row = o_tile + (thread / 32 * 16 + lane % 16) * 64;
    const float scale_log2 = p.scale_log2;
    // flash_attention.py:60: s = T.alloc_fragment((bm, bn), "float32")
    // flash_attention.py:61: p_half = T.alloc_fragment((bm, bn), config.x)
    Fragment<float, kBlockN / 2> s;
    Fragment<bf16, kBlockN / 2> p_tile;
    // flash_attention.py:62: o = T.alloc_fragment((bm, dv), "float32")
    // flash_attention.py:63: o_half = T.alloc_fragment((bm, sub), config.x)
    Fragment<float, 64> o;
    Fragment<bf16, 64> o_half;
    // flash_attention.py:64: top, shift, factor, sums, total, row_lse = (T.alloc_fragment(*row_vector) for _ in range(6))
    Fragment<float, 2> peak, shift, factor, total;  // of the two rows of this thread; total: its part of the row sums
    Fragment<float, 4> chain;
    Fragment<float, 1> lse;
    Fragment<int32_t, 2> visible;  // the last column that a row sees, from this thread's first column on
    int stage = 0, parity = 0, q_parity = 0;
    if (group == 1) named_barrier_arrive(1, 256, site(30));  // the first turn is consumer 0's

    // flash_attention.py:67: blocks_of_all = tile_count[0] if config.lengths else T.ceildiv(sq, bm)
    // flash_attention.py:69: for batch, head, block in T.Persistent((batches, heads, blocks_of_all), **order):
    TILEOPS_NO_UNROLL
    while (true) {
      wait(q_full + group, q_parity, site(31));
      int next = 0;  // lane 0 reads, since it is the one that hands the barrier back
      if (lane == 0) next = load_shared(next_tiles, group, site(32));
      const int tile = shuffle(next, 0, site(33));
      if (tile < 0) break;
      const int section = tile / (p.section * p.tiles_m);
      const int width = min(p.section, p.tiles / p.tiles_m - section * p.section);
      const int place = tile - section * p.section * p.tiles_m;
      // flash_attention.py:74: token, row, q_len, first_key, k_len = block * bm, block * bm, sq, None, sk
      const int m = (p.tiles_m - 1 - place / width) * 128 + group * 64;
      const int head = (section * p.section + place % width) % p.heads;
      const int batch = (section * p.section + place % width) / p.heads;
      const int row = m + thread / 32 * 16 + lane / 4;  // this thread's first
      const int last_key = m + p.seqlen_k - p.seqlen_q;  // the last key that the consumer's first row sees
      // flash_attention.py:79: seen = T.min(row + bm + k_len - q_len, k_len) if config.causal else k_len  # keys that the last row sees
      const int keys = min(p.seqlen_k, m - group * 64 + 128 + p.seqlen_k - p.seqlen_q);  // that the last row sees
      // flash_attention.py:80: blocks = T.max(T.ceildiv(seen, bn), 1)  # a tile that sees no key has one block, all masked
      const int blocks = keys > 0 ? (keys + kBlockN - 1) / kBlockN : 1;  // a tile that sees no key has one block, all masked
      // flash_attention.py:81: whole = (
      // flash_attention.py:84: masked = blocks - whole if config.causal else T.min(blocks - whole, 1)
      const int unmasked = last_key >= 0 ? (last_key + 1) / kBlockN : 0;  // key blocks that all rows of the consumer see

      // flash_attention.py:91: for i in T.Pipelined(blocks, num_stages=config.stages, turns=config.turns):
      // The last block: S and softmax, with no product of this consumer to overlap.
      const auto k_block = k_blocks + stage * 2 * kTileKV;
      // flash_attention.py:88: queries = q_half if config.q_registers else q_tile
      // flash_attention.py:99: T.gemm(queries, k_tile, s, transpose_B=True, policy=by_rows, clear_accum=True)
      wait(k_full + stage, parity, site(34));
      named_barrier_sync(1 + group, 256, site(35));
      wgmma_fence(site(36));
      TILEOPS_UNROLL
      for (int k = 0; k < 8; ++k)
        wgmma<kBlockN>(s, 0, q + (k / 4 * 8192 + k % 4 * 32), k_block + (k / 4 * 2 * kBoxKV + k % 4 * 32), k != 0, site(37));
      wgmma_commit(site(38));
      named_barrier_arrive(2 - group, 256, site(39));
      wgmma_wait<0>(site(40));
      fence_operand(s);
      if (lane == 0) {
        arrive(k_empty + stage, site(41));
        if (blocks == 1) arrive(q_empty + group, site(42));
      }

      // flash_attention.py:103: with T.If(i < masked):
      // flash_attention.py:104: for r, c in T.Parallel(bm, bn):
      // flash_attention.py:105: limit = T.min(row + r + 1 + k_len - q_len + right, k_len) if hides_rows else k_len
      TILEOPS_UNROLL
      for (int r = 0; r < 2; ++r) visible[r] = last_key + row - m + r * 8 - (blocks - 1) * kBlockN - lane % 4 * 2;
      // flash_attention.py:106: s[r, c] = T.if_then_else(key + c < limit, s[r, c], -T.infinity())
      TILEOPS_UNROLL
      for (int i = 0; i < kBlockN / 2; ++i)
        if (i / 4 * 8 + i % 2 > visible[i / 2 % 2]) s[i] = -infinity();
      // flash_attention.py:114: for r in T.Parallel(bm):
      // flash_attention.py:119: factor[r] = shift[r]
      // flash_attention.py:115: top[r] = (shift[r] + T.if_then_else(shift[r] < 0.0, 0.0, SLACK)) * unscale  # above which it moves
      // flash_attention.py:116: with T.If((i == 0) | T.any_above(s, top), "grows") as grows:
      // This text, by hand, is older than the slack: its maximum moves in each block.
      // flash_attention.py:117: T.reduce_max(s, top)
      TILEOPS_UNROLL
      for (int c = 0; c < 4; ++c) chain[c] = reduce_registers<Max, kBlockN / 8, 4>(s, c);
      // flash_attention.py:86: T.fill(shift, LOWEST)
      // flash_attention.py:87: T.fill(sums, 0.0)
      // flash_attention.py:118: for r in T.Parallel(bm):
      // flash_attention.py:120: shift[r] = T.max(shift[r], top[r] * scale_log2)
      // flash_attention.py:121: factor[r] = T.exp2(factor[r] - shift[r])
      // flash_attention.py:122: sums[r] = sums[r] * factor[r]
      TILEOPS_UNROLL
      for (int r = 0; r < 2; ++r) {
        peak[r] = reduce_lanes<Max, 4>(max(chain[2 * r], chain[2 * r + 1]), site(43));
        shift[r] = peak[r] == -infinity() ? 0.0f : peak[r] * scale_log2;
        total[r] = 0.0f;
      }
      // flash_attention.py:108: for r, c in T.Parallel(bm, bn):
      // flash_attention.py:131: exponentials(s[:, config.early : bn], shift, scale_log2, sums)
      // flash_attention.py:175: T.reduce_sum(scores, sums, clear=False, partial=True)
      TILEOPS_UNROLL
      for (int i = 0; i < kBlockN / 2; ++i) {
        s[i] = exp2(fma(s[i], scale_log2, -shift[i / 2 % 2]));
        total[i / 2 % 2] += s[i];
      }
      // flash_attention.py:108: for r, c in T.Parallel(bm, bn):
      // flash_attention.py:132: rounded(s[:, config.early : bn], p_half[:, config.early : bn])
      TILEOPS_UNROLL
      for (int i = 0; i < kBlockN / 2; i += 2) round_pair(p_tile, i, s[i], s[i + 1]);

      int accumulate = 0;
      int block = blocks - 2;
      // flash_attention.py:91: for i in T.Pipelined(blocks, num_stages=config.stages, turns=config.turns):
      TILEOPS_NO_UNROLL
      for (; block >= unmasked; --block) {
        const auto v_block = v + stage * 2 * kTileKV;
        const int v_stage = stage, v_parity = parity;
        stage ^= 1;
        parity ^= stage == 0;
        const auto k_block = k_blocks + stage * 2 * kTileKV;
        // flash_attention.py:99: T.gemm(queries, k_tile, s, transpose_B=True, policy=by_rows, clear_accum=True)
        wait(k_full + stage, parity, site(44));
        named_barrier_sync(1 + group, 256, site(45));
        fence_operand(o);
        fence_operand(p_tile);
        wgmma_fence(site(46));
        TILEOPS_UNROLL
        for (int k = 0; k < 8; ++k)
          wgmma<kBlockN>(s, 0, q + (k / 4 * 8192 + k % 4 * 32), k_block + (k / 4 * 2 * kBoxKV + k % 4 * 32), k != 0, site(47));
        wgmma_commit(site(48));
        // flash_attention.py:136: T.gemm(p_half, v_tile, o, policy=by_rows, clear_accum=i == 0, stage=1)
        wait(v_full + v_stage, v_parity, site(49));
        wgmma_fence(site(50));
        TILEOPS_UNROLL
        for (int k = 0; k < kBlockN / 16; ++k)
          wgmma<128>(o, 0, p_tile, 8 * k, v_block + k * 2048, k > 0 || accumulate, site(51));
        wgmma_commit(site(52));
        named_barrier_arrive(2 - group, 256, site(53));
        accumulate = 1;
        wgmma_wait<1>(site(54));
        fence_operand(s);
        if (lane == 0) {
          arrive(k_empty + stage, site(55));
          if (block == 0) arrive(q_empty + group, site(56));
        }

        // flash_attention.py:103: with T.If(i < masked):
        // flash_attention.py:104: for r, c in T.Parallel(bm, bn):
        // flash_attention.py:105: limit = T.min(row + r + 1 + k_len - q_len + right, k_len) if hides_rows else k_len
        TILEOPS_UNROLL
        for (int r = 0; r < 2; ++r) visible[r] += kBlockN;
        // flash_attention.py:106: s[r, c] = T.if_then_else(key + c < limit, s[r, c], -T.infinity())
        TILEOPS_UNROLL
        for (int i = 0; i < kBlockN / 2; ++i)
          if (i / 4 * 8 + i % 2 > visible[i / 2 % 2]) s[i] = -infinity();
        // flash_attention.py:114: for r in T.Parallel(bm):
        // flash_attention.py:119: factor[r] = shift[r]
        // flash_attention.py:117: T.reduce_max(s, top)
        TILEOPS_UNROLL
        for (int c = 0; c < 4; ++c) chain[c] = reduce_registers<Max, kBlockN / 8, 4>(s, c);
        // flash_attention.py:118: for r in T.Parallel(bm):
        // flash_attention.py:120: shift[r] = T.max(shift[r], top[r] * scale_log2)
        // flash_attention.py:121: factor[r] = T.exp2(factor[r] - shift[r])
        // flash_attention.py:122: sums[r] = sums[r] * factor[r]
        TILEOPS_UNROLL
        for (int r = 0; r < 2; ++r) {
          const float before = peak[r];
          peak[r] = max(before, reduce_lanes<Max, 4>(max(chain[2 * r], chain[2 * r + 1]), site(57)));
          shift[r] = peak[r] == -infinity() ? 0.0f : peak[r] * scale_log2;
          factor[r] = exp2(fma(before, scale_log2, -shift[r]));
          total[r] *= factor[r];
        }
        // flash_attention.py:108: for r, c in T.Parallel(bm, bn):
        // flash_attention.py:131: exponentials(s[:, config.early : bn], shift, scale_log2, sums)
        // flash_attention.py:175: T.reduce_sum(scores, sums, clear=False, partial=True)
        TILEOPS_UNROLL
        for (int i = 0; i < kBlockN / 2; ++i) {
          s[i] = exp2(fma(s[i], scale_log2, -shift[i / 2 % 2]));
          total[i / 2 % 2] += s[i];
        }
        fence_operand(s);
        before_wait(total[0] + total[1], site(58));

        wgmma_wait<0>(site(59));
        fence_operand(o);
        fence_operand(p_tile);
        if (lane == 0) arrive(v_empty + v_stage, site(60));
        // flash_attention.py:127: with T.If(i > 0), T.If(grows):  # before, o holds nothing
        // flash_attention.py:128: steps.times(o, factor)
        TILEOPS_UNROLL
        for (int i = 0; i < 64; ++i) o[i] *= factor[i / 2 % 2];
        // flash_attention.py:108: for r, c in T.Parallel(bm, bn):
        // flash_attention.py:132: rounded(s[:, config.early : bn], p_half[:, config.early : bn])
        TILEOPS_UNROLL
        for (int i = 0; i < kBlockN / 2; i += 2) round_pair(p_tile, i, s[i], s[i + 1]);
      }
      // flash_attention.py:91: for i in T.Pipelined(blocks, num_stages=config.stages, turns=config.turns):
      TILEOPS_NO_UNROLL
      for (; block >= 0; --block) {
        const auto v_block = v + stage * 2 * kTileKV;
        const int v_stage = stage, v_parity = parity;
        stage ^= 1;
        parity ^= stage == 0;
        const auto k_block = k_blocks + stage * 2 * kTileKV;
        // flash_attention.py:99: T.gemm(queries, k_tile, s, transpose_B=True, policy=by_rows, clear_accum=True)
        wait(k_full + stage, parity, site(61));
        named_barrier_sync(1 + group, 256, site(62));
        fence_operand(o);
        fence_operand(p_tile);
        wgmma_fence(site(63));
        TILEOPS_UNROLL
        for (int k = 0; k < 8; ++k)
          wgmma<kBlockN>(s, 0, q + (k / 4 * 8192 + k % 4 * 32), k_block + (k / 4 * 2 * kBoxKV + k % 4 * 32), k != 0, site(64));
        wgmma_commit(site(65));
        // flash_attention.py:136: T.gemm(p_half, v_tile, o, policy=by_rows, clear_accum=i == 0, stage=1)
        wait(v_full + v_stage, v_parity, site(66));
        wgmma_fence(site(67));
        TILEOPS_UNROLL
        for (int k = 0; k < kBlockN / 16; ++k)
          wgmma<128>(o, 0, p_tile, 8 * k, v_block + k * 2048, k > 0 || accumulate, site(68));
        wgmma_commit(site(69));
        named_barrier_arrive(2 - group, 256, site(70));
        accumulate = 1;
        wgmma_wait<1>(site(71));
        fence_operand(s);
        if (lane == 0) {
          arrive(k_empty + stage, site(72));
          if (block == 0) arrive(q_empty + group, site(73));
        }

        // flash_attention.py:114: for r in T.Parallel(bm):
        // flash_attention.py:119: factor[r] = shift[r]
        // flash_attention.py:117: T.reduce_max(s, top)
        TILEOPS_UNROLL
        for (int c = 0; c < 4; ++c) chain[c] = reduce_registers<Max, kBlockN / 8, 4>(s, c);
        // flash_attention.py:118: for r in T.Parallel(bm):
        // flash_attention.py:120: shift[r] = T.max(shift[r], top[r] * scale_log2)
        // flash_attention.py:121: factor[r] = T.exp2(factor[r] - shift[r])
        // flash_attention.py:122: sums[r] = sums[r] * factor[r]
        TILEOPS_UNROLL
        for (int r = 0; r < 2; ++r) {
          const float before = peak[r];
          peak[r] = max(before, reduce_lanes<Max, 4>(max(chain[2 * r], chain[2 * r + 1]), site(74)));
          shift[r] = peak[r] * scale_log2;
          factor[r] = exp2(fma(before, scale_log2, -shift[r]));
          total[r] *= factor[r];
        }
        // flash_attention.py:108: for r, c in T.Parallel(bm, bn):
        // flash_attention.py:131: exponentials(s[:, config.early : bn], shift, scale_log2, sums)
        // flash_attention.py:175: T.reduce_sum(scores, sums, clear=False, partial=True)
        TILEOPS_UNROLL
        for (int i = 0; i < kBlockN / 2; ++i) {
          s[i] = exp2(fma(s[i], scale_log2, -shift[i / 2 % 2]));
          total[i / 2 % 2] += s[i];
        }
        fence_operand(s);
        before_wait(total[0] + total[1], site(75));

        wgmma_wait<0>(site(76));
        fence_operand(o);
        fence_operand(p_tile);
        if (lane == 0) arrive(v_empty + v_stage, site(77));
        // flash_attention.py:127: with T.If(i > 0), T.If(grows):  # before, o holds nothing
        // flash_attention.py:128: steps.times(o, factor)
        TILEOPS_UNROLL
        for (int i = 0; i < 64; ++i) o[i] *= factor[i / 2 % 2];
        // flash_attention.py:108: for r, c in T.Parallel(bm, bn):
        // flash_attention.py:132: rounded(s[:, config.early : bn], p_half[:, config.early : bn])
        TILEOPS_UNROLL
        for (int i = 0; i < kBlockN / 2; i += 2) round_pair(p_tile, i, s[i], s[i + 1]);
      }

      // flash_attention.py:136: T.gemm(p_half, v_tile, o, policy=by_rows, clear_accum=i == 0, stage=1)
      // The last product needs no turn.
      const auto v_block = v + stage * 2 * kTileKV;
      wait(v_full + stage, parity, site(78));
      fence_operand(o);
      fence_operand(p_tile);
      wgmma_fence(site(79));
      TILEOPS_UNROLL
      for (int k = 0; k < kBlockN / 16; ++k)
        wgmma<128>(o, 0, p_tile, 8 * k, v_block + k * 2048, k > 0 || accumulate, site(80));
      wgmma_commit(site(81));

      // While it runs: the row sums and the LSE; and the staging has been read for the tile before.
      // flash_attention.py:139: T.reduce_sum(sums, total)
      const int64_t lse_row = (static_cast<int64_t>(batch) * p.heads + head) * p.seqlen_q;
      // flash_attention.py:140: for r in T.Parallel(bm):
      // flash_attention.py:151: factor[r] = T.if_then_else(total[r] == 0.0, 0.0, T.reciprocal(total[r]))
      // flash_attention.py:152: row_lse[r] = (shift[r] + T.log2(total[r])) * math.log(2)
      // flash_attention.py:157: T.copy(row_lse, lse[batch, head, row])
      TILEOPS_UNROLL
      for (int r = 0; r < 2; ++r) {
        total[r] = reduce_lanes<Sum, 4>(total[r], site(82));
        factor[r] = total[r] == 0.0f ? 0.0f : reciprocal(total[r]);
        lse[0] = fma(peak[r], scale_log2, log2(total[r])) * 0.6931471805599453f;
        if (lane % 4 == 0 && row + r * 8 < p.seqlen_q) store_global<1>(p.lse, lse_row + row + r * 8, lse, 0, site(83));
      }
      if (thread == 0) store_wait_read<0>(site(84));
      named_barrier_sync(3 + group, 128, site(85));

      wgmma_wait<0>(site(86));
      fence_operand(o);
      fence_operand(p_tile);
      if (lane == 0) arrive(v_empty + stage, site(87));
      stage ^= 1;
      parity ^= stage == 0;
      q_parity ^= 1;
      // flash_attention.py:158: for e in T.Pipelined(dv // sub, num_stages=2):
      // flash_attention.py:159: piece = o[:, e * sub : e * sub + sub]
      // flash_attention.py:160: for r, c in T.Parallel(bm, sub):
      // flash_attention.py:161: o_half[r, c] = piece[r, c] * factor[r]
      TILEOPS_UNROLL
      for (int i = 0; i < 64; i += 2) round_pair(o_half, i, o[i] * factor[i / 2 % 2], o[i + 1] * factor[i / 2 % 2]);
      // flash_attention.py:165: T.copy(o_half, o_tile)
      TILEOPS_UNROLL
      for (int j = 0; j < 8; ++j)  // 16 columns, in pieces of 8 that the swizzle permutes
        store_matrix<4>(o_row + (j / 4 * kBoxO + ((j % 4 * 2 + lane / 16) ^ lane % 8) * 8), o_half, 8 * j, site(88));
      fence_async_shared(site(89));
      named_barrier_sync(3 + group, 128, site(90));
      if (thread == 0) {
        // flash_attention.py:166: T.copy(o_tile, out[batch, head, row, e * sub])
        tma_store(p.o, at(0, head, m, batch), o_tile, site(91));
        tma_store(p.o, at(64, head, m, batch), o_tile + kBoxO, site(92));
        store_commit(site(93));
      }
    }
    if (group == 0) named_barrier_sync(1, 256, site(94));  // takes the last turn, which nobody uses
    if (thread == 0) store_wait<0>(site(95));              // shared memory outlives the stores that read it
  }
}

}  // namespace tileops
