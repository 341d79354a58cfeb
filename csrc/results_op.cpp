#include "results_op.h"

#include <algorithm>

#include "allocate.h"
#include "eager.h"
#include "knobs.h"
#include "row_op.h"

namespace tileops {

namespace {

constexpr int64_t kMaxDims = 16;

bool is_empty(const ResultsOp& op) {
  return std::all_of(op.results.begin(), op.results.end(), [](const Result& r) { return has_no_elements(r.sizes); });
}

DType type_of(const ResultsOp& op, const Result& result) { return result.type == DType::none ? op.type : result.type; }

OwnedResults allocate_results(const ResultsOp& op) {
  OwnedResults owned;
  for (const Result& result : op.results) {
    owned.push_back(empty_contiguous(result.sizes, type_of(op, result), *op.inputs[0].tensor, "allocating a result"));
  }
  return owned;
}

EagerTwin twin_of(const ResultsOp& op) {
  EagerTwin twin = {op.name, op.eager, op.arguments, {}};
  for (int i = 0; i < op.operands; ++i) twin.operands[i] = op.inputs[i].tensor;
  return twin;
}

// Results that are not allocated yet, and the choice for them.
class NewResults {
 public:
  NewResults(const ResultsOp& op, const Device& device) {
    for (const Result& result : op.results) strides_.push_back(contiguous_strides(result.sizes));
    for (const auto& of_result : strides_) places.push_back({nullptr, nullptr, of_result.data()});
    kernel = op.choose_kernel(device, places);
    if (!kernel.name && !knobs().force.empty()) cannot_force(op.name, knobs().force, kernel.reason);
  }

  std::vector<Place> places;
  ChosenKernel kernel;

 private:
  std::vector<std::vector<int64_t>> strides_;
};

void execute(const ResultsOp& op, Device& device, ChosenKernel& kernel, const std::vector<Place>& places) {
  if (__builtin_expect(knobs().log, 0)) log_path(twin_of(op), kernel.name, kernel.reason);
  if (kernel.variant) {
    load_kernel(device, *kernel.variant);
    RowTensor* tensors = kernel.call.tensors + kernel.call.count - places.size();
    for (size_t i = 0; i < places.size(); ++i) tensors[i].data = places[i].data;
  }
  op.launch(device, kernel, places, current_stream(op.inputs[0].tensor->device_index));
}

OwnedResults compute(const ResultsOp& op, Args& args, Device& device) {
  std::string reason = refusal(op.name, device);
  if (reason.empty()) {
    NewResults fresh(op, device);
    if (fresh.kernel.name) {
      OwnedResults owned = allocate_results(op);
      for (size_t i = 0; i < owned.size(); ++i) {
        fresh.places[i].handle = owned[i].get();
        fresh.places[i].data = mutable_data(owned[i].get());
      }
      execute(op, device, fresh.kernel, fresh.places);
      return owned;
    }
    reason = fresh.kernel.reason;
  }
  return run_eager_all(twin_of(op), args, device, reason, static_cast<int>(op.results.size()));
}

// Whether a kernel has written the results where they are wanted.
bool compute_into(const ResultsOp& op, Device& device, const std::vector<TensorView>& outs) {
  if (!refusal(op.name, device).empty()) return false;
  std::vector<Place> places;
  for (const TensorView& out : outs) places.push_back({out.handle, mutable_data(out.handle), out.strides});
  ChosenKernel kernel = op.choose_kernel(device, places);
  if (kernel.name) execute(op, device, kernel, places);
  return kernel.name != nullptr;
}

void check_outs(const ResultsOp& op, const std::vector<TensorView>& outs) {
  for (size_t i = 0; i < outs.size(); ++i) {
    const Result& result = op.results[i];
    const int64_t ndim = static_cast<int64_t>(result.sizes.size());
    check_fits(op.name, result.name, ndim, result.sizes.data(), dtype_code(type_of(op, result)), op.inputs[0], outs[i]);
  }
  for (size_t i = 0; i < outs.size(); ++i) {
    check_apart(op.name, op.results[i].name, op.inputs, outs[i]);
    for (size_t j = 0; j < i; ++j) check_apart(op.name, op.results[i].name, {{op.results[j].name, &outs[j]}}, outs[i]);
  }
}

}  // namespace

const TensorView& ResultsOp::operand(const char* argument, AtenTensorHandle handle) {
  ++operands;
  return *optional(argument, handle);
}

const TensorView* ResultsOp::optional(const char* argument, AtenTensorHandle handle) {
  if (!handle) return nullptr;
  TensorView& view = views_[inputs.size()];
  view = view_of(handle);
  inputs.push_back({argument, &view});
  return &view;
}

std::string ResultsOp::why_no_kernel() const { return std::string("this build has no ") + name + " kernel"; }

ChosenKernel ResultsOp::choose_kernel(const Device&, const std::vector<Place>&) const {
  ChosenKernel none;
  none.reason = why_no_kernel();
  return none;
}

ChosenKernel ResultsOp::choose_row_kernel(const RowTable& kernels, const Device& device,
                                          const std::vector<Place>& places) const {
  ChosenKernel found;
  RowCall& call = found.call;
  call.x_type = call.y_type = type;
  const std::vector<int64_t>& sizes = results[0].sizes;
  const int64_t ndim = static_cast<int64_t>(sizes.size());
  int64_t strides[kMaxRowTensors][kMaxDims];
  const int64_t* rows[kMaxRowTensors];
  const auto add = [&](const void* data, const int64_t* given, int64_t given_dims, bool is_result) {
    if (call.count == kMaxRowTensors) throw std::logic_error(std::string(name) + " has more tensors than a row kernel takes");
    int64_t* own = strides[call.count];
    std::copy(given, given + given_dims, own);
    const bool is_value = given_dims < ndim;
    if (is_value) own[ndim - 1] = 0;
    if (is_value && lse_order) std::swap(own[ndim - 3], own[ndim - 2]);
    call.tensors[call.count] = {data, is_value, is_result};
    rows[call.count++] = own;
  };
  found.reason = "its rows need more than three strides";
  if (ndim > kMaxDims) return found;
  for (const NamedTensor& input : inputs) {
    if (input.tensor != weight) add(const_data(input.tensor->handle), input.tensor->strides, input.tensor->ndim, false);
  }
  for (size_t i = 0; i < places.size(); ++i) {
    add(places[i].data, places[i].strides, static_cast<int64_t>(results[i].sizes.size()), true);
  }
  if (!collapse_rows(ndim, sizes.data(), ndim - 1, rows, call.count, 3, &call.problem)) return found;
  if (weight) {
    call.weight = const_data(weight->handle);
    call.weight_stride = weight->strides[0];
  }
  found.variant = choose(name, kernels, device, call, &found.reason);
  if (found.variant) {
    found.name = found.variant->name;
    found.reason = why_chosen(*found.variant);
  }
  return found;
}

OwnedResults run_results_op(const ResultsOp& op, Args& args) {
  if (is_empty(op)) return allocate_results(op);
  const int32_t index = op.inputs[0].tensor->device_index;
  const DeviceScope scope(index);
  return compute(op, args, device_at(index));
}

OwnedResults run_results_op_out(const ResultsOp& op, Args& args) {
  std::vector<TensorView> outs;
  const int count = static_cast<int>(op.results.size());
  for (int i = 0; i < count; ++i) outs.push_back(view_of(args.tensor(op.arguments + i)));
  check_outs(op, outs);
  if (!is_empty(op)) {
    const int32_t index = op.inputs[0].tensor->device_index;
    const DeviceScope scope(index);
    Device& device = device_at(index);
    if (!compute_into(op, device, outs)) {
      const OwnedResults computed = compute(op, args, device);
      for (int i = 0; i < count; ++i) copy_to(outs[i], computed[i]);
    }
  }
  OwnedResults given;
  for (int i = 0; i < count; ++i) given.push_back(args.take_tensor(op.arguments + i));
  return given;
}

std::string explain_results_op(const ResultsOp& op) {
  if (is_empty(op)) return "kernel\t\tthe results are empty, so nothing is launched";
  const int32_t index = op.inputs[0].tensor->device_index;
  const DeviceScope scope(index);
  const Device& device = device_at(index);
  const std::string reason = refusal(op.name, device);
  if (!reason.empty()) return "eager\t\t" + reason;
  const ChosenKernel kernel = NewResults(op, device).kernel;
  return kernel.name ? std::string("kernel\t") + kernel.name + "\t" + kernel.reason : "eager\t\t" + kernel.reason;
}

}  // namespace tileops
