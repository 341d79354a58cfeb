// mla_decode(Tensor q, Tensor kv_cache, Tensor block_table, Tensor cache_seqlens, float scale, *, Tensor? q_rope=None,
//     int head_dim_v=512, bool causal=True, int num_splits=0[, Tensor(a!) out, Tensor(b!) lse])
#include <math.h>

#include <algorithm>

#include "allocate.h"
#include "attention_check.h"
#include "eager.h"
#include "gemm_problem.h"
#include "index_tensor.h"
#include "mla_launch.h"
#include "ops.h"

namespace tileops {

namespace {

constexpr const char* kOp = "mla_decode";
constexpr int kScale = 4, kRope = 5, kDimV = 6, kCausal = 7, kSplits = 8;
constexpr int kQ = 0, kCache = 1, kTable = 2, kLengths = 3;  // of the inputs
constexpr double kLog2E = 1.4426950408889634;

// In the order and the words of tileops/ops/mla_decode.py.
struct MlaDecode final : PairOp {
  static constexpr Kind kKinds[] = {Kind::tensor, Kind::tensor, Kind::tensor, Kind::tensor, Kind::value, Kind::optional_tensor,
                                    Kind::value,  Kind::value,  Kind::value,  Kind::tensor, Kind::tensor};

  explicit MlaDecode(Args& args) : PairOp(kOp, TILEOPS_QUALIFIED("_eager_mla_decode"), argument_count<MlaDecode>) {
    const TensorView& q = operand("q", args.tensor(0));
    const TensorView& cache = operand("kv_cache", args.tensor(1));
    const TensorView& table = operand("block_table", args.tensor(2));
    const TensorView& lengths = operand("cache_seqlens", args.tensor(3));
    rope_ = optional("q_rope", args.optional_tensor(kRope));
    type = check_dtype(kOp, "q", q.dtype);
    check_rank(kOp, {"q", &q}, "[B, Sq, H, D]");
    check_like_q(q, {"kv_cache", &cache}, "[pages, page, D]");
    if (rope_) check_rope(q, *rope_);
    const int64_t dim = q.sizes[3] + (rope_ ? rope_->sizes[3] : 0), dim_v = args.value<int64_t>(kDimV);
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
    scale_ = args.value<double>(kScale);
    causal_ = args.value<bool>(kCausal);
    num_splits_ = args.value<int64_t>(kSplits);
  }

  ChosenKernel choose_kernel(const Device& device, const std::vector<Place>& places) const override {
    ChosenKernel chosen;
    if (type == DType::f32) {
      chosen.reason = no_attention_kernel(kOp, type, "");
    } else if (!(scale_log2() > 0 && scale_log2() < INFINITY)) {
      chosen.reason = "mla_decode kernels take a scale above 0 in float32";
    } else {
      MlaChoice choice = choose_mla(device, call_for(places));
      chosen.mla = choice.variant;
      chosen.name = choice.variant ? choice.variant->name : nullptr;
      chosen.reason = choice.reason;
    }
    return chosen;
  }

  void launch(Device& device, const ChosenKernel& kernel, const std::vector<Place>& places,
              cudaStream_t stream) const override {
    const NoGrad no_grad;
    MlaCall call = call_for(places);
    const Owned copy = bind_q(&call);
    const IndexTensor table(input(kTable)), lengths(input(kLengths));
    call.block_table = table.data;
    call.block_table_stride = table.stride;
    call.cache_seqlens = lengths.data;
    launch_mla(device, *kernel.mla, call, input(kQ), stream);
  }

 private:
  const TensorView& input(int number) const { return *inputs[number].tensor; }
  float scale_log2() const { return static_cast<float>(scale_ * kLog2E); }

  MlaCall call_for(const std::vector<Place>& places) const {
    const TensorView &q = input(kQ), &cache = input(kCache);
    MlaCall call = {};
    call.type = type;
    call.batches = q.sizes[0];
    call.sq = q.sizes[1];
    call.heads = q.sizes[2];
    call.head_dim = cache.sizes[2];
    call.head_dim_v = results[0].sizes[3];
    call.pages = cache.sizes[0];
    call.page = cache.sizes[1];
    call.table_width = input(kTable).sizes[1];
    call.cache = const_data(cache.handle);
    call.cache_strides = cache.strides;
    call.out_strides = places[0].strides;
    call.lse_strides = places[1].strides;
    call.causal = causal_;
    call.num_splits = num_splits_;
    call.scale_log2 = scale_log2();
    call.out = places[0].data;
    call.lse = places[1].data;
    return call;
  }

  // q, or a copy of it whose rows lie one behind the other, with those of q_rope at their ends.
  Owned bind_q(MlaCall* call) const {
    const TensorView& q = input(kQ);
    const int64_t* s = q.strides;
    const bool has_rows = call->sq == 1 || call->heads == 1 || s[1] == call->heads * s[2];
    const auto address = reinterpret_cast<uintptr_t>(const_data(q.handle));
    call->q_strides[0] = s[0];
    call->q_strides[1] = call->heads > 1 ? s[2] : s[1];
    if (!rope_ && has_rows && access_along(address, item_size(type), 4, q.sizes, s, 3) == Access::tma) {
      call->q = const_data(q.handle);
      return Owned();
    }
    const int64_t columns = call->head_dim;
    Owned rows = empty_contiguous({call->batches, call->sq, call->heads, columns}, type, q, "allocating a copy of q");
    const std::vector<int64_t> strides = {call->rows() * columns, call->heads * columns, columns, 1};
    copy_into(rows, q, strides, 0);
    if (rope_) copy_into(rows, *rope_, strides, q.sizes[3]);
    call->q = const_data(rows.get());
    call->q_strides[0] = strides[0];
    call->q_strides[1] = columns;
    return rows;
  }

  static void copy_into(const Owned& rows, const TensorView& from, const std::vector<int64_t>& strides, int64_t column) {
    const Owned columns = strided_view(rows.get(), 4, from.sizes, strides.data(), column);
    torch_check(aoti_torch_copy_(columns.get(), from.handle, 0), "copying q or q_rope");
  }

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

  const TensorView* rope_;  // NULL: q has these columns
  double scale_;
  bool causal_;
  int64_t num_splits_;
};

}  // namespace

void mla_decode(StableIValue* stack, uint64_t, uint64_t) { call_op<MlaDecode>(stack); }
void mla_decode_out(StableIValue* stack, uint64_t, uint64_t) { call_op_out<MlaDecode>(stack); }
void explain_mla_decode(StableIValue* stack, uint64_t, uint64_t) { explain_op<MlaDecode>(stack); }

}  // namespace tileops
