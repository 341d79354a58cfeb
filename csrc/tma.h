// Tensor maps: how the tensor memory accelerator (TMA) finds the tiles of a tensor.
#pragma once

#include <stdint.h>
#include <tileops/tensor_map.h>

#include "variant.h"

namespace tileops {

// A tensor of rank 3 or 4 of which neighbouring columns are neighbours in memory. Its address and strides are multiples of 16
// bytes; a stride of 0 repeats what is there. A box has one of each dimension beyond the rows.
struct MappedTensor {
  const void* data;
  int64_t rank;
  int64_t extents[4];  // columns, rows, ...; 0 beyond the rank
  int64_t strides[3];  // in bytes, of all but the columns; 0 beyond the rank
  DType type;
  MapBox box;
};

tensor_map map_of(const MappedTensor& tensor);

}  // namespace tileops
