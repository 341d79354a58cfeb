// The made-up CUDA's attention: a launch computes out and lse in double from the tensor maps, or the addresses and strides, and
// the numbers that it was given.
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "fake_attention.h"
#include "flash_attention_portable_params.h"
#include "flash_attention_sm_90a_params.h"
#include "variant.h"

namespace tileops {

// The mask is "full", "causal" or "window", with options; those with lengths are launched by fake_lengths.cpp.
#define NAMED(target, dims, x, mask, bm, bn, head_dim, head_dim_v)      \
  {"flash_attention",                                                   \
   "flash_attention_" #target "_" #x "_" #bm "x" #bn "x" dims "_" mask, \
   Target::target,                                                      \
   DType::x,                                                            \
   mask[0] == 'c',                                                      \
   has(mask, "lengths"),                                                \
   has(mask, "paged"),                                                  \
   has(mask, "window"),                                                 \
   has(mask, "sinks"),                                                  \
   has(mask, "softcap"),                                                \
   has(mask, "longest_first"),                                          \
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
    ATTENTION(bf16, "causal_lengths", 128, 128, 64),
    ATTENTION(bf16, "lengths_window_sinks", 128, 128, 64),
    ATTENTION(bf16, "lengths_window_softcap", 64, 96, 64),
    NAMED(sm_90a, "192x128", bf16, "causal_lengths", 128, 112, 192, 128),
    ATTENTION(f16, "lengths_window_sinks", 128, 128, 64),
    ATTENTION(bf16, "causal_lengths_paged", 128, 128, 64),
    ATTENTION(bf16, "lengths_paged_window_sinks", 128, 128, 64),
    ATTENTION(bf16, "lengths_paged_window_softcap", 64, 96, 64),
    ATTENTION(bf16, "lengths_paged_window_sinks", 128, 192, 128),
    PORTABLE(bf16, "lengths_window_sinks", 64, 64, 64),
    PORTABLE(bf16, "lengths_window_sinks_softcap", 64, 64, 64),
    PORTABLE(bf16, "lengths_paged_window_sinks", 64, 64, 64),
    NAMED(sm_90a, "256x64", bf16, "causal_longest_first", 128, 64, 256, 64),
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

using fake::Heads;
using fake::of_map;
using fake::of_strides;

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
  const auto product = [&, b = b, h = h, s = s](int64_t key) {
    double sum = 0;
    for (int64_t c = 0; c < q.columns; ++c) sum += q(b, h, s, c) * k(b, kv, key, c);
    return sum;
  };
  const auto [values, lse] =
      fake::attend(fake::scores_of(p, v.softcap, v.sinks, h, s), first, std::min<int64_t>(last + 1, p.sk), value.columns, product,
                   [&, b = b](int64_t key, int64_t c) { return value(b, kv, key, c); });
  for (int64_t c = 0; c < out.columns; ++c) out.put(b, h, s, c, c < value.columns ? values[c] : 0.0);
  fake::store(p.lse, b * p.lse_stride[0] + h * p.lse_stride[1] + s * p.lse_stride[2], 3, lse);
}

template <typename Params>
void compute_all(const tileops::AttentionVariant& v, const Params& p, const cudaLaunchConfig_t& config, const Heads& q,
                 const Heads& k, const Heads& value, const Heads& out) {
  const bool right = config.numAttrs == 0 && p.sk > 0 && q.columns == k.columns && (!p.sinks_dtype || p.sinks_stride[1] == 0);
  if (!right) abort();
  if (v.longest_first) {
    fake::record_launch(v.name, {config.gridDim.x, p.section});
  } else {
    fake::record_launch(v.name, {config.gridDim.x, p.batches, p.heads, p.kv_heads, p.sq, p.sk});
  }
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
  if (v.lengths) {
    launch_lengths(v, config, params);
  } else if (v.target == tileops::Target::sm_90a) {
    run_sm_90a(v, config, *static_cast<const tileops::flash_attention_sm_90a_params*>(params));
  } else {
    run_portable(v, config, *static_cast<const tileops::flash_attention_portable_params*>(params));
  }
}

}  // namespace fake
