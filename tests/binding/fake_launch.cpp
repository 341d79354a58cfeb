// The made-up CUDA's persistent kernels: tensor maps, which are checked by the rules of TMA as a GPU would, what is asked about a
// kernel before its first launch, and the launch.
#include <cuda.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <string>

#include "fake_cuda.h"

namespace {

using tileops::AttentionVariant;
using tileops::DecodeVariant;
using tileops::MlaVariant;
using tileops::ProductVariant;

int64_t encodes = 0;
std::string launch_text;

CUresult encode(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* extents,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  ++encodes;
  const unsigned size = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  const unsigned span = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 32;
  bool good = (rank == 3 || rank == 4) && reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] * size <= span;
  for (unsigned d = 0; d < rank; ++d) good = good && extents[d] > 0 && extents[d] <= 1ull << 32 && box[d] <= 256 && steps[d] == 1;
  for (unsigned d = 0; d + 1 < rank; ++d) good = good && strides[d] % 16 == 0 && strides[d] < 1ull << 40;
  if (!good) return CUDA_ERROR_INVALID_VALUE;
  const int code = size == 4 ? 3 : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 ? 2 : 1;  // as tileops::DType
  fake::Map map = {static_cast<char*>(data), rank, {}, {}, {}, code, span};
  std::copy(extents, extents + rank, map.extents);
  std::copy(strides, strides + rank - 1, map.strides);
  std::copy(box, box + rank, map.box);
  memset(out, 0, sizeof(*out));
  memcpy(out, &map, sizeof(map));
  return CUDA_SUCCESS;
}

template <typename Variant>
const Variant* find(const Variant* variants, int count, const void* kernel) {
  const auto* end = variants + count;
  const auto* found = std::find_if(variants, end, [&](const Variant& v) { return v.kernel == kernel; });
  return found == end ? nullptr : found;
}

const ProductVariant* product(const void* kernel) {
  return find(tileops::product_variants, tileops::product_variant_count, kernel);
}

const AttentionVariant* attention(const void* kernel) {
  return find(tileops::attention_variants, tileops::attention_variant_count, kernel);
}

const DecodeVariant* decode(const void* kernel) {
  return find(tileops::decode_variants, tileops::decode_variant_count, kernel);
}

const MlaVariant* mla(const void* kernel) { return find(tileops::mla_variants, tileops::mla_variant_count, kernel); }

// Of a persistent kernel; 0 of another.
struct Shape {
  int threads = 0, shared_bytes = 0;
};

Shape shape_of(const void* kernel) {
  if (const auto* v = product(kernel)) return {v->threads, v->shared_bytes};
  if (const auto* v = attention(kernel)) return {v->threads, v->shared_bytes};
  if (const auto* v = decode(kernel)) return {v->threads, v->shared_bytes};
  if (const auto* v = mla(kernel)) return {v->threads, v->shared_bytes};
  return {};
}

}  // namespace

namespace fake {

Map map_of(const tileops::tensor_map& bytes, unsigned rank, std::initializer_list<int64_t> extents, int type,
           tileops::MapBox box) {
  Map map;
  memcpy(&map, &bytes, sizeof(map));
  const uint32_t boxes[] = {uint32_t(box.columns), uint32_t(box.rows), 1, 1};
  const bool right = map.rank == rank && std::equal(extents.begin(), extents.end(), map.extents) && map.type == type &&
                     std::equal(boxes, boxes + rank, map.box) && map.swizzle == unsigned(box.swizzle);
  if (!right) abort();
  return map;
}

void record_launch(const char* kernel, std::initializer_list<int64_t> numbers) {
  record_launch(kernel);
  launch_text.clear();
  for (const int64_t number : numbers) launch_text += (launch_text.empty() ? "" : " ") + std::to_string(number);
}

}  // namespace fake

extern "C" {
#pragma GCC visibility push(default)

int64_t fake_encodes() { return encodes; }
const char* fake_last_launch() { return launch_text.c_str(); }  // the numbers that a persistent kernel has recorded

#pragma GCC visibility pop

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = strcmp(name, "cuTensorMapEncodeTiled") == 0 && version == 12000;
  *function = known ? reinterpret_cast<void*>(&encode) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  fake::count_question();
  const Shape shape = shape_of(kernel);
  const bool right = shape.threads && attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value == shape.shared_bytes;
  return right ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads, size_t shared) {
  fake::count_question();
  const Shape shape = shape_of(kernel);
  if (!shape.threads || threads != shape.threads || int(shared) != shape.shared_bytes) return cudaErrorInvalidValue;
  const ProductVariant* v = product(kernel);
  *blocks = v && v->target == tileops::Target::portable ? 2 : 1;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  if (fake::launch_fails()) return cudaErrorLaunchFailure;
  const Shape shape = shape_of(kernel);
  if (fake::launch_by_hand(*config, kernel, arguments[0])) return cudaSuccess;
  if (!shape.threads) return fake::launch_row(*config, kernel, arguments);
  const bool right = int(config->blockDim.x) == shape.threads && int(config->dynamicSmemBytes) == shape.shared_bytes &&
                     config->stream == reinterpret_cast<cudaStream_t>(0x5) &&
                     (mla(kernel) || decode(kernel) || config->gridDim.y == 1) && config->gridDim.z == 1;
  if (!right) abort();
  if (const auto* v = product(kernel)) fake::launch_gemm(*v, *config, arguments[0]);
  if (const auto* v = attention(kernel)) fake::launch_attention(*v, *config, arguments[0]);
  if (const auto* v = decode(kernel)) fake::launch_decode(*v, *config, arguments[0]);
  if (const auto* v = mla(kernel)) fake::launch_mla(*v, *config, arguments[0]);
  return cudaSuccess;
}
}
