// flash_attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q,
//     int max_seqlen_k, *, Tensor? seqused_k=None, ...options of flash_attention...[, Tensor(a!) out, Tensor(b!) lse])
#include "attention_check.h"
#include "ops.h"

namespace tileops {

namespace {

constexpr const char* kOp = "flash_attention_varlen";
constexpr int kMaxQ = 5, kMaxK = 6, kUsed = 7, kOptions = 8, kSinks = 13, kDescales = 14;

// In the order and the words of tileops/ops/flash_attention_varlen.py.
struct FlashAttentionVarlen final : PairOp {
  static constexpr Kind kKinds[] = {Kind::tensor, Kind::tensor, Kind::tensor, Kind::tensor, Kind::tensor,  // q, k, v, offsets
                                    Kind::value, Kind::value, Kind::optional_tensor,
                                    Kind::value, Kind::optional_value, Kind::value, Kind::value, Kind::value,  // options
                                    Kind::optional_tensor, Kind::optional_tensor, Kind::optional_tensor, Kind::optional_tensor,
                                    Kind::tensor, Kind::tensor};

  explicit FlashAttentionVarlen(Args& args)
      : PairOp(kOp, TILEOPS_QUALIFIED("_eager_flash_attention_varlen"), argument_count<FlashAttentionVarlen>) {
    const TensorView& q = operand("q", args.tensor(0));
    const TensorView& k = operand("k", args.tensor(1));
    const TensorView& v = operand("v", args.tensor(2));
    const TensorView& offsets_q = operand("cu_seqlens_q", args.tensor(3));
    const TensorView& offsets_k = operand("cu_seqlens_k", args.tensor(4));
    const TensorView* used = optional("seqused_k", args.optional_tensor(kUsed));
    const TensorView* sinks = optional("sinks", args.optional_tensor(kSinks));
    refuse_scales(kOp, args, kDescales);
    type = check_dtype(kOp, "q", q.dtype);
    check_rank(kOp, {"q", &q}, "[total_q, H, D]");
    check_keys(kOp, q, {"k", &k}, {"v", &v}, "[total_k, Hk, D]", "[total_k, Hk, Dv]");
    const int64_t count = check_offsets(kOp, {"cu_seqlens_q", &offsets_q}, q);
    check_index(kOp, {"cu_seqlens_k", &offsets_k}, {count + 1}, "", q);
    check_count(kOp, "max_seqlen_q", args.value<int64_t>(kMaxQ));
    check_count(kOp, "max_seqlen_k", args.value<int64_t>(kMaxK));
    if (used) check_index(kOp, {"seqused_k", used}, {count}, "", q);
    check_options(kOp, q, args, kOptions, sinks);
    out_sizes() = {q.sizes[0], q.sizes[1], v.sizes[2]};
    lse_sizes() = {q.sizes[1], q.sizes[0]};
    head_dims = head_dims_text(q.sizes[2], v.sizes[2]);
  }

  std::string why_no_kernel() const override { return no_attention_kernel(kOp, type, head_dims); }

  std::string head_dims;
};

}  // namespace

void flash_attention_varlen(StableIValue* stack, uint64_t, uint64_t) { call_op<FlashAttentionVarlen>(stack); }
void flash_attention_varlen_out(StableIValue* stack, uint64_t, uint64_t) { call_op_out<FlashAttentionVarlen>(stack); }
void explain_flash_attention_varlen(StableIValue* stack, uint64_t, uint64_t) { explain_op<FlashAttentionVarlen>(stack); }

}  // namespace tileops
