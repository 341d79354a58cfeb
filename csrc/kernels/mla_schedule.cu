// Deals the pages of all requests out to the parts of mla_decode, which CTAs compute: nearly the same cost for each.
//
// Written by hand: it counts, and has no tiles. A part takes whole requests while they fit, then an even number of pages of the
// next one. A request that exceeds what is left by a thirty-second of a part is taken whole: to split it would cost more. The last
// part takes what is left. After FlashMLA's tile scheduler, https://github.com/deepseek-ai/FlashMLA.
#include <tileops/device.h>

#include "mla_schedule_params.h"

namespace tileops {

constexpr int kOverhead = 5;  // what starting and storing a piece costs, in pages

TILEOPS_WORD int pages_of(const mla_schedule_params& p, int request, site s) {
  Fragment<int32_t, 1> length;
  load_global<1>(length, 0, global<int32_t>(p.cache_seqlens), request * p.cache_seqlens_stride, s);
  return max((length[0] + p.page - 1) / p.page, 1);
}

// One warp: all lanes add up the costs, which brings the lengths near, and the first one deals.
TILEOPS_KERNEL(mla_schedule, mla_schedule_params, 32, 1) {
  const int lane = thread_index();
  float cost = 0.0f;  // exact up to 2^24 pages, beyond them near enough
  for (int request = lane; request < p.requests; request += 32) {
    cost += static_cast<float>(pages_of(p, request, site(1)) + kOverhead);
  }
  const int total = static_cast<int>(reduce_lanes<Sum, 32>(cost, site(2)));
  const int payload = (total + p.parts - 1) / p.parts + kOverhead + 1;
  Fragment<int32_t, 8> part;
  Fragment<int32_t, 1> first;
  int request = 0, done = 0, pieces = 0, splits = 0;  // done and pieces: of this request
  for (int n = 0; lane == 0 && n < p.parts; ++n) {
    const bool is_last = n == p.parts - 1;
    part[0] = request;
    part[1] = done;
    part[2] = request - 1;  // none yet
    part[3] = 0;
    part[4] = pieces;
    part[5] = part[6] = part[7] = 0;
    bool fits = true;
    for (int left = payload; fits && request < p.requests && (left > kOverhead + 1 || is_last);) {
      const int rest = pages_of(p, request, site(3)) - done;
      fits = rest + kOverhead <= left + payload / 32 || pieces + 1 == p.most_pieces || is_last;
      const int taken = fits ? rest : (left - kOverhead) / 2 * 2;
      left -= taken + kOverhead;
      part[2] = request;
      part[3] = done += taken;
      ++pieces;
      if (fits) {
        first[0] = splits;
        store_global<1>(global<int32_t>(p.first_split), request++, first, 0, site(4));
        splits += pieces > 1 ? pieces : 0;
        done = pieces = 0;
      }
    }
    store_global<8>(global<int32_t>(p.schedule), n * 8, part, 0, site(5));
  }
  first[0] = splits;
  if (lane == 0) store_global<1>(global<int32_t>(p.first_split), p.requests, first, 0, site(6));
}

}  // namespace tileops
