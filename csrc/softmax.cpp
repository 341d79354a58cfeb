// softmax(Tensor x, int dim=-1, *, ScalarType? dtype=None[, Tensor(a!) out])
#include "ops.h"
#include "row_op.h"
#include "softmax_params.h"

namespace tileops {

namespace {

constexpr const char* kOp = "softmax";
constexpr int kX = 0, kDim = 1, kDtype = 2, kOut = 3;
constexpr Kind kKinds[] = {Kind::tensor, Kind::value, Kind::optional_value};
constexpr Kind kOutKinds[] = {Kind::tensor, Kind::value, Kind::optional_value, Kind::tensor};

const RowTable& kernels() {
  static const RowTable the_table(kOp);
  return the_table;
}

struct Softmax final : RowOp {
  explicit Softmax(const Args& args) : RowOp(kOp, TILEOPS_QUALIFIED("_eager_softmax"), kOut, kernels(), args.tensor(kX)) {
    x_type = check_dtype(kOp, "x", x.dtype);
    dim = check_dim(kOp, x, args.value<int64_t>(kDim));
    y_type = check_dtype(kOp, "dtype", args.optional_value<int32_t>(kDtype, x.dtype));
  }

  void launch(const RowVariant& variant, const RowCall& call, cudaStream_t stream) const override {
    launch_rows(variant, call, softmax_params{}, stream);
  }
};

}  // namespace

void softmax(StableIValue* stack, uint64_t, uint64_t) {
  boxed(stack, [&] {
    Args args(stack, kKinds);
    return to_stable(run_row_op(Softmax(args), args).release());
  });
}

void softmax_out(StableIValue* stack, uint64_t, uint64_t) {
  boxed(stack, [&] {
    Args args(stack, kOutKinds);
    const Softmax op(args);
    const TensorView out = view_of(args.tensor(kOut));
    check_out(kOp, op.x, dtype_code(op.y_type), nullptr, out);
    run_row_op_out(op, args, out);
    return to_stable(args.take_tensor(kOut).release());
  });
}

void explain_softmax(StableIValue* stack, uint64_t, uint64_t) {
  boxed(stack, [&] {
    const Args args(stack, kKinds);
    return stable_string(explain_row_op(Softmax(args)));
  });
}

}  // namespace tileops
