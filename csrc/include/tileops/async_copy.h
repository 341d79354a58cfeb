// Asynchronous copies from global to shared memory by each thread (cp.async, sm_80 on). They write as the thread itself would
// (generic proxy): whoever hands the data to wgmma calls fence_async_shared between the wait and the product.
#pragma once

#include "tileops/barrier.h"

namespace tileops {

// V elements, 4, 8 or 16 bytes in all at addresses aligned to that, to dst + shared_offset; zeros where not `inside`, and
// then nothing is read. 16 bytes bypass the L1 cache.
template <int V, typename T>
TILEOPS_WORD void copy_async(shared_ptr<T> dst, int shared_offset, global_ptr<const T> src, int64_t offset, bool inside, site) {
  constexpr int bytes = V * static_cast<int>(sizeof(T));
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "copies of 4, 8 or 16 bytes");
  const uint32_t to = detail::shared_address(dst + shared_offset);
  const int read = inside ? bytes : 0;
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(src + offset), "r"(read) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::
                 "r"(to), "l"(src + offset), "n"(bytes), "r"(read) : "memory");
}

// Copies since the last commit, by this thread, become a group.
TILEOPS_WORD void copy_commit(site) { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `Pending` groups of this thread are unfinished; sync_threads or an arrival then shows them to other threads.
template <int Pending>
TILEOPS_WORD void copy_wait(site) { asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory"); }

// One arrival, one of those that init_barrier counts, made when all copies so far by this thread have landed. Does not wait.
TILEOPS_WORD void arrive_after_copies(shared_ptr<mbarrier> b, site) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(detail::shared_address(b)) : "memory");
}

}  // namespace tileops
