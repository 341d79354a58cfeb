#include "gemm_launch.h"

#include <algorithm>
#include <stdexcept>

#include "tma.h"

// A build for one target has the parameters of that one only.
#if __has_include("gemm_sm_90a_params.h")
#define TILEOPS_SM_90A
#include "gemm_sm_90a_params.h"
#endif
#if __has_include("gemm_portable_params.h")
#define TILEOPS_PORTABLE
#include "gemm_portable_params.h"
#endif

namespace tileops {

namespace {

// A CTA takes tile after tile, so there are no more than run at a time, nor more than have one.
unsigned grid_of(Device& device, const ProductVariant& v, const GemmProblem& p) {
  const int64_t tiles = ceil_div(p.m, static_cast<int64_t>(v.bm) * v.cluster) * ceil_div(p.n, v.bn) * p.batch;
  return static_cast<unsigned>(std::min<int64_t>(resident_ctas(device, v), v.cluster * tiles));
}

void launch(const ProductVariant& v, unsigned grid, void* params, cudaStream_t stream) {
  const int cluster = v.cluster > 1 ? v.cluster : 0;
  launch_kernel({v.op, v.name, v.kernel, dim3(grid, 1, 1), v.threads, v.shared_bytes, cluster}, params, stream);
}

// What both targets' structs have.
template <typename Params>
Params common_params(const GemmCall& call) {
  Params params = {};
  params.batch = static_cast<int32_t>(call.problem.batch);
  params.m = static_cast<int32_t>(call.problem.m);
  params.n = static_cast<int32_t>(call.problem.n);
  params.k = static_cast<int32_t>(call.problem.k);
  params.bias = call.bias;
  params.bias_dtype = static_cast<int32_t>(call.bias_type);
  params.activation = static_cast<int32_t>(call.activation);
  params.has_residual = call.has_residual;
  return params;
}

#ifdef TILEOPS_SM_90A
// Of a stack of rows x columns matrices; transposed: neighbours in memory are those of a column.
tensor_map map_matrices(const void* data, DType type, const int64_t (&extents)[3], const int64_t (&strides)[3],
                        bool transposed, const MapBox& box) {
  const int64_t size = item_size(type);
  const int rows = transposed ? 2 : 1, columns = transposed ? 1 : 2;
  return map_of({data, 3, {extents[columns], extents[rows], extents[0]}, {strides[rows] * size, strides[0] * size}, type, box});
}

gemm_sm_90a_params sm_90a_params(const ProductVariant& v, const GemmCall& call) {
  const GemmProblem& p = call.problem;
  auto params = common_params<gemm_sm_90a_params>(call);
  params.a = map_matrices(call.a, v.x, {p.batch, p.m, p.k}, p.a_stride, v.transpose_a, v.maps[0]);
  params.b = map_matrices(call.b, v.x, {p.batch, p.k, p.n}, p.b_stride, v.transpose_b, v.maps[1]);
  params.c = map_matrices(call.y, v.y, {p.batch, p.m, p.n}, p.y_stride, false, v.maps[2]);
  if (call.has_residual)
    params.residual = map_matrices(call.residual, v.y, {p.batch, p.m, p.n}, p.residual_stride, false, v.maps[3]);
  return params;
}
#endif

#ifdef TILEOPS_PORTABLE
// In the order in which the dimensions are stored.
void set_strides(int64_t (&to)[3], const int64_t (&from)[3], bool transposed) {
  to[0] = from[0];
  to[1] = from[transposed ? 2 : 1];
  to[2] = from[transposed ? 1 : 2];
}

gemm_portable_params portable_params(const ProductVariant& v, const GemmCall& call) {
  const GemmProblem& p = call.problem;
  auto params = common_params<gemm_portable_params>(call);
  params.a = call.a;
  params.b = call.b;
  params.c = call.y;
  params.residual = call.residual;
  set_strides(params.a_stride, p.a_stride, v.transpose_a);
  set_strides(params.b_stride, p.b_stride, v.transpose_b);
  set_strides(params.c_stride, p.y_stride, false);
  set_strides(params.residual_stride, p.residual_stride, false);
  params.bias_stride[0] = 1;
  return params;
}
#endif

}  // namespace

void launch_gemm(Device& device, const ProductVariant& variant, const GemmCall& call, cudaStream_t stream) {
  const unsigned grid = grid_of(device, variant, call.problem);
#ifdef TILEOPS_SM_90A
  if (variant.target == Target::sm_90a) {
    gemm_sm_90a_params params = sm_90a_params(variant, call);
    return launch(variant, grid, &params, stream);
  }
#endif
#ifdef TILEOPS_PORTABLE
  if (variant.target == Target::portable) {
    gemm_portable_params params = portable_params(variant, call);
    return launch(variant, grid, &params, stream);
  }
#endif
}

}  // namespace tileops
