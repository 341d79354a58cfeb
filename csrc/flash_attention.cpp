// flash_attention(Tensor q, Tensor k, Tensor v, *, bool causal=False, float? scale=None, int window_left=-1,
//     int window_right=-1, float softcap=0.0, Tensor? sinks=None, Tensor? q_descale=None, Tensor? k_descale=None,
//     Tensor? v_descale=None[, Tensor(a!) out, Tensor(b!) lse])
#include <algorithm>
#include <vector>

#include "attention_check.h"
#include "attention_copies.h"
#include "attention_launch.h"
#include "attention_options.h"
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
    options_ = read_options(args, kOptions, sinks, q.sizes[1], k.sizes[1], q.sizes[3]);
  }

  ChosenKernel choose_kernel(const Device& device, const std::vector<Place>& places) const override {
    ChosenKernel chosen;
    chosen.reason = why_eager(kOp, type, options_);
    if (chosen.reason.empty() && input(1).sizes[1] == 0) chosen.reason = "there are no keys to sum over";
    if (!chosen.reason.empty()) return chosen;
    AttentionChoice choice = choose_attention(device, call_for(places));
    if (choice.variant) chosen.name = choice.variant->name;
    chosen.attention = choice.variant;
    chosen.reason = choice.reason;
    return chosen;
  }

  void launch(Device& device, const ChosenKernel& kernel, const std::vector<Place>& places,
              cudaStream_t stream) const override {
    AttentionCall call = call_for(places);
    const AttentionCopies copies(&call, input(0), input(1), input(2));
    launch_attention(device, *kernel.attention, call, stream);
    copies.bring_back(places[0].handle);
  }

 private:
  const TensorView& input(int number) const { return *inputs[number].tensor; }

  AttentionCall call_for(const std::vector<Place>& places) const {
    const auto tensor = [&](const TensorView& view) {
      return tensor_for_tma(type, const_data(view.handle), view.sizes, view.strides, false);
    };
    AttentionCall call = {};
    call.type = type;
    call.q = tensor(input(0));
    call.k = tensor(input(1));
    call.v = tensor(input(2));
    call.out = tensor_for_tma(type, places[0].data, results[0].sizes.data(), places[0].strides, true);
    call.lse = places[1].data;
    std::copy(places[1].strides, places[1].strides + 3, call.lse_strides);
    set_options(options_, &call);
    return call;
  }

  AttentionOptions options_;
};

}  // namespace

void flash_attention(StableIValue* stack, uint64_t, uint64_t) { call_op<FlashAttention>(stack); }
void flash_attention_out(StableIValue* stack, uint64_t, uint64_t) { call_op_out<FlashAttention>(stack); }
void explain_flash_attention(StableIValue* stack, uint64_t, uint64_t) { explain_op<FlashAttention>(stack); }

}  // namespace tileops
