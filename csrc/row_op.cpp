#include "row_op.h"

#include "allocate.h"
#include "eager.h"
#include "knobs.h"

namespace tileops {

namespace {

constexpr const char* kCopyNote = "x is copied first, because its rows need three or more strides and the kernels take two";

// torch.empty_like(x, dtype=...). Where x has no gaps that is its own strides, which the shim can allocate without the
// dispatcher.
Owned allocate_result(const RowOp& op) {
  if (op.x.numel > 0 && is_dense(op.x.ndim, op.x.sizes, op.x.strides))
    return empty_strided(op.x.ndim, op.x.sizes, op.x.strides, op.y_type, op.x, "allocating the result");
  StableIValue stack[6] = {
      to_stable(new_reference(op.x.handle).release()), new_box(to_stable(dtype_code(op.y_type))), 0, 0, 0, 0};
  torch_check(torch_call_dispatcher("aten::empty_like", "", stack, kBuildVersion), "allocating the result");
  return Owned(from_stable<AtenTensorHandle>(stack[0]));
}

// Kernel and arguments of a call; no variant: the reason says why.
struct Plan {
  const RowVariant* variant = nullptr;
  RowCall call;
  Owned copy_of_x;  // to be filled before the launch
  std::string reason;
};

bool collapse(const RowOp& op, const int64_t* x_strides, const TensorView& y, RowProblem* problem) {
  const int64_t* strides[] = {x_strides, y.strides};
  return collapse_rows(op.x.ndim, op.x.sizes, op.dim, strides, 2, 2, problem);
}

Plan plan_into(const RowOp& op, const Device& device, const TensorView& y) {
  Plan plan;
  RowCall& call = plan.call;
  call.x_type = op.x_type;
  call.y_type = op.y_type;
  call.count = 2;
  call.tensors[0] = {nullptr, false, false};
  call.tensors[1] = {mutable_data(y.handle), false, true};
  if (collapse(op, op.x.strides, y, &call.problem)) {
    call.tensors[0].data = const_data(op.x.handle);
  } else if (collapse(op, y.strides, y, &call.problem)) {
    plan.copy_of_x = empty_strided(op.x.ndim, op.x.sizes, y.strides, op.x_type, op.x, "allocating a copy of x");
    call.tensors[0].data = const_data(plan.copy_of_x.get());
  } else {
    throw std::logic_error(std::string(op.name) +
                           ": a result without gaps must collapse to two row dimensions; please report this");
  }
  if (op.weight) {
    call.weight = const_data(op.weight->handle);
    call.weight_stride = op.weight->strides[0];
  }
  plan.variant = choose(op.name, op.table, device, call, &plan.reason);
  return plan;
}

std::string kernel_reason(const Plan& plan) {
  std::string reason = why_chosen(*plan.variant);
  if (plan.copy_of_x) reason += std::string("; ") + kCopyNote;
  return reason;
}

EagerTwin twin_of(const RowOp& op) { return {op.name, op.eager, op.arguments, {&op.x}}; }

void execute(const RowOp& op, Device& device, const Plan& plan) {
  if (__builtin_expect(knobs().log, 0)) log_path(twin_of(op), plan.variant->name, kernel_reason(plan));
  if (plan.copy_of_x) {
    const NoGrad no_grad;
    torch_check(aoti_torch_copy_(plan.copy_of_x.get(), op.x.handle, 0), "copying x");
  }
  load_kernel(device, *plan.variant);
  op.launch(*plan.variant, plan.call, current_stream(op.x.device_index));
}

}  // namespace

Owned run_row_op(const RowOp& op, Args& args) {
  if (op.x.numel == 0) return allocate_result(op);
  const DeviceScope scope(op.x.device_index);
  Device& device = device_at(op.x.device_index);
  std::string reason = refusal(op.name, device);
  if (reason.empty()) {
    Owned y = allocate_result(op);
    const Plan plan = plan_into(op, device, view_of(y.get()));
    if (plan.variant) {
      execute(op, device, plan);
      return y;
    }
    reason = plan.reason;
  }
  return run_eager(twin_of(op), args, device, reason);
}

void run_row_op_out(const RowOp& op, Args& args, const TensorView& out) {
  if (op.x.numel == 0) return;
  const DeviceScope scope(op.x.device_index);
  Device& device = device_at(op.x.device_index);
  std::string reason = refusal(op.name, device);
  if (reason.empty()) {
    RowProblem problem;
    // An `out` with gaps whose rows do not collapse is written through a result of our own.
    // Only a dense one lends its strides to the copy of x, which would otherwise have its gaps too.
    const bool direct = collapse(op, op.x.strides, out, &problem) ||
                        (is_dense(out.ndim, out.sizes, out.strides) && collapse(op, out.strides, out, &problem));
    const Owned own = direct ? Owned() : allocate_result(op);
    const Plan plan = plan_into(op, device, direct ? out : view_of(own.get()));
    if (plan.variant) {
      execute(op, device, plan);
      if (own) copy_to(out, own);
      return;
    }
    reason = plan.reason;
  }
  copy_to(out, run_eager(twin_of(op), args, device, reason));
}

std::string explain_row_op(const RowOp& op) {
  if (op.x.numel == 0) return "kernel\t\tx is empty, so nothing is launched";
  const DeviceScope scope(op.x.device_index);
  Device& device = device_at(op.x.device_index);
  std::string reason = refusal(op.name, device);
  if (reason.empty()) {
    const Owned y = allocate_result(op);  // its address takes part in the choice
    const Plan plan = plan_into(op, device, view_of(y.get()));
    if (plan.variant) return std::string("kernel\t") + plan.variant->name + "\t" + kernel_reason(plan);
    reason = plan.reason;
  }
  return "eager\t\t" + reason;
}

std::string why_chosen(const RowVariant& variant) {
  const std::string& force = knobs().force;
  return force.empty() ? std::string("the first ") + target_name(variant.target) + " kernel that fits"
                       : "TILEOPS_FORCE=" + force + " is set";
}

}  // namespace tileops
