#include "row_problem.h"

#include <utility>

namespace tileops {

namespace {

struct Dim {
  int64_t size, x, y;
};

constexpr int kMaxDims = 16;  // more that cannot merge are more than two anyway

// `outer` runs over whole ranges of `inner`, in x and in y: the two are one dimension.
bool continues(const Dim& outer, const Dim& inner) {
  return outer.x == inner.size * inner.x && outer.y == inner.size * inner.y;
}

// Adds d to dims[0, count), merged with what it continues or is continued by.
bool add_dim(Dim* dims, int* count, Dim d) {
  for (int i = 0; i < *count;) {
    Dim& e = dims[i];
    if (continues(d, e)) {
      d = {d.size * e.size, e.x, e.y};
    } else if (continues(e, d)) {
      d = {d.size * e.size, d.x, d.y};
    } else {
      ++i;
      continue;
    }
    e = dims[--*count];  // what d has become continues only what d or e did, so those that were passed need no second look
  }
  if (*count == kMaxDims) return false;
  dims[(*count)++] = d;
  return true;
}

}  // namespace

bool collapse_rows(int64_t ndim, const int64_t* sizes, const int64_t* x_strides, const int64_t* y_strides, int64_t dim,
                   RowProblem* out) {
  Dim rows[kMaxDims];
  int count = 0;
  for (int64_t i = ndim - 1; i >= 0; --i) {
    if (i == dim || sizes[i] == 1) continue;
    if (!add_dim(rows, &count, {sizes[i], x_strides[i], y_strides[i]})) return false;
  }
  if (count > 2) return false;

  const Dim none = {1, 0, 0};
  const Dim cols = ndim == 0 || sizes[dim] == 1 ? none : Dim{sizes[dim], x_strides[dim], y_strides[dim]};
  Dim inner = count > 0 ? rows[0] : none, outer = count > 1 ? rows[1] : none;
  // Neighbouring threads take neighbouring elements of the unit stride of x: where that is not the columns, let it be the inner
  // rows.
  const bool lanes_outer = cols.x != 1 && outer.x == 1, lanes_inner = cols.x != 1 && inner.x == 1;
  if (lanes_outer || (!lanes_inner && outer.size > inner.size)) std::swap(inner, outer);

  *out = {outer.size, inner.size, ndim == 0 ? 1 : sizes[dim], {outer.x, inner.x, cols.x}, {outer.y, inner.y, cols.y}};
  return true;
}

bool is_dense(int64_t ndim, const int64_t* sizes, const int64_t* strides) {
  int64_t numel = 1, expected = 1;
  for (int64_t i = 0; i < ndim; ++i) numel *= sizes[i];
  if (numel == 0) return true;
  while (expected < numel) {  // each round finds the dimension whose stride continues those found so far
    int64_t i = 0;
    while (i < ndim && (sizes[i] == 1 || strides[i] != expected)) ++i;
    if (i == ndim) return false;
    expected *= sizes[i];
  }
  return true;
}

namespace {

int64_t span(const MemoryView& m, int64_t below) {  // bytes from the first element to the end of the last, over strides < below
  int64_t bytes = m.item_size;
  for (int64_t i = 0; i < m.ndim; ++i) {
    const int64_t stride = m.strides[i] * m.item_size;
    if (stride < below) bytes += (m.sizes[i] - 1) * stride;
  }
  return bytes;
}

bool strides_are_multiples(const MemoryView& m, int64_t period) {  // all that are not below it
  for (int64_t i = 0; i < m.ndim; ++i) {
    const int64_t stride = m.strides[i] * m.item_size;
    if (m.sizes[i] > 1 && stride >= period && stride % period != 0) return false;
  }
  return true;
}

// Modulo `period` each view is one interval, and the two intervals do not meet.
bool separated_by(const MemoryView& a, const MemoryView& b, int64_t period) {
  if (period <= 0 || !strides_are_multiples(a, period) || !strides_are_multiples(b, period)) return false;
  const int64_t span_a = span(a, period), span_b = span(b, period);
  if (span_a > period || span_b > period) return false;
  const int64_t difference = static_cast<int64_t>(b.address - a.address) % period;
  const int64_t gap = difference < 0 ? difference + period : difference;  // from the start of a to the start of b, going round
  return gap >= span_a && period - gap >= span_b;
}

bool is_empty(const MemoryView& m) {
  for (int64_t i = 0; i < m.ndim; ++i) {
    if (m.sizes[i] == 0) return true;
  }
  return false;
}

}  // namespace

bool may_overlap(const MemoryView& a, const MemoryView& b) {
  if (is_empty(a) || is_empty(b)) return false;
  const uintptr_t end_a = a.address + span(a, INT64_MAX), end_b = b.address + span(b, INT64_MAX);
  if (a.address >= end_b || b.address >= end_a) return false;
  for (const MemoryView* m : {&a, &b}) {
    for (int64_t i = 0; i < m->ndim; ++i) {
      if (m->sizes[i] > 1 && separated_by(a, b, m->strides[i] * m->item_size)) return false;
    }
  }
  return true;
}

bool overlaps_itself(int64_t ndim, const int64_t* sizes, const int64_t* strides) {
  bool zero = false;
  for (int64_t i = 0; i < ndim; ++i) {
    if (sizes[i] == 0) return false;
    zero |= sizes[i] > 1 && strides[i] == 0;
  }
  return zero;
}

}  // namespace tileops
