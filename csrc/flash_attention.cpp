// flash_attention(Tensor q, Tensor k, Tensor v, *, bool causal=False, float? scale=None, int window_left=-1,
//     int window_right=-1, float softcap=0.0, Tensor? sinks=None, Tensor? q_descale=None, Tensor? k_descale=None,
//     Tensor? v_descale=None[, Tensor(a!) out, Tensor(b!) lse])
#include "attention_check.h"
#include "ops.h"

namespace tileops {

namespace {

constexpr const char* kOp = "flash_attention";
constexpr int kOptions = 3, kSinks = 8, kDescales = 9;

// In the order and the words of tileops/ops/flash_attention.py.
struct FlashAttention final : PairOp {
  static constexpr Kind kKinds[] = {Kind::tensor, Kind::tensor, Kind::tensor,  // q, k, v
                                    Kind::value, Kind::optional_value, Kind::value, Kind::value, Kind::value,  // options
                                    Kind::optional_tensor, Kind::optional_tensor, Kind::optional_tensor, Kind::optional_tensor,
                                    Kind::tensor, Kind::tensor};

  explicit FlashAttention(Args& args)
      : PairOp(kOp, TILEOPS_QUALIFIED("_eager_flash_attention"), argument_count<FlashAttention>) {
    const TensorView& q = operand("q", args.tensor(0));
    const TensorView& k = operand("k", args.tensor(1));
    const TensorView& v = operand("v", args.tensor(2));
    const TensorView* sinks = optional("sinks", args.optional_tensor(kSinks));
    refuse_scales(kOp, args, kDescales);
    type = check_dtype(kOp, "q", q.dtype);
    check_rank(kOp, {"q", &q}, "[B, Sq, H, D]");
    check_keys(kOp, q, {"k", &k}, {"v", &v}, "[B, Sk, Hk, D]", "[B, Sk, Hk, Dv]");
    if (k.sizes[0] != q.sizes[0]) {
      reject(kOp, "k", "has shape " + shape_text(k.ndim, k.sizes), "a batch of " + std::to_string(q.sizes[0]) + ", that of q");
    }
    check_options(kOp, q, args, kOptions, sinks);
    out_sizes() = {q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]};
    lse_sizes() = {q.sizes[0], q.sizes[2], q.sizes[1]};
    head_dims = head_dims_text(q.sizes[3], v.sizes[3]);
  }

  std::string why_no_kernel() const override { return no_attention_kernel(kOp, type, head_dims); }

  std::string head_dims;
};

}  // namespace

void flash_attention(StableIValue* stack, uint64_t, uint64_t) { call_op<FlashAttention>(stack); }
void flash_attention_out(StableIValue* stack, uint64_t, uint64_t) { call_op_out<FlashAttention>(stack); }
void explain_flash_attention(StableIValue* stack, uint64_t, uint64_t) { explain_op<FlashAttention>(stack); }

}  // namespace tileops
