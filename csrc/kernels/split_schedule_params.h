// What split_schedule takes (csrc/kernels/split_schedule.cu).
#pragma once

#include <stdint.h>

namespace tileops {

struct split_schedule_params {
  const int32_t* cache_seqlens;  // [items / heads], keys
  int32_t* schedule;        // [parts, 8]: first item, its first block, last item, end of its blocks, number of the first piece
  int32_t* first_split;     // [items + 1]: where the pieces of an item lie among those of all that are split
  int32_t* split_items;  // [parts]: items in more than one piece, then -1
  int32_t items, parts;
  int32_t heads;        // items of a request
  int32_t block;        // keys
  int32_t seen;         // keys at the end of a request, which alone count; those before, as far as whole blocks go, nobody sees
  int32_t overhead;     // what starting and storing a piece costs, in blocks
  int32_t most_pieces;  // of an item; 0: any number
};

constexpr int split_schedule_threads = 1024;

// For each warp two sums and a maximum, and where the parts begin and end.
constexpr int split_schedule_shared_bytes(int parts) { return 3 * 32 * 4 + (parts + 1) * 16; }

}  // namespace tileops
