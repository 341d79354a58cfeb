// The options that the attention operators share, as kernels take them. Plain numbers: tensors are the operators'.
#pragma once

#include <string>

#include "attention_choice.h"
#include "stable.h"

namespace tileops {

struct AttentionOptions {
  bool causal;
  int64_t left, right;  // windows, of at most sk and sq; causal: nothing to the right
  int64_t window;       // how many keys a query sees at most; 0: the window hides none that the mask does not
  double scale, softcap;
  const TensorView* sinks;  // NULL: none

  // scale * log2(e); with a softcap, softcap * log2(e)
  float scale_log2() const { return static_cast<float>((softcap != 0 ? softcap : scale) * 1.4426950408889634); }
  float cap_scale() const { return softcap != 0 ? static_cast<float>(scale / softcap) : 0; }
};

// As _attention.options_of reads them: slots of causal, scale, window_left, window_right and softcap from `first_slot` on. A causal
// call sees no key to the right of the one a query stands on. sq, sk: of the longest sequence, or more.
AttentionOptions read_options(const Args& args, int first_slot, const TensorView* sinks, int64_t sq, int64_t sk,
                              int64_t head_dim);

// Why no kernel serves a call with them, whatever the layout of its tensors; "" if one may.
std::string why_eager(const char* op, DType type, const AttentionOptions& options);

void set_options(const AttentionOptions& options, AttentionCall* call);

}  // namespace tileops
