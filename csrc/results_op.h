// What operators share whose results are new contiguous tensors: refuse, allocate, launch, or hand over to the eager twin.
#pragma once

#include <string>
#include <vector>

#include "check.h"
#include "device.h"
#include "row_choice.h"
#include "stable.h"

namespace tileops {

struct Result {
  const char* name;
  DType type;  // none: that of the operator
  std::vector<int64_t> sizes;
};

// Where a result lies. data NULL: it is not allocated yet, and will be contiguous and aligned.
struct Place {
  AtenTensorHandle handle;
  void* data;
  const int64_t* strides;
};

// A kernel; no name: the reason says why.
struct ChosenKernel {
  const char* name = nullptr;
  std::string reason;
  const RowVariant* variant = nullptr;  // of an operator that computes row by row, with its arguments
  RowCall call = {};
  const AttentionVariant* attention = nullptr;
  const DecodeVariant* decode = nullptr;
  const MlaVariant* mla = nullptr;
};

// One call of such an operator, its inputs checked.
class ResultsOp {
 public:
  ResultsOp(const char* op, const char* eager_twin, int twin_arguments)
      : name(op), eager(eager_twin), arguments(twin_arguments) {}
  ResultsOp(const ResultsOp&) = delete;

  const char* name;
  const char* eager;  // the twin with the same schema, served by Python
  int arguments;  // of that schema
  std::vector<NamedTensor> inputs;  // those given, in the order of the schema
  int operands = 0;  // how many of them have no default
  const TensorView* weight = nullptr;  // that of the inputs which has one value a column; NULL: none
  DType type = DType::none;
  std::vector<Result> results;
  bool lse_order = false;  // a tensor of a value a row is [.., H, S] for rows [.., S, H, D]

  // The default is that of an operator without kernels.
  virtual ChosenKernel choose_kernel(const Device& device, const std::vector<Place>& places) const;
  virtual void launch(Device&, const ChosenKernel&, const std::vector<Place>&, cudaStream_t) const {}

 protected:
  ~ResultsOp() = default;
  // In the order of the schema; NULL for what was not given. An operand is a tensor without a default.
  const TensorView& operand(const char* argument, AtenTensorHandle handle);
  const TensorView* optional(const char* argument, AtenTensorHandle handle);
  // Of type none: that of the operator. Gives its sizes, to be filled: copies of vectors would need a newer libstdc++ than a
  // wheel may (wheel_tag.py).
  std::vector<int64_t>& add_result(const char* result, DType result_type) {
    results.push_back({result, result_type, {}});
    return results.back().sizes;
  }
  virtual std::string why_no_kernel() const;
  // choose_kernel() of an operator that computes row by row: each tensor is like the first result, or has one value a row and a
  // dimension less. The tensors of the call are the inputs but the weight, then the results.
  ChosenKernel choose_row_kernel(const RowTable& kernels, const Device& device, const std::vector<Place>& places) const;

 private:
  TensorView views_[Args::kMaxArguments];
};

// An operator with the results `out` and `lse`.
class PairOp : public ResultsOp {
 public:
  static constexpr int kResults = 2;

 protected:
  PairOp(const char* op, const char* eager_twin, int twin_arguments) : ResultsOp(op, eager_twin, twin_arguments) {
    add_result("out", DType::none);
    add_result("lse", DType::f32);
    lse_order = true;
  }
  ~PairOp() = default;

  std::vector<int64_t>& out_sizes() { return results[0].sizes; }
  std::vector<int64_t>& lse_sizes() { return results[1].sizes; }
};

using OwnedResults = std::vector<Owned>;

OwnedResults run_results_op(const ResultsOp& op, Args& args);
OwnedResults run_results_op_out(const ResultsOp& op, Args& args);  // the last arguments take the results
std::string explain_results_op(const ResultsOp& op);  // "kernel|eager \t variant \t reason"

// Op::kKinds are the kinds of the arguments of the .out overload, of which Op::kResults take results.
template <typename Op>
constexpr int argument_count = sizeof(Op::kKinds) / sizeof(Kind) - Op::kResults;

template <typename Op>
void call_op(StableIValue* stack) {
  boxed_results(stack, [&] {
    Args args(stack, Op::kKinds, argument_count<Op>);
    const Op op(args);
    return run_results_op(op, args);
  });
}

template <typename Op>
void call_op_out(StableIValue* stack) {
  boxed_results(stack, [&] {
    Args args(stack, Op::kKinds, argument_count<Op> + Op::kResults);
    const Op op(args);
    return run_results_op_out(op, args);
  });
}

template <typename Op>
void explain_op(StableIValue* stack) {
  boxed(stack, [&] {
    Args args(stack, Op::kKinds, argument_count<Op>);
    const Op op(args);
    return stable_string(explain_results_op(op));
  });
}

}  // namespace tileops
