// Accesses to global and shared memory. Offsets are in elements; global offsets are 64-bit.
#pragma once

#include "tileops/types.h"

namespace tileops {

template <typename T> using global_ptr = T*;
template <typename T> using shared_ptr = T*;

template <typename T> TILEOPS_WORD global_ptr<const T> global(const void* p) { return static_cast<const T*>(p); }
template <typename T> TILEOPS_WORD global_ptr<T> global(void* p) { return static_cast<T*>(p); }

template <typename T>
TILEOPS_WORD uint64_t address_of(global_ptr<const T> p, int64_t offset) { return reinterpret_cast<uint64_t>(p + offset); }

// The CTA's dynamic shared memory, from a byte offset of the shared-memory plan.
template <typename T>
TILEOPS_WORD shared_ptr<T> shared(int byte_offset) {
  extern __shared__ __align__(1024) unsigned char arena[];
  return reinterpret_cast<T*>(arena + byte_offset);
}

namespace detail {
template <int Bytes> struct Word;
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned int; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

// How V elements of type T are moved: in words of at most 16 bytes, `step` elements each.
template <typename T, int V>
struct Access {
  static constexpr int bytes = V * sizeof(T) < 16 ? V * sizeof(T) : 16, step = bytes / static_cast<int>(sizeof(T));
  using W = typename Word<bytes>::type;
  static TILEOPS_WORD W& at(T* p) { return *reinterpret_cast<W*>(p); }
  static TILEOPS_WORD const W& at(const T* p) { return *reinterpret_cast<const W*>(p); }
};
}  // namespace detail

// V consecutive elements into registers k..k+V-1, in accesses of at most 16 bytes; the address is aligned to the access and
// nothing writes there while the kernel runs. The plain form is the fastest where nothing is read twice: .cs and
// L1::no_allocate cost 3 to 8 per cent. `evict_first` is for data that must not displace what will be read again.
template <int V, typename T, int N>
TILEOPS_WORD void load_global(Fragment<T, N>& f, int k, global_ptr<const T> p, int64_t offset, site) {
  using A = detail::Access<T, V>;
  TILEOPS_UNROLL
  for (int i = 0; i < V; i += A::step) A::at(&f.data[k + i]) = __ldg(&A::at(p + offset + i));
}

template <int V, typename T, int N>
TILEOPS_WORD void load_global_evict_first(Fragment<T, N>& f, int k, global_ptr<const T> p, int64_t offset, site) {
  using A = detail::Access<T, V>;
  TILEOPS_UNROLL
  for (int i = 0; i < V; i += A::step) A::at(&f.data[k + i]) = __ldcs(&A::at(p + offset + i));
}

// V consecutive elements from registers k..k+V-1.
template <int V, typename T, int N>
TILEOPS_WORD void store_global(global_ptr<T> p, int64_t offset, const Fragment<T, N>& f, int k, site) {
  using A = detail::Access<T, V>;
  TILEOPS_UNROLL
  for (int i = 0; i < V; i += A::step) A::at(p + offset + i) = A::at(&f.data[k + i]);
}

template <int V, typename T, int N>
TILEOPS_WORD void store_global_evict_first(global_ptr<T> p, int64_t offset, const Fragment<T, N>& f, int k, site) {
  using A = detail::Access<T, V>;
  TILEOPS_UNROLL
  for (int i = 0; i < V; i += A::step) __stcs(&A::at(p + offset + i), A::at(&f.data[k + i]));
}

// The integer at p + offset, to which v is then added: atomic, orders nothing else.
TILEOPS_WORD int fetch_add(global_ptr<int32_t> p, int64_t offset, int v, site) { return atomicAdd(p + offset, v); }

template <typename T> TILEOPS_WORD T load_shared(shared_ptr<T> p, int offset, site) { return p[offset]; }
template <typename T> TILEOPS_WORD void store_shared(shared_ptr<T> p, int offset, T v, site) { p[offset] = v; }

// V consecutive elements into registers k..k+V-1 and from them, in accesses of at most 16 bytes, at addresses aligned to that.
template <int V, typename T, int N>
TILEOPS_WORD void load_shared(Fragment<T, N>& f, int k, shared_ptr<T> p, int offset, site) {
  using A = detail::Access<T, V>;
  TILEOPS_UNROLL
  for (int i = 0; i < V; i += A::step) A::at(&f.data[k + i]) = A::at(p + offset + i);
}
template <int V, typename T, int N>
TILEOPS_WORD void store_shared(shared_ptr<T> p, int offset, const Fragment<T, N>& f, int k, site) {
  using A = detail::Access<T, V>;
  TILEOPS_UNROLL
  for (int i = 0; i < V; i += A::step) A::at(p + offset + i) = A::at(&f.data[k + i]);
}

}  // namespace tileops
