// Words over the registers of a tile, written in the other words alone, so that the emulator runs this file.
#pragma once

#include "tileops/memory.h"

namespace tileops {

// Registers k..k+V-1 become v.
template <int V, typename T, int N>
TILEOPS_WORD void fill(Fragment<T, N>& f, int k, T v) {
  TILEOPS_UNROLL
  for (int i = 0; i < V; ++i) f[k + i] = v;
}

// V consecutive elements of any dtype, converted: for a tensor whose dtype is known at run time.
template <int V, typename T, int N>
TILEOPS_WORD void load_global_as_float(Fragment<float, N>& f, int k, global_ptr<const T> p, int64_t offset, site s) {
  Fragment<T, V> raw;
  load_global<V>(raw, 0, p, offset, s);
  TILEOPS_UNROLL
  for (int i = 0; i < V; ++i) f[k + i] = to_float(raw[i]);
}

// The same, an element at a time: for an address that need not be aligned.
template <int V, typename T, int N>
TILEOPS_WORD void load_global_as_float_each(Fragment<float, N>& f, int k, global_ptr<const T> p, int64_t offset, site s) {
  TILEOPS_UNROLL
  for (int i = 0; i < V; ++i) load_global_as_float<1>(f, k + i, p, offset + i, s);
}

// How many elements lie between p + offset and the next address that is aligned to V elements.
template <int V, typename T>
TILEOPS_WORD int elements_to_alignment(global_ptr<const T> p, int64_t offset) {
  return static_cast<int>(-(address_of(p, offset) / sizeof(T)) % V);
}

}  // namespace tileops
