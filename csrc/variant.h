// What the dispatcher knows of a kernel: one row of the generated table (csrc/generated/registry.cpp).
#pragma once

#include <stdint.h>

namespace tileops {

enum class Target : int { portable = 0, sm_90a = 1 };
enum class DType : int { none = 0, bf16 = 1, f16 = 2, f32 = 3 };  // as DTypeCode of include/tileops/types.h

// A kernel that computes each row of x [outer, inner, cols] by itself; grid = (ceil(inner / rows_per_block), outer).
struct RowVariant {
  const char* op;
  const char* name;
  Target target;
  DType x, y;
  int vector;          // elements per access; above 1: unit column stride, and base, strides and cols are multiples of it,
                       // for the weight too (unless shifted)
  bool lanes_on_rows;  // neighbouring threads hold neighbouring rows: for a row (inner) stride of 1, and the above of rows
  bool shifted;        // only that x and y (of one dtype) have unit column stride and rows that lie alike in their vectors
  int64_t max_cols;    // 0: any
  int rows_per_block;
  int threads;
  int shared_bytes;
  const void* kernel;
};

extern const RowVariant row_variants[];  // in order of preference: the first eligible row is taken
extern const int row_variant_count;

}  // namespace tileops
