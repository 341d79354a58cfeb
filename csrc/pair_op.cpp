#include "pair_op.h"

#include "allocate.h"
#include "eager.h"
#include "knobs.h"
#include "row_choice.h"

namespace tileops {

namespace {

bool is_empty(const PairOp& op) { return has_no_elements(op.out_sizes) && has_no_elements(op.lse_sizes); }

std::pair<Owned, Owned> allocate_results(const PairOp& op) {
  const TensorView& first = *op.inputs[0].tensor;
  return {empty_contiguous(op.out_sizes, op.type, first, "allocating a result"),
          empty_contiguous(op.lse_sizes, DType::f32, first, "allocating a result")};
}

EagerTwin twin_of(const PairOp& op) {
  EagerTwin twin = {op.name, op.eager, op.arguments, {}};
  for (int i = 0; i < op.operands; ++i) twin.operands[i] = op.inputs[i].tensor;
  return twin;
}

// Why the call goes to its eager twin; throws where TILEOPS_FORCE asks for a kernel.
std::string refuse(const PairOp& op, const Device& device) {
  const std::string reason = refusal(op.name, device);
  if (!reason.empty()) return reason;
  const std::string no_kernel = op.why_no_kernel();
  if (!knobs().force.empty()) cannot_force(op.name, knobs().force, no_kernel);
  return no_kernel;
}

std::pair<Owned, Owned> compute(const PairOp& op, Args& args) {
  const int32_t index = op.inputs[0].tensor->device_index;
  const DeviceScope scope(index);
  Device& device = device_at(index);
  const std::string reason = refuse(op, device);
  return run_eager_pair(twin_of(op), args, device, reason);
}

void check_outs(const PairOp& op, const TensorView& out, const TensorView& lse) {
  const auto fits = [&](const char* argument, const std::vector<int64_t>& sizes, DType type, const TensorView& tensor) {
    check_fits(op.name, argument, static_cast<int64_t>(sizes.size()), sizes.data(), dtype_code(type), op.inputs[0], tensor);
  };
  fits("out", op.out_sizes, op.type, out);
  fits("lse", op.lse_sizes, DType::f32, lse);
  check_apart(op.name, "out", op.inputs, out);
  check_apart(op.name, "lse", op.inputs, lse);
  check_apart(op.name, "lse", {{"out", &out}}, lse);
}

}  // namespace

const TensorView& PairOp::operand(const char* argument, AtenTensorHandle handle) {
  ++operands;
  return *optional(argument, handle);
}

const TensorView* PairOp::optional(const char* argument, AtenTensorHandle handle) {
  if (!handle) return nullptr;
  TensorView& view = views_[inputs.size()];
  view = view_of(handle);
  inputs.push_back({argument, &view});
  return &view;
}

std::pair<Owned, Owned> run_pair_op(const PairOp& op, Args& args) {
  return is_empty(op) ? allocate_results(op) : compute(op, args);
}

std::pair<Owned, Owned> run_pair_op_out(const PairOp& op, Args& args) {
  const int slot = op.arguments;
  const TensorView out = view_of(args.tensor(slot)), lse = view_of(args.tensor(slot + 1));
  check_outs(op, out, lse);
  if (!is_empty(op)) {
    const std::pair<Owned, Owned> results = compute(op, args);
    copy_to(out, results.first);
    copy_to(lse, results.second);
  }
  return {args.take_tensor(slot), args.take_tensor(slot + 1)};
}

std::string explain_pair_op(const PairOp& op) {
  if (is_empty(op)) return "kernel\t\tthe results are empty, so nothing is launched";
  const int32_t index = op.inputs[0].tensor->device_index;
  const DeviceScope scope(index);
  return "eager\t\t" + refuse(op, device_at(index));
}

}  // namespace tileops
