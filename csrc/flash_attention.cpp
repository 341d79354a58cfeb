// flash_attention(Tensor q, Tensor k, Tensor v, *, bool causal=False, float? scale=None, int window_left=-1,
//     int window_right=-1, float softcap=0.0, Tensor? sinks=None, Tensor? q_descale=None, Tensor? k_descale=None,
//     Tensor? v_descale=None[, Tensor(a!) out, Tensor(b!) lse])
#include <math.h>

#include <algorithm>
#include <vector>

#include "allocate.h"
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
    sinks_ = optional("sinks", args.optional_tensor(kSinks));
    refuse_scales(kOp, args, kDescales);
    type = check_dtype(kOp, "q", q.dtype);
    check_rank(kOp, {"q", &q}, "[B, Sq, H, D]");
    check_keys(kOp, q, {"k", &k}, {"v", &v}, "[B, Sk, Hk, D]", "[B, Sk, Hk, Dv]");
    if (k.sizes[0] != q.sizes[0]) {
      reject(kOp, "k", "has shape " + shape_text(k.ndim, k.sizes), "a batch of " + std::to_string(q.sizes[0]) + ", that of q");
    }
    check_options(kOp, q, args, kOptions, sinks_);
    out_sizes() = {q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]};
    lse_sizes() = {q.sizes[0], q.sizes[2], q.sizes[1]};
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
    AttentionCall call = call_for(places);
    if (call.has_copies()) return launch_on_copies(device, *kernel.attention, call, places[0], stream);
    launch_attention(device, *kernel.attention, call, stream);
  }

 private:
  const TensorView& input(int number) const { return *inputs[number].tensor; }

  // As _attention.options_of reads them: a causal call sees no key to the right of the one a query stands on.
  void read_options(const Args& args) {
    const int64_t sq = input(0).sizes[1], sk = input(1).sizes[1];
    const int64_t left = args.value<int64_t>(kOptions + 2), right = args.value<int64_t>(kOptions + 3);
    causal_ = args.value<bool>(kOptions) || right == 0;
    left_ = left < 0 ? sk : std::min(left, sk);
    right_ = causal_ ? 0 : right < 0 ? sq : std::min(right, sq);
    const bool hides_right = !causal_ && right_ < sq - 1;
    if (left_ < sk - 1 || hides_right) window_ = std::min(sk, left_ + 1 + right_);
    scale_ = args.optional_value<double>(kOptions + 1, 1 / sqrt(static_cast<double>(input(0).sizes[3])));
    softcap_ = args.value<double>(kOptions + 4);
  }

  // Why no kernel serves the call, whatever the layout of its tensors; "" if one may.
  std::string why_eager() const {
    if (type == DType::f32) return no_attention_kernel(kOp, type, "");
    if (softcap_ != 0 && !(isnormal(scale_log2()) && (isnormal(cap_scale()) || scale_ == 0))) {
      return "flash_attention kernels take a softcap, and a scale divided by it, that are normal numbers of float32";
    }
    if (!(scale_log2() > 0 && scale_log2() < INFINITY)) return "flash_attention kernels take a scale above 0 in float32";
    if (input(1).sizes[1] == 0) return "there are no keys to sum over";
    return "";
  }

  void launch_on_copies(Device& device, const AttentionVariant& variant, AttentionCall& call, const Place& out,
                        cudaStream_t stream) const {
    const NoGrad no_grad;
    Owned copies[3], result;
    AttentionTensor* read[] = {&call.q, &call.k, &call.v};
    for (int i = 0; i < 3; ++i) {
      if (!read[i]->copied) continue;
      copies[i] = allocate_copy(read[i]);
      torch_check(aoti_torch_copy_(copies[i].get(), input(i).handle, 0), "copying q, k or v");
    }
    if (call.out.copied) result = allocate_copy(&call.out);
    launch_attention(device, variant, call, stream);
    if (result) torch_check(aoti_torch_copy_(out.handle, result.get(), 0), "copying the result to its place");
  }

  // A view of whole rows of 16 bytes: behind those of q, k and v the kernel reads nothing, those of out it writes.
  Owned allocate_copy(AttentionTensor* tensor) const {
    const int64_t* e = tensor->extents;
    const Owned rows = empty_contiguous({e[0], e[1], e[2], tensor->strides[2]}, type, input(0), "allocating a copy");
    tensor->data = mutable_data(rows.get());
    AtenTensorHandle copy = nullptr;
    torch_check(aoti_torch_as_strided(rows.get(), e, tensor->strides, &copy), "taking a view of a copy");
    return Owned(copy);
  }

  float scale_log2() const { return static_cast<float>((softcap_ != 0 ? softcap_ : scale_) * kLog2E); }
  float cap_scale() const { return softcap_ != 0 ? static_cast<float>(scale_ / softcap_) : 0; }

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
    call.lse_strides = places[1].strides;
    call.causal = causal_;
    call.window_left = left_;
    call.window_right = right_;
    call.window = window_;
    if (sinks_) {
      call.sinks = const_data(sinks_->handle);
      call.sinks_type = dtype_of(sinks_->dtype);
      call.sinks_stride = sinks_->strides[0];
    }
    call.has_softcap = softcap_ != 0;
    call.scale_log2 = scale_log2();
    call.cap_scale = cap_scale();
    return call;
  }

  const TensorView* sinks_;  // NULL: none
  bool causal_;
  int64_t left_, right_;  // windows, of at most sk and sq
  int64_t window_ = 0;    // how many keys a query sees at most; 0: the window hides none
  double scale_, softcap_;
};

}  // namespace

void flash_attention(StableIValue* stack, uint64_t, uint64_t) { call_op<FlashAttention>(stack); }
void flash_attention_out(StableIValue* stack, uint64_t, uint64_t) { call_op_out<FlashAttention>(stack); }
void explain_flash_attention(StableIValue* stack, uint64_t, uint64_t) { explain_op<FlashAttention>(stack); }

}  // namespace tileops
