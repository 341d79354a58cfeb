#include "index_tensor.h"

#include "allocate.h"

namespace tileops {

IndexTensor::IndexTensor(const TensorView& index) : stride(index.strides[0]) {
  const int64_t last = index.ndim - 1;
  if (index.dtype == aoti_torch_dtype_int32() && (index.sizes[last] <= 1 || index.strides[last] == 1)) {
    data = static_cast<const int32_t*>(const_data(index.handle));
    return;
  }
  copy_ = empty_int32({index.sizes, index.sizes + index.ndim}, index, "allocating a copy of an index tensor");
  torch_check(aoti_torch_copy_(copy_.get(), index.handle, 0), "converting an index tensor");
  data = static_cast<const int32_t*>(const_data(copy_.get()));
  stride = index.ndim > 1 ? index.sizes[last] : 1;
}

}  // namespace tileops
