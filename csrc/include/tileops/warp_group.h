// Warps and warp groups as roles: indices that are uniform, election, votes, named barriers, register budgets.
#pragma once

#include "tileops/thread.h"

namespace tileops {

// The warp's and the warp group's index in the CTA. Broadcast from lane 0, so that the compiler knows them to be uniform.
TILEOPS_WORD int warp_index() { return __shfl_sync(0xffffffffu, thread_index() / 32, 0); }
TILEOPS_WORD int warp_group_index() { return __shfl_sync(0xffffffffu, thread_index() / 128, 0); }
TILEOPS_WORD int lane_index() { return thread_index() % 32; }

// True in one lane of the warp, always the same; all 32 lanes take part.
TILEOPS_WORD bool elect_one(site) {
  uint32_t elected;
  asm volatile(
      "{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.b32 %0, 1, 0, p;\n}\n" : "=r"(elected));
  return elected != 0;
}

TILEOPS_WORD bool all_of_warp(bool v, site) { return __all_sync(0xffffffffu, v); }
TILEOPS_WORD bool any_of_warp(bool v, site) { return __any_sync(0xffffffffu, v); }
TILEOPS_WORD uint32_t ballot_of_warp(bool v, site) { return __ballot_sync(0xffffffffu, v); }

// The value of another lane; all 32 lanes take part.
TILEOPS_WORD int shuffle(int v, int lane, site) { return __shfl_sync(0xffffffffu, v, lane); }
TILEOPS_WORD float shuffle(float v, int lane, site) { return __shfl_sync(0xffffffffu, v, lane); }
TILEOPS_WORD uint32_t shuffle_xor(uint32_t v, int lane_mask, site) { return __shfl_xor_sync(0xffffffffu, v, lane_mask); }

// Orders the shared and global accesses of the warp's lanes.
TILEOPS_WORD void sync_warp(site) { __syncwarp(); }

// Named barrier `id` (1..15; sync_threads is 0), complete when `threads` threads, whole warps, have synced or arrived. The
// instruction wants the warp's lanes together. Inline assembly does not tell the compiler so: behind a branch of one lane it
// let that lane and the others run into the barrier one after the other, which counts the warp twice. __syncwarp tells it.
TILEOPS_WORD void named_barrier_sync(int id, int threads, site) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
TILEOPS_WORD void named_barrier_arrive(int id, int threads, site) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Registers per thread from here on, for all four warps of the warp group: a multiple of 8 in 24..256. What one group
// gives back another can take: an increase waits until the registers are there. Needs launch bounds with a block count.
template <int Registers>
TILEOPS_WORD void register_budget_decrease(site) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
TILEOPS_WORD void register_budget_increase(site) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace tileops
