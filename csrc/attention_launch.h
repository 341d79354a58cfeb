// Launches of attention kernels: tensor maps, the parameter struct, the grid.
#pragma once

#include "attention_choice.h"

namespace tileops {

void launch_attention(Device& device, const AttentionVariant& variant, const AttentionCall& call, cudaStream_t stream);

}  // namespace tileops
