// What the made-up kernels of attention share: tensors, however a kernel gets them, and a row of results in double.
#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "fake_cuda.h"

namespace fake {

// A tensor [batch (or page), heads, tokens, columns], of no more columns than the tile.
struct Heads {
  const char* data;
  int64_t batch, head, token;  // strides in elements
  int64_t columns;
  int type;

  int64_t at(int64_t b, int64_t h, int64_t s, int64_t c) const { return c + s * token + h * head + b * batch; }
  double operator()(int64_t b, int64_t h, int64_t s, int64_t c) const { return load(data, at(b, h, s, c), type); }
  void put(int64_t b, int64_t h, int64_t s, int64_t c, double value) const {
    store(const_cast<char*>(data), at(b, h, s, c), type, static_cast<float>(value));
  }
};

inline Heads of_map(const tileops::tensor_map& bytes, int64_t batches, int64_t heads, int64_t tokens, int64_t most, int type,
                    tileops::MapBox box) {
  Map map;
  memcpy(&map, &bytes, sizeof(map));
  const int64_t columns = map.extents[0];
  if (columns > most) abort();
  map = map_of(bytes, 4, {columns, tokens, heads, batches}, type, box);
  const auto stride = [&](int dim) { return static_cast<int64_t>(map.strides[dim]) / 2; };
  return {map.data, stride(2), stride(1), stride(0), columns, type};
}

// Accesses of 16 bytes, to rows of any length.
inline Heads of_strides(const void* data, const int64_t (&strides)[4], int64_t columns, int64_t most, int type) {
  bool right = reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides[3] == 1 && columns <= most;
  for (int dim = 0; dim < 3; ++dim) right = right && strides[dim] % 8 == 0;
  if (!right) abort();
  return {static_cast<const char*>(data), strides[0], strides[1], strides[2], columns, type};
}

// What a call asks for beside keys and values.
struct Scores {
  double scale_log2, cap_scale;
  bool softcap;
  double sink;  // natural; -INFINITY: none
};

// out and lse of a row that sees the keys from `first` up to `end`: product(key) with its query, value(key, column).
template <typename Product, typename Value>
std::pair<std::vector<double>, double> attend(const Scores& s, int64_t first, int64_t end, int64_t columns, Product product,
                                              Value value) {
  std::vector<double> scores, sums(columns);
  double peak = -INFINITY, total = 0;
  for (int64_t key = first; key < end; ++key) {
    const double score = product(key);
    scores.push_back((s.softcap ? tanh(score * s.cap_scale) : score) * s.scale_log2);
    peak = std::max(peak, scores.back());
  }
  if (scores.empty()) return {sums, -INFINITY};
  for (int64_t key = first; key < end; ++key) {
    const double weight = exp2(scores[key - first] - peak);
    total += weight;
    for (int64_t c = 0; c < columns; ++c) sums[c] += weight * value(key, c);
  }
  total += exp2(s.sink / M_LN2 - peak);
  for (double& sum : sums) sum /= total;
  return {sums, (peak + log2(total)) * M_LN2};
}

template <typename Params>
Scores scores_of(const Params& p, bool softcap, bool sinks, int64_t head, int64_t row) {
  Scores s = {p.scale_log2, p.cap_scale, softcap, -INFINITY};
  if (!(p.scale_log2 > 0)) abort();
  if (sinks && p.sinks_dtype) s.sink = load(p.sinks, head * p.sinks_stride[0] + row * p.sinks_stride[1], p.sinks_dtype);
  return s;
}

// Columns of values, as either program calls them.
template <typename Params>
auto columns_of_v(const Params& p) -> decltype(p.head_dim_v) {
  return p.head_dim_v;
}
template <typename Params>
auto columns_of_v(const Params& p) -> decltype(p.dim_v) {
  return p.dim_v;
}

// Keys and values in pages, as a paged kernel finds them: without a division, through the table of a request.
template <typename Params>
struct Pages {
  const Params& p;
  int64_t requests;
  Heads k, v;

  Pages(const Params& params, int64_t request_count, int bn, int head_dim, int head_dim_v, const tileops::MapBox* maps, int type)
      : p(params), requests(request_count) {
    const int unit = p.unit;
    if (p.block_table_stride[1] != 1) abort();
    if constexpr (std::is_same_v<std::decay_t<decltype(p.k)>, tileops::tensor_map>) {
      if (unit < 1 || (unit & (unit - 1)) || p.page % unit || bn % unit || unit * 128 < bn) abort();
      k = of_map(p.k, p.pages, p.kv_heads, p.page, head_dim, type, {maps[1].columns, unit, maps[1].swizzle});
      v = of_map(p.v, p.pages, p.kv_heads, p.page, head_dim_v, type, {maps[2].columns, unit, maps[2].swizzle});
    } else {
      k = of_strides(p.k, p.k_stride, p.head_dim, head_dim, type);
      v = of_strides(p.v, p.v_stride, columns_of_v(p), head_dim_v, type);
    }
  }

  std::pair<int64_t, int64_t> place(int64_t request, int64_t key) const {  // page, and slot in it
    const int64_t index = key * p.inverse >> 32;
    if (index >= p.table || request >= requests) abort();
    const int64_t page = static_cast<const int32_t*>(p.block_table)[request * p.block_table_stride[0] + index];
    if (page < 0 || page >= p.pages) abort();
    return {page, key - index * p.page};
  }
};

}  // namespace fake
