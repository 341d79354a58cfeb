// Host meaning of csrc/include/tileops/copy_async_part.h.
#pragma once

#include "tileops/async_copy.h"

namespace tileops {

template <int V, typename T>
TILEOPS_WORD void copy_async_part(shared_ptr<T> dst, int shared_offset, global_ptr<const T> src, int64_t offset, int count,
                                  site s) {
  constexpr int size = static_cast<int>(sizeof(T));
  static_assert(V * size == 16, "copies of 16 bytes");
  const int read = (count < 0 ? 0 : count < V ? count : V) * size;
  emulator::machine->copy_async((dst + shared_offset).byte_offset, src.origin, (src.at + offset) * static_cast<int64_t>(size),
                                16, read, s.number);
}

}  // namespace tileops
