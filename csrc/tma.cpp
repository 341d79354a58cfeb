#include "tma.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "device.h"

namespace tileops {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver that the CUDA runtime has loaded: we do not link libcuda, which a machine without a GPU lacks.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t code =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (code != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    throw std::runtime_error("tileops: the NVIDIA driver has no cuTensorMapEncodeTiled: " +
                             (code != cudaSuccess ? cuda_text(code) : std::string("update the driver")));
  }
  return reinterpret_cast<Encode>(function);
}

CUtensorMapDataType data_type(DType type) {
  switch (type) {
    case DType::bf16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::f16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  }
}

CUtensorMapSwizzle swizzle_of(int bytes) {
  switch (bytes) {
    case 128: return CU_TENSOR_MAP_SWIZZLE_128B;
    case 64: return CU_TENSOR_MAP_SWIZZLE_64B;
    case 32: return CU_TENSOR_MAP_SWIZZLE_32B;
    default: return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

tensor_map encode(const MappedTensor& t) {
  static const Encode encode_tiled = find_encode();
  static_assert(sizeof(CUtensorMap) == sizeof(tensor_map), "a tensor map is what the driver writes");
  CUtensorMap map;
  cuuint64_t extents[4], strides[3];
  std::copy(t.extents, t.extents + 4, extents);
  std::copy(t.strides, t.strides + 3, strides);
  const cuuint32_t box[] = {static_cast<cuuint32_t>(t.box.columns), static_cast<cuuint32_t>(t.box.rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult code = encode_tiled(&map, data_type(t.type), static_cast<cuuint32_t>(t.rank), const_cast<void*>(t.data),
                                     extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(t.box.swizzle),
                                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS)
    throw std::runtime_error("tileops: the driver refuses a tensor map: CUDA error " + std::to_string(code));
  tensor_map out;
  memcpy(&out, &map, sizeof(out));
  return out;
}

struct Entry {
  MappedTensor key;
  tensor_map map;
};

constexpr size_t kEntries = 1024;  // weights and activations of a large model; 256 KiB
static_assert(sizeof(MappedTensor) == 11 * sizeof(uint64_t), "compared and hashed as bytes: no padding");

size_t slot_of(const MappedTensor& key) {
  uint64_t words[11], hash = 0;
  memcpy(words, &key, sizeof(words));
  for (const uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
  return hash % kEntries;
}

}  // namespace

// Cached: a kernel takes three or four maps, and the driver takes about a microsecond to encode one, of the ten that a call may
// cost. A map says nothing but what its key does, so it never grows stale; a thread has its own, so nothing is locked.
tensor_map map_of(const MappedTensor& tensor) {
  thread_local std::unique_ptr<Entry[]> entries;
  if (__builtin_expect(!entries, 0)) entries.reset(new Entry[kEntries]());
  Entry& entry = entries[slot_of(tensor)];
  if (memcmp(&entry.key, &tensor, sizeof(tensor)) != 0) entry = {tensor, encode(tensor)};
  return entry.map;
}

}  // namespace tileops
