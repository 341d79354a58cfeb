// Host meaning of csrc/include/tileops/tma.h. A tensor map holds what tileops_dsl/emulate.py writes (../../tensor_map.h).
#pragma once

#include "tileops/barrier.h"
#include "tileops/tensor_map.h"

namespace tileops {

enum class L2 : uint64_t { kEvictNormal, kEvictFirst, kEvictLast };

template <int Rank> struct coordinates { int v[Rank]; };
template <typename... I> TILEOPS_WORD coordinates<sizeof...(I)> at(I... i) { return {{static_cast<int>(i)...}}; }

namespace detail {
template <typename T, int Rank>
TILEOPS_WORD emulator::Box box(const tensor_map& map, coordinates<Rank> c) {
  static_assert(Rank >= 2 && Rank <= 4, "boxes have 2 to 4 dimensions");
  emulator::Box b{&map, Rank, {}, sizeof(T)};
  for (int i = 0; i < Rank; ++i) b.coordinates[i] = c.v[i];
  return b;
}
}  // namespace detail

TILEOPS_WORD void prefetch_tensor_map(const tensor_map& map, site s) { emulator::machine->prefetch_tensor_map(&map, s.number); }

template <L2 hint = L2::kEvictNormal, typename T, int Rank>
TILEOPS_WORD void tma_load(shared_ptr<T> dst, const tensor_map& map, coordinates<Rank> c, shared_ptr<mbarrier> b, site s) {
  emulator::machine->load_box(dst.byte_offset, detail::box<T>(map, c), b.byte_offset, 0, false, s.number);
}
template <L2 hint = L2::kEvictNormal, typename T, int Rank>
TILEOPS_WORD void tma_load_multicast(shared_ptr<T> dst, const tensor_map& map, coordinates<Rank> c, shared_ptr<mbarrier> b,
                                     uint16_t ctas, site s) {
  emulator::machine->load_box(dst.byte_offset, detail::box<T>(map, c), b.byte_offset, ctas, true, s.number);
}
template <typename T, int Rank>
TILEOPS_WORD void tma_store(const tensor_map& map, coordinates<Rank> c, shared_ptr<T> src, site s) {
  emulator::machine->store_box(src.byte_offset, detail::box<T>(map, c), emulator::Direction::store, s.number);
}
template <typename T, int Rank>
TILEOPS_WORD void tma_reduce_add(const tensor_map& map, coordinates<Rank> c, shared_ptr<T> src, site s) {
  emulator::machine->store_box(src.byte_offset, detail::box<T>(map, c), emulator::Direction::add, s.number);
}

template <typename T, typename P>
TILEOPS_WORD void bulk_load(shared_ptr<T> dst, global_ptr<P> src, int64_t offset, int bytes, shared_ptr<mbarrier> b, site s) {
  emulator::machine->bulk_load(dst.byte_offset, src.origin, (src.at + offset) * static_cast<int64_t>(sizeof(T)), bytes,
                               b.byte_offset, s.number);
}
template <typename T>
TILEOPS_WORD void bulk_store(global_ptr<T> dst, int64_t offset, shared_ptr<T> src, int bytes, site s) {
  const int64_t at = (dst.at + offset) * static_cast<int64_t>(sizeof(T));
  emulator::machine->bulk_store(src.byte_offset, dst.origin, at, bytes, s.number);
}

template <typename T>
TILEOPS_WORD void bulk_load(shared_ptr<T> dst, const T* src, int64_t offset, int bytes, shared_ptr<mbarrier> b, site s) {
  bulk_load(dst, global_ptr<const T>{src, 0}, offset, bytes, b, s);
}
template <typename T>
TILEOPS_WORD void bulk_store(T* dst, int64_t offset, shared_ptr<T> src, int bytes, site s) {
  bulk_store(global_ptr<T>{dst, 0}, offset, src, bytes, s);
}

TILEOPS_WORD void store_commit(site s) { emulator::machine->store_commit(s.number); }
template <int Pending>
TILEOPS_WORD void store_wait_read(site s) { emulator::machine->store_wait(Pending, true, s.number); }
template <int Pending>
TILEOPS_WORD void store_wait(site s) { emulator::machine->store_wait(Pending, false, s.number); }

}  // namespace tileops
