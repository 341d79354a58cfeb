// Deals the blocks of keys of all items out to the parts of mla_decode or attention_decode, which CTAs compute: nearly the same cost
// for each. An item is a request, or one of its key heads.
//
// Written by hand: it counts, and has no tiles. In each call its instructions come from memory, so there are few. Each thread knows
// the cost of the items before its own, and so which parts begin in them: no thread waits for the part before. Where parts begin,
// items are cut, in front of an even block; not within a thirty-second of a part from either end, nor within what a piece costs.
// Items of nearly one length are cut into equal pieces, or stay whole, where that is as good. tests/golden/mla_decode.py has a
// schedule that fills one part after the other.
#include <tileops/portable.h>

#include "split_schedule_params.h"
#include "sum_before.h"

namespace tileops {

constexpr int kThreads = split_schedule_threads, kWarps = kThreads / 32;

// What is divided by again and again.
struct Divisors {
  Divisor heads, block;
};

// How items are dealt out. With a length: to `parts` parts each pieces of that length, or one part for each `items` ones.
struct Deal {
  Divisor payload;  // of a part
  int slack;        // how near to its ends an item is not cut
  int parts;
  Divisor items;
  int length;
};

// Those of which a query sees a key, at least one.
TILEOPS_WORD int blocks_of(const split_schedule_params& p, const Divisors& by, int item, site s) {
  Fragment<int32_t, 1> length;
  load_global<1>(length, 0, global<int32_t>(p.cache_seqlens), divide(item, by.heads), s);
  return max(divide_up(length[0], by.block) - divide(max(length[0] - p.seen, 0), by.block), 1);
}

// Of an item behind others of the cost `before`: in how many pieces it is. Notes where the parts begin that begin in it.
TILEOPS_WORD int cut(const split_schedule_params& p, const Deal& deal, shared_ptr<int32_t> starts, int item, int before, int blocks,
                     bool notes, site s) {
  const int behind = before + blocks + p.overhead, most_pieces = p.most_pieces > 0 ? p.most_pieces : INT32_MAX;
  const int first = deal.length ? divide_up(item * deal.parts, deal.items) : divide_up(before, deal.payload);
  const int last = deal.length ? divide_up((item + 1) * deal.parts, deal.items) : divide_up(behind, deal.payload);
  int pieces = 1;
  TILEOPS_NO_UNROLL
  for (int part = first; part < min(last, p.parts); ++part) {
    int block = (part - first) * deal.length;
    if (!deal.length) {
      block = max(part * deal.payload.value - before - p.overhead / 2, 0) / 2 * 2;
      block = block <= deal.slack ? 0 : blocks - block <= deal.slack ? blocks : block;
    }
    const bool cuts = 0 < block && block < blocks && pieces < most_pieces;
    Fragment<int32_t, 4> start;
    start[0] = item + (block > 0 && !cuts);
    start[1] = cuts ? block : 0;
    start[2] = cuts ? pieces : 0;
    start[3] = 0;
    if (notes) store_shared<4>(starts, part * 4, start, 0, s);
    pieces += cuts;
  }
  return pieces;
}

TILEOPS_KERNEL(split_schedule, split_schedule_params, kThreads, 1) {
  const int thread = thread_index();
  const auto costs = shared<int32_t>(0), pieces_of = shared<int32_t>(128), starts = shared<int32_t>(384);
  const auto maxima = shared<float>(256);
  const Divisors by = {divisor(p.heads), divisor(p.block)};
  const int share = divide_up(p.items, kThreads), begin = min(thread * share, p.items), end = min(begin + share, p.items);
  int cost = 0, all = 0;
  float most = 0.0f;  // blocks of an item
  TILEOPS_NO_UNROLL
  for (int item = begin; item < end; ++item) {
    const int blocks = blocks_of(p, by, item, site(1));
    cost += blocks + p.overhead;
    most = max(most, static_cast<float>(blocks));
  }
  Fragment<int32_t, 4> none;
  none[0] = p.items;
  none[1] = none[2] = none[3] = 0;
  Fragment<int32_t, 1> number;
  number[0] = -1;
  TILEOPS_NO_UNROLL
  for (int part = thread; part <= p.parts; part += kThreads) {
    store_shared<4>(starts, part * 4, none, 0, site(2));
    if (part < p.parts) store_global<1>(global<int32_t>(p.split_items), part, number, 0, site(3));
  }
  most = reduce_lanes<Max, 32>(most, site(4));
  if (thread % 32 == 0) store_shared(maxima, thread / 32, most, site(4));
  const int before = sum_before<kWarps>(costs, cost, all, site(5));  // all threads have met there
  most = reduce_lanes<Max, 32>(thread % 32 < kWarps ? load_shared(maxima, thread % 32, site(4)) : 0.0f, site(4));

  // At least 2 blocks: cuts in front of even ones then differ.
  const int payload = max(divide_up(all, p.parts), 2), slack = min(payload / 32, p.overhead);
  const int items = max(divide_up(p.items, p.parts), 1);
  Deal deal = {divisor(payload), slack, max(p.parts / max(p.items, 1), 1), divisor(items), 0};
  const int length = (divide_up(static_cast<int>(most), deal.parts) + 1) / 2 * 2;
  if (items * (length + p.overhead) <= payload + p.overhead + 1 + slack) deal.length = length;

  int splits = 0;  // pieces of split requests, and in the upper half such requests
  TILEOPS_NO_UNROLL
  for (int item = begin, here = before; item < end; ++item) {
    const int blocks = blocks_of(p, by, item, site(6)), pieces = cut(p, deal, starts, item, here, blocks, true, site(7));
    splits += pieces > 1 ? pieces + (1 << 16) : 0;
    here += blocks + p.overhead;
  }
  splits = sum_before<kWarps>(pieces_of, splits, all, site(8));
  TILEOPS_NO_UNROLL
  for (int item = begin, here = before; item < end; ++item) {
    const int blocks = blocks_of(p, by, item, site(9)), pieces = cut(p, deal, starts, item, here, blocks, false, site(10));
    number[0] = splits & 0xffff;
    store_global<1>(global<int32_t>(p.first_split), item, number, 0, site(11));
    number[0] = item;
    if (pieces > 1) store_global<1>(global<int32_t>(p.split_items), splits >> 16, number, 0, site(12));
    splits += pieces > 1 ? pieces + (1 << 16) : 0;
    here += blocks + p.overhead;
  }
  number[0] = all & 0xffff;
  if (thread == 0) store_global<1>(global<int32_t>(p.first_split), p.items, number, 0, site(13));

  TILEOPS_NO_UNROLL
  for (int part = thread; part < p.parts; part += kThreads) {
    Fragment<int32_t, 4> here, next;
    Fragment<int32_t, 8> row;
    load_shared<4>(here, 0, starts, part * 4, site(14));
    load_shared<4>(next, 0, starts, part * 4 + 4, site(15));
    const int last = next[1] > 0 ? next[0] : next[0] - 1;
    row[0] = here[0];
    row[1] = here[1];
    row[2] = last;
    row[3] = next[1] > 0 ? next[1] : blocks_of(p, by, max(last, 0), site(16));
    row[4] = here[2];
    row[5] = row[6] = row[7] = 0;
    store_global<8>(global<int32_t>(p.schedule), part * 8, row, 0, site(17));
  }
}

}  // namespace tileops
