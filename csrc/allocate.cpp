#include "allocate.h"

namespace tileops {

namespace {

Owned empty(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype, const TensorView& like,
            const char* doing) {
  AtenTensorHandle handle = nullptr;
  torch_check(aoti_torch_empty_strided(ndim, sizes, strides, dtype, like.device_type, like.device_index, &handle), doing);
  return Owned(handle);
}

}  // namespace

Owned empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, DType type, const TensorView& like,
                    const char* doing) {
  return empty(ndim, sizes, strides, dtype_code(type), like, doing);
}

Owned empty_contiguous(const std::vector<int64_t>& sizes, DType type, const TensorView& like, const char* doing) {
  const std::vector<int64_t> strides = contiguous_strides(sizes);
  return empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), type, like, doing);
}

Owned empty_int32(const std::vector<int64_t>& sizes, const TensorView& like, const char* doing) {
  const std::vector<int64_t> strides = contiguous_strides(sizes);
  return empty(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), aoti_torch_dtype_int32(), like, doing);
}

Owned strided_view(AtenTensorHandle tensor, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t offset) {
  AtenTensorHandle view = nullptr;
  torch_check(aoti_torch__reinterpret_tensor(tensor, ndim, sizes, strides, offset, &view), "taking a view");
  return Owned(view);
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) strides[d] = stride;
  return strides;
}

bool has_no_elements(const std::vector<int64_t>& sizes) {
  for (const int64_t size : sizes) {
    if (size == 0) return true;
  }
  return false;
}

}  // namespace tileops
