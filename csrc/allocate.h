// New tensors, on the device of another. `doing` is what an error of torch is said to have interrupted.
#pragma once

#include <vector>

#include "check.h"
#include "stable.h"

namespace tileops {

Owned empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, DType type, const TensorView& like,
                    const char* doing);
Owned empty_contiguous(const std::vector<int64_t>& sizes, DType type, const TensorView& like, const char* doing);
Owned empty_int32(const std::vector<int64_t>& sizes, const TensorView& like, const char* doing);

// A view of the tensor's memory, from so many elements behind its first one.
Owned strided_view(AtenTensorHandle tensor, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t offset = 0);

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes);
bool has_no_elements(const std::vector<int64_t>& sizes);

}  // namespace tileops
