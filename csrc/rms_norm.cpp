// rms_norm and rms_norm_silu, which has no weight_offset (schemas: tileops/ops).
#include "ops.h"
#include "rms_norm_params.h"
#include "rms_norm_silu_params.h"
#include "row_op.h"

namespace tileops {

namespace {

constexpr double kFloat32Epsilon = 1.1920929e-07;  // eps=None

// Where the two differ: the name, the parameters and the slots of the arguments.
struct RmsNormTraits {
  using Params = rms_norm_params;
  static constexpr const char* op = "rms_norm";
  static constexpr const char* eager = TILEOPS_QUALIFIED("_eager_rms_norm");
  static constexpr int offset = 4, round = 5, out = 6;
  static constexpr Kind kinds[] = {Kind::tensor, Kind::optional_tensor, Kind::optional_value,
                                   Kind::value,  Kind::value,           Kind::value};
  static constexpr Kind out_kinds[] = {Kind::tensor, Kind::optional_tensor, Kind::optional_value, Kind::value,
                                       Kind::value,  Kind::value,           Kind::tensor};
  static void set_offset(Params& params, const Args& args) {
    params.weight_offset = static_cast<float>(args.value<double>(offset));
  }
};

struct RmsNormSiluTraits {
  using Params = rms_norm_silu_params;
  static constexpr const char* op = "rms_norm_silu";
  static constexpr const char* eager = TILEOPS_QUALIFIED("_eager_rms_norm_silu");
  static constexpr int round = 4, out = 5;
  static constexpr Kind kinds[] = {Kind::tensor, Kind::optional_tensor, Kind::optional_value, Kind::value, Kind::value};
  static constexpr Kind out_kinds[] = {Kind::tensor, Kind::optional_tensor, Kind::optional_value,
                                       Kind::value,  Kind::value,           Kind::tensor};
  static void set_offset(Params&, const Args&) {}
};

constexpr int kX = 0, kWeight = 1, kEps = 2, kDim = 3;

template <typename Traits>
const RowTable& kernels() {
  static const RowTable the_table(Traits::op);
  return the_table;
}

template <typename Traits>
struct Norm final : RowOp {
  TensorView weight_view;
  typename Traits::Params params = {};  // all but what launch_rows sets

  explicit Norm(const Args& args) : RowOp(Traits::op, Traits::eager, Traits::out, kernels<Traits>(), args.tensor(kX)) {
    x_type = y_type = check_dtype(name, "x", x.dtype);
    const int64_t dim_as_given = args.value<int64_t>(kDim);
    dim = check_dim(name, x, dim_as_given);
    if (const AtenTensorHandle handle = args.optional_tensor(kWeight)) {
      weight_view = view_of(handle);
      check_weight(name, x, dim, dim_as_given, weight_view);
      weight = &weight_view;
      params.weight_dtype = static_cast<int32_t>(dtype_of(weight_view.dtype));
    }
    params.eps = static_cast<float>(args.optional_value<double>(kEps, kFloat32Epsilon));
    params.round_before_weight = args.value<bool>(Traits::round);
    Traits::set_offset(params, args);
  }

  void launch(const RowVariant& variant, const RowCall& call, cudaStream_t stream) const override {
    typename Traits::Params p = params;
    p.weight = call.weight;
    p.weight_stride[0] = call.weight_stride;
    launch_rows(variant, call, p, stream);
  }
};

template <typename Traits>
void run(StableIValue* stack) {
  boxed(stack, [&] {
    Args args(stack, Traits::kinds);
    return to_stable(run_row_op(Norm<Traits>(args), args).release());
  });
}

template <typename Traits>
void run_out(StableIValue* stack) {
  boxed(stack, [&] {
    Args args(stack, Traits::out_kinds);
    const Norm<Traits> op(args);
    const TensorView out = view_of(args.tensor(Traits::out));
    check_out(op.name, op.x, op.x.dtype, op.weight, out);
    run_row_op_out(op, args, out);
    return to_stable(args.take_tensor(Traits::out).release());
  });
}

template <typename Traits>
void explain(StableIValue* stack) {
  boxed(stack, [&] {
    const Args args(stack, Traits::kinds);
    return stable_string(explain_row_op(Norm<Traits>(args)));
  });
}

}  // namespace

void rms_norm(StableIValue* stack, uint64_t, uint64_t) { run<RmsNormTraits>(stack); }
void rms_norm_out(StableIValue* stack, uint64_t, uint64_t) { run_out<RmsNormTraits>(stack); }
void explain_rms_norm(StableIValue* stack, uint64_t, uint64_t) { explain<RmsNormTraits>(stack); }

void rms_norm_silu(StableIValue* stack, uint64_t, uint64_t) { run<RmsNormSiluTraits>(stack); }
void rms_norm_silu_out(StableIValue* stack, uint64_t, uint64_t) { run_out<RmsNormSiluTraits>(stack); }
void explain_rms_norm_silu(StableIValue* stack, uint64_t, uint64_t) { explain<RmsNormSiluTraits>(stack); }

}  // namespace tileops
