// Input checks and the words of their errors; tileops/ops has the same sentences for the paths that never come here.
#pragma once

#include <string>
#include <vector>

#include "row_problem.h"
#include "stable.h"
#include "variant.h"

namespace tileops {

std::string shape_text(int64_t ndim, const int64_t* sizes);  // [4, 5]
std::string dtype_text(int32_t code);  // torch.float32
std::string device_text(const TensorView& tensor);  // cuda:0
const char* dtype_name(DType type);  // float32
std::string types_text(DType x, DType y);  // of operands and result: bfloat16 to float32, or one name

DType dtype_of(int32_t code);  // DType::none for any but the three that the kernels take
int32_t dtype_code(DType type);

enum class Activation : int32_t { none = 0, relu = 1, gelu = 2, gelu_tanh = 3, silu = 4 };  // as _schemas.ACTIVATIONS

// false: there is none of that name.
bool find_activation(const std::string& name, Activation* found);

struct NamedTensor {
  const char* name;
  const TensorView* tensor;  // NULL: not given
};

// Each throws std::invalid_argument (ValueError), check_dim std::out_of_range (IndexError).
[[noreturn]] void reject(const char* op, const char* argument, const std::string& found, const std::string& expected);
DType check_dtype(const char* op, const char* argument, int32_t code);
int64_t check_dim(const char* op, const TensorView& x, int64_t dim);  // returns it counted from 0
void check_weight(const char* op, const TensorView& x, int64_t dim, int64_t dim_as_given, const TensorView& weight);
void check_device(const char* op, const char* argument, const NamedTensor& first, const TensorView& tensor);
Activation check_activation(const char* op, const std::string& name);
void check_out(const char* op, const TensorView& x, int32_t result_dtype, const TensorView* weight, const TensorView& out);
// The same for a result that is not shaped like the first input.
void check_result(const char* op, int64_t ndim, const int64_t* sizes, int32_t dtype, const std::vector<NamedTensor>& inputs,
                  const TensorView& out);
// Its two halves, for a result that `argument` takes: whether it is what is wanted, and whether its memory is its own.
void check_fits(const char* op, const char* argument, int64_t ndim, const int64_t* sizes, int32_t dtype,
                const NamedTensor& first, const TensorView& out);
void check_apart(const char* op, const char* argument, const std::vector<NamedTensor>& others, const TensorView& out);

}  // namespace tileops
