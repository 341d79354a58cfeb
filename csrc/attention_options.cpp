#include "attention_options.h"

#include <math.h>

#include <algorithm>

#include "attention_check.h"

namespace tileops {

AttentionOptions read_options(const Args& args, int first_slot, const TensorView* sinks, int64_t sq, int64_t sk,
                              int64_t head_dim) {
  AttentionOptions o = {};
  const int64_t left = args.value<int64_t>(first_slot + 2), right = args.value<int64_t>(first_slot + 3);
  o.causal = args.value<bool>(first_slot) || right == 0;
  o.left = left < 0 ? sk : std::min(left, sk);
  o.right = o.causal ? 0 : right < 0 ? sq : std::min(right, sq);
  const bool hides_right = !o.causal && o.right < sq - 1;
  if (o.left < sk - 1 || hides_right) o.window = std::min(sk, o.left + 1 + o.right);
  o.scale = args.optional_value<double>(first_slot + 1, 1 / sqrt(static_cast<double>(head_dim)));
  o.softcap = args.value<double>(first_slot + 4);
  o.sinks = sinks;
  return o;
}

std::string why_eager(const char* op, DType type, const AttentionOptions& o) {
  if (type == DType::f32) return no_attention_kernel(op, type, "");
  const float scale = o.scale_log2();
  if (o.softcap != 0 && !(isnormal(scale) && (isnormal(o.cap_scale()) || o.scale == 0))) {
    return std::string(op) + " kernels take a softcap, and a scale divided by it, that are normal numbers of float32";
  }
  return scale > 0 && scale < INFINITY ? "" : std::string(op) + " kernels take a scale above 0 in float32";
}

void set_options(const AttentionOptions& o, AttentionCall* call) {
  call->causal = o.causal;
  call->window_left = o.left;
  call->window_right = o.right;
  call->window = o.window;
  if (o.sinks) {
    call->sinks = const_data(o.sinks->handle);
    call->sinks_type = dtype_of(o.sinks->dtype);
    call->sinks_stride = o.sinks->strides[0];
  }
  call->has_softcap = o.softcap != 0;
  call->scale_log2 = o.scale_log2();
  call->cap_scale = o.cap_scale();
}

}  // namespace tileops
