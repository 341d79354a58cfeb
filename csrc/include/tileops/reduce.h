// Reductions across the threads that share a row. Written in the other words alone, so that the emulator runs this file.
#pragma once

#include "tileops/thread.h"
#include "tileops/memory.h"
#include "tileops/math.h"

namespace tileops {

struct Sum { static TILEOPS_WORD float combine(float a, float b) { return a + b; } };
struct Max { static TILEOPS_WORD float combine(float a, float b) { return max(a, b); } };

// The N registers k, k + Stride, ..., pairwise: the rounding error grows with log N.
template <typename Op, int N, int Stride = 1, typename T, int M>
TILEOPS_WORD float reduce_registers(const Fragment<T, M>& f, int k) {
  if constexpr (N == 1) {
    return to_float(f, k);
  } else {
    return Op::combine(reduce_registers<Op, N / 2, Stride>(f, k),
                       reduce_registers<Op, N - N / 2, Stride>(f, k + N / 2 * Stride));
  }
}

// For each row of a thread in the layout of wgmma's results, the largest of its registers: k, k + 1, k + 4, k + 5, ..., Span / 2 of
// them, from k = x / 2 * Span + x % 2 * 2 on. Of negative ones, if no limit is negative, any.
template <int Span, int R, int M>
TILEOPS_WORD void largest_of_rows(Fragment<float, R>& largest, const Fragment<float, R>& limit, const Fragment<float, M>& f) {
  bool negative = false;
  TILEOPS_UNROLL
  for (int x = 0; x < R; ++x) negative |= !(limit[x] >= 0.0f);
  if (negative) {
    TILEOPS_UNROLL
    for (int x = 0; x < R; ++x) {
      const int k = x / 2 * Span + x % 2 * 2;
      largest[x] = max(reduce_registers<Max, Span / 4, 4>(f, k), reduce_registers<Max, Span / 4, 4>(f, k + 1));
    }
    return;
  }
  TILEOPS_UNROLL
  for (int x = 0; x < R; ++x) {
    const int k = x / 2 * Span + x % 2 * 2;
    largest[x] = f[k];
    float odd = f[k + 1];  // columns: two chains hide what an instruction takes
    TILEOPS_UNROLL
    for (int i = 0; i < Span; i += 8) {
      const int next = i + 4 < Span ? k + i + 4 : k + i;
      largest[x] = max_of_nonnegative(largest[x], f[k + i], f[next]);
      odd = max_of_nonnegative(odd, f[k + i + 1], f[next + 1]);
    }
    largest[x] = max(largest[x], odd);
  }
}

// Butterfly over groups of `Lanes` neighbouring lanes; each lane gets the result.
template <typename Op, int Lanes>
TILEOPS_WORD float reduce_lanes(float v, site s) {
  TILEOPS_UNROLL
  for (int mask = Lanes / 2; mask >= 1; mask /= 2) v = Op::combine(v, shuffle_xor(v, mask, s));
  return v;
}

// The threads of a row are `Members` groups, in each of which reduce_lanes has run (a group may be one thread): combine the
// R values of each group through shared memory. The row of this thread is `slot` of `slots`, its group is `member`; one
// thread of each group is the leader. buffer holds R * slots * Members floats that nobody reads before this barrier; where
// neighbouring threads have neighbouring slots, they meet no bank twice.
template <typename Op, int Members, int R>
TILEOPS_WORD void reduce_members(Fragment<float, R>& v, shared_ptr<float> buffer, int slots, int slot, int member,
                                 bool leader, site s) {
  TILEOPS_UNROLL
  for (int r = 0; r < R; ++r)
    if (leader) store_shared(buffer, (r * Members + member) * slots + slot, v[r], s);
  sync_threads(s);
  TILEOPS_UNROLL
  for (int r = 0; r < R; ++r) {
    float total = load_shared(buffer, r * Members * slots + slot, s);
    TILEOPS_UNROLL
    for (int i = 1; i < Members; ++i) total = Op::combine(total, load_shared(buffer, (r * Members + i) * slots + slot, s));
    v[r] = total;
  }
}

}  // namespace tileops
