// Which kernel serves mla_decode, and the launches that a call takes: the kernel and the merge of split requests.
#pragma once

#include <string>

#include "device.h"
#include "stable.h"
#include "variant.h"

namespace tileops {

struct MlaCall {
  DType type;
  int64_t batches, sq, heads, head_dim, head_dim_v;
  int64_t pages, page, table_width;  // table_width: entries of block_table for a request
  const void* cache;
  const int64_t* cache_strides;  // of (page, token, column)
  const int64_t* out_strides;  // of (batch, query, head, column)
  const int64_t* lse_strides;  // of (batch, head, query)
  bool causal;
  int64_t num_splits;  // at most so many pieces of a request; 0: any number
  float scale_log2;  // scale * log2(e)
  // Known at the launch. q is [batch, query and head, column]: with one stride over queries and heads, and aligned for TMA.
  const void* q;
  int64_t q_strides[2];  // of (batch, query and head)
  const int32_t *block_table, *cache_seqlens;  // rows of entries without gaps
  int64_t block_table_stride;
  void *out, *lse;

  int64_t rows() const { return sq * heads; }
};

struct MlaChoice {
  const MlaVariant* variant = nullptr;  // NULL: the reason says why
  std::string reason;
};

// What a kernel has for good; NULL if that is the call's.
const char* why_other_kind(const MlaVariant& variant, const MlaCall& call);
const char* why_not(const MlaVariant& variant, const MlaCall& call);

// The first kernel that can serve the call: eager PyTorch never wins.
MlaChoice choose_mla(const Device& device, const MlaCall& call);

// Workspace comes from torch, on the device of `like`.
void launch_mla(Device& device, const MlaVariant& variant, const MlaCall& call, const TensorView& like, cudaStream_t stream);

}  // namespace tileops
