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

TILEOPS_WORD void note(shared_ptr<int32_t> starts, int part, int item, int block, int piece, site s) {
  Fragment<int32_t, 4> start;
  start[0] = item;
  start[1] = block;
  start[2] = piece;
  start[3] = 0;
  store_shared<4>(starts, part * 4, start, 0, s);
}

// Of an item in equal pieces: how many they are. The parts in which it begins are those from first_part on.
TILEOPS_WORD int first_part(const Deal& deal, int item) { return divide_up(item * deal.parts, deal.items); }
TILEOPS_WORD int equal_pieces(const Deal& deal, int item, int blocks, int parts, int most) {
  const int begin = first_part(deal, item) + 1, behind = min(first_part(deal, item + 1), parts);
  return max(min(min(behind - begin, most - 1), (blocks - 1) / deal.length), 0) + 1;  // 0: parts have several items
}

// Of an item behind others of the cost `before`: in how many pieces it is. Notes where the parts begin that begin in it.
TILEOPS_WORD int cut(const split_schedule_params& p, const Deal& deal, shared_ptr<int32_t> starts, int item, int before, int blocks,
                     bool notes, int most, site s) {
  const int first = divide_up(before, deal.payload), last = divide_up(before + blocks + p.overhead, deal.payload);
  int pieces = 1;
  TILEOPS_NO_UNROLL
  for (int part = first; part < min(last, p.parts); ++part) {
    int block = max(part * deal.payload.value - before - p.overhead / 2, 0) / 2 * 2;
    block = block <= deal.slack ? 0 : blocks - block <= deal.slack ? blocks : block;
    const bool cuts = 0 < block && block < blocks && pieces < most;
    if (notes) note(starts, part, item + (block > 0 && !cuts), cuts ? block : 0, cuts ? pieces : 0, s);
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
  float longest = 0.0f;  // item, in blocks
  TILEOPS_NO_UNROLL
  for (int item = begin; item < end; ++item) {
    const int blocks = blocks_of(p, by, item, site(1));
    cost += blocks + p.overhead;
    longest = max(longest, static_cast<float>(blocks));
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
  longest = reduce_lanes<Max, 32>(longest, site(4));
  if (thread % 32 == 0) store_shared(maxima, thread / 32, longest, site(4));
  const int before = sum_before<kWarps>(costs, cost, all, site(5));  // all threads have met there
  longest = reduce_lanes<Max, 32>(thread % 32 < kWarps ? load_shared(maxima, thread % 32, site(4)) : 0.0f, site(4));

  // At least 2 blocks: cuts in front of even ones then differ.
  const int payload = max(divide_up(all, p.parts), 2), slack = min(payload / 32, p.overhead);
  const int items = max(divide_up(p.items, p.parts), 1);
  Deal deal = {divisor(payload), slack, max(p.parts / max(p.items, 1), 1), divisor(items), 0};
  const int length = (divide_up(static_cast<int>(longest), deal.parts) + 1) / 2 * 2;
  if (items * (length + p.overhead) <= payload + p.overhead + 1 + slack) deal.length = length;

  const int most = p.most_pieces > 0 ? p.most_pieces : INT32_MAX;
  TILEOPS_NO_UNROLL
  for (int part = thread; deal.length && part < p.parts; part += kThreads) {  // one item may have all parts: each for itself
    const int item = static_cast<int>(static_cast<int64_t>(part) * items / deal.parts);
    if (item >= p.items) continue;
    const int piece = part - first_part(deal, item), block = piece * deal.length;
    const bool cuts = 0 < piece && piece < most && block < blocks_of(p, by, item, site(6));
    note(starts, part, item + (piece > 0 && !cuts), cuts ? block : 0, cuts ? piece : 0, site(7));
  }
  int splits = 0;  // pieces of split requests, and in the upper half such requests
  TILEOPS_NO_UNROLL
  for (int item = begin, here = before; item < end; ++item) {
    const int blocks = blocks_of(p, by, item, site(18));
    const int pieces = deal.length ? equal_pieces(deal, item, blocks, p.parts, most)
                                   : cut(p, deal, starts, item, here, blocks, true, most, site(19));
    splits += pieces > 1 ? pieces + (1 << 16) : 0;
    here += blocks + p.overhead;
  }
  splits = sum_before<kWarps>(pieces_of, splits, all, site(8));
  TILEOPS_NO_UNROLL
  for (int item = begin, here = before; item < end; ++item) {
    const int blocks = blocks_of(p, by, item, site(9));
    const int pieces = deal.length ? equal_pieces(deal, item, blocks, p.parts, most)
                                   : cut(p, deal, starts, item, here, blocks, false, most, site(10));
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
