// The made-up CUDA's attention: a launch computes out and lse in double from the tensor maps, or the addresses and strides, and
// the numbers that it was given.
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "fake_cuda.h"
#include "flash_attention_portable_params.h"
#include "flash_attention_sm_90a_params.h"
#include "variant.h"

namespace tileops {

// The mask is "full", "causal" or "window" with its options.
#define NAMED(target, dims, x, mask, bm, bn, head_dim, head_dim_v)      \
  {"flash_attention",                                                   \
   "flash_attention_" #target "_" #x "_" #bm "x" #bn "x" dims "_" mask, \
   Target::target,                                                      \
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
#define ATTENTION(x, mask, bm, bn, head_dim) NAMED(sm_90a, #head_dim, x, mask, bm, bn, head_dim, head_dim)
#define PORTABLE(x, mask, bm, bn, head_dim) NAMED(portable, #head_dim, x, mask, bm, bn, head_dim, head_dim)

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
    NAMED(sm_90a, "192x128", bf16, "causal", 128, 112, 192, 128),
    ATTENTION(bf16, "causal", 128, 128, 96),
    PORTABLE(bf16, "full", 128, 64, 32),
    PORTABLE(bf16, "full", 128, 64, 64),
    PORTABLE(bf16, "causal", 128, 64, 64),
    PORTABLE(bf16, "window_sinks_softcap", 64, 64, 64),
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

// A tensor [batch, heads, tokens, columns], however the kernel got it, of no more columns than the tile.
struct Heads {
  const char* data;
  int64_t batch, head, token;  // strides in elements
  int64_t columns;
  int type;

  int64_t at(int64_t b, int64_t h, int64_t s, int64_t c) const { return c + s * token + h * head + b * batch; }
  double operator()(int64_t b, int64_t h, int64_t s, int64_t c) const { return fake::load(data, at(b, h, s, c), type); }
};

Heads of_map(const tileops::tensor_map& bytes, int64_t batches, int64_t heads, int64_t tokens, int64_t most, int type,
             tileops::MapBox box) {
  fake::Map map;
  memcpy(&map, &bytes, sizeof(map));
  const int64_t columns = map.extents[0];
  if (columns > most) abort();
  map = fake::map_of(bytes, 4, {columns, tokens, heads, batches}, type, box);
  const auto stride = [&](int dim) { return static_cast<int64_t>(map.strides[dim]) / 2; };
  return {map.data, stride(2), stride(1), stride(0), columns, type};
}

// Copies of 16 bytes, from rows of any length.
Heads of_strides(const void* data, const int64_t (&strides)[4], int64_t columns, int64_t most, int type) {
  bool right = reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides[3] == 1 && columns <= most;
  for (int dim = 0; dim < 3; ++dim) right = right && strides[dim] % 8 == 0;
  if (!right) abort();
  return {static_cast<const char*>(data), strides[0], strides[1], strides[2], columns, type};
}

struct Row {
  int64_t b, h, s;
};

template <typename Params>
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
  char* to = const_cast<char*>(out.data);
  for (int64_t c = 0; c < out.columns; ++c) {
    fake::store(to, out.at(b, h, s, c), out.type, seen && c < value.columns ? sums[c] / total : 0.0);
  }
  const int64_t at = b * p.lse_stride[0] + h * p.lse_stride[1] + s * p.lse_stride[2];
  fake::store(p.lse, at, 3, seen ? (peak + log2(total)) * M_LN2 : -INFINITY);
}

template <typename Params>
void compute_all(const tileops::AttentionVariant& v, const Params& p, const cudaLaunchConfig_t& config, const Heads& q,
                 const Heads& k, const Heads& value, const Heads& out) {
  const bool right = config.numAttrs == 0 && p.scale_log2 > 0 && p.sk > 0 && q.columns == k.columns;
  if (!right) abort();
  fake::record_launch(v.name, {config.gridDim.x, p.batches, p.heads, p.kv_heads, p.sq, p.sk});
  for (int64_t i = 0; i < int64_t(p.batches) * p.heads * p.sq; ++i) {
    compute(v, p, q, k, value, out, {i / p.sq / p.heads, i / p.sq % p.heads, i % p.sq});
  }
}

void run_sm_90a(const tileops::AttentionVariant& v, const cudaLaunchConfig_t& config,
                const tileops::flash_attention_sm_90a_params& p) {
  if (reinterpret_cast<uintptr_t>(&p) % 64 != 0) abort();
  const int type = int(v.x);
  const Heads value = of_map(p.v, p.batches, p.kv_heads, p.sk, v.head_dim_v, type, v.maps[2]);
  const Heads out = of_map(p.out, p.batches, p.heads, p.sq, v.head_dim_v, type, v.maps[3]);
  if ((value.columns + 7) / 8 * 8 != out.columns) abort();  // a store writes whole 16 bytes
  compute_all(v, p, config, of_map(p.q, p.batches, p.heads, p.sq, v.head_dim, type, v.maps[0]),
              of_map(p.k, p.batches, p.kv_heads, p.sk, v.head_dim, type, v.maps[1]), value, out);
}

void run_portable(const tileops::AttentionVariant& v, const cudaLaunchConfig_t& config,
                  const tileops::flash_attention_portable_params& p) {
  const int type = int(v.x);
  compute_all(v, p, config, of_strides(p.q, p.q_stride, p.head_dim, v.head_dim, type),
              of_strides(p.k, p.k_stride, p.head_dim, v.head_dim, type),
              of_strides(p.v, p.v_stride, p.head_dim_v, v.head_dim_v, type),
              of_strides(p.out, p.out_stride, p.head_dim_v, v.head_dim_v, type));
}

}  // namespace

namespace fake {

void launch_attention(const tileops::AttentionVariant& v, const cudaLaunchConfig_t& config, const void* params) {
  if (v.target == tileops::Target::sm_90a) {
    run_sm_90a(v, config, *static_cast<const tileops::flash_attention_sm_90a_params*>(params));
  } else {
    run_portable(v, config, *static_cast<const tileops::flash_attention_portable_params*>(params));
  }
}

}  // namespace fake
