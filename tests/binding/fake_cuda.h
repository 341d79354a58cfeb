// What the parts of the made-up CUDA share.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "variant.h"

namespace fake {

double load(const void* base, int64_t i, int type);  // type: as tileops::DType
void store(void* base, int64_t i, int type, float value);

bool launch_fails();
void count_question();  // about a kernel: must be asked while the thread is relaxed about captures
void record_launch(const char* kernel);

void merge_attention(const tileops::RowVariant& v, dim3 grid, const void* params);  // computes what was launched

}  // namespace fake
