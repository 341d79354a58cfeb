// Index tensors as kernels read them.
#pragma once

#include "stable.h"

namespace tileops {

// An index tensor of one or two dimensions, or a copy of it: int32, neighbours in memory along its last dimension.
class IndexTensor {
 public:
  IndexTensor() = default;
  explicit IndexTensor(const TensorView& index);

  const int32_t* data = nullptr;  // NULL: not given
  int64_t stride = 0;  // of the first of two dimensions

 private:
  Owned copy_;
};

}  // namespace tileops
