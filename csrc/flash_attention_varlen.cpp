// flash_attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q,
//     int max_seqlen_k, *, Tensor? seqused_k=None, ...options of flash_attention...[, Tensor(a!) out, Tensor(b!) lse])
#include <algorithm>

#include "attention_check.h"
#include "attention_copies.h"
#include "attention_lengths.h"
#include "attention_options.h"
#include "index_tensor.h"
#include "ops.h"

namespace tileops {

namespace {

constexpr const char* kOp = "flash_attention_varlen";
constexpr int kQ = 0, kK = 1, kV = 2, kOffsetsQ = 3, kOffsetsK = 4;  // of the inputs
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
    const TensorView* used = used_ = optional("seqused_k", args.optional_tensor(kUsed));
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
    most_queries_ = std::min(args.value<int64_t>(kMaxQ), q.sizes[0]);
    most_keys_ = std::min(args.value<int64_t>(kMaxK), k.sizes[0]);
    options_ = read_options(args, kOptions, sinks, most_queries_, most_keys_, q.sizes[2]);
  }

  ChosenKernel choose_kernel(const Device& device, const std::vector<Place>& places) const override {
    ChosenKernel chosen;
    chosen.reason = why_eager(kOp, type, options_);
    if (chosen.reason.empty() && input(kK).sizes[0] == 0) chosen.reason = "there are no keys to sum over";
    if (!chosen.reason.empty()) return chosen;
    AttentionChoice choice = choose_lengths(kOp, device, call_for(places));
    chosen.name = choice.variant ? choice.variant->name : nullptr;
    chosen.attention = choice.variant;
    chosen.reason = choice.reason;
    return chosen;
  }

  void launch(Device& device, const ChosenKernel& kernel, const std::vector<Place>& places,
              cudaStream_t stream) const override {
    const NoGrad no_grad;
    AttentionCall call = call_for(places);
    const AttentionCopies copies(&call, input(kQ), input(kK), input(kV));
    const IndexTensor q(input(kOffsetsQ)), k(input(kOffsetsK)), used = used_ ? IndexTensor(*used_) : IndexTensor();
    Lengths lengths = {};
    lengths.requests = input(kOffsetsQ).sizes[0] - 1;
    lengths.most_queries = most_queries_;
    lengths.most_keys = most_keys_;
    lengths.cu_seqlens_q = q.data;
    lengths.cu_seqlens_k = k.data;
    lengths.seqlens_k = used.data;
    launch_lengths(device, *kernel.attention, call, lengths, input(kQ), stream);
    copies.bring_back(places[0].handle);
  }

 private:
  const TensorView& input(int number) const { return *inputs[number].tensor; }

  // All requests as one, of which the kernel is told whose the rows are.
  AttentionCall call_for(const std::vector<Place>& places) const {
    const auto tensor = [&](const void* data, const int64_t* sizes, const int64_t* strides, bool is_written) {
      const int64_t extents[] = {1, sizes[0], sizes[1], sizes[2]}, all[] = {0, strides[0], strides[1], strides[2]};
      return tensor_for_tma(type, data, extents, all, is_written);
    };
    const auto read = [&](const TensorView& t) { return tensor(const_data(t.handle), t.sizes, t.strides, false); };
    AttentionCall call = {};
    call.type = type;
    call.lengths = true;
    call.q = read(input(kQ));
    call.k = read(input(kK));
    call.v = read(input(kV));
    call.out = tensor(places[0].data, results[0].sizes.data(), places[0].strides, true);
    call.lse = places[1].data;
    call.lse_strides[1] = places[1].strides[0];
    call.lse_strides[2] = places[1].strides[1];
    set_options(options_, &call);
    return call;
  }

  const TensorView* used_;  // NULL: none
  int64_t most_queries_, most_keys_;  // of a sequence
  AttentionOptions options_;
};

}  // namespace

void flash_attention_varlen(StableIValue* stack, uint64_t, uint64_t) { call_op<FlashAttentionVarlen>(stack); }
void flash_attention_varlen_out(StableIValue* stack, uint64_t, uint64_t) { call_op_out<FlashAttentionVarlen>(stack); }
void explain_flash_attention_varlen(StableIValue* stack, uint64_t, uint64_t) { explain_op<FlashAttentionVarlen>(stack); }

}  // namespace tileops
