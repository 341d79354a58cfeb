// What operators with the two results `out` and `lse` share: refuse, allocate, or hand over to the eager twin.
#pragma once

#include <string>
#include <vector>

#include "check.h"
#include "device.h"
#include "stable.h"

namespace tileops {

// One call of such an operator, its inputs checked.
class PairOp {
 public:
  PairOp(const char* op, const char* eager_twin, int twin_arguments)
      : name(op), eager(eager_twin), arguments(twin_arguments) {}
  PairOp(const PairOp&) = delete;

  const char* name;
  const char* eager;  // the twin with the same schema, served by Python
  int arguments;  // of that schema
  std::vector<NamedTensor> inputs;  // those given, in the order of the schema
  int operands = 0;  // how many of them have no default
  DType type = DType::none;
  std::vector<int64_t> out_sizes, lse_sizes;

  virtual std::string why_no_kernel() const = 0;

 protected:
  ~PairOp() = default;
  // In the order of the schema; NULL for what was not given. An operand is a tensor without a default.
  const TensorView& operand(const char* argument, AtenTensorHandle handle);
  const TensorView* optional(const char* argument, AtenTensorHandle handle);

 private:
  TensorView views_[Args::kMaxArguments];
};

std::pair<Owned, Owned> run_pair_op(const PairOp& op, Args& args);
std::pair<Owned, Owned> run_pair_op_out(const PairOp& op, Args& args);  // the last two arguments take the results
std::string explain_pair_op(const PairOp& op);  // "kernel|eager \t variant \t reason"

// Op::kKinds are the kinds of the arguments of the .out overload.
template <typename Op>
constexpr int argument_count = sizeof(Op::kKinds) / sizeof(Kind) - 2;

template <typename Op>
void call_pair(StableIValue* stack) {
  boxed_pair(stack, [&] {
    Args args(stack, Op::kKinds, argument_count<Op>);
    const Op op(args);
    return run_pair_op(op, args);
  });
}

template <typename Op>
void call_pair_out(StableIValue* stack) {
  boxed_pair(stack, [&] {
    Args args(stack, Op::kKinds, argument_count<Op> + 2);
    const Op op(args);
    return run_pair_op_out(op, args);
  });
}

template <typename Op>
void explain_pair(StableIValue* stack) {
  boxed(stack, [&] {
    Args args(stack, Op::kKinds, argument_count<Op>);
    const Op op(args);
    return stable_string(explain_pair_op(op));
  });
}

}  // namespace tileops
