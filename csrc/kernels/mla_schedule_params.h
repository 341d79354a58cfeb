// What mla_schedule takes (csrc/kernels/mla_schedule.cu).
#pragma once

#include <stdint.h>

namespace tileops {

struct mla_schedule_params {
  const int32_t* cache_seqlens;  // [requests], tokens
  int32_t* schedule;     // [parts, 8]: first request, its first page, last request, end of its pages, number of the first piece
  int32_t* first_split;  // [requests + 1]: where the pieces of a request lie among those of all that are split
  int32_t requests, parts;
  int32_t page;         // tokens
  int32_t most_pieces;  // of a request
};

}  // namespace tileops
