#include "row_problem.h"

#include <utility>

namespace tileops {

namespace {

struct Dim {
  int64_t size, stride[kMaxRowTensors];
};

constexpr int kMaxDims = 16;  // more that cannot merge are more than three anyway
constexpr int64_t kFewRows = 32;  // may leave a part of a CTA's rows unused

// `outer` runs over whole ranges of `inner`, in each tensor: the two are one dimension.
bool continues(const Dim& outer, const Dim& inner, int count) {
  for (int t = 0; t < count; ++t) {
    if (outer.stride[t] != inner.size * inner.stride[t]) return false;
  }
  return true;
}

// Adds d to dims[0, used), merged with what it continues or is continued by.
bool add_dim(Dim* dims, int* used, Dim d, int count) {
  for (int i = 0; i < *used;) {
    Dim& e = dims[i];
    if (continues(d, e, count)) {
      e.size *= d.size;
      d = e;
    } else if (continues(e, d, count)) {
      d.size *= e.size;
    } else {
      ++i;
      continue;
    }
    e = dims[--*used];  // what d has become continues only what d or e did, so those that were passed need no second look
  }
  if (*used == kMaxDims) return false;
  dims[(*used)++] = d;
  return true;
}

// Of two or three dimensions, innermost first, the one for the inner rows. Neighbouring threads take neighbouring elements of
// the unit stride of the first tensor: where that is not the columns, the rows that have it. Else the innermost, so that CTAs
// that run together are neighbours in memory, unless it is short and another is longer.
int inner_rows(const Dim* rows, int used, int64_t column_stride) {
  int longest = 0;
  for (int i = 0; i < used; ++i) {
    if (column_stride != 1 && rows[i].stride[0] == 1) return i;
    if (rows[i].size > rows[longest].size) longest = i;
  }
  return rows[0].size < kFewRows ? longest : 0;
}

}  // namespace

bool collapse_rows(int64_t ndim, const int64_t* sizes, int64_t dim, const int64_t* const* strides, int count, int row_dims,
                   RowProblem* out) {
  const auto dim_of = [&](int64_t i) {
    Dim d;
    d.size = sizes[i];
    for (int t = 0; t < count; ++t) d.stride[t] = strides[t][i];
    return d;
  };
  Dim none = {1, {}}, rows[kMaxDims];
  int used = 0;
  for (int64_t i = ndim - 1; i >= 0; --i) {
    if (i == dim || sizes[i] == 1) continue;
    if (!add_dim(rows, &used, dim_of(i), count)) return false;
  }
  if (used > row_dims) return false;

  Dim cols = ndim == 0 || sizes[dim] == 1 ? none : dim_of(dim);
  if (used > 1) std::swap(rows[0], rows[inner_rows(rows, used, cols.stride[0])]);
  if (used > 2 && rows[2].size > rows[1].size) std::swap(rows[1], rows[2]);
  const Dim* ordered[] = {used > 2 ? &rows[2] : &none, used > 1 ? &rows[1] : &none, used > 0 ? &rows[0] : &none, &cols};
  out->batch = ordered[0]->size;
  out->outer = ordered[1]->size;
  out->inner = ordered[2]->size;
  out->cols = ordered[3]->size;
  for (int t = 0; t < count; ++t) {
    for (int i = 0; i < 4; ++i) out->stride[t][i] = ordered[i]->stride[t];
  }
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
