// merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b[, *, Tensor(a!) out, Tensor(b!) lse])
#include "merge_attention_params.h"
#include "ops.h"
#include "results_op.h"
#include "row_op.h"

namespace tileops {

namespace {

constexpr const char* kOp = "merge_attention";

const RowTable& kernels() {
  static const RowTable the_table(kOp);
  return the_table;
}

// In the order and the words of tileops/ops/merge_attention.py.
struct MergeAttention final : PairOp {
  static constexpr Kind kKinds[] = {Kind::tensor, Kind::tensor, Kind::tensor, Kind::tensor, Kind::tensor, Kind::tensor};

  explicit MergeAttention(Args& args) : PairOp(kOp, TILEOPS_QUALIFIED("_eager_merge_attention"), 4) {
    const TensorView& out_a = operand("out_a", args.tensor(0));
    const TensorView& lse_a = operand("lse_a", args.tensor(1));
    const TensorView& out_b = operand("out_b", args.tensor(2));
    const TensorView& lse_b = operand("lse_b", args.tensor(3));
    type = check_dtype(kOp, "out_a", out_a.dtype);
    const std::string shape = shape_text(out_a.ndim, out_a.sizes);
    if (out_a.ndim != 3 && out_a.ndim != 4) {
      reject(kOp, "out_a", "has shape " + shape, "[B, Sq, H, D] or [total, H, D]");
    }
    if (out_b.dtype != out_a.dtype) {
      reject(kOp, "out_b", "has dtype " + dtype_text(out_b.dtype), dtype_text(out_a.dtype) + ", that of out_a");
    }
    const std::string shape_b = shape_text(out_b.ndim, out_b.sizes);
    if (shape_b != shape) reject(kOp, "out_b", "has shape " + shape_b, shape + ", that of out_a");
    check_device(kOp, "out_b", inputs[0], out_b);
    out_sizes().assign(out_a.sizes, out_a.sizes + out_a.ndim);
    if (out_a.ndim == 4) lse_sizes().push_back(out_a.sizes[0]);
    lse_sizes().push_back(out_a.sizes[out_a.ndim - 2]);
    lse_sizes().push_back(out_a.sizes[out_a.ndim - 3]);
    check_lse("lse_a", lse_a);
    check_lse("lse_b", lse_b);
  }

  ChosenKernel choose_kernel(const Device& device, const std::vector<Place>& places) const override {
    return choose_row_kernel(kernels(), device, places);
  }

  void launch(Device&, const ChosenKernel& kernel, const std::vector<Place>&, cudaStream_t stream) const override {
    merge_attention_params p = {};
    p.cols = kernel.call.problem.cols;
    for_each_part(*kernel.variant, kernel.call, [&](const RowPart& part) {
      part.bind(0, &p.out_a, p.out_a_stride);
      part.bind(1, &p.lse_a, p.lse_a_stride);
      part.bind(2, &p.out_b, p.out_b_stride);
      part.bind(3, &p.lse_b, p.lse_b_stride);
      part.bind(4, &p.out, p.out_stride);
      part.bind(5, &p.lse, p.lse_stride);
      p.batch = part.extent[0];
      p.outer = part.extent[1];
      p.inner = part.extent[2];
      part.launch(&p, stream);
    });
  }

 private:
  void check_lse(const char* argument, const TensorView& lse) {
    if (lse.dtype != dtype_code(DType::f32)) {
      reject(kOp, argument, "has dtype " + dtype_text(lse.dtype), dtype_text(dtype_code(DType::f32)));
    }
    const std::string found = shape_text(lse.ndim, lse.sizes);
    const std::string expected = shape_text(static_cast<int64_t>(lse_sizes().size()), lse_sizes().data());
    if (found != expected) {
      reject(kOp, argument, "has shape " + found,
             expected + " for out_a of shape " + shape_text(static_cast<int64_t>(out_sizes().size()), out_sizes().data()));
    }
    check_device(kOp, argument, inputs[0], lse);
  }
};

}  // namespace

void merge_attention(StableIValue* stack, uint64_t, uint64_t) { call_op<MergeAttention>(stack); }
void merge_attention_out(StableIValue* stack, uint64_t, uint64_t) { call_op_out<MergeAttention>(stack); }
void explain_merge_attention(StableIValue* stack, uint64_t, uint64_t) { explain_op<MergeAttention>(stack); }

}  // namespace tileops
