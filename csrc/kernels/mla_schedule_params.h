// What mla_schedule takes (csrc/kernels/mla_schedule.cu).
#pragma once

#include <stdint.h>

namespace tileops {

struct mla_schedule_params {
  const int32_t* cache_seqlens;  // [requests], tokens
  int32_t* schedule;     // [parts, 8]: first request, its first block, last request, end of its blocks, first piece
  int32_t* first_split;  // [requests + 1]: where the pieces of a request lie among those of all that are split
  int32_t* split_requests;  // [parts]: those in more than one piece, then -1
  int32_t requests, parts;
  int32_t block;        // tokens
  int32_t most_pieces;  // of a request
};

constexpr int mla_schedule_threads = 256;
constexpr int mla_schedule_together = 1024;  // requests whose blocks, and the splits before them, shared memory has at a time

// Of those, of a sum for each warp, and of where the parts begin and end.
constexpr int mla_schedule_shared_bytes(int parts) { return mla_schedule_together * 8 + 32 + (parts + 1) * 16; }

}  // namespace tileops
