// mla_decode(Tensor q, Tensor kv_cache, Tensor block_table, Tensor cache_seqlens, float scale, *, Tensor? q_rope=None,
//     int head_dim_v=512, bool causal=True, int num_splits=0[, Tensor(a!) out, Tensor(b!) lse])
#include <algorithm>

#include "attention_check.h"
#include "ops.h"

namespace tileops {

namespace {

constexpr const char* kOp = "mla_decode";
constexpr int kScale = 4, kRope = 5, kDimV = 6, kSplits = 8;

// In the order and the words of tileops/ops/mla_decode.py.
struct MlaDecode final : PairOp {
  static constexpr Kind kKinds[] = {Kind::tensor, Kind::tensor, Kind::tensor, Kind::tensor, Kind::value, Kind::optional_tensor,
                                    Kind::value,  Kind::value,  Kind::value,  Kind::tensor, Kind::tensor};

  explicit MlaDecode(Args& args) : PairOp(kOp, TILEOPS_QUALIFIED("_eager_mla_decode"), argument_count<MlaDecode>) {
    const TensorView& q = operand("q", args.tensor(0));
    const TensorView& cache = operand("kv_cache", args.tensor(1));
    const TensorView& table = operand("block_table", args.tensor(2));
    const TensorView& lengths = operand("cache_seqlens", args.tensor(3));
    const TensorView* rope = optional("q_rope", args.optional_tensor(kRope));
    type = check_dtype(kOp, "q", q.dtype);
    check_rank(kOp, {"q", &q}, "[B, Sq, H, D]");
    check_like_q(q, {"kv_cache", &cache}, "[pages, page, D]");
    if (rope) check_rope(q, *rope);
    const int64_t dim = q.sizes[3] + (rope ? rope->sizes[3] : 0), dim_v = args.value<int64_t>(kDimV);
    if (cache.sizes[2] != dim) {
      reject(kOp, "kv_cache", "has shape " + shape_text(cache.ndim, cache.sizes),
             "[pages, page, " + std::to_string(dim) + "], the head dim of q");
    }
    if (dim_v < 1 || dim_v > dim) {
      reject(kOp, "head_dim_v", "is " + std::to_string(dim_v), "1 to " + std::to_string(dim) + ", the head dim of q");
    }
    check_index(kOp, {"block_table", &table}, {q.sizes[0], kAnySize}, "W", q);
    check_index(kOp, {"cache_seqlens", &lengths}, {q.sizes[0]}, "", q);
    check_scale(kOp, args.value<double>(kScale), "a finite number");
    check_count(kOp, "num_splits", args.value<int64_t>(kSplits));
    out_sizes() = {q.sizes[0], q.sizes[1], q.sizes[2], dim_v};
    lse_sizes() = {q.sizes[0], q.sizes[2], q.sizes[1]};
    what = std::to_string(q.sizes[2]) + " heads, " + head_dims_text(dim, dim_v) + ", page " + std::to_string(cache.sizes[1]);
  }

  std::string why_no_kernel() const override { return no_attention_kernel(kOp, type, what); }

  std::string what;

 private:
  static void check_like_q(const TensorView& q, const NamedTensor& tensor, const char* form) {
    if (tensor.tensor->dtype != q.dtype) {
      reject(kOp, tensor.name, "has dtype " + dtype_text(tensor.tensor->dtype), dtype_text(q.dtype) + ", that of q");
    }
    check_rank(kOp, tensor, form);
    check_device(kOp, tensor.name, {"q", &q}, *tensor.tensor);
  }

  static void check_rope(const TensorView& q, const TensorView& rope) {
    check_like_q(q, {"q_rope", &rope}, "[B, Sq, H, D]");
    if (std::equal(q.sizes, q.sizes + 3, rope.sizes)) return;
    const std::string shape = shape_text(q.ndim, q.sizes);
    reject(kOp, "q_rope", "has shape " + shape_text(rope.ndim, rope.sizes),
           shape.substr(0, shape.rfind(',')) + ", D] for q of shape " + shape);
  }
};

}  // namespace

void mla_decode(StableIValue* stack, uint64_t, uint64_t) { call_op<MlaDecode>(stack); }
void mla_decode_out(StableIValue* stack, uint64_t, uint64_t) { call_op_out<MlaDecode>(stack); }
void explain_mla_decode(StableIValue* stack, uint64_t, uint64_t) { explain_op<MlaDecode>(stack); }

}  // namespace tileops
