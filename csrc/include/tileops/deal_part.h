// Deals the blocks of keys of all items out to the parts of attention_decode, mla_decode and mla_decode_few: nearly the same cost for
// each. An item is a request, or one of its key heads; a part is what CTAs with one index in the grid compute. Each of them finds its
// own part, so that no kernel stands in front. Written in the other words alone, so that the emulator runs this file.
//
// Each thread knows the cost of the requests before its own, and so which parts begin in them. Where a part begins, an item is cut,
// in front of an even block; not within a thirty-second of a part from either end, nor within what a piece costs. Items of nearly one
// length are cut into equal pieces, or stay whole, where that is as good. tests/golden/mla_decode.py has a schedule that fills one part
// after the other. Instructions come from memory in each call, so there are few.
#pragma once

#include "tileops/sum_before.h"

// A function that is called. Inlined, ptxas had too few registers for the products of mla_decode, far behind it (C7511).
#ifdef __CUDACC__
#define TILEOPS_CALLED __device__ __noinline__
#else
#define TILEOPS_CALLED TILEOPS_WORD
#endif

namespace tileops {

struct Deal {
  int requests, heads;  // items of a request
  int parts;
  int seen;         // keys at the end of a request, which alone count; those before, as far as whole blocks go, nobody sees
  int overhead;     // what starting and storing a piece costs, in blocks
  int most_pieces;  // of an item; 0: any number
};

// What it needs of shared memory: 288 bytes. First 8 numbers, of which 4 say where this part begins and 4 where the next one does: the
// item; its block; the part that has its first block; the first item of which the part before has nothing. Then a sum and a maximum for
// each warp.

// Blocks of which a query sees a key, at least one.
template <int Block>
TILEOPS_WORD int blocks_of(const Deal& deal, global_ptr<const int32_t> lengths, int request, site s) {
  Fragment<int32_t, 1> length;
  load_global<1>(length, 0, lengths, request, s);
  return max((length[0] + Block - 1) / Block - max(length[0] - deal.seen, 0) / Block, 1);
}

// Of all lanes of the warp: one instruction each.
#ifdef __CUDACC__
TILEOPS_WORD int sum_of_warp(int v, site) { return __reduce_add_sync(0xffffffffu, v); }
TILEOPS_WORD int largest_of_warp(int v, site) { return __reduce_max_sync(0xffffffffu, v); }
#else
TILEOPS_WORD int sum_of_warp(int v, site s) { return shuffle(sum_of_lanes(v, thread_index() % 32, s), 31, s); }
TILEOPS_WORD int largest_of_warp(int v, site s) {
  for (int mask = 16; mask >= 1; mask /= 2) v = max(v, shuffle(v, (thread_index() % 32) ^ mask, s));
  return v;
}
#endif

// All threads of the CTA take part, and meet. With `notes` the items of this part that
// end in it are noted for mla_combine, in `pieces` [min(items, parts), 4]: the item, the part in which it begins, in how many it lies;
// 0 if it is in one. With fewer items than parts each item has a row, else each part one, for the split item that ends in it.
template <int Threads, int Block>
TILEOPS_CALLED void deal_part(Deal deal, int part, global_ptr<const int32_t> lengths, global_ptr<int32_t> pieces, bool notes,
                            shared_ptr<int32_t> starts, site s) {
  constexpr int kWarps = Threads / 32;
  const auto sums = starts + 8, maxima = starts + 40;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
  const int items = deal.requests * deal.heads, share = divide_up(deal.requests, Threads);
  const int from = min(thread * share, deal.requests), to = min(from + share, deal.requests);
  const int together = max(divide_up(items, deal.parts), 1), apart = max(divide(deal.parts, max(items, 1)), 1);
  const int most = deal.most_pieces > 0 ? deal.most_pieces : 0x7fffffff;

  int cost = 0, longest = 0;  // request, in blocks
  TILEOPS_NO_UNROLL
  for (int request = from; request < to; ++request) {
    const int blocks = blocks_of<Block>(deal, lengths, request, s);
    cost += (blocks + deal.overhead) * deal.heads;
    longest = max(longest, blocks);
  }
  longest = largest_of_warp(longest, s);
  const int of_warp = sum_of_warp(cost, s);
  if (lane == 0) {
    store_shared(sums, warp, of_warp, s);
    store_shared(maxima, warp, longest, s);
  }
  Fragment<int32_t, 4> start;
  start[0] = start[3] = items;  // behind the last one
  start[1] = start[2] = 0;
  if (thread < 2) store_shared<4>(starts, thread * 4, start, 0, s);
  sync_threads(s);
  const int of_warps = lane < kWarps ? load_shared(sums, lane, s) : 0, all = sum_of_warp(of_warps, s);
  longest = largest_of_warp(lane < kWarps ? load_shared(maxima, lane, s) : 0, s);

  // At least 2 blocks: cuts in front of even ones then differ.
  const int payload = max(divide_up(all, deal.parts), 2), slack = min(payload / 32, deal.overhead);
  const int length = (divide_up(longest, apart) + 1) / 2 * 2;  // of equal pieces
  const bool equal = together * (length + deal.overhead) <= payload + deal.overhead + 1 + slack;
  if (equal) {
    const int number = part + thread;
    const int item = together > 1 ? number * together : divide(number, apart);
    if (thread < 2 && number < deal.parts && item < items) {
      const int first = together > 1 ? number : item * apart, block = (number - first) * length;
      const bool cuts = 0 < block && number - first < most && block < blocks_of<Block>(deal, lengths, divide(item, deal.heads), s);
      start[0] = item + (block > 0 && !cuts);
      start[1] = cuts ? block : 0;
      start[2] = first;
      start[3] = start[0] + cuts;
      store_shared<4>(starts, thread * 4, start, 0, s);
    }
  } else {
    const int before = sum_of_warp(lane < warp ? of_warps : 0, s) + sum_of_lanes(cost, lane, s) - cost;
    TILEOPS_NO_UNROLL
    for (int next = 0; next < 2; ++next) {
      const int place = (part + next) * payload;
      if (part + next >= deal.parts || place < before || place >= before + cost) continue;
      int request = from, own = before, blocks = blocks_of<Block>(deal, lengths, from, s);
      TILEOPS_NO_UNROLL
      while (place >= own + (blocks + deal.overhead) * deal.heads) {
        own += (blocks + deal.overhead) * deal.heads;
        blocks = blocks_of<Block>(deal, lengths, ++request, s);
      }
      const int head = divide(place - own, blocks + deal.overhead);
      own += head * (blocks + deal.overhead);
      int block = max(place - own - deal.overhead / 2, 0) / 2 * 2;
      block = block <= slack ? 0 : blocks - block <= slack ? blocks : block;
      const int first = divide(own + deal.overhead / 2 + (slack | 1), payload);  // the last part without a cut at its begin
      const bool cuts = 0 < block && block < blocks && part + next - first < most;
      start[0] = request * deal.heads + head + (block > 0 && !cuts);
      start[1] = cuts ? block : 0;
      start[2] = first;
      start[3] = start[0] + cuts;
      store_shared<4>(starts, next * 4, start, 0, s);
    }
  }
  sync_threads(s);
  if (!notes) return;
  Fragment<int32_t, 4> own, next, row;
  load_shared<4>(own, 0, starts, 0, s);
  load_shared<4>(next, 0, starts, 4, s);
  const int split = own[1] > 0 && own[0] < next[0] ? part - own[2] + 1 : 0;
  const bool of_parts = items >= deal.parts;
  TILEOPS_NO_UNROLL
  for (int item = own[0] + thread; item < (of_parts ? own[0] + 1 : next[0]); item += Threads) {
    row[0] = item;
    row[1] = own[2];
    row[2] = item == own[0] ? split : 0;
    row[3] = 0;
    store_global<4>(pieces, (of_parts ? part : item) * 4, row, 0, s);
  }
}

}  // namespace tileops
