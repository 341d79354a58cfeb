// Deals the blocks of all requests out to the parts of mla_decode, which CTAs compute: nearly the same cost for each.
//
// Written by hand: it counts, and has no tiles. A part takes whole requests while they fit, then an even number of blocks of
// the next one. A request that exceeds what is left by a thirty-second of a part, and by no more than a split costs, is taken
// whole. The last part takes what is left. (FlashMLA deals in a similar way: https://github.com/deepseek-ai/FlashMLA.)
#include <tileops/device.h>

#include "mla_schedule_params.h"

namespace tileops {

constexpr int kThreads = mla_schedule_threads, kTogether = mla_schedule_together;
constexpr int kOverhead = 5;  // what starting and storing a piece costs, in blocks

TILEOPS_WORD int blocks_of(const mla_schedule_params& p, int request, site s) {
  Fragment<int32_t, 1> length;
  load_global<1>(length, 0, global<int32_t>(p.cache_seqlens), request, s);
  return max((length[0] + p.block - 1) / p.block, 1);
}

// Where a part begins: a block of a request, and how many pieces of that request lie before it.
TILEOPS_WORD void begin_part(shared_ptr<int32_t> starts, int part, int request, int block, int piece, site s) {
  Fragment<int32_t, 4> start;
  start[0] = request;
  start[1] = block;
  start[2] = piece;
  start[3] = 0;
  store_shared<4>(starts, part * 4, start, 0, s);
}

// One thread deals, and remembers no more than where parts begin; the others bring the numbers and write the results.
TILEOPS_KERNEL(mla_schedule, mla_schedule_params, kThreads, 1) {
  const int thread = thread_index();
  const auto blocks = shared<int32_t>(0), splits_before = shared<int32_t>(kTogether * 4);
  const auto starts = shared<int32_t>(kTogether * 8 + 32);
  Fragment<float, 1> cost;  // exact up to 2^24 blocks, beyond them near enough
  cost[0] = 0.0f;
  for (int request = thread; request < p.requests; request += kThreads) {
    const int count = blocks_of(p, request, site(1));
    cost[0] += static_cast<float>(count + kOverhead);
    if (request < kTogether) store_shared(blocks, request, count, site(5));
  }
  cost[0] = reduce_lanes<Sum, 32>(cost[0], site(2));
  reduce_members<Sum, kThreads / 32>(cost, shared<float>(kTogether * 8), 1, 0, thread / 32, thread % 32 == 0, site(2));
  const int payload = (static_cast<int>(cost[0]) + p.parts - 1) / p.parts + kOverhead + 1;
  const int slack = min(payload / 32, kOverhead), last_part = p.parts - 1;
  const int most_pieces = p.most_pieces > 0 ? p.most_pieces : INT32_MAX;
  Fragment<int32_t, 1> number;
  number[0] = -1;
  for (int part = thread; part <= p.parts; part += kThreads) {
    begin_part(starts, part, p.requests, 0, 0, site(3));
    if (part < p.parts) store_global<1>(global<int32_t>(p.split_requests), part, number, 0, site(20));
  }

  int part = -1, left = 0, splits = 0, split_count = 0;  // of the part that is being filled; before this request
  for (int start = 0; start < p.requests; start += kTogether) {
    const int count = min(p.requests - start, kTogether);
    for (int i = thread; start > 0 && i < count; i += kThreads) {
      store_shared(blocks, i, blocks_of(p, start + i, site(6)), site(6));
    }
    for (int i = count + thread; i < (count + 3) / 4 * 4; i += kThreads) store_shared(blocks, i, 0, site(7));
    sync_threads(site(4));
    TILEOPS_NO_UNROLL
    for (int i = 0; thread == 0 && i < count; i += 4) {  // four at a time: one access of shared memory
      Fragment<int32_t, 4> own, before;
      load_shared<4>(own, 0, blocks, i, site(8));
      TILEOPS_UNROLL
      for (int k = 0; k < 4; ++k) {
        before[k] = splits;
        int rest = own[k], pieces = 1;
        if (i + k >= count) continue;
        if (left > kOverhead + 1 && rest + kOverhead <= left + slack) {
          left -= rest + kOverhead;
          continue;
        }
        for (int block = 0;; ++pieces) {
          if (left <= kOverhead + 1 && part < last_part) {
            begin_part(starts, ++part, start + i + k, block, pieces - 1, site(11));
            left = payload;
          }
          if (rest + kOverhead <= left + slack || pieces >= most_pieces || part == last_part) break;
          block += (left - kOverhead) / 2 * 2;
          rest -= (left - kOverhead) / 2 * 2;
          left = 0;
        }
        left -= rest + kOverhead;
        if (pieces > 1) {
          number[0] = start + i + k;
          store_global<1>(global<int32_t>(p.split_requests), split_count++, number, 0, site(21));
          splits += pieces;
        }
      }
      store_shared<4>(splits_before, i, before, 0, site(10));
    }
    sync_threads(site(12));
    for (int i = thread; i < count; i += kThreads) {
      number[0] = load_shared(splits_before, i, site(13));
      store_global<1>(global<int32_t>(p.first_split), start + i, number, 0, site(14));
    }
  }

  number[0] = splits;
  if (thread == 0) store_global<1>(global<int32_t>(p.first_split), p.requests, number, 0, site(15));
  for (int number = thread; number < p.parts; number += kThreads) {
    Fragment<int32_t, 4> here, behind;
    Fragment<int32_t, 8> row;
    load_shared<4>(here, 0, starts, number * 4, site(16));
    load_shared<4>(behind, 0, starts, number * 4 + 4, site(17));
    const int last = behind[1] > 0 ? behind[0] : behind[0] - 1;
    row[0] = here[0];
    row[1] = here[1];
    row[2] = last;
    row[3] = behind[1] > 0 ? behind[1] : blocks_of(p, last, site(18));
    row[4] = here[2];
    row[5] = row[6] = row[7] = 0;
    store_global<8>(global<int32_t>(p.schedule), number * 8, row, 0, site(19));
  }
}

}  // namespace tileops
