// The tensors of a row operator, of any rank, as the kernels see them: rows [batch, outer, inner] with strides.
#pragma once

#include <stdint.h>

namespace tileops {

constexpr int kMaxRowTensors = 8;

struct RowProblem {
  int64_t batch, outer, inner, cols;
  int64_t stride[kMaxRowTensors][4];  // in elements, of (batch, outer, inner, cols); 0 for an extent of 1
};

// Writes `count` tensors over the dimensions `sizes`, tensor t with strides[t], as rows along `dim` (0 <= dim < ndim, or ndim 0).
// One that has a single value a row has a stride of 0 along `dim`. Dimensions of size 1 vanish, and two merge wherever the
// strides of all tensors allow, in whatever order they stand. False if more than row_dims (2 or 3) remain.
bool collapse_rows(int64_t ndim, const int64_t* sizes, int64_t dim, const int64_t* const* strides, int count, int row_dims,
                   RowProblem* out);

// Whether the elements fill one block of memory without gaps or overlap, in whatever order the dimensions stand: then
// torch.empty_like keeps the strides, and together with a result of the same strides it always collapses.
bool is_dense(int64_t ndim, const int64_t* sizes, const int64_t* strides);

// Memory of a tensor: where its elements lie, in bytes.
struct MemoryView {
  uintptr_t address;
  int64_t item_size, ndim;
  const int64_t* sizes;
  const int64_t* strides;
};

// False only if no byte is in both. Interleaved views (two slices of one buffer) are told apart where a common stride separates
// them; beyond that, views whose address ranges meet count as overlapping.
bool may_overlap(const MemoryView& a, const MemoryView& b);

// A stride of 0 on a dimension of more than one element: two indices, one address.
bool overlaps_itself(int64_t ndim, const int64_t* sizes, const int64_t* strides);

}  // namespace tileops
