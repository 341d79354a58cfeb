#include "attention_check.h"

#include <math.h>
#include <stdio.h>

#include <algorithm>

namespace tileops {

namespace {

std::string shape_of(const TensorView& tensor) { return shape_text(tensor.ndim, tensor.sizes); }

std::string number_text(double number) {
  if (isnan(number)) return "nan";  // printf may sign it, Python does not
  char text[32];
  snprintf(text, sizeof(text), "%g", number);
  return text;
}

int64_t last(const TensorView& tensor, int from_end = 1) { return tensor.sizes[tensor.ndim - from_end]; }

void check_window(const char* op, const char* argument, int64_t window) {
  if (window < -1) reject(op, argument, "is " + std::to_string(window), "-1 (no limit) or more");
}

}  // namespace

void refuse_scales(const char* op, const Args& args, int first_slot) {
  for (const char* argument : {"q_descale", "k_descale", "v_descale"}) {
    if (args.optional_tensor(first_slot++)) {
      throw std::runtime_error(std::string(op) + ": " + argument +
                               " was given; scaled operands do not work yet, expected None");
    }
  }
}

void check_rank(const char* op, const NamedTensor& tensor, const char* expected) {
  const std::string form = expected;
  if (tensor.tensor->ndim == std::count(form.begin(), form.end(), ',') + 1) return;
  reject(op, tensor.name, "has shape " + shape_of(*tensor.tensor), form);
}

void check_keys(const char* op, const TensorView& q, const NamedTensor& k, const NamedTensor& v, const char* k_form,
                const char* v_form) {
  const NamedTensor first = {"q", &q};
  for (const NamedTensor* tensor : {&k, &v}) {
    if (tensor->tensor->dtype != q.dtype) {
      reject(op, tensor->name, "has dtype " + dtype_text(tensor->tensor->dtype), dtype_text(q.dtype) + ", that of q");
    }
    check_rank(op, *tensor, tensor == &k ? k_form : v_form);
    check_device(op, tensor->name, first, *tensor->tensor);
  }
  if (last(q) < 1) reject(op, "q", "has shape " + shape_of(q), "a head dim of 1 or more");
  const std::string k_shape = shape_of(*k.tensor);
  if (last(*k.tensor) != last(q)) {
    reject(op, k.name, "has shape " + k_shape, "the head dim of q, " + std::to_string(last(q)) + ", as its last dimension");
  }
  if (!std::equal(k.tensor->sizes, k.tensor->sizes + k.tensor->ndim - 1, v.tensor->sizes) || last(*v.tensor) < 1) {
    const std::string start = k_shape.substr(0, k_shape.rfind(','));
    reject(op, v.name, "has shape " + shape_of(*v.tensor), start + ", Dv] for " + k.name + " of shape " + k_shape);
  }
  const int64_t heads = last(q, 2), kv_heads = last(*k.tensor, 2);
  if (kv_heads ? heads % kv_heads : heads) {
    reject(op, "q", "has " + std::to_string(heads) + " heads and " + k.name + " has " + std::to_string(kv_heads),
           std::string("a multiple of the heads of ") + k.name);
  }
}

void check_index(const char* op, const NamedTensor& index, const std::vector<int64_t>& shape, const char* any,
                 const TensorView& q) {
  const TensorView& view = *index.tensor;
  if (view.dtype != aoti_torch_dtype_int32() && view.dtype != aoti_torch_dtype_int64()) {
    reject(op, index.name, "has dtype " + dtype_text(view.dtype), "torch.int32 or torch.int64");
  }
  bool fits = view.ndim == static_cast<int64_t>(shape.size());
  std::string expected;
  for (size_t d = 0; d < shape.size(); ++d) {
    expected += (d ? ", " : "") + (shape[d] == kAnySize ? any : std::to_string(shape[d]));
    fits = fits && (shape[d] == kAnySize || view.sizes[d] == shape[d]);
  }
  if (!fits) reject(op, index.name, "has shape " + shape_of(view), "[" + expected + "]");
  check_device(op, index.name, {"q", &q}, view);
}

int64_t check_offsets(const char* op, const NamedTensor& offsets, const TensorView& q) {
  check_index(op, offsets, {kAnySize}, "B + 1", q);
  if (offsets.tensor->sizes[0] == 0) reject(op, offsets.name, "has shape [0]", "[B + 1]");
  return offsets.tensor->sizes[0] - 1;
}

void check_count(const char* op, const char* argument, int64_t count) {
  if (count < 0) reject(op, argument, "is " + std::to_string(count), "0 or more");
}

void check_scale(const char* op, double scale, const char* expected) {
  if (!isfinite(scale)) reject(op, "scale", "is " + number_text(scale), expected);
}

void check_options(const char* op, const TensorView& q, const Args& args, int first_slot, const TensorView* sinks) {
  check_scale(op, args.optional_value<double>(first_slot + 1, 0.0), "a finite number or None");
  check_window(op, "window_left", args.value<int64_t>(first_slot + 2));
  check_window(op, "window_right", args.value<int64_t>(first_slot + 3));
  const double softcap = args.value<double>(first_slot + 4);
  if (!(softcap >= 0 && softcap < INFINITY)) {
    reject(op, "softcap", "is " + number_text(softcap), "0 (off) or a positive number");
  }
  if (!sinks) return;
  check_dtype(op, "sinks", sinks->dtype);
  const int64_t heads = last(q, 2);
  if (sinks->ndim != 1 || sinks->sizes[0] != heads) {
    reject(op, "sinks", "has shape " + shape_of(*sinks), "[" + std::to_string(heads) + "], one for each head of q");
  }
  check_device(op, "sinks", {"q", &q}, *sinks);
}

std::string head_dims_text(int64_t dim, int64_t dim_v) {
  if (dim == dim_v) return "head dim " + std::to_string(dim);
  return "head dims " + std::to_string(dim) + " and " + std::to_string(dim_v);
}

std::string no_attention_kernel(const char* op, DType type, const std::string& what) {
  if (type == DType::f32) return std::string(op) + " kernels take bfloat16 and float16, and q is float32";
  return std::string("this build has no ") + op + " kernel for " + dtype_name(type) + " " + what;
}

}  // namespace tileops
