// What the parts of the made-up CUDA share.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <tileops/tensor_map.h>

#include <initializer_list>

#include "variant.h"

namespace fake {

double load(const void* base, int64_t i, int type);  // type: as tileops::DType
void store(void* base, int64_t i, int type, float value);

bool launch_fails();
cudaError_t launch_row(const cudaLaunchConfig_t& config, const void* kernel, void** arguments);  // of a row kernel
void count_question();  // about a kernel: must be asked while the thread is relaxed about captures
void record_launch(const char* kernel);

void record_launch(const char* kernel, std::initializer_list<int64_t> numbers);  // the same, for fake_last_launch

// What the made-up driver writes into a tensor map. Strides in bytes.
struct Map {
  const char* data;
  unsigned rank;
  uint64_t extents[4], strides[3];
  uint32_t box[4];
  int type;
  unsigned swizzle;
};
static_assert(sizeof(Map) <= sizeof(tileops::tensor_map), "fits where the real one does");

// A map of the parameters, which must be that of a tensor of these extents.
Map map_of(const tileops::tensor_map& bytes, unsigned rank, std::initializer_list<int64_t> extents, int type,
           tileops::MapBox box);

bool is_dependent(const cudaLaunchConfig_t& config);  // whether it may start while the kernel before it runs

// Whether a kernel knows where its pieces go.
template <typename Params>
bool has_split(const Params& p, int64_t rows, int64_t columns) {
  const int64_t row = rows * columns;
  return p.partial && p.partial_lse && p.pieces && p.pieces_stride[0] == 4 && p.pieces_stride[1] == 1 &&
         p.partial_stride[0] == p.parts * row && p.partial_stride[1] == row && p.partial_stride[2] == columns &&
         p.partial_stride[3] == 1 && p.partial_lse_stride[0] == p.parts * rows && p.partial_lse_stride[1] == rows &&
         p.partial_lse_stride[2] == 1;
}

// Each computes what was launched.
void launch_gemm(const tileops::ProductVariant& v, const cudaLaunchConfig_t& config, const void* params);
void launch_attention(const tileops::AttentionVariant& v, const cudaLaunchConfig_t& config, const void* params);
void launch_lengths(const tileops::AttentionVariant& v, const cudaLaunchConfig_t& config, const void* params);
void launch_decode(const tileops::DecodeVariant& v, const cudaLaunchConfig_t& config, const void* params);
void launch_mla(const tileops::MlaVariant& v, const cudaLaunchConfig_t& config, const void* params);
bool launch_by_hand(const cudaLaunchConfig_t& config, const void* kernel, const void* params);  // false: it is another kernel
void combine(const tileops::RowVariant& v, const cudaLaunchConfig_t& config, const void* params);
void merge_attention(const tileops::RowVariant& v, dim3 grid, const void* params);

}  // namespace fake
