#include "attention_launch.h"

#include <algorithm>

#include "gemm_problem.h"
#include "tma.h"

// A build for one target has the parameters of that one only, one without kernels none.
#if __has_include("flash_attention_sm_90a_params.h")
#define TILEOPS_SM_90A
#include "flash_attention_sm_90a_params.h"
#endif
#if __has_include("flash_attention_portable_params.h")
#define TILEOPS_PORTABLE
#include "flash_attention_portable_params.h"
#endif

namespace tileops {

namespace {

// As many heads as share keys and values that the L2 cache holds: a power of 2, at least 1.
int32_t heads_of_section(const AttentionCall& call) {
  constexpr int64_t kCache = int64_t{32} << 20;
  const int64_t of_kv_head = call.sk() * (call.head_dim() + call.head_dim_v()) * item_size(call.type);
  const int64_t fitting = kCache * (call.heads() / call.kv_heads()) / std::max<int64_t>(of_kv_head, 1);
  int32_t heads = 1;
  while (heads * 2 <= fitting && heads < call.heads() * call.batches()) heads *= 2;
  return heads;
}

// What both targets' structs have.
template <typename Params>
Params common_params(const AttentionCall& call) {
  Params params = {};
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
  params.unscale = 1 / call.scale_log2;
  params.cap_scale = call.cap_scale;
  params.window_left = static_cast<int32_t>(call.window_left);
  params.window_right = static_cast<int32_t>(call.window_right);
  params.section = heads_of_section(call);
  return params;
}

#ifdef TILEOPS_SM_90A
// Columns, tokens, heads, batch. The stride of a dimension of one is any, and 0 always fits.
tensor_map map_heads(const AttentionTensor& t, DType type, const MapBox& box) {
  const auto bytes = [&](int dim) { return t.extents[dim] > 1 ? t.strides[dim] * item_size(type) : 0; };
  return map_of({t.data, 4, {t.columns, t.extents[1], t.extents[2], t.extents[0]}, {bytes(1), bytes(2), bytes(0)}, type, box});
}

flash_attention_sm_90a_params sm_90a_params(const AttentionVariant& v, const AttentionCall& call) {
  auto params = common_params<flash_attention_sm_90a_params>(call);
  params.q = map_heads(call.q, v.x, v.maps[0]);
  params.k = map_heads(call.k, v.x, v.maps[1]);
  params.v = map_heads(call.v, v.x, v.maps[2]);
  params.out = map_heads(call.out, v.x, v.maps[3]);
  return params;
}
#endif

#ifdef TILEOPS_PORTABLE
// Copies of 16 bytes want what TMA wants, so the tensors are the same.
flash_attention_portable_params portable_params(const AttentionCall& call) {
  auto params = common_params<flash_attention_portable_params>(call);
  params.q = call.q.data;
  params.k = call.k.data;
  params.v = call.v.data;
  params.out = const_cast<void*>(call.out.data);
  params.head_dim = static_cast<int32_t>(call.head_dim());
  params.head_dim_v = static_cast<int32_t>(call.head_dim_v());
  set_strides(params.q_stride, call.q);
  set_strides(params.k_stride, call.k);
  set_strides(params.v_stride, call.v);
  set_strides(params.out_stride, call.out);
  return params;
}
#endif

void launch(Device& device, const AttentionVariant& v, const AttentionCall& call, void* params, cudaStream_t stream) {
  // A CTA takes tile after tile, so there are no more than run at a time, nor more than have one; unless each has one.
  const int64_t tiles = ceil_div(call.sq(), v.bm) * call.heads() * call.batches();
  const int64_t resident = resident_ctas(device, v);  // which makes the kernel ready, too
  const auto grid = static_cast<unsigned>(v.longest_first ? tiles : std::min(resident, tiles));
  launch_kernel({v.op, v.name, v.kernel, dim3(grid, 1, 1), v.threads, v.shared_bytes, 0}, params, stream);
}

}  // namespace

void set_strides(int64_t (&to)[4], const AttentionTensor& from) {
  const int order[] = {0, 2, 1};
  for (int dim = 0; dim < 3; ++dim) to[dim] = from.extents[order[dim]] > 1 ? from.strides[order[dim]] : 0;
  to[3] = 1;
}

void launch_attention(Device& device, const AttentionVariant& variant, const AttentionCall& call, cudaStream_t stream) {
#ifdef TILEOPS_SM_90A
  if (variant.target == Target::sm_90a) {
    flash_attention_sm_90a_params params = sm_90a_params(variant, call);
    return launch(device, variant, call, &params, stream);
  }
#endif
#ifdef TILEOPS_PORTABLE
  if (variant.target == Target::portable) {
    flash_attention_portable_params params = portable_params(call);
    return launch(device, variant, call, &params, stream);
  }
#endif
}

}  // namespace tileops
