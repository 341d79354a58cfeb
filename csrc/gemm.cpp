// gemm(Tensor a, Tensor b, Tensor? bias=None, *, str activation='none', Tensor? residual=None, ScalarType? out_dtype=None,
//      Tensor? scale_a=None, Tensor? scale_b=None[, Tensor(a!) out])
#include <vector>

#include "allocate.h"
#include "check.h"
#include "device.h"
#include "eager.h"
#include "gemm_choice.h"
#include "gemm_launch.h"
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
  Activation activation;
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
    activation = check_activation(kOp, args.string(kActivation));
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

  Owned allocate() const { return empty_contiguous(y_sizes, y_type, a, "allocating the result"); }

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

// An input as the kernel gets it: as it is, or a contiguous copy, which is made just before the launch.
class Operand {
 public:
  explicit Operand(const TensorView* tensor) : tensor_(tensor) {}

  void take_copy() { copy_strides_ = contiguous_strides({tensor_->sizes, tensor_->sizes + tensor_->ndim}); }
  bool is_copy() const { return !copy_strides_.empty(); }
  MatrixStack stack() const { return {tensor_->ndim, tensor_->sizes, is_copy() ? copy_strides_.data() : tensor_->strides}; }
  const void* data() const { return is_copy() ? nullptr : const_data(tensor_->handle); }

  const void* ready(const char* copying) {
    if (!is_copy()) return data();
    copy_ = empty_strided(tensor_->ndim, tensor_->sizes, copy_strides_.data(), dtype_of(tensor_->dtype), *tensor_, copying);
    const NoGrad no_grad;
    torch_check(aoti_torch_copy_(copy_.get(), tensor_->handle, 0), copying);
    return const_data(copy_.get());
  }

 private:
  const TensorView* tensor_;
  std::vector<int64_t> copy_strides_;
  Owned copy_;
};

// Kernel and arguments of a call.
struct Plan {
  Operand a, b, bias;
  GemmCall call = {};
  GemmChoice choice;

  explicit Plan(const Gemm& op) : a(&op.a), b(&op.b), bias(op.bias) {}
};

// Writes the problem, with copies of a and b where they have no unit stride. False if it is more than one batch.
bool collapse(const Gemm& op, const int64_t* y_strides, Plan* plan) {
  const MatrixStack y = {static_cast<int64_t>(op.y_sizes.size()), op.y_sizes.data(), y_strides};
  const MatrixStack residual = op.residual ? stack_of(*op.residual) : MatrixStack();
  GemmCall& call = plan->call;
  const auto collapsed = [&] {
    call.a = plan->a.data();
    call.b = plan->b.data();
    return collapse_gemm(plan->a.stack(), plan->b.stack(), y, op.residual ? &residual : nullptr, &call.problem);
  };
  if (!collapsed()) return false;
  const bool copy_a = call.a_layout().access == Access::copy, copy_b = call.b_layout().access == Access::copy;
  if (copy_a) plan->a.take_copy();
  if (copy_b) plan->b.take_copy();
  return (!copy_a && !copy_b) || collapsed();
}

// Why no kernel serves the call, whatever its layout; "" if one may.
std::string why_eager(const Gemm& op) {
  if (op.type == DType::f32) return "gemm kernels take bfloat16 and float16, and a is float32";
  if (op.y_type != op.type && op.y_type != DType::f32) {
    return std::string("gemm kernels round to the dtype of a or to float32, and out_dtype is ") + dtype_name(op.y_type);
  }
  if (op.residual && dtype_of(op.residual->dtype) != op.y_type) {
    return std::string("gemm kernels take a residual of the result's dtype, ") + dtype_name(op.y_type) + ", and it is " +
           dtype_name(dtype_of(op.residual->dtype));
  }
  if (op.a.sizes[op.a.ndim - 1] == 0) return "there is no product to sum: a has no columns";
  return "";
}

// y: where the result goes, NULL for memory that is yet to be allocated.
Plan plan_into(const Gemm& op, const Device& device, const int64_t* y_strides, void* y) {
  Plan plan(op);
  plan.choice.reason = why_eager(op);
  if (!plan.choice.reason.empty()) return plan;
  GemmCall& call = plan.call;
  call.x_type = op.type;
  call.y_type = op.y_type;
  call.y = y;
  call.activation = op.activation;
  call.has_residual = op.residual != nullptr;
  call.residual = op.residual ? const_data(op.residual->handle) : nullptr;
  if (op.bias) {
    call.bias_type = dtype_of(op.bias->dtype);
    if (op.bias->sizes[0] > 1 && op.bias->strides[0] != 1) plan.bias.take_copy();
  }
  if (collapse(op, y_strides, &plan)) {
    plan.choice = choose(device, call);
  } else {
    plan.choice.reason =
        "gemm kernels take one batch dimension, and those of a, b, residual and the result do not merge into one";
  }
  return plan;
}

void require_forced(const Plan& plan) {
  const std::string& force = knobs().force;
  if (!plan.choice.variant && !force.empty()) cannot_force(kOp, force, plan.choice.reason);
}

std::string kernel_reason(const Plan& plan) {
  std::string copied;
  if (plan.a.is_copy()) copied += "; a is copied first, because it has no unit stride";
  if (plan.b.is_copy()) copied += "; b is copied first, because it has no unit stride";
  if (plan.bias.is_copy()) copied += "; bias is copied first, because its stride is not 1";
  return why_chosen(plan.choice) + copied;
}

void execute(const Gemm& op, Device& device, Plan& plan, void* y) {
  if (__builtin_expect(knobs().log, 0)) log_path(op.twin(), plan.choice.variant->name, kernel_reason(plan));
  GemmCall& call = plan.call;
  call.a = plan.a.ready("copying a");
  call.b = plan.b.ready("copying b");
  call.bias = op.bias ? plan.bias.ready("copying bias") : nullptr;
  call.y = y;
  launch_gemm(device, *plan.choice.variant, call, current_stream(op.a.device_index));
}

// Into out itself where a kernel can write there, else through a result of our own.
void run_into(const Gemm& op, Args& args, const TensorView& out) {
  const DeviceScope scope(op.a.device_index);
  Device& device = device_at(op.a.device_index);
  std::string reason = refusal(kOp, device);
  if (reason.empty()) {
    Plan direct = plan_into(op, device, out.strides, mutable_data(out.handle));
    if (direct.choice.variant) return execute(op, device, direct, mutable_data(out.handle));
    Plan plan = plan_into(op, device, contiguous_strides(op.y_sizes).data(), nullptr);
    require_forced(plan);
    if (plan.choice.variant) {
      const Owned own = op.allocate();
      execute(op, device, plan, mutable_data(own.get()));
      return copy_to(out, own);
    }
    reason = plan.choice.reason;
  }
  copy_to(out, run_eager(op.twin(), args, device, reason));
}

}  // namespace

void gemm(StableIValue* stack, uint64_t, uint64_t) {
  boxed(stack, [&] {
    Args args(stack, kKinds);
    const Gemm op(args);
    if (op.is_empty()) return to_stable(op.allocate().release());
    const DeviceScope scope(op.a.device_index);
    Device& device = device_at(op.a.device_index);
    std::string reason = refusal(kOp, device);
    if (reason.empty()) {
      Plan plan = plan_into(op, device, contiguous_strides(op.y_sizes).data(), nullptr);
      require_forced(plan);
      if (plan.choice.variant) {
        Owned y = op.allocate();
        execute(op, device, plan, mutable_data(y.get()));
        return to_stable(y.release());
      }
      reason = plan.choice.reason;
    }
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
    if (!op.is_empty()) run_into(op, args, out);
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
    std::string reason = refusal(kOp, device);
    if (reason.empty()) {
      const Plan plan = plan_into(op, device, contiguous_strides(op.y_sizes).data(), nullptr);
      require_forced(plan);
      if (const ProductVariant* variant = plan.choice.variant)
        return stable_string(std::string("kernel\t") + variant->name + "\t" + kernel_reason(plan));
      reason = plan.choice.reason;
    }
    return stable_string("eager\t\t" + reason);
  });
}

}  // namespace tileops
