// Opens the parts of the binding that are plain C++ to ctypes.
#include "gemm_problem.h"
#include "row_problem.h"

extern "C" {

// extents of (batch, outer, inner, cols), then the strides of each tensor
int probe_rows(int64_t ndim, const int64_t* sizes, int64_t dim, const int64_t* const* strides, int count, int row_dims,
               int64_t* out) {
  tileops::RowProblem p;
  if (!tileops::collapse_rows(ndim, sizes, dim, strides, count, row_dims, &p)) return 0;
  for (const int64_t extent : {p.batch, p.outer, p.inner, p.cols}) *out++ = extent;
  for (int t = 0; t < count; ++t) {
    for (const int64_t stride : p.stride[t]) *out++ = stride;
  }
  return 1;
}

int probe_collapse(int64_t ndim, const int64_t* sizes, const int64_t* x, const int64_t* y, int64_t dim, int64_t* out) {
  const int64_t* strides[] = {x, y};
  return probe_rows(ndim, sizes, dim, strides, 2, 2, out);
}

// sizes and strides of a, b, y and residual, one after the other; ndims[3] 0: no residual.
int probe_gemm(const int64_t* ndims, const int64_t* sizes, const int64_t* strides, int64_t* out) {
  tileops::MatrixStack tensors[4];
  for (int t = 0; t < 4; ++t) {
    tensors[t] = {ndims[t], sizes, strides};
    sizes += ndims[t];
    strides += ndims[t];
  }
  tileops::GemmProblem p;
  if (!tileops::collapse_gemm(tensors[0], tensors[1], tensors[2], ndims[3] ? &tensors[3] : nullptr, &p)) return 0;
  *out++ = p.batch, *out++ = p.m, *out++ = p.n, *out++ = p.k;
  for (const auto* stride : {&p.a_stride, &p.b_stride, &p.y_stride, &p.residual_stride}) {
    for (int i = 0; i < 3; ++i) *out++ = (*stride)[i];
  }
  return 1;
}

int probe_is_dense(int64_t ndim, const int64_t* sizes, const int64_t* strides) {
  return tileops::is_dense(ndim, sizes, strides);
}

int probe_may_overlap(int64_t ndim, int64_t address_a, int64_t item_a, const int64_t* sizes_a, const int64_t* strides_a,
                      int64_t address_b, int64_t item_b, const int64_t* sizes_b, const int64_t* strides_b) {
  const tileops::MemoryView a = {static_cast<uintptr_t>(address_a), item_a, ndim, sizes_a, strides_a};
  const tileops::MemoryView b = {static_cast<uintptr_t>(address_b), item_b, ndim, sizes_b, strides_b};
  return tileops::may_overlap(a, b);
}
}
