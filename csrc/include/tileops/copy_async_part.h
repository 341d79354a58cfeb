// An asynchronous copy whose end may lie inside its vector (cp.async, sm_80 on).
#pragma once

#include "tileops/async_copy.h"

namespace tileops {

// The first `count` of V elements, 16 bytes in all at addresses aligned to that, to dst + shared_offset, zeros in the place of
// the others: all of them where count is 0 or less, none where it is V or more. Only those elements are read.
template <int V, typename T>
TILEOPS_WORD void copy_async_part(shared_ptr<T> dst, int shared_offset, global_ptr<const T> src, int64_t offset, int count,
                                  site) {
  constexpr int size = static_cast<int>(sizeof(T));
  static_assert(V * size == 16, "copies of 16 bytes");
  const int read = (count < 0 ? 0 : count < V ? count : V) * size;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::
               "r"(detail::shared_address(dst + shared_offset)), "l"(src + offset), "r"(read) : "memory");
}

}  // namespace tileops
