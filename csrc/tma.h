// Tensor maps: how the tensor memory accelerator (TMA) finds the tiles of a tensor.
#pragma once

#include <stdint.h>
#include <tileops/tensor_map.h>

#include "variant.h"

namespace tileops {

// A tensor [batch, rows, columns] of which neighbouring columns are neighbours in memory. Its address and strides are multiples
// of 16 bytes; a stride of 0 repeats what is there.
struct MappedTensor {
  const void* data;
  int64_t columns, rows, batch;
  int64_t row_stride, batch_stride;  // in bytes
  DType type;
  MapBox box;
};

tensor_map map_of(const MappedTensor& tensor);

}  // namespace tileops
