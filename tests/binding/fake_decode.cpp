// The made-up CUDA's attention over a paged cache for a few queries of each request: the kernel computes all items whole, in double,
// from the tensor maps, addresses and numbers that it was given; the merge finds nothing to do, in the same places.
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include <algorithm>

#include "attention_decode_portable_params.h"
#include "attention_decode_sm_90a_params.h"
#include "fake_attention.h"
#include "mla_combine_params.h"

namespace tileops {

#define NAMED(target, x, bn, dims, head_dim, head_dim_v, softcap, name)                                                      \
  {"attention_decode", "attention_decode_" #target "_" #x "_64x" #bn "x" dims name, Target::target, DType::x, 64, bn, head_dim, \
   head_dim_v, softcap, 256, 4000 + __COUNTER__, {{64, 64, 128}, {64, bn, 128}, {64, bn, 128}}, &places[__COUNTER__]}
#define DECODE(x, bn, dims, head_dim, head_dim_v, softcap, name) NAMED(sm_90a, x, bn, dims, head_dim, head_dim_v, softcap, name)

static const char places[32] = {};  // their addresses are the kernels

extern const DecodeVariant decode_variants[] = {
    DECODE(bf16, 192, "128", 128, 128, false, ""),
    DECODE(bf16, 64, "64", 64, 64, false, ""),
    DECODE(bf16, 128, "64", 64, 64, false, ""),
    DECODE(bf16, 128, "64", 64, 64, true, "_softcap"),
    DECODE(bf16, 96, "192x128", 192, 128, false, ""),
    DECODE(f16, 128, "64", 64, 64, false, ""),
    NAMED(portable, bf16, 64, "64", 64, 64, false, ""),
    {}};
extern const int decode_variant_count = sizeof(decode_variants) / sizeof(decode_variants[0]) - 1;

}  // namespace tileops

namespace {

using fake::Heads;

// Of the launch whose results are to be merged; items is 0 where there is none.
struct Results {
  void *out, *lse, *partial, *partial_lse, *pieces;
  int64_t items, kv_heads, rows, dim_v, parts, out_stride[3], lse_stride[3];
} launched = {};

template <typename Params>
Heads queries_of(const tileops::DecodeVariant& v, const Params& p) {
  if constexpr (std::is_same_v<decltype(p.q), tileops::tensor_map>) {
    if (reinterpret_cast<uintptr_t>(&p) % 64 != 0) abort();
    return fake::of_map(p.q, p.n, p.kv_heads, p.rows, v.head_dim, int(v.x), v.maps[0]);
  } else {
    return fake::of_strides(p.q, p.q_stride, p.head_dim, v.head_dim, int(v.x));
  }
}

template <typename Params>
void compute(const tileops::DecodeVariant& v, const Params& p, const Heads& q, const fake::Pages<Params>& keys, const Heads& out,
             int64_t request, int64_t head, int64_t row) {
  const int64_t length = static_cast<const int32_t*>(p.cache_seqlens)[request];
  const int64_t own = length - p.rows / p.shared_by + row / p.shared_by;
  const auto product = [&](int64_t key) {
    const auto [page, slot] = keys.place(request, key);
    double sum = 0;
    for (int64_t c = 0; c < q.columns; ++c) sum += q(request, head, row, c) * keys.k(page, head, slot, c);
    return sum;
  };
  const auto value = [&](int64_t key, int64_t c) {
    const auto [page, slot] = keys.place(request, key);
    return keys.v(page, head, slot, c);
  };
  const int64_t first = std::max<int64_t>(own - p.window_left, 0), end = std::min<int64_t>(own + 1 + p.window_right, length);
  const auto [values, lse] = fake::attend(fake::scores_of(p, v.softcap, true, head, row), first, end, out.columns, product, value);
  for (int64_t c = 0; c < out.columns; ++c) out.put(request, head, row, c, values[c]);
  fake::store(p.lse, request * p.lse_stride[0] + head * p.lse_stride[1] + row * p.lse_stride[2], 3, lse);
}

template <typename Params>
void check(const tileops::DecodeVariant& v, const cudaLaunchConfig_t& config, const Params& p) {
  const bool grid = int(config.gridDim.x) == (p.rows + v.bm - 1) / v.bm && int(config.gridDim.y) == p.parts;
  const bool launch = fake::is_dependent(config) == (v.target == tileops::Target::sm_90a) && p.parts >= 1 && p.most_pieces >= 0;
  if (!fake::has_split(p, p.rows, p.dim_v) || !grid || !launch || p.rows > v.bm) abort();
}

template <typename Params>
void run(const tileops::DecodeVariant& v, const cudaLaunchConfig_t& config, const Params& p) {
  check(v, config, p);
  const int type = int(v.x);
  const Heads q = queries_of(v, p);
  const fake::Pages<Params> keys(p, p.n, v.bn, v.head_dim, v.head_dim_v, v.maps, type);
  const Heads out = fake::of_strides(p.out, p.out_stride, p.dim_v, v.head_dim_v, type);
  if (q.columns != keys.k.columns || out.columns != keys.v.columns || out.columns % 8 != 0) abort();
  const int64_t items = int64_t(p.n) * p.kv_heads;
  for (int64_t item = 0; item < items; ++item) {
    for (int64_t row = 0; row < p.rows; ++row) compute(v, p, q, keys, out, item / p.kv_heads, item % p.kv_heads, row);
  }
  fake::record_launch(v.name, {p.n, p.rows, p.page, p.unit, p.most_pieces});
  if (p.most_pieces == 1 || p.parts == 1) return;
  launched = {p.out, p.lse, p.partial, p.partial_lse, p.pieces, items, p.kv_heads, p.rows, p.dim_v, p.parts, {}, {}};
  std::copy(p.out_stride, p.out_stride + 3, launched.out_stride);
  std::copy(p.lse_stride, p.lse_stride + 3, launched.lse_stride);
}

}  // namespace

namespace fake {

void launch_decode(const tileops::DecodeVariant& v, const cudaLaunchConfig_t& config, const void* params) {
  if (v.target == tileops::Target::sm_90a) {
    run(v, config, *static_cast<const tileops::attention_decode_sm_90a_params*>(params));
  } else {
    run(v, config, *static_cast<const tileops::attention_decode_portable_params*>(params));
  }
}

// Of attention_decode, or of mla_decode.
void combine(const tileops::RowVariant& v, const cudaLaunchConfig_t& config, const void* params) {
  const dim3 grid = config.gridDim;
  const auto& m = *static_cast<const tileops::mla_combine_params*>(params);
  if (grid.x != (m.inner + v.rows_per_block - 1) / v.rows_per_block || grid.y != m.outer || grid.z != m.batch) abort();
  const bool strides = m.pieces_stride[0] == 4 && m.pieces_stride[1] == 1 && m.batch == std::min(m.requests, m.parts);
  if (!strides || is_dependent(config) != (v.target == tileops::Target::sm_90a)) abort();
  const Results p = launched;
  launched = {};
  if (p.items == 0) return;
  const bool same = m.out == p.out && m.lse == p.lse && m.partial == p.partial && m.partial_lse == p.partial_lse &&
                    m.requests == p.items && m.outer == 1 && m.inner == p.rows && m.cols == p.dim_v && m.parts == p.parts &&
                    m.pieces == p.pieces;
  if (!same) abort();
  for (int64_t item = 0; item < p.items; ++item) {
    const int64_t request = item / p.kv_heads, head = item % p.kv_heads;
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t out = request * p.out_stride[0] + head * p.out_stride[1] + row * p.out_stride[2];
      const int64_t lse = request * p.lse_stride[0] + head * p.lse_stride[1] + row * p.lse_stride[2];
      if (out != item * m.out_stride[0] + row * m.out_stride[2]) abort();
      if (lse != item * m.lse_stride[0] + row * m.lse_stride[2]) abort();
    }
  }
}

}  // namespace fake
