// Opens the parts of the binding that are plain C++ to ctypes.
#include "row_problem.h"

extern "C" {

int probe_collapse(int64_t ndim, const int64_t* sizes, const int64_t* x, const int64_t* y, int64_t dim, int64_t* out) {
  tileops::RowProblem p;
  if (!tileops::collapse_rows(ndim, sizes, x, y, dim, &p)) return 0;
  const int64_t flat[] = {p.outer,       p.inner,       p.cols,        p.x_stride[0], p.x_stride[1],
                          p.x_stride[2], p.y_stride[0], p.y_stride[1], p.y_stride[2]};
  for (int i = 0; i < 9; ++i) out[i] = flat[i];
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
