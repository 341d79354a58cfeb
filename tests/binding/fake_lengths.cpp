// The made-up CUDA's attention over requests of different lengths: a launch computes the tiles that were listed, in double, from
// the tensor maps, addresses and numbers that it was given. Every row must be in one of them.
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "fake_attention.h"
#include "flash_attention_portable_lengths_params.h"
#include "flash_attention_portable_paged_params.h"
#include "flash_attention_sm_90a_lengths_params.h"
#include "flash_attention_sm_90a_paged_params.h"

namespace {

using fake::Heads;
using tileops::AttentionVariant;
using Lengths = tileops::flash_attention_sm_90a_lengths_params;
using Paged = tileops::flash_attention_sm_90a_paged_params;
using PortableLengths = tileops::flash_attention_portable_lengths_params;
using PortablePaged = tileops::flash_attention_portable_paged_params;

// Keys one behind the other.
struct Packed {
  Heads k, v;
  int64_t count;

  std::pair<int64_t, int64_t> place(int64_t first_key, int64_t key) const {
    if (first_key + key >= count) abort();
    return {0, first_key + key};
  }
};

Packed keys_of(const AttentionVariant& v, const Lengths& p) {
  const int type = int(v.x);
  return {fake::of_map(p.k, 1, p.kv_heads, p.sk, v.head_dim, type, v.maps[1]),
          fake::of_map(p.v, 1, p.kv_heads, p.sk, v.head_dim_v, type, v.maps[2]), p.sk};
}

Packed keys_of(const AttentionVariant& v, const PortableLengths& p) {
  const int type = int(v.x);
  return {fake::of_strides(p.k, p.k_stride, p.head_dim, v.head_dim, type),
          fake::of_strides(p.v, p.v_stride, p.head_dim_v, v.head_dim_v, type), p.sk};
}

template <typename Params>
fake::Pages<Params> keys_of(const AttentionVariant& v, const Params& p) {
  return {p, p.requests, v.bn, v.head_dim, v.head_dim_v, v.maps, int(v.x)};
}

template <typename Params>
Heads queries_of(const AttentionVariant& v, const Params& p) {
  if constexpr (std::is_same_v<decltype(p.q), tileops::tensor_map>) {
    if (reinterpret_cast<uintptr_t>(&p) % 64 != 0) abort();
    return fake::of_map(p.q, 1, p.heads, p.sq, v.head_dim, int(v.x), v.maps[0]);
  } else {
    return fake::of_strides(p.q, p.q_stride, p.head_dim, v.head_dim, int(v.x));
  }
}

// As tileops_dsl/kernels/flash_attention.py names them.
struct Tile {
  int32_t token, row, q_len, first_key, k_len, at, none[2];
};

template <typename Params, typename Keys>
void compute(const AttentionVariant& v, const Params& p, const Heads& q, const Keys& keys, const Heads& out, const Tile& tile,
             int64_t h, int64_t r) {
  const int64_t kv = h / (p.heads / p.kv_heads), token = tile.token + r, own = tile.row + r + tile.k_len - tile.q_len;
  const int64_t first = v.window ? std::max<int64_t>(own - p.window_left, 0) : 0;
  const int64_t last = v.window ? own + p.window_right : v.causal ? own : tile.k_len;
  const auto product = [&](int64_t key) {
    const auto [page, slot] = keys.place(tile.first_key, key);
    double sum = 0;
    for (int64_t c = 0; c < q.columns; ++c) sum += q(0, h, token, c) * keys.k(page, kv, slot, c);
    return sum;
  };
  const auto value = [&](int64_t key, int64_t c) {
    const auto [page, slot] = keys.place(tile.first_key, key);
    return keys.v(page, kv, slot, c);
  };
  const auto [values, lse] = fake::attend(fake::scores_of(p, v.softcap, v.sinks, h, token), first,
                                          std::min<int64_t>(last + 1, tile.k_len), out.columns, product, value);
  for (int64_t c = 0; c < out.columns; ++c) out.put(0, h, token, c, values[c]);
  fake::store(p.lse, h * p.lse_stride[1] + (tile.at + r) * p.lse_stride[2], 3, lse);
}

template <typename Params>
void run(const AttentionVariant& v, const cudaLaunchConfig_t& config, const Params& p) {
  const auto keys = keys_of(v, p);
  const Heads q = queries_of(v, p);
  const Heads out = fake::of_strides(p.out, p.out_stride, p.head_dim_v, v.head_dim_v, int(v.x));
  const int32_t count = *static_cast<const int32_t*>(p.tile_count);
  const bool numbers = p.batches == 1 && p.tiles_stride[0] == 8 && p.tiles_stride[1] == 1 && count <= p.most_tiles &&
                       p.sinks_stride[1] == 0 && config.numAttrs == 0 && int64_t(config.gridDim.x) <= int64_t(p.most_tiles) * p.heads;
  const int64_t pairs = (out.columns + 1) / 2 * 2;  // a store writes two columns
  const bool room = (p.heads == 1 || p.out_stride[1] >= pairs) && (p.sq == 1 || p.out_stride[2] >= pairs);
  const bool columns = q.columns == keys.k.columns && out.columns == keys.v.columns && room;
  if (!numbers || !columns) abort();
  std::vector<int> listed(p.sq);
  for (int32_t n = 0; n < count; ++n) {
    const Tile& tile = static_cast<const Tile*>(p.tiles)[n];
    for (int64_t r = 0; r < std::min(v.bm, tile.q_len - tile.row); ++r) {
      ++listed.at(tile.token + r);
      for (int64_t h = 0; h < p.heads; ++h) compute(v, p, q, keys, out, tile, h, r);
    }
  }
  if (std::count(listed.begin(), listed.end(), 1) != p.sq) abort();
  fake::record_launch(v.name, {config.gridDim.x, count, p.most_tiles});
}

}  // namespace

namespace fake {

void launch_lengths(const AttentionVariant& v, const cudaLaunchConfig_t& config, const void* params) {
  const bool tma = v.target == tileops::Target::sm_90a;
  if (tma && v.paged) return run(v, config, *static_cast<const Paged*>(params));
  if (tma) return run(v, config, *static_cast<const Lengths*>(params));
  if (v.paged) return run(v, config, *static_cast<const PortablePaged*>(params));
  run(v, config, *static_cast<const PortableLengths*>(params));
}

}  // namespace fake
