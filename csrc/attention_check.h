// What the attention operators ask of their arguments: in the order and the words of tileops/ops/_attention_checks.py.
#pragma once

#include <string>
#include <vector>

#include "check.h"
#include "results_op.h"

namespace tileops {

constexpr int64_t kAnySize = -1;  // in an expected shape

// RuntimeError here, NotImplementedError in Python: no C++ exception becomes the latter.
void refuse_scales(const char* op, const Args& args, int first_slot);

// `expected` is a shape in words: [B, Sq, H, D].
void check_rank(const char* op, const NamedTensor& tensor, const char* expected);

// k and v against q and each other; heads and head dims are their last two dimensions.
void check_keys(const char* op, const TensorView& q, const NamedTensor& k, const NamedTensor& v, const char* k_form,
                const char* v_form);

// An index tensor of the given shape, where kAnySize is spelled as `any`.
void check_index(const char* op, const NamedTensor& index, const std::vector<int64_t>& shape, const char* any,
                 const TensorView& q);
int64_t check_offsets(const char* op, const NamedTensor& offsets, const TensorView& q);  // returns the number of sequences

void check_count(const char* op, const char* argument, int64_t count);
void check_scale(const char* op, double scale, const char* expected);

// Slots of causal, scale, window_left, window_right, softcap and sinks from `first_slot` on; `sinks` is NULL if not given.
void check_options(const char* op, const TensorView& q, const Args& args, int first_slot, const TensorView* sinks);

std::string head_dims_text(int64_t dim, int64_t dim_v);  // head dim 128, or head dims 192 and 128

// "this build has no <op> kernel for <what>", or that float32 has none.
std::string no_attention_kernel(const char* op, DType type, const std::string& what);

}  // namespace tileops
