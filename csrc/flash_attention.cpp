// flash_attention(Tensor q, Tensor k, Tensor v, *, bool causal=False, float? scale=None, int window_left=-1,
//     int window_right=-1, float softcap=0.0, Tensor? sinks=None, Tensor? q_descale=None, Tensor? k_descale=None,
//     Tensor? v_descale=None[, Tensor(a!) out, Tensor(b!) lse])
#include <math.h>

#include <vector>

#include "attention_check.h"
#include "attention_launch.h"
#include "ops.h"

namespace tileops {

namespace {

constexpr const char* kOp = "flash_attention";
constexpr int kOptions = 3, kSinks = 8, kDescales = 9;
constexpr double kLog2E = 1.4426950408889634;

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
    has_sinks_ = sinks != nullptr;
    read_options(args);
  }

  ChosenKernel choose_kernel(const Device& device, const std::vector<Place>& places) const override {
    ChosenKernel chosen;
    chosen.reason = why_eager();
    if (!chosen.reason.empty()) return chosen;
    AttentionChoice choice = choose_attention(device, call_for(places));
    if (choice.variant) chosen.name = choice.variant->name;
    chosen.attention = choice.variant;
    chosen.reason = choice.reason;
    return chosen;
  }

  void launch(Device& device, const ChosenKernel& kernel, const std::vector<Place>& places,
              cudaStream_t stream) const override {
    launch_attention(device, *kernel.attention, call_for(places), stream);
  }

 private:
  const TensorView& input(int number) const { return *inputs[number].tensor; }

  // As _attention.options_of reads them: a causal call sees no key to the right of the one a query stands on.
  void read_options(const Args& args) {
    const int64_t sq = input(0).sizes[1], sk = input(1).sizes[1];
    const int64_t left = args.value<int64_t>(kOptions + 2), right = args.value<int64_t>(kOptions + 3);
    causal_ = args.value<bool>(kOptions) || right == 0;
    hides_left_ = left >= 0 && left < sk - 1;
    hides_right_ = !causal_ && right >= 0 && right < sq - 1;
    scale_ = args.optional_value<double>(kOptions + 1, 1 / sqrt(static_cast<double>(input(0).sizes[3])));
    has_softcap_ = args.value<double>(kOptions + 4) != 0;
  }

  // Why no kernel serves the call, whatever the layout of its tensors; "" if one may.
  std::string why_eager() const {
    const int64_t dim = input(0).sizes[3], dim_v = input(2).sizes[3];
    if (type == DType::f32 || dim != dim_v) return no_attention_kernel(kOp, type, head_dims_text(dim, dim_v));
    if (hides_left_ || hides_right_) return "flash_attention kernels take no window";
    if (has_softcap_) return "flash_attention kernels take no softcap";
    if (has_sinks_) return "flash_attention kernels take no sinks";
    if (!(scale_log2() > 0 && scale_log2() < INFINITY)) return "flash_attention kernels take a scale above 0 in float32";
    if (input(1).sizes[1] == 0) return "there are no keys to sum over";
    return "";
  }

  float scale_log2() const { return static_cast<float>(scale_ * kLog2E); }

  AttentionCall call_for(const std::vector<Place>& places) const {
    const auto tensor = [](const TensorView& view) {
      return AttentionTensor{const_data(view.handle), view.sizes, view.strides};
    };
    const AttentionTensor out = {places[0].data, results[0].sizes.data(), places[0].strides};
    return {type,           tensor(input(0)), tensor(input(1)), tensor(input(2)), out,
            places[1].data, places[1].strides, causal_,          scale_log2()};
  }

  bool causal_, hides_left_, hides_right_, has_softcap_, has_sinks_;
  double scale_;
};

}  // namespace

void flash_attention(StableIValue* stack, uint64_t, uint64_t) { call_op<FlashAttention>(stack); }
void flash_attention_out(StableIValue* stack, uint64_t, uint64_t) { call_op_out<FlashAttention>(stack); }
void explain_flash_attention(StableIValue* stack, uint64_t, uint64_t) { explain_op<FlashAttention>(stack); }

}  // namespace tileops
