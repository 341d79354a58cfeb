// The made-up CUDA's attention: a launch computes out and lse in double from the tensor maps and numbers that it was given.
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "fake_cuda.h"
#include "flash_attention_sm_90a_params.h"
#include "variant.h"

namespace tileops {

// The mask is "full", "causal" or "window" with its options.
#define NAMED(dims, x, mask, bm, bn, head_dim, head_dim_v)              \
  {"flash_attention",                                                   \
   "flash_attention_sm_90a_" #x "_" #bm "x" #bn "x" dims "_" mask,      \
   Target::sm_90a,                                                      \
   DType::x,                                                            \
   mask[0] == 'c',                                                      \
   false,                                                               \
   false,                                                               \
   has(mask, "window"),                                                 \
   has(mask, "sinks"),                                                  \
   has(mask, "softcap"),                                                \
   bm,                                                                  \
   bn,                                                                  \
   head_dim,                                                            \
   head_dim_v,                                                          \
   384,                                                                 \
   2000 + __COUNTER__,                                                  \
   {{64, bm, 128}, {64, bn, 128}, {64, bn, 128}, {64, 64, 128}},        \
   &places[__COUNTER__]}
#define ATTENTION(x, mask, bm, bn, head_dim) NAMED(#head_dim, x, mask, bm, bn, head_dim, head_dim)

static const char places[64] = {};  // their addresses are the kernels

static bool has(const char* mask, const char* option) { return strstr(mask, option) != nullptr; }

extern const AttentionVariant attention_variants[] = {
    ATTENTION(bf16, "full", 128, 160, 64),
    ATTENTION(bf16, "causal", 128, 128, 64),
    ATTENTION(bf16, "full", 64, 96, 64),
    ATTENTION(bf16, "full", 128, 160, 128),
    ATTENTION(f16, "full", 128, 160, 64),
    ATTENTION(bf16, "window_sinks", 128, 128, 64),
    ATTENTION(bf16, "window_softcap", 128, 128, 64),
    NAMED("192x128", bf16, "causal", 128, 112, 192, 128),
    ATTENTION(bf16, "causal", 128, 128, 96),
    {}};
extern const int attention_variant_count = sizeof(attention_variants) / sizeof(attention_variants[0]) - 1;

#define FAKE_GPU "Fake \"GPU\""
extern const AttentionMeasurement attention_measurements[] = {
    {0, FAKE_GPU, 8, 64, 64, 0, 0, 0, 10.0, 12.0},
    {2, FAKE_GPU, 8, 64, 64, 0, 0, 0, 11.0, 12.0},
    {0, FAKE_GPU, 8, 16, 64, 0, 0, 0, 12.0, 10.0},
    {2, FAKE_GPU, 8, 16, 64, 0, 0, 0, 10.1, 10.0},
    {1, FAKE_GPU, 8, 64, 64, 0, 0, 0, 11.0, 10.0},
    {3, FAKE_GPU, 8, 64, 64, 0, 0, 0, 9.0, 10.0},
    {4, "Another GPU", 8, 64, 64, 0, 0, 0, 1.0, 12.0},
    {5, FAKE_GPU, 8, 64, 64, 16, 0, 0, 9.0, 10.0},
    {5, FAKE_GPU, 8, 64, 64, 0, 0, 0, 11.0, 10.0},
    {6, FAKE_GPU, 8, 64, 64, 0, 0, 0, 9.0, 10.0},
    {7, FAKE_GPU, 8, 64, 64, 0, 0, 0, 9.0, 10.0},
    {0, FAKE_GPU, 8, 64, 64, 0, 60, 60, 9.0, 10.0},
    {3, FAKE_GPU, 8, 64, 64, 0, 40, 40, 1.0, 10.0},
    {3, FAKE_GPU, 8, 64, 64, 0, 80, 80, 11.0, 10.0},
    {3, FAKE_GPU, 8, 64, 64, 0, 100, 100, 11.0, 10.0},
    {}};
extern const int attention_measurement_count = sizeof(attention_measurements) / sizeof(attention_measurements[0]) - 1;

}  // namespace tileops

namespace {

using Params = tileops::flash_attention_sm_90a_params;

int64_t columns_of(const tileops::tensor_map& bytes) {
  fake::Map map;
  memcpy(&map, &bytes, sizeof(map));
  return map.extents[0];
}

// A tensor [batch, heads, tokens, columns] that a map describes, of no more columns than the tile.
struct Heads {
  fake::Map map;
  int64_t columns;

  Heads(const tileops::tensor_map& bytes, int64_t batches, int64_t heads, int64_t tokens, int64_t most, int type,
        tileops::MapBox box)
      : map(fake::map_of(bytes, 4, {columns_of(bytes), tokens, heads, batches}, type, box)), columns(map.extents[0]) {
    if (columns > most) abort();
  }

  int64_t at(int64_t b, int64_t h, int64_t s, int64_t c) const {
    return c + int64_t(s * map.strides[0] + h * map.strides[1] + b * map.strides[2]) / 2;
  }
  double operator()(int64_t b, int64_t h, int64_t s, int64_t c) const { return fake::load(map.data, at(b, h, s, c), map.type); }
};

struct Row {
  int64_t b, h, s;
};

void compute(const tileops::AttentionVariant& v, const Params& p, const Heads& q, const Heads& k, const Heads& value,
             const Heads& out, Row row) {
  const auto [b, h, s] = row;
  const int64_t kv = h / (p.heads / p.kv_heads), own = s + p.sk - p.sq;
  const int64_t first = v.window ? std::max<int64_t>(own - p.window_left, 0) : 0;
  const int64_t last = v.window ? own + p.window_right : v.causal ? own : p.sk;
  const int64_t seen = std::max<int64_t>(std::min<int64_t>(last + 1, p.sk) - first, 0);
  std::vector<double> scores, sums(value.columns);
  double peak = -INFINITY, total = 0;
  for (int64_t j = first; j < first + seen; ++j) {
    double score = 0;
    for (int64_t c = 0; c < q.columns; ++c) score += q(b, h, s, c) * k(b, kv, j, c);
    scores.push_back((v.softcap ? tanh(score * p.cap_scale) : score) * p.scale_log2);
    peak = std::max(peak, scores.back());
  }
  for (int64_t j = 0; j < seen; ++j) {
    const double weight = exp2(scores[j] - peak);
    total += weight;
    for (int64_t c = 0; c < value.columns; ++c) sums[c] += weight * value(b, kv, first + j, c);
  }
  if (v.sinks && p.sinks_dtype && p.sinks_stride[1] == 0) {
    total += exp2(fake::load(static_cast<const char*>(p.sinks), h * p.sinks_stride[0], p.sinks_dtype) / M_LN2 - peak);
  }
  char* to = const_cast<char*>(out.map.data);
  for (int64_t c = 0; c < out.columns; ++c) {
    fake::store(to, out.at(b, h, s, c), out.map.type, seen && c < value.columns ? sums[c] / total : 0.0);
  }
  const int64_t at = b * p.lse_stride[0] + h * p.lse_stride[1] + s * p.lse_stride[2];
  fake::store(p.lse, at, 3, seen ? (peak + log2(total)) * M_LN2 : -INFINITY);
}

}  // namespace

namespace fake {

void launch_attention(const tileops::AttentionVariant& v, const cudaLaunchConfig_t& config, const void* params) {
  const auto& p = *static_cast<const Params*>(params);
  const bool right = config.numAttrs == 0 && reinterpret_cast<uintptr_t>(params) % 64 == 0 && p.scale_log2 > 0 && p.sk > 0;
  if (!right) abort();
  record_launch(v.name, {config.gridDim.x, p.batches, p.heads, p.kv_heads, p.sq, p.sk});
  const int type = int(v.x);
  const Heads q(p.q, p.batches, p.heads, p.sq, v.head_dim, type, v.maps[0]);
  const Heads k(p.k, p.batches, p.kv_heads, p.sk, v.head_dim, type, v.maps[1]);
  const Heads value(p.v, p.batches, p.kv_heads, p.sk, v.head_dim_v, type, v.maps[2]);
  const Heads out(p.out, p.batches, p.heads, p.sq, v.head_dim_v, type, v.maps[3]);
  if (q.columns != k.columns || (value.columns + 7) / 8 * 8 != out.columns) abort();  // a store writes whole 16 bytes
  for (int64_t i = 0; i < int64_t(p.batches) * p.heads * p.sq; ++i) {
    compute(v, p, q, k, value, out, {i / p.sq / p.heads, i / p.sq % p.heads, i % p.sq});
  }
}

}  // namespace fake
