// Deals the pages of all requests out to the parts of mla_decode, which CTAs compute: nearly the same cost for each.
//
// Written by hand: it counts, and has no tiles. A part takes whole requests while they fit, then an even number of pages of the
// next one. A request that exceeds what is left by a thirty-second of a part, and by no more than a split costs, is taken whole.
// The last part takes what is left. (FlashMLA deals in a similar way: https://github.com/deepseek-ai/FlashMLA.)
#include <tileops/device.h>

#include "mla_schedule_params.h"

namespace tileops {

constexpr int kThreads = 256;
constexpr int kTogether = 1024;  // requests whose pages lie in shared memory at a time
constexpr int kOverhead = 5;  // what starting and storing a piece costs, in pages

TILEOPS_WORD int pages_of(const mla_schedule_params& p, int request, site s) {
  Fragment<int32_t, 1> length;
  load_global<1>(length, 0, global<int32_t>(p.cache_seqlens), request, s);
  return max((length[0] + p.page - 1) / p.page, 1);
}

// A part that is being filled: from page `begin` of request `first` on, in which `piece` pieces lie before it.
struct Part {
  int number, first, begin, piece, left;
};

TILEOPS_WORD void store_part(const mla_schedule_params& p, const Part& part, int last, int end, site s) {
  Fragment<int32_t, 8> row;
  row[0] = part.first;
  row[1] = part.begin;
  row[2] = last;
  row[3] = end;
  row[4] = part.piece;
  row[5] = row[6] = row[7] = 0;
  store_global<8>(global<int32_t>(p.schedule), part.number * 8, row, 0, s);
}

TILEOPS_KERNEL(mla_schedule, mla_schedule_params, kThreads, 1) {
  const int thread = thread_index();
  const auto pages = shared<int32_t>(0);
  Fragment<float, 1> cost;  // exact up to 2^24 pages, beyond them near enough
  cost[0] = 0.0f;
  for (int request = thread; request < p.requests; request += kThreads) {
    cost[0] += static_cast<float>(pages_of(p, request, site(1)) + kOverhead);
  }
  cost[0] = reduce_lanes<Sum, 32>(cost[0], site(2));
  reduce_members<Sum, kThreads / 32>(cost, shared<float>(kTogether * 4), 1, 0, thread / 32, thread % 32 == 0, site(2));
  const int payload = (static_cast<int>(cost[0]) + p.parts - 1) / p.parts + kOverhead + 1;
  const int slack = min(payload / 32, kOverhead);
  for (int number = thread; number < p.parts; number += kThreads) {  // without work, until it gets some
    store_part(p, Part{number, p.requests, 0, 0, 0}, p.requests - 1, 0, site(3));
  }

  Part part = {0, 0, 0, 0, payload};
  int end = 0, splits = 0;
  Fragment<int32_t, 1> first_split;
  for (int start = 0; start < p.requests; start += kTogether) {
    const int count = min(p.requests - start, kTogether);
    sync_threads(site(4));
    for (int i = thread; i < count; i += kThreads) store_shared(pages, i, pages_of(p, start + i, site(5)), site(6));
    sync_threads(site(7));
    int next = load_shared(pages, 0, site(8));
    for (int i = 0; thread == 0 && i < count; ++i) {
      const int request = start + i;
      int rest = next, done = 0, pieces = 0;
      next = load_shared(pages, min(i + 1, count - 1), site(9));
      for (bool fits = false; !fits; ++pieces) {
        if (part.left <= kOverhead + 1 && part.number < p.parts - 1) {
          store_part(p, part, done > 0 ? request : request - 1, end, site(10));
          part = Part{part.number + 1, request, done, pieces, payload};
        }
        fits = rest + kOverhead <= part.left + slack || pieces + 1 == p.most_pieces || part.number == p.parts - 1;
        const int taken = fits ? rest : (part.left - kOverhead) / 2 * 2;
        part.left = fits ? part.left - taken - kOverhead : 0;
        rest -= taken;
        end = done += taken;
      }
      first_split[0] = splits;
      store_global<1>(global<int32_t>(p.first_split), request, first_split, 0, site(11));
      splits += pieces > 1 ? pieces : 0;
    }
  }
  if (thread != 0) return;
  store_part(p, part, p.requests - 1, end, site(12));
  first_split[0] = splits;
  store_global<1>(global<int32_t>(p.first_split), p.requests, first_split, 0, site(13));
}

}  // namespace tileops
