// The made-up CUDA's MLA decode: the kernel computes all requests in double, through the tensor maps and numbers that it was given,
// and the merge finds nothing to do.
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>

#include <algorithm>
#include <vector>

#include "fake_cuda.h"
#include "mla_decode_sm_90a_params.h"
#include "variant.h"

namespace tileops {

#define MLA(x, unit)                                                                                                       \
  {"mla_decode", "mla_decode_sm_90a_" #x "_64x64x24x16_u" #unit, Target::sm_90a, DType::x, 64, 64, 24, 16, unit, 256, 3000, \
   {{64, 64, 128}, {64, 64, 128}, {64, 64, 128}}, &places[__COUNTER__]}

static const char places[8] = {};  // their addresses are the kernels

// None for the other pages of f16.
extern const MlaVariant mla_variants[] = {MLA(bf16, 0), MLA(f16, 0), MLA(bf16, 64), MLA(bf16, 1), {}};
extern const int mla_variant_count = sizeof(mla_variants) / sizeof(mla_variants[0]) - 1;

}  // namespace tileops

namespace {

using Params = tileops::mla_decode_sm_90a_params;

// Row `row` of matrix `item` of a map of rank 3.
double value(const fake::Map& map, int64_t item, int64_t row, int64_t column) {
  const int64_t bytes = item * map.strides[1] + row * map.strides[0];
  return fake::load(map.data, column + bytes / 2, map.type);
}

// Where the cache has a token, as the kernel of that kind finds it.
std::pair<int64_t, int64_t> place(const tileops::MlaVariant& v, const Params& p, int64_t request, int64_t token) {
  const int64_t index = v.unit > 0 ? token * p.inverse >> 32 : token / v.block;
  if (index >= p.table) abort();
  const int64_t page = static_cast<const int32_t*>(p.block_table)[request * p.block_table_stride[0] + index];
  if (page < 0 || page >= p.pages) abort();
  return {page, token - index * (v.unit > 0 ? p.page : v.block)};
}

void compute(const tileops::MlaVariant& v, const Params& p, const fake::Map& q, const fake::Map& cache, const fake::Map& out,
             int64_t request, int64_t row) {
  const int64_t length = static_cast<const int32_t*>(p.cache_seqlens)[request], query = row / p.heads;
  const int64_t seen = std::max<int64_t>(p.causal ? length + query + 1 - p.sq : length, 0);
  std::vector<double> sums(v.head_dim_v);
  double total = 0;
  for (int64_t token = 0; token < seen; ++token) {
    const auto [page, at] = place(v, p, request, token);
    double score = 0;
    for (int c = 0; c < v.head_dim; ++c) score += value(q, request, row, c) * value(cache, page, at, c);
    const double weight = exp2(score * p.scale_log2);
    total += weight;
    for (int c = 0; c < v.head_dim_v; ++c) sums[c] += weight * value(cache, page, at, c);
  }
  const int64_t bytes = request * out.strides[1] + row * out.strides[0];
  for (int c = 0; c < v.head_dim_v; ++c) {
    fake::store(const_cast<char*>(out.data), c + bytes / 2, out.type, seen > 0 ? sums[c] / total : 0.0);
  }
  const int64_t lse = request * p.lse_stride[0] + row % p.heads * p.lse_stride[1] + query * p.lse_stride[2];
  fake::store(p.lse, lse, 3, seen > 0 ? log(total) : -INFINITY);
}

}  // namespace

namespace fake {

void launch_mla(const tileops::MlaVariant& v, const cudaLaunchConfig_t& config, const void* params) {
  const auto& p = *static_cast<const Params*>(params);
  const bool grid = int(config.gridDim.x) == (p.rows + v.bm - 1) / v.bm && int(config.gridDim.y) == p.parts;
  const bool unit = (p.unit & (p.unit - 1)) == 0 && p.unit >= 1 && p.unit <= 64 && p.page % p.unit == 0;
  const tileops::split_schedule_params& dealt = last_schedule();
  const bool all = dealt.items == p.n && dealt.heads == 1 && dealt.block == v.block && dealt.seen == INT32_MAX;
  if (!all || dealt.parts != p.parts || dealt.schedule != p.schedule || dealt.cache_seqlens != p.cache_seqlens) abort();
  if (!grid || !unit || p.unit < v.unit || (v.unit == 0 && p.page != v.block)) abort();
  record_launch(v.name, {p.page, p.unit, p.splits});
  const int type = int(v.x);
  const Map q = map_of(p.q, 3, {v.head_dim, p.rows, p.n}, type, v.maps[0]);
  const Map cache = map_of(p.kv_cache, 3, {v.head_dim, p.page, p.pages}, type, {64, p.unit, 128});
  const Map out = map_of(p.out, 3, {v.head_dim_v, p.rows, p.n}, type, v.maps[2]);
  for (int64_t i = 0; i < int64_t(p.n) * p.rows; ++i) compute(v, p, q, cache, out, i / p.rows, i % p.rows);
}

}  // namespace fake
