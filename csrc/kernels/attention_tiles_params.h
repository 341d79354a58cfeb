// What attention_tiles takes (csrc/kernels/attention_tiles.cu).
#pragma once

#include <stdint.h>

namespace tileops {

struct attention_tiles_params {
  const int32_t* cu_seqlens_q;  // [requests + 1]; NULL: `queries` each
  const int32_t* cu_seqlens_k;  // [requests + 1]; NULL: pages, whose requests have numbers
  const int32_t* seqlens_k;     // [requests], keys in use; NULL: all between two of cu_seqlens_k
  // [most_tiles, 8]: first row of q, and of its request, whose queries, first key (or number) and keys; first row in lse; 0, 0
  int32_t* tiles;
  int32_t* tile_count;  // [1]
  int32_t requests, queries;
  int32_t all_queries;   // rows of q
  int32_t most_queries, most_keys;  // of a request: the rest of a longer one is left out
  int32_t lse_stride;    // rows of lse between requests; 0: lse has the rows of q
  int32_t rows;          // of a tile
};

constexpr int attention_tiles_threads = 256;
constexpr int attention_tiles_shared_bytes = 32 * 4;  // a sum for each warp

}  // namespace tileops
