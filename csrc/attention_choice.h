// Which kernel serves attention: the rows of the generated table, and where they were measured, against the call.
#pragma once

#include <string>

#include "device.h"
#include "variant.h"

namespace tileops {

// A tensor [batch, tokens, heads, columns]. data NULL: it is yet to be allocated, and will be aligned.
struct AttentionTensor {
  const void* data;
  int64_t extents[4], strides[4];
  int64_t columns;  // that a kernel may touch: those of its extent; of a copy of the result whole 16 bytes, as they are stored
  bool copied;  // TMA cannot address what the caller has, so a copy takes its place: data NULL, rows of whole 16 bytes
};

// What a kernel gets for a tensor of the caller's.
AttentionTensor tensor_for_tma(DType type, const void* data, const int64_t* extents, const int64_t* strides, bool is_written);

struct AttentionCall {
  DType type;
  bool lengths, paged;  // requests of different lengths, one behind the other; keys [pages, page, heads, columns]
  AttentionTensor q, k, v, out;  // extents of k are those of v but for its columns, those of q
  void* lse;
  int64_t lse_strides[3];  // of (batch, head, row)
  bool causal;
  int64_t window_left, window_right;  // at most sk and sq; causal: nothing to the right
  int64_t window;  // how many keys a query sees at most; 0: the window hides none that the mask does not
  const void* sinks;
  DType sinks_type;  // none: not given
  int64_t sinks_stride;
  bool has_softcap;
  float scale_log2;  // scale * log2(e); with a softcap, softcap * log2(e)
  float cap_scale;   // scale / softcap

  int64_t batches() const { return q.extents[0]; }
  int64_t heads() const { return q.extents[2]; }
  int64_t kv_heads() const { return k.extents[2]; }
  int64_t sq() const { return q.extents[1]; }
  int64_t sk() const { return k.extents[1]; }
  int64_t head_dim() const { return q.extents[3]; }
  int64_t head_dim_v() const { return v.extents[3]; }
  bool has_window() const { return window > 0; }
  bool has_sinks() const { return sinks_type != DType::none; }
  bool has_copies() const { return q.copied || k.copied || v.copied || out.copied; }
};

struct AttentionChoice {
  const AttentionVariant* variant = nullptr;  // NULL: the reason says why
  std::string reason;
};

// What a kernel has for good: dtype, head dims, mask and options. NULL if they are the call's. Copies fill tiles up with zeros,
// so they may have more columns. A kernel with a window or sinks serves any call with one of the two; only a softcap costs time where
// it is not asked for.
const char* why_other_kind(const AttentionVariant& variant, const AttentionCall& call);

// NULL if the kernel can serve the call, else what it asks for that the call lacks.
const char* why_not(const AttentionVariant& variant, const AttentionCall& call);

// The kernel for requests of different lengths: eager PyTorch, which pads them, never wins.
AttentionChoice choose_lengths(const char* op, const Device& device, const AttentionCall& call);

// The kernel that TILEOPS_FORCE names, or one that was measured to be faster than eager PyTorch near this problem: among those
// of a target with the fewest columns that can serve the call.
AttentionChoice choose_attention(const Device& device, const AttentionCall& call);

}  // namespace tileops
