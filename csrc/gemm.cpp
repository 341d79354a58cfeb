// gemm(Tensor a, Tensor b, Tensor? bias=None, *, str activation='none', Tensor? residual=None, ScalarType? out_dtype=None,
//      Tensor? scale_a=None, Tensor? scale_b=None[, Tensor(a!) out])
#include <vector>

#include "allocate.h"
#include "check.h"
#include "device.h"
#include "eager.h"
#include "gemm_problem.h"
#include "knobs.h"
#include "ops.h"
#include "row_choice.h"
#include "stable.h"

namespace tileops {

namespace {

constexpr const char* kOp = "gemm";
constexpr int kA = 0, kB = 1, kBias = 2, kActivation = 3, kResidual = 4, kOutDtype = 5, kScaleA = 6, kScaleB = 7, kOut = 8;
constexpr Kind kKinds[] = {Kind::tensor,          Kind::tensor,         Kind::optional_tensor, Kind::string,
                           Kind::optional_tensor, Kind::optional_value, Kind::optional_tensor, Kind::optional_tensor};
constexpr Kind kOutKinds[] = {Kind::tensor,          Kind::tensor,          Kind::optional_tensor,
                              Kind::string,          Kind::optional_tensor, Kind::optional_value,
                              Kind::optional_tensor, Kind::optional_tensor, Kind::tensor};

// One call, its inputs checked: in the order and the words of tileops/ops/gemm.py.
struct Gemm {
  TensorView a, b, bias_view, residual_view;
  const TensorView* bias = nullptr;  // NULL: none
  const TensorView* residual = nullptr;
  DType type, y_type;
  std::vector<int64_t> y_sizes;

  explicit Gemm(Args& args) : a(view_of(args.tensor(kA))), b(view_of(args.tensor(kB))) {
    refuse_scale(args, kScaleA, "scale_a");
    refuse_scale(args, kScaleB, "scale_b");
    check_operands();
    if (const AtenTensorHandle handle = args.optional_tensor(kBias)) {
      bias_view = view_of(handle);
      bias = &bias_view;
      check_bias();
    }
    const Activation activation = check_activation(kOp, args.string(kActivation));
    args.replace(kActivation, to_stable(static_cast<int64_t>(activation)));
    if (const AtenTensorHandle handle = args.optional_tensor(kResidual)) {
      residual_view = view_of(handle);
      residual = &residual_view;
      check_residual();
    }
    y_type = check_dtype(kOp, "out_dtype", args.optional_value<int32_t>(kOutDtype, a.dtype));
  }
  Gemm(const Gemm&) = delete;

  bool is_empty() const { return has_no_elements(y_sizes); }

  MatrixStack y_stack(const int64_t* strides) const { return {static_cast<int64_t>(y_sizes.size()), y_sizes.data(), strides}; }

  EagerTwin twin() const { return {kOp, TILEOPS_QUALIFIED("_eager_gemm"), kOut, {&a, &b}}; }

 private:
  void check_operands() {
    type = check_dtype(kOp, "a", a.dtype);
    if (b.dtype != a.dtype) reject(kOp, "b", "has dtype " + dtype_text(b.dtype), dtype_text(a.dtype) + ", that of a");
    check_matrix("a", a, "[..., M, K]");
    check_matrix("b", b, "[..., K, N]");
    check_device(kOp, "b", {"a", &a}, b);
    const int64_t k = a.sizes[a.ndim - 1];
    if (b.sizes[b.ndim - 2] != k) {
      reject(kOp, "b", "has shape " + shape_text(b.ndim, b.sizes),
             "[..., " + std::to_string(k) + ", N] for a of shape " + shape_text(a.ndim, a.sizes));
    }
    const int64_t rank = a.ndim > b.ndim ? a.ndim : b.ndim;
    y_sizes.resize(rank);
    for (int64_t d = 0; d < rank - 2; ++d) y_sizes[d] = broadcast_size(d, rank);
    y_sizes[rank - 2] = a.sizes[a.ndim - 2];
    y_sizes[rank - 1] = b.sizes[b.ndim - 1];
  }

  static void check_matrix(const char* argument, const TensorView& tensor, const char* expected) {
    if (tensor.ndim >= 2) return;
    reject(kOp, argument, "has shape " + shape_text(tensor.ndim, tensor.sizes),
           std::string("two dimensions or more, ") + expected);
  }

  int64_t broadcast_size(int64_t d, int64_t rank) const {
    const int64_t in_a = d - (rank - a.ndim), in_b = d - (rank - b.ndim);
    const int64_t of_a = in_a < 0 ? 1 : a.sizes[in_a], of_b = in_b < 0 ? 1 : b.sizes[in_b];
    if (of_a != of_b && of_a != 1 && of_b != 1) {
      reject(kOp, "b", "has shape " + shape_text(b.ndim, b.sizes),
             "batch dimensions that broadcast with those of a of shape " + shape_text(a.ndim, a.sizes));
    }
    return of_a == 1 ? of_b : of_a;
  }

  void check_bias() const {
    check_dtype(kOp, "bias", bias->dtype);
    const int64_t n = y_sizes.back();
    if (bias->ndim != 1 || bias->sizes[0] != n) {
      reject(kOp, "bias", "has shape " + shape_text(bias->ndim, bias->sizes),
             "[" + std::to_string(n) + "], the number of columns of b");
    }
    check_device(kOp, "bias", {"a", &a}, *bias);
  }

  void check_residual() const {
    check_dtype(kOp, "residual", residual->dtype);
    const int64_t rank = static_cast<int64_t>(y_sizes.size());
    bool fits = residual->ndim <= rank;
    for (int64_t d = 0; fits && d < residual->ndim; ++d) {
      fits = residual->sizes[d] == 1 || residual->sizes[d] == y_sizes[rank - residual->ndim + d];
    }
    if (!fits) {
      reject(kOp, "residual", "has shape " + shape_text(residual->ndim, residual->sizes),
             "one that broadcasts to the result, " + shape_text(rank, y_sizes.data()));
    }
    check_device(kOp, "residual", {"a", &a}, *residual);
  }

  // NotImplementedError in Python; there is no C++ exception that torch would turn into one.
  static void refuse_scale(const Args& args, int slot, const char* argument) {
    if (!args.optional_tensor(slot)) return;
    throw std::runtime_error(std::string(kOp) + ": " + argument + " was given; scales do not work yet, expected None");
  }
};

MatrixStack stack_of(const TensorView& tensor) { return {tensor.ndim, tensor.sizes, tensor.strides}; }

// Why no kernel serves the product; y_strides are those of the result.
std::string why_no_kernel(const Gemm& op, const int64_t* y_strides) {
  if (op.type == DType::f32) return "gemm kernels take bfloat16 and float16, and a is float32";
  GemmProblem p;
  const MatrixStack residual = op.residual ? stack_of(*op.residual) : MatrixStack();
  if (!collapse_gemm(stack_of(op.a), stack_of(op.b), op.y_stack(y_strides), op.residual ? &residual : nullptr, &p)) {
    return "gemm kernels take one batch dimension, and those of a, b, residual and the result do not merge into one";
  }
  const auto address = [](const TensorView& t) { return reinterpret_cast<uintptr_t>(const_data(t.handle)); };
  const OperandLayout a = layout_of(address(op.a), 2, {p.batch, p.m, p.k}, p.a_stride, 2);
  const OperandLayout b = layout_of(address(op.b), 2, {p.batch, p.k, p.n}, p.b_stride, 1);
  return std::string("this build has no gemm kernel for ") + dtype_name(op.type) + " " + describe(p, a, b);
}

// Why the call goes to its eager twin; throws where TILEOPS_FORCE asks for a kernel.
std::string refuse(const Gemm& op, const Device& device, const int64_t* y_strides) {
  const std::string reason = refusal(kOp, device);
  if (!reason.empty()) return reason;
  const std::string no_kernel = why_no_kernel(op, y_strides);
  if (!knobs().force.empty()) cannot_force(kOp, knobs().force, no_kernel);
  return no_kernel;
}

}  // namespace

void gemm(StableIValue* stack, uint64_t, uint64_t) {
  boxed(stack, [&] {
    Args args(stack, kKinds);
    const Gemm op(args);
    if (op.is_empty()) return to_stable(empty_contiguous(op.y_sizes, op.y_type, op.a, "allocating the result").release());
    const DeviceScope scope(op.a.device_index);
    Device& device = device_at(op.a.device_index);
    const std::string reason = refuse(op, device, contiguous_strides(op.y_sizes).data());
    return to_stable(run_eager(op.twin(), args, device, reason).release());
  });
}

void gemm_out(StableIValue* stack, uint64_t, uint64_t) {
  boxed(stack, [&] {
    Args args(stack, kOutKinds);
    const Gemm op(args);
    const TensorView out = view_of(args.tensor(kOut));
    check_result(kOp, static_cast<int64_t>(op.y_sizes.size()), op.y_sizes.data(), dtype_code(op.y_type),
                 {{"a", &op.a}, {"b", &op.b}, {"bias", op.bias}, {"residual", op.residual}}, out);
    if (!op.is_empty()) {
      const DeviceScope scope(op.a.device_index);
      Device& device = device_at(op.a.device_index);
      const std::string reason = refuse(op, device, out.strides);
      copy_to(out, run_eager(op.twin(), args, device, reason));
    }
    return to_stable(args.take_tensor(kOut).release());
  });
}

void explain_gemm(StableIValue* stack, uint64_t, uint64_t) {
  boxed(stack, [&] {
    Args args(stack, kKinds);
    const Gemm op(args);
    if (op.is_empty()) return stable_string("kernel\t\tthe result is empty, so nothing is launched");
    const DeviceScope scope(op.a.device_index);
    Device& device = device_at(op.a.device_index);
    return stable_string("eager\t\t" + refuse(op, device, contiguous_strides(op.y_sizes).data()));
  });
}

}  // namespace tileops
