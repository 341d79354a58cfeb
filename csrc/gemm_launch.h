// Launches of product kernels: tensor maps or strides, the parameter struct of the target, the grid.
#pragma once

#include "gemm_choice.h"

namespace tileops {

void launch_gemm(Device& device, const ProductVariant& variant, const GemmCall& call, cudaStream_t stream);

}  // namespace tileops
