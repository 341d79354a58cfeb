// The made-up CUDA's MLA decode: the kernel computes all requests in double, through the tensor maps and numbers that it was given,
// and the merge finds nothing to do.
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>

#include <algorithm>
#include <vector>

#include "fake_cuda.h"
#include "mla_decode_few_portable_params.h"
#include "mla_decode_sm_90a_params.h"
#include "variant.h"

namespace tileops {

#define MLA(x, unit)                                                                                                       \
  {"mla_decode", "mla_decode_sm_90a_" #x "_64x64x24x16_u" #unit, Target::sm_90a, DType::x, 64, 64, 24, 16, unit, 256, 3000, \
   {{64, 64, 128}, {64, 64, 128}, {64, 64, 128}}, &places[__COUNTER__]}

#define FEW(x)                                                                                                              \
  {"mla_decode_few", "mla_decode_few_portable_" #x "_16x64x24x16_u1", Target::portable, DType::x, 16, 64, 24, 16, 1, 128, 3001, \
   {}, &places[__COUNTER__]}

static const char places[8] = {};  // their addresses are the kernels

// None for the other pages of f16.
extern const MlaVariant mla_variants[] = {MLA(bf16, 64), MLA(f16, 0), MLA(bf16, 1), FEW(bf16), {}};
extern const int mla_variant_count = sizeof(mla_variants) / sizeof(mla_variants[0]) - 1;

}  // namespace tileops

namespace {

// Matrices of rows, however a kernel gets them; strides in elements.
struct Matrices {
  const char* data;
  int64_t matrix, row;
  int type;

  int64_t at(int64_t item, int64_t r, int64_t column) const { return item * matrix + r * row + column; }
};

Matrices of_map(const fake::Map& map) {
  return {static_cast<const char*>(map.data), int64_t(map.strides[1]) / 2, int64_t(map.strides[0]) / 2, map.type};
}

// Accesses of 16 bytes, but to what is stored.
Matrices of_strides(const void* data, const int64_t (&strides)[3], int type) {
  const bool right = reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides[2] == 1 && strides[0] % 8 == 0 && strides[1] % 8 == 0;
  if (!right) abort();
  return {static_cast<const char*>(data), strides[0], strides[1], type};
}

double value(const Matrices& m, int64_t item, int64_t row, int64_t column) {
  return fake::load(m.data, m.at(item, row, column), m.type);
}

// Where the cache has a token, as the kernel of that kind finds it.
template <typename Params>
std::pair<int64_t, int64_t> place(const tileops::MlaVariant& v, const Params& p, int64_t request, int64_t token) {
  const int64_t index = v.unit > 0 ? token * p.inverse >> 32 : token / v.block;
  if (index >= p.table) abort();
  const int64_t page = static_cast<const int32_t*>(p.block_table)[request * p.block_table_stride[0] + index];
  if (page < 0 || page >= p.pages) abort();
  return {page, token - index * (v.unit > 0 ? p.page : v.block)};
}

template <typename Params>
void compute(const tileops::MlaVariant& v, const Params& p, const Matrices& q, const Matrices& cache, const Matrices& out,
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
  for (int c = 0; c < v.head_dim_v; ++c) {
    fake::store(const_cast<char*>(out.data), out.at(request, row, c), out.type, seen > 0 ? sums[c] / total : 0.0);
  }
  const int64_t lse = request * p.lse_stride[0] + row % p.heads * p.lse_stride[1] + query * p.lse_stride[2];
  fake::store(p.lse, lse, 3, seen > 0 ? log(total) : -INFINITY);
}

template <typename Params>
void compute_all(const tileops::MlaVariant& v, const cudaLaunchConfig_t& config, const Params& p, const Matrices& q,
                 const Matrices& cache, const Matrices& out) {
  const bool grid = int(config.gridDim.x) == (p.rows + v.bm - 1) / v.bm && int(config.gridDim.y) == p.parts;
  const bool launch = fake::is_dependent(config) == (v.target == tileops::Target::sm_90a) && p.parts >= 1 && p.most_pieces >= 0;
  if (!fake::has_split(p, p.rows, v.head_dim_v) || !launch) abort();
  if (!grid || (v.unit == 0 && p.page != v.block)) abort();
  for (int64_t i = 0; i < int64_t(p.n) * p.rows; ++i) compute(v, p, q, cache, out, i / p.rows, i % p.rows);
}

void run(const tileops::MlaVariant& v, const cudaLaunchConfig_t& config, const tileops::mla_decode_sm_90a_params& p) {
  const bool unit = (p.unit & (p.unit - 1)) == 0 && p.unit >= 1 && p.unit <= 64 && p.page % p.unit == 0;
  if (!unit || p.unit < v.unit) abort();
  fake::record_launch(v.name, {p.page, p.unit, p.most_pieces});
  const int type = int(v.x);
  compute_all(v, config, p, of_map(fake::map_of(p.q, 3, {v.head_dim, p.rows, p.n}, type, v.maps[0])),
              of_map(fake::map_of(p.kv_cache, 3, {v.head_dim, p.page, p.pages}, type, {64, p.unit, 128})),
              of_map(fake::map_of(p.out, 3, {v.head_dim_v, p.rows, p.n}, type, v.maps[2])));
}

void run(const tileops::MlaVariant& v, const cudaLaunchConfig_t& config, const tileops::mla_decode_few_portable_params& p) {
  fake::record_launch(v.name, {p.page, 1, p.most_pieces});
  const int type = int(v.x);
  compute_all(v, config, p, of_strides(p.q, p.q_stride, type), of_strides(p.kv_cache, p.kv_cache_stride, type),
              of_strides(p.out, p.out_stride, type));
}

}  // namespace

namespace fake {

void launch_mla(const tileops::MlaVariant& v, const cudaLaunchConfig_t& config, const void* params) {
  if (v.target == tileops::Target::sm_90a) {
    run(v, config, *static_cast<const tileops::mla_decode_sm_90a_params*>(params));
  } else {
    run(v, config, *static_cast<const tileops::mla_decode_few_portable_params*>(params));
  }
}

}  // namespace fake
