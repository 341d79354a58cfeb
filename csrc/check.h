// Input checks and the words of their errors; tileops/ops has the same sentences for the paths that never come here.
#pragma once

#include <string>

#include "row_problem.h"
#include "stable.h"
#include "variant.h"

namespace tileops {

std::string shape_text(int64_t ndim, const int64_t* sizes);  // [4, 5]
std::string dtype_text(int32_t code);  // torch.float32
std::string device_text(const TensorView& tensor);  // cuda:0
const char* dtype_name(DType type);  // float32

DType dtype_of(int32_t code);  // DType::none for any but the three that the kernels take
int32_t dtype_code(DType type);

// Each throws std::invalid_argument (ValueError), check_dim std::out_of_range (IndexError).
DType check_dtype(const char* op, const char* argument, int32_t code);
int64_t check_dim(const char* op, const TensorView& x, int64_t dim);  // returns it counted from 0
void check_weight(const char* op, const TensorView& x, int64_t dim, int64_t dim_as_given, const TensorView& weight);
void check_out(const char* op, const TensorView& x, int32_t result_dtype, const TensorView* weight, const TensorView& out);

}  // namespace tileops
