// Host meaning of csrc/include/tileops/memory.h: pointers that remember where they came from, accesses that are checked.
#pragma once

#include <type_traits>

#include "tileops/types.h"

namespace tileops {

template <typename T>
struct global_ptr {
  T* origin;
  int64_t at;  // in elements from origin
  global_ptr operator+(int64_t n) const { return {origin, at + n}; }
  global_ptr operator-(int64_t n) const { return {origin, at - n}; }
  global_ptr& operator+=(int64_t n) { at += n; return *this; }
};

template <typename T>
struct shared_ptr {
  int64_t byte_offset;  // in the CTA's arena
  shared_ptr operator+(int n) const { return {byte_offset + n * static_cast<int64_t>(sizeof(T))}; }
  shared_ptr operator-(int n) const { return *this + -n; }
};

template <typename T> TILEOPS_WORD global_ptr<const T> global(const void* p) { return {static_cast<const T*>(p), 0}; }
template <typename T> TILEOPS_WORD global_ptr<T> global(void* p) { return {static_cast<T*>(p), 0}; }
template <typename T> TILEOPS_WORD shared_ptr<T> shared(int byte_offset) { return {byte_offset}; }

template <typename T>
TILEOPS_WORD uint64_t address_of(global_ptr<const T> p, int64_t offset) {
  return reinterpret_cast<uint64_t>(p.origin) + (p.at + offset) * static_cast<int64_t>(sizeof(T));
}

namespace detail {
template <int V, typename T, typename P>
TILEOPS_WORD void* access(global_ptr<P> p, int64_t offset, int k, int count, bool write, site s) {
  constexpr int all = V * static_cast<int>(sizeof(T)), bytes = all < 16 ? all : 16;
  static_assert((bytes & (bytes - 1)) == 0 && bytes > 1 && all % bytes == 0, "an access has 2, 4, 8 or a multiple of 16 bytes");
  if (k < 0 || k + V > count) emulator::machine->register_index(k < 0 ? k : k + V - 1, count, s.number);
  if (k * static_cast<int>(sizeof(T)) % bytes != 0) emulator::machine->register_misaligned(k, bytes, s.number);
  return emulator::machine->access_global(p.origin, (p.at + offset) * static_cast<int64_t>(sizeof(T)), sizeof(T), V, write,
                                          s.number);
}
}  // namespace detail

// P is T or const T: the device's pointer converts, a class template's argument does not.
template <int V, typename T, int N, typename P>
TILEOPS_WORD void load_global(Fragment<T, N>& f, int k, global_ptr<P> p, int64_t offset, site s) {
  static_assert(std::is_same<typename std::remove_const<P>::type, T>::value, "pointer and fragment differ in type");
  T values[V];
  memcpy(values, detail::access<V, T>(p, offset, k, N, false, s), sizeof(values));
  for (int i = 0; i < V; ++i) f.data[k + i] = values[i];
}

template <int V, typename T, int N, typename P>
TILEOPS_WORD void load_global_evict_first(Fragment<T, N>& f, int k, global_ptr<P> p, int64_t offset, site s) {
  load_global<V>(f, k, p, offset, s);
}

template <int V, typename T, int N>
TILEOPS_WORD void store_global(global_ptr<T> p, int64_t offset, const Fragment<T, N>& f, int k, site s) {
  void* target = detail::access<V, T>(p, offset, k, N, true, s);
  T values[V];
  for (int i = 0; i < V; ++i) values[i] = detail::written(f, k + i, s);
  memcpy(target, values, sizeof(values));
}

template <int V, typename T, int N>
TILEOPS_WORD void store_global_evict_first(global_ptr<T> p, int64_t offset, const Fragment<T, N>& f, int k, site s) {
  store_global<V>(p, offset, f, k, s);
}

TILEOPS_WORD int fetch_add(global_ptr<int32_t> p, int64_t offset, int v, site s) {
  int32_t before;
  emulator::machine->access_global(p.origin, (p.at + offset) * 4, 4, 1, false, s.number);
  void* target = emulator::machine->access_global(p.origin, (p.at + offset) * 4, 4, 1, true, s.number);
  memcpy(&before, target, 4);
  const int32_t after = before + v;
  memcpy(target, &after, 4);
  return before;
}

// A field of the parameters that has its type is a raw pointer, which on the device needs no global().
template <int V, typename T, int N>
TILEOPS_WORD void load_global(Fragment<T, N>& f, int k, const T* p, int64_t offset, site s) {
  load_global<V>(f, k, global_ptr<const T>{p, 0}, offset, s);
}
template <int V, typename T, int N>
TILEOPS_WORD void load_global_evict_first(Fragment<T, N>& f, int k, const T* p, int64_t offset, site s) {
  load_global<V>(f, k, global_ptr<const T>{p, 0}, offset, s);
}
template <int V, typename T, int N>
TILEOPS_WORD void store_global(T* p, int64_t offset, const Fragment<T, N>& f, int k, site s) {
  store_global<V>(global_ptr<T>{p, 0}, offset, f, k, s);
}
template <int V, typename T, int N>
TILEOPS_WORD void store_global_evict_first(T* p, int64_t offset, const Fragment<T, N>& f, int k, site s) {
  store_global<V>(global_ptr<T>{p, 0}, offset, f, k, s);
}
TILEOPS_WORD int fetch_add(int32_t* p, int64_t offset, int v, site s) {
  return fetch_add(global_ptr<int32_t>{p, 0}, offset, v, s);
}

template <typename T>
TILEOPS_WORD T load_shared(shared_ptr<T> p, int offset, site s) {
  T v;
  memcpy(&v, emulator::machine->access_shared((p + offset).byte_offset, sizeof(T), false, -1, s.number), sizeof(T));
  return v;
}

// The value takes no part in deducing T, so that a register of a fragment converts.
template <typename T>
TILEOPS_WORD void store_shared(shared_ptr<T> p, int offset, typename detail::identity<T>::type v, site s) {
  memcpy(emulator::machine->access_shared((p + offset).byte_offset, sizeof(T), true, -1, s.number), &v, sizeof(T));
}

namespace detail {
// The address of the i-th access, of at most 16 bytes, that moves V elements between registers k.. and shared memory.
template <int V, typename T>
TILEOPS_WORD void* access(shared_ptr<T> p, int offset, int i, int k, int count, bool write, site s) {
  constexpr int all = V * static_cast<int>(sizeof(T)), bytes = all < 16 ? all : 16;
  static_assert((bytes & (bytes - 1)) == 0 && bytes > 1 && all % bytes == 0, "an access has 2, 4, 8 or a multiple of 16 bytes");
  if (k < 0 || k + V > count) emulator::machine->register_index(k < 0 ? k : k + V - 1, count, s.number);
  if (k * static_cast<int>(sizeof(T)) % bytes != 0) emulator::machine->register_misaligned(k, bytes, s.number);
  return emulator::machine->access_shared((p + offset).byte_offset + i, bytes, write, -1, s.number);
}
}  // namespace detail

template <int V, typename T, int N>
TILEOPS_WORD void load_shared(Fragment<T, N>& f, int k, shared_ptr<T> p, int offset, site s) {
  T values[V];
  constexpr int all = sizeof(values), bytes = all < 16 ? all : 16;
  for (int i = 0; i < all; i += bytes)
    memcpy(reinterpret_cast<char*>(values) + i, detail::access<V, T>(p, offset, i, k, N, false, s), bytes);
  for (int i = 0; i < V; ++i) f.data[k + i] = values[i];
}

template <int V, typename T, int N>
TILEOPS_WORD void store_shared(shared_ptr<T> p, int offset, const Fragment<T, N>& f, int k, site s) {
  T values[V];
  constexpr int all = sizeof(values), bytes = all < 16 ? all : 16;
  for (int i = 0; i < V; ++i) values[i] = detail::written(f, k + i, s);
  for (int i = 0; i < all; i += bytes)
    memcpy(detail::access<V, T>(p, offset, i, k, N, true, s), reinterpret_cast<char*>(values) + i, bytes);
}

}  // namespace tileops
