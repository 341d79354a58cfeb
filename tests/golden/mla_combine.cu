// Merges the pieces of the requests that mla_decode.cu has split: out = sum of w out_piece, w = exp2(lse_piece - lse).
// The target text of the generator, written by hand.
//
// A warp for each row of 512 columns, 8 warps; grid (rows / 8, requests). A request in one piece has no splits: its CTAs leave.
// Registers of a thread: total 16 x f32, x_tile 16 x f32, y_tile 16 x bf16. Shared memory: 0 bytes.
#include <tileops/sm_90a.h>

namespace tileops {

struct mla_combine_params {
  bf16* out;                   // [B, rows, 512]
  float* lse;                  // [B, heads, queries], natural logarithm
  const float* partial;        // [splits, rows, 512]
  const float* partial_lse;    // [splits, rows], base 2
  const int32_t* first_split;  // [B + 1]
  int32_t rows;                // queries * heads
  int32_t heads;
  int32_t queries;
};

TILEOPS_KERNEL(mla_combine, mla_combine_params, 256, 4) {
  const int64_t request = block_index_y();
  const int row = static_cast<int>(block_index_x()) * 8 + warp_index();
  const int lane = lane_index();
  Fragment<int32_t, 1> first, last;
  Fragment<float, 1> value;
  load_global<1>(first, 0, p.first_split, request, site(1));
  load_global<1>(last, 0, p.first_split, request + 1, site(2));
  if (first[0] < last[0] && row < p.rows) {
    // The LSE of the row: -inf if no piece has a key.
    float peak = -infinity();
    TILEOPS_NO_UNROLL
    for (int split = first[0] + lane; split < last[0]; split += 32) {
      load_global<1>(value, 0, p.partial_lse, static_cast<int64_t>(split) * p.rows + row, site(3));
      peak = max(peak, value[0]);
    }
    peak = reduce_lanes<Max, 32>(peak, site(4));
    const float base = peak > -infinity() ? peak : 0.0f;
    float sum = 0.0f;
    TILEOPS_NO_UNROLL
    for (int split = first[0] + lane; split < last[0]; split += 32) {
      load_global<1>(value, 0, p.partial_lse, static_cast<int64_t>(split) * p.rows + row, site(5));
      sum += exp2(value[0] - base);
    }
    sum = reduce_lanes<Sum, 32>(sum, site(6));
    const float lse = base + log2(sum);
    const float subtracted = sum > 0.0f ? lse : 0.0f;

    Fragment<float, 16> total, x_tile;  // columns 4 lane + 128 i + 0..3
    Fragment<bf16, 16> y_tile;
    fill<16>(total, 0, 0.0f);
    TILEOPS_NO_UNROLL
    for (int split = first[0]; split < last[0]; ++split) {
      const int64_t piece = static_cast<int64_t>(split) * p.rows + row;
      load_global<1>(value, 0, p.partial_lse, piece, site(7));
      TILEOPS_UNROLL
      for (int i = 0; i < 4; ++i) load_global<4>(x_tile, i * 4, p.partial, piece * 512 + lane * 4 + i * 128, site(8));
      const float weight = exp2(value[0] - subtracted);
      TILEOPS_UNROLL
      for (int i = 0; i < 16; ++i) total[i] = fma(x_tile[i], weight, total[i]);
    }
    TILEOPS_UNROLL
    for (int i = 0; i < 16; i += 2) round_pair(y_tile, i, total[i], total[i + 1]);
    TILEOPS_UNROLL
    for (int i = 0; i < 4; ++i) store_global<4>(p.out, (request * p.rows + row) * 512 + lane * 4 + i * 128, y_tile, i * 4, site(9));
    if (lane == 0) {
      value[0] = lse * 0.69314718f;
      store_global<1>(p.lse, (request * p.heads + row % p.heads) * p.queries + row / p.heads, value, 0, site(10));
    }
  }
}

}  // namespace tileops
