// Launches of attention kernels: tensor maps, the parameter struct, the grid.
#pragma once

#include "attention_choice.h"

namespace tileops {

// Batch, heads, tokens, columns: the order of programs. A stride of a dimension of one may be no multiple of 16 bytes.
void set_strides(int64_t (&to)[4], const AttentionTensor& from);

void launch_attention(Device& device, const AttentionVariant& variant, const AttentionCall& call, cudaStream_t stream);

}  // namespace tileops
