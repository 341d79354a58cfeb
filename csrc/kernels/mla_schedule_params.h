// What mla_schedule takes (csrc/kernels/mla_schedule.cu).
#pragma once

#include <stdint.h>

namespace tileops {

struct mla_schedule_params {
  const int32_t* cache_seqlens;  // [requests], tokens
  int32_t* schedule;     // [parts, 8]: first request, its first page, last request, end of its pages, number of the first piece
  int32_t* first_split;  // [requests + 1]: where the pieces of a request lie among those of all that are split
  int32_t* split_requests;  // [parts]: those in more than one piece, then -1
  int32_t requests, parts;
  int32_t page;         // tokens
  int32_t most_pieces;  // of a request
};

constexpr int mla_schedule_threads = 256;

// A sum for each thread, a maximum for each warp, and where the parts begin and end.
constexpr int mla_schedule_shared_bytes(int parts) { return mla_schedule_threads * 4 + 32 + (parts + 1) * 16; }

}  // namespace tileops
