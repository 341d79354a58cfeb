// Launches of flash_attention for requests of different lengths: the list of tiles, then the kernel.
#pragma once

#include "attention_choice.h"
#include "stable.h"

namespace tileops {

// Which rows of q, and which keys, are whose.
struct Lengths {
  int64_t requests;
  int64_t queries;       // of each request, where there are no offsets
  int64_t most_queries, most_keys;  // of a request: the rest of a longer one is left out
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // NULL: none
  const int32_t* seqlens_k;  // keys in use; NULL: all
  const int32_t* block_table;  // of paged keys
  int64_t block_table_stride, table_width;
  int64_t lse_stride;  // rows between the requests of an lse [requests, heads, queries]; 0: lse [heads, all queries]
};

// Of what a page and a step's keys have in common: how many rows are loaded together.
int64_t rows_together(int64_t page, int64_t keys);

// 2^32 / page, rounded up: the high half of its product with a key's number is the key's page, as long as the product's error,
// key * (inverse * page - 2^32), stays below 2^32: has_exact_pages, of so many keys.
int64_t inverse_of(int64_t page);
bool has_exact_pages(int64_t page, int64_t keys);

// Whether kernels that count keys in 32 bits can number those of so many pages, and their pages.
bool can_number(int64_t page, int64_t pages);

void launch_lengths(Device& device, const AttentionVariant& variant, const AttentionCall& call, const Lengths& lengths,
                    const TensorView& like, cudaStream_t stream);

}  // namespace tileops
