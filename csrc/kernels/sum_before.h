// What the kernels that count have in common.
#pragma once

#include <tileops/portable.h>

namespace tileops {

// A run-time divisor: dividing takes five instructions then, not some thirty.
struct Divisor {
  int value;
  int64_t inverse;  // 2^32 / value, rounded up
};

TILEOPS_WORD Divisor divisor(int value) { return {value, int64_t{0xffffffffu / static_cast<uint32_t>(value)} + 1}; }

// a >= 0, rounded down: the product is too large by less than a / 2^32, so the quotient by 1 at most.
TILEOPS_WORD int divide(int a, const Divisor& by) {
  const int quotient = static_cast<int>((a * by.inverse) >> 32);
  return quotient - (quotient * by.value > a);
}
TILEOPS_WORD int divide_up(int a, const Divisor& by) { return divide(a + by.value - 1, by); }
TILEOPS_WORD int divide_up(int a, int b) { return (a + b - 1) / b; }

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
