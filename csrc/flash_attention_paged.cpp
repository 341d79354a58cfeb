// flash_attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cache_seqlens, *,
//     Tensor? cu_seqlens_q=None, int max_seqlen_q=0, ...options of flash_attention up to sinks..., int num_splits=0,
//     ...descales...[, Tensor(a!) out, Tensor(b!) lse])
#include "attention_check.h"
#include "ops.h"

namespace tileops {

namespace {

constexpr const char* kOp = "flash_attention_paged";
constexpr int kOffsets = 5, kMaxQ = 6, kOptions = 7, kSinks = 12, kSplits = 13, kDescales = 14;

// In the order and the words of tileops/ops/flash_attention_paged.py.
struct FlashAttentionPaged final : PairOp {
  static constexpr Kind kKinds[] = {Kind::tensor, Kind::tensor, Kind::tensor, Kind::tensor, Kind::tensor,  // q, caches, indices
                                    Kind::optional_tensor, Kind::value,
                                    Kind::value, Kind::optional_value, Kind::value, Kind::value, Kind::value,  // options
                                    Kind::optional_tensor, Kind::value,
                                    Kind::optional_tensor, Kind::optional_tensor, Kind::optional_tensor,
                                    Kind::tensor, Kind::tensor};

  explicit FlashAttentionPaged(Args& args)
      : PairOp(kOp, TILEOPS_QUALIFIED("_eager_flash_attention_paged"), argument_count<FlashAttentionPaged>) {
    const TensorView& q = operand("q", args.tensor(0));
    const TensorView& k = operand("k_cache", args.tensor(1));
    const TensorView& v = operand("v_cache", args.tensor(2));
    const TensorView& table = operand("block_table", args.tensor(3));
    const TensorView& lengths = operand("cache_seqlens", args.tensor(4));
    const TensorView* offsets = optional("cu_seqlens_q", args.optional_tensor(kOffsets));
    const TensorView* sinks = optional("sinks", args.optional_tensor(kSinks));
    refuse_scales(kOp, args, kDescales);
    type = check_dtype(kOp, "q", q.dtype);
    check_rank(kOp, {"q", &q}, offsets ? "[total_q, H, D]" : "[B, Sq, H, D]");
    check_keys(kOp, q, {"k_cache", &k}, {"v_cache", &v}, "[pages, page, Hk, D]", "[pages, page, Hk, Dv]");
    const int64_t count = offsets ? check_offsets(kOp, {"cu_seqlens_q", offsets}, q) : q.sizes[0];
    check_index(kOp, {"block_table", &table}, {count, kAnySize}, "W", q);
    check_index(kOp, {"cache_seqlens", &lengths}, {count}, "", q);
    check_longest(args.value<int64_t>(kMaxQ), offsets, q);
    check_options(kOp, q, args, kOptions, sinks);
    check_count(kOp, "num_splits", args.value<int64_t>(kSplits));
    out_sizes().assign(q.sizes, q.sizes + q.ndim - 1);
    out_sizes().push_back(v.sizes[3]);
    if (!offsets) lse_sizes().push_back(q.sizes[0]);
    lse_sizes().push_back(q.sizes[q.ndim - 2]);
    lse_sizes().push_back(q.sizes[q.ndim - 3]);
    what = head_dims_text(q.sizes[q.ndim - 1], v.sizes[3]) + ", page " + std::to_string(k.sizes[1]);
  }

  std::string why_no_kernel() const override { return no_attention_kernel(kOp, type, what); }

  std::string what;

 private:
  static void check_longest(int64_t longest, const TensorView* offsets, const TensorView& q) {
    check_count(kOp, "max_seqlen_q", longest);
    if (!offsets && longest != 0 && longest != q.sizes[1]) {
      reject(kOp, "max_seqlen_q", "is " + std::to_string(longest),
             "0 or " + std::to_string(q.sizes[1]) + ", as in q, without cu_seqlens_q");
    }
    if (offsets && longest == 0 && q.sizes[0] != 0) {
      reject(kOp, "max_seqlen_q", "is 0", "the number of queries of the longest sequence, with cu_seqlens_q");
    }
  }
};

}  // namespace

void flash_attention_paged(StableIValue* stack, uint64_t, uint64_t) { call_op<FlashAttentionPaged>(stack); }
void flash_attention_paged_out(StableIValue* stack, uint64_t, uint64_t) { call_op_out<FlashAttentionPaged>(stack); }
void explain_flash_attention_paged(StableIValue* stack, uint64_t, uint64_t) { explain_op<FlashAttentionPaged>(stack); }

}  // namespace tileops
