// A row operator on tensors of any rank, as the kernels see it: x and y are [outer, inner, cols] with strides.
#pragma once

#include <stdint.h>

namespace tileops {

struct RowProblem {
  int64_t outer, inner, cols;
  int64_t x_stride[3], y_stride[3];  // in elements, of (outer, inner, cols); 0 for an extent of 1
};

// Writes x [sizes] with strides x_strides, and y of the same sizes, as rows along `dim` (0 <= dim < ndim, or ndim 0).
// Dimensions of size 1 vanish, and two merge wherever the strides of both x and y allow, in whatever order they stand. False if
// more than two remain.
bool collapse_rows(int64_t ndim, const int64_t* sizes, const int64_t* x_strides, const int64_t* y_strides, int64_t dim,
                   RowProblem* out);

// Whether the elements fill one block of memory without gaps or overlap, in whatever order the dimensions stand: then
// torch.empty_like keeps the strides, and together with a y of the same strides it always collapses.
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
