#include "eager.h"

#include "check.h"
#include "knobs.h"
#include "row_choice.h"

namespace tileops {

namespace {

void call_twin(const EagerTwin& twin, Args& args, Device& device, const std::string& reason, StableIValue* results, int count) {
  const Knobs& k = knobs();
  // What was forced by name is no fallback.
  if (k.require_native && k.force != "eager") {
    throw std::runtime_error(std::string(twin.op) +
                             ": TILEOPS_REQUIRE_NATIVE is set and no kernel serves this call: " + reason);
  }
  if (k.log) log_path(twin, "eager", reason);
  if (device.target_count == 0 && !device.warned.exchange(true)) {
    const std::string message = "tileops runs in eager PyTorch on this GPU: " + device.reason;
    aoti_torch_warn("tileops", "tileops", 0, message.c_str());
  }
  const NoGrad no_grad;
  if (args.give_to(twin.name, twin.arguments, results, count) != 0) {
    const std::string text = torch_error_text();
    throw std::runtime_error(!text.empty() ? text
                                           : std::string(twin.op) + ": no kernel serves this call (" + reason +
                                                 "), and its eager form failed; torch printed why on stderr");
  }
}

}  // namespace

Owned run_eager(const EagerTwin& twin, Args& args, Device& device, const std::string& reason) {
  StableIValue result;
  call_twin(twin, args, device, reason, &result, 1);
  return Owned(from_stable<AtenTensorHandle>(result));
}

std::vector<Owned> run_eager_all(const EagerTwin& twin, Args& args, Device& device, const std::string& reason, int results) {
  StableIValue stack[Args::kMaxArguments];
  call_twin(twin, args, device, reason, stack, results);
  std::vector<Owned> owned;
  for (int i = 0; i < results; ++i) owned.emplace_back(from_stable<AtenTensorHandle>(stack[i]));
  return owned;
}

void copy_to(const TensorView& out, const Owned& result) {
  const NoGrad no_grad;
  torch_check(aoti_torch_copy_(out.handle, result.get(), 0), "copying the result to out");
}

void log_path(const EagerTwin& twin, const char* path, const std::string& reason) {
  std::string shapes;
  for (const TensorView* operand : twin.operands) {
    if (operand) shapes += (shapes.empty() ? "" : " ") + shape_text(operand->ndim, operand->sizes);
  }
  log_decision(twin.op, dtype_name(dtype_of(twin.operands[0]->dtype)), shapes, path, reason);
}

}  // namespace tileops
