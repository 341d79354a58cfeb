#include "gemm_problem.h"

namespace tileops {

namespace {

constexpr int kTensors = 4;  // a, b, y, residual
constexpr int64_t kTmaExtent = int64_t{1} << 31;  // coordinates are int32
constexpr int64_t kTmaStride = int64_t{1} << 40;  // in bytes

// Stride along dimension `dim` of the result, 0 where the tensor is broadcast.
int64_t stride_along(const MatrixStack& tensor, int64_t result_ndim, int64_t dim) {
  const int64_t own = dim - (result_ndim - tensor.ndim);
  return own < 0 || tensor.sizes[own] == 1 ? 0 : tensor.strides[own];
}

// One dimension of the result and the strides of all tensors along it.
struct Dimension {
  int64_t size = 1;
  int64_t stride[kTensors] = {};
};

// Whether `outer` followed by `inner` is one dimension for the tensors of the mask.
bool merges(const Dimension& outer, const Dimension& inner, const bool (&counts)[kTensors]) {
  for (int t = 0; t < kTensors; ++t) {
    if (counts[t] && outer.stride[t] != inner.stride[t] * inner.size) return false;
  }
  return true;
}

// Puts `outer` before `inner`; false: the two do not merge.
bool absorb(const Dimension& outer, Dimension* inner, const bool (&counts)[kTensors]) {
  if (inner->size == 1) {
    *inner = outer;
    return true;
  }
  if (!merges(outer, *inner, counts)) return false;
  inner->size *= outer.size;
  return true;
}

bool fits_tma(uintptr_t address, int64_t item_size, int rank, const int64_t* extents, const int64_t* strides, int unit_dim) {
  if (address % 16 != 0) return false;
  for (int d = 0; d < rank; ++d) {
    if (extents[d] >= kTmaExtent) return false;
    const int64_t bytes = strides[d] * item_size;
    if (d != unit_dim && extents[d] > 1 && (bytes % 16 != 0 || bytes >= kTmaStride)) return false;
  }
  return true;
}

}  // namespace

bool collapse_gemm(const MatrixStack& a, const MatrixStack& b, const MatrixStack& y, const MatrixStack* residual,
                   GemmProblem* out) {
  constexpr bool all[] = {true, true, true, true};
  constexpr bool all_but_b[] = {true, false, true, true};
  const MatrixStack* tensors[kTensors] = {&a, &b, &y, residual};
  Dimension rows, batch;
  rows.size = y.sizes[y.ndim - 2];
  for (int t = 0; t < kTensors; ++t) {
    if (tensors[t] && t != 1) rows.stride[t] = stride_along(*tensors[t], y.ndim, y.ndim - 2);
  }
  for (int64_t d = y.ndim - 3; d >= 0; --d) {
    Dimension next;
    next.size = y.sizes[d];
    if (next.size == 1) continue;
    for (int t = 0; t < kTensors; ++t) {
      if (tensors[t]) next.stride[t] = stride_along(*tensors[t], y.ndim, d);
    }
    const bool becomes_rows = batch.size == 1 && next.stride[1] == 0 && absorb(next, &rows, all_but_b);
    if (!becomes_rows && !absorb(next, &batch, all)) return false;
  }
  const int64_t last = y.ndim - 1;
  const int64_t k = a.sizes[a.ndim - 1];
  *out = {batch.size,
          rows.size,
          y.sizes[last],
          k,
          {batch.stride[0], rows.stride[0], k == 1 ? 0 : a.strides[a.ndim - 1]},
          {batch.stride[1], k == 1 ? 0 : b.strides[b.ndim - 2], stride_along(b, y.ndim, last)},
          {batch.stride[2], rows.stride[2], stride_along(y, y.ndim, last)},
          {batch.stride[3], rows.stride[3], residual ? stride_along(*residual, y.ndim, last) : 0}};
  return true;
}

Access access_along(uintptr_t address, int64_t item_size, int rank, const int64_t* extents, const int64_t* strides, int dim) {
  if (extents[dim] > 1 && strides[dim] != 1) return Access::copy;
  return fits_tma(address, item_size, rank, extents, strides, dim) ? Access::tma : Access::vector;
}

OperandLayout layout_of(uintptr_t address, int64_t item_size, const int64_t (&extents)[3], const int64_t (&strides)[3],
                        int k_dim) {
  const Access along_k = access_along(address, item_size, extents, strides, k_dim);
  const Access across = access_along(address, item_size, extents, strides, 3 - k_dim);
  return along_k <= across ? OperandLayout{true, along_k} : OperandLayout{false, across};
}

std::string describe(const GemmProblem& p, OperandLayout a, OperandLayout b) {
  const std::string shape = std::to_string(p.m) + "x" + std::to_string(p.n) + "x" + std::to_string(p.k);
  const bool by_tma = a.access == Access::tma && b.access == Access::tma;
  return (p.batch > 1 ? std::to_string(p.batch) + " times " : "") + shape + " " + (a.along_k ? 'n' : 't') +
         (b.along_k ? 't' : 'n') + (by_tma ? " by TMA" : " by vectors");
}

}  // namespace tileops
