// Which kernel serves a few queries of each request over a paged cache, and the launches that a call takes: the
// kernel and the merge of split key heads.
#pragma once

#include <string>

#include "attention_choice.h"
#include "results_op.h"
#include "stable.h"

namespace tileops {

// q [requests, queries, heads, columns] and out as tensors of the call, k and v the pages of the cache.
struct DecodeCall {
  AttentionCall attention;
  bool packed;  // requests have different numbers of queries: all rows are as those of one request
  int64_t table_width, num_splits;
  // Known at the launch.
  const int32_t *block_table, *cache_seqlens;
  int64_t block_table_stride;

  int64_t requests() const { return attention.q.extents[0]; }
  int64_t queries() const { return attention.q.extents[1]; }
  int64_t group() const { return attention.heads() / attention.kv_heads(); }
  int64_t rows() const { return queries() * group(); }
};

struct DecodeChoice {
  const DecodeVariant* variant = nullptr;  // NULL: the reason says why
  std::string reason;
  bool is_last = false;  // no other kind of kernel is to be tried: TILEOPS_FORCE names one of this kind
};

const char* why_other_kind(const DecodeVariant& variant, const DecodeCall& call);
const char* why_not(const DecodeVariant& variant, const DecodeCall& call);

DecodeChoice choose_decode(const char* op, const Device& device, const DecodeCall& call);

// `sinks` is NULL if not given; `places` those of out and lse. Workspace comes from torch, on the device of `q`.
void launch_decode(Device& device, const DecodeVariant& variant, const DecodeCall& call, const TensorView& q,
                   const TensorView* sinks, const std::vector<Place>& places, cudaStream_t stream);

}  // namespace tileops
