#include "check.h"

#include <string.h>

namespace tileops {

namespace {

struct TypeCodes {
  int32_t bf16 = aoti_torch_dtype_bfloat16(), f16 = aoti_torch_dtype_float16(), f32 = aoti_torch_dtype_float32();
};

const TypeCodes& codes() {
  static const TypeCodes the_codes;
  return the_codes;
}

constexpr const char* kTypes = "torch.float32, torch.float16 or torch.bfloat16";

bool same_device(const TensorView& a, const TensorView& b) {
  return a.device_type == b.device_type && a.device_index == b.device_index;
}

MemoryView memory_of(const TensorView& tensor, int64_t item_size) {
  return {reinterpret_cast<uintptr_t>(const_data(tensor.handle)), item_size, tensor.ndim, tensor.sizes, tensor.strides};
}

// Of the types of checked arguments: the three of the kernels, and those of an index.
int64_t item_size(int32_t code) {
  if (code == aoti_torch_dtype_int64()) return 8;
  return code == aoti_torch_dtype_int32() ? 4 : tileops::item_size(dtype_of(code));
}

constexpr const char* kActivations[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};  // in the order of the enum

}  // namespace

void reject(const char* op, const char* argument, const std::string& found, const std::string& expected) {
  throw std::invalid_argument(std::string(op) + ": " + argument + " " + found + "; expected " + expected);
}

bool find_activation(const std::string& name, Activation* found) {
  int number = 0;
  for (const char* known : kActivations) {
    *found = static_cast<Activation>(number++);
    if (name == known) return true;
  }
  return false;
}

std::string shape_text(int64_t ndim, const int64_t* sizes) {
  std::string text = "[";
  for (int64_t i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

std::string dtype_text(int32_t code) {
  const struct {
    int32_t code;
    const char* name;
  } names[] = {{codes().f32, "float32"},
               {codes().f16, "float16"},
               {codes().bf16, "bfloat16"},
               {aoti_torch_dtype_float64(), "float64"},
               {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
               {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
               {aoti_torch_dtype_uint8(), "uint8"},
               {aoti_torch_dtype_int8(), "int8"},
               {aoti_torch_dtype_int16(), "int16"},
               {aoti_torch_dtype_int32(), "int32"},
               {aoti_torch_dtype_int64(), "int64"},
               {aoti_torch_dtype_bool(), "bool"},
               {aoti_torch_dtype_complex64(), "complex64"},
               {aoti_torch_dtype_complex128(), "complex128"}};
  for (const auto& row : names) {
    if (row.code == code) return std::string("torch.") + row.name;
  }
  return "number " + std::to_string(code) + " of torch's list";
}

std::string device_text(const TensorView& tensor) {
  if (tensor.device_type == aoti_torch_device_type_cpu()) return "cpu";
  if (tensor.device_type == aoti_torch_device_type_meta()) return "meta";
  const bool cuda = tensor.device_type == aoti_torch_device_type_cuda();
  return (cuda ? "cuda:" : "device type " + std::to_string(tensor.device_type) + ":") + std::to_string(tensor.device_index);
}

const char* dtype_name(DType type) {
  switch (type) {
    case DType::bf16: return "bfloat16";
    case DType::f16: return "float16";
    case DType::f32: return "float32";
    default: return "none";
  }
}

std::string types_text(DType x, DType y) {
  return x == y ? dtype_name(x) : std::string(dtype_name(x)) + " to " + dtype_name(y);
}

DType dtype_of(int32_t code) {
  if (code == codes().bf16) return DType::bf16;
  if (code == codes().f16) return DType::f16;
  if (code == codes().f32) return DType::f32;
  return DType::none;
}

int32_t dtype_code(DType type) { return type == DType::bf16 ? codes().bf16 : type == DType::f16 ? codes().f16 : codes().f32; }

DType check_dtype(const char* op, const char* argument, int32_t code) {
  const DType type = dtype_of(code);
  const bool is_tensor = !strstr(argument, "dtype");  // the arguments of that name are one themselves
  if (type == DType::none) reject(op, argument, (is_tensor ? "has dtype " : "is ") + dtype_text(code), kTypes);
  return type;
}

int64_t check_dim(const char* op, const TensorView& x, int64_t dim) {
  const int64_t rank = x.ndim > 0 ? x.ndim : 1;  // a tensor of no dimension is one row of one, as torch has it
  if (dim < -rank || dim >= rank) {
    throw std::out_of_range(std::string(op) + ": dim is " + std::to_string(dim) + "; expected a value from " +
                            std::to_string(-rank) + " to " + std::to_string(rank - 1) + " for x of shape " +
                            shape_text(x.ndim, x.sizes));
  }
  return dim < 0 ? dim + rank : dim;
}

void check_weight(const char* op, const TensorView& x, int64_t dim, int64_t dim_as_given, const TensorView& weight) {
  check_dtype(op, "weight", weight.dtype);
  const int64_t cols = x.ndim > 0 ? x.sizes[dim] : 1;
  if (weight.ndim != 1 || weight.sizes[0] != cols) {
    reject(op, "weight", "has shape " + shape_text(weight.ndim, weight.sizes),
           "[" + std::to_string(cols) + "], the size of x along dim " + std::to_string(dim_as_given));
  }
  check_device(op, "weight", {"x", &x}, weight);
}

void check_device(const char* op, const char* argument, const NamedTensor& first, const TensorView& tensor) {
  if (same_device(*first.tensor, tensor)) return;
  reject(op, argument, "is on " + device_text(tensor), device_text(*first.tensor) + ", where " + first.name + " is");
}

Activation check_activation(const char* op, const std::string& name) {
  Activation found;
  if (find_activation(name, &found)) return found;
  std::string names;
  for (const char* known : kActivations) names += (names.empty() ? "" : ", ") + std::string(known);
  reject(op, "activation", "is '" + name + "'", "one of " + names);
}

void check_out(const char* op, const TensorView& x, int32_t result_dtype, const TensorView* weight, const TensorView& out) {
  check_result(op, x.ndim, x.sizes, result_dtype, {{"x", &x}, {"weight", weight}}, out);
}

void check_result(const char* op, int64_t ndim, const int64_t* sizes, int32_t dtype, const std::vector<NamedTensor>& inputs,
                  const TensorView& out) {
  check_fits(op, "out", ndim, sizes, dtype, inputs[0], out);
  check_apart(op, "out", inputs, out);
}

void check_fits(const char* op, const char* argument, int64_t ndim, const int64_t* sizes, int32_t dtype,
                const NamedTensor& first, const TensorView& out) {
  if (out.dtype != dtype) reject(op, argument, "has dtype " + dtype_text(out.dtype), dtype_text(dtype));
  if (out.ndim != ndim || (ndim > 0 && memcmp(out.sizes, sizes, ndim * sizeof(int64_t)) != 0)) {
    reject(op, argument, "has shape " + shape_text(out.ndim, out.sizes), shape_text(ndim, sizes));
  }
  check_device(op, argument, first, out);
}

void check_apart(const char* op, const char* argument, const std::vector<NamedTensor>& others, const TensorView& out) {
  const std::string overlaps = std::string(op) + ": " + argument + " overlaps ", remedy = "; give it storage of its own";
  if (overlaps_itself(out.ndim, out.sizes, out.strides)) {
    throw std::invalid_argument(overlaps + "itself (a stride is 0)" + remedy);
  }
  const MemoryView memory = memory_of(out, item_size(out.dtype));
  for (const NamedTensor& other : others) {
    if (other.tensor && may_overlap(memory, memory_of(*other.tensor, item_size(other.tensor->dtype)))) {
      throw std::invalid_argument(overlaps + other.name + " in memory" + remedy);
    }
  }
}

}  // namespace tileops
