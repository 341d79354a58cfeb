// Host meaning of csrc/include/tileops/async_copy.h.
#pragma once

#include "tileops/barrier.h"

namespace tileops {

template <int V, typename T, typename P>
TILEOPS_WORD void copy_async(shared_ptr<T> dst, int shared_offset, global_ptr<P> src, int64_t offset, bool inside, site s) {
  static_assert(std::is_same<typename std::remove_const<P>::type, T>::value, "pointers differ in type");
  constexpr int bytes = V * static_cast<int>(sizeof(T));
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "copies of 4, 8 or 16 bytes");
  emulator::machine->copy_async((dst + shared_offset).byte_offset, src.origin,
                                (src.at + offset) * static_cast<int64_t>(sizeof(T)), bytes, inside ? bytes : 0, s.number);
}
template <int V, typename T>
TILEOPS_WORD void copy_async(shared_ptr<T> dst, int shared_offset, const T* src, int64_t offset, bool inside, site s) {
  copy_async<V>(dst, shared_offset, global_ptr<const T>{src, 0}, offset, inside, s);
}

TILEOPS_WORD void copy_commit(site s) { emulator::machine->copy_commit(s.number); }
template <int Pending>
TILEOPS_WORD void copy_wait(site s) { emulator::machine->copy_wait(Pending, s.number); }
TILEOPS_WORD void arrive_after_copies(shared_ptr<mbarrier> b, site s) {
  emulator::machine->arrive_after_copies(b.byte_offset, s.number);
}

}  // namespace tileops
