#include "attention_launch.h"

#include <algorithm>

#include "gemm_problem.h"
#include "tma.h"

// A build without such kernels has no parameters of theirs.
#if __has_include("flash_attention_sm_90a_params.h")
#define TILEOPS_SM_90A
#include "flash_attention_sm_90a_params.h"
#endif

namespace tileops {

#ifdef TILEOPS_SM_90A

namespace {

// Columns, tokens, heads, batch. The stride of a dimension of one is any, and 0 always fits.
tensor_map map_heads(const AttentionTensor& t, DType type, const MapBox& box) {
  const auto bytes = [&](int dim) { return t.extents[dim] > 1 ? t.strides[dim] * item_size(type) : 0; };
  return map_of({t.data, 4, {t.columns, t.extents[1], t.extents[2], t.extents[0]}, {bytes(1), bytes(2), bytes(0)}, type, box});
}

}  // namespace

void launch_attention(Device& device, const AttentionVariant& v, const AttentionCall& call, cudaStream_t stream) {
  flash_attention_sm_90a_params params = {};
  params.q = map_heads(call.q, v.x, v.maps[0]);
  params.k = map_heads(call.k, v.x, v.maps[1]);
  params.v = map_heads(call.v, v.x, v.maps[2]);
  params.out = map_heads(call.out, v.x, v.maps[3]);
  params.lse = call.lse;
  params.batches = static_cast<int32_t>(call.batches());
  params.heads = static_cast<int32_t>(call.heads());
  params.kv_heads = static_cast<int32_t>(call.kv_heads());
  params.sq = static_cast<int32_t>(call.sq());
  params.sk = static_cast<int32_t>(call.sk());
  std::copy(call.lse_strides, call.lse_strides + 3, params.lse_stride);
  params.sinks = call.sinks;
  params.sinks_stride[0] = call.sinks_stride;  // the same for all rows
  params.sinks_dtype = static_cast<int32_t>(call.sinks_type);
  params.scale_log2 = call.scale_log2;
  params.cap_scale = call.cap_scale;
  params.window_left = static_cast<int32_t>(call.window_left);
  params.window_right = static_cast<int32_t>(call.window_right);
  // A CTA takes tile after tile, so there are no more than run at a time, nor more than have one.
  const int64_t tiles = ceil_div(call.sq(), v.bm) * call.heads() * call.batches();
  const auto grid = static_cast<unsigned>(std::min<int64_t>(resident_ctas(device, v), tiles));
  launch_kernel({v.op, v.name, v.kernel, dim3(grid, 1, 1), v.threads, v.shared_bytes, 0}, &params, stream);
}

#else

void launch_attention(Device&, const AttentionVariant&, const AttentionCall&, cudaStream_t) {}

#endif

}  // namespace tileops
