// What kernels that count have in common. Written in the other words alone, so that the emulator runs this file.
#pragma once

#include "tileops/math.h"
#include "tileops/memory.h"
#include "tileops/thread.h"
#include "tileops/warp_group.h"

namespace tileops {

// Of numbers that are not negative.
TILEOPS_WORD int divide(int a, int b) { return static_cast<int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b)); }
TILEOPS_WORD int divide_up(int a, int b) { return divide(a + b - 1, b); }

// The sum of the warp's lanes up to this one.
TILEOPS_WORD int sum_of_lanes(int sum, int lane, site s) {
  TILEOPS_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = shuffle(sum, max(lane - distance, 0), s);
    if (lane >= distance) sum += other;
  }
  return sum;
}

// The sum of the threads before this one, and in `total` that of all; a CTA has `Warps` warps. All threads take part, and meet.
// `sums` holds 32 numbers, which nobody reads before.
template <int Warps>
TILEOPS_WORD int sum_before(shared_ptr<int32_t> sums, int own, int& total, site s) {
  static_assert(Warps <= 32, "a lane for each warp");
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int sum = sum_of_lanes(own, lane, s);
  if (lane == 31) store_shared(sums, warp, sum, s);
  sync_threads(s);
  const int warps = sum_of_lanes(lane < Warps ? load_shared(sums, lane, s) : 0, lane, s);
  const int before = shuffle(warps, max(warp - 1, 0), s);
  total = shuffle(warps, 31, s);
  return sum - own + (warp > 0 ? before : 0);
}

}  // namespace tileops
