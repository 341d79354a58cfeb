// flash_attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cache_seqlens, *,
//     Tensor? cu_seqlens_q=None, int max_seqlen_q=0, ...options of flash_attention up to sinks..., int num_splits=0,
//     ...descales...[, Tensor(a!) out, Tensor(b!) lse])
#include <algorithm>

#include "attention_check.h"
#include "attention_copies.h"
#include "attention_decode.h"
#include "attention_lengths.h"
#include "attention_options.h"
#include "index_tensor.h"
#include "measured_choice.h"
#include "ops.h"

namespace tileops {

namespace {

constexpr const char* kOp = "flash_attention_paged";
constexpr int kQ = 0, kK = 1, kV = 2, kTable = 3, kLengths = 4;  // of the inputs
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
    const TensorView* offsets = offsets_ = optional("cu_seqlens_q", args.optional_tensor(kOffsets));
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
    most_queries_ = offsets ? std::min(args.value<int64_t>(kMaxQ), q.sizes[0]) : q.sizes[1];
    have_one_ = offsets && args.value<int64_t>(kMaxQ) == 1 && q.sizes[0] == count;
    num_splits_ = args.value<int64_t>(kSplits);
    options_ = read_options(args, kOptions, sinks, most_queries_, table.sizes[1] * k.sizes[1], q.sizes[q.ndim - 1]);
  }

  ChosenKernel choose_kernel(const Device& device, const std::vector<Place>& places) const override {
    ChosenKernel chosen;
    chosen.reason = why_eager(kOp, type, options_);
    const int64_t *cache = input(kK).sizes, page = cache[1];
    if (chosen.reason.empty() && (cache[0] == 0 || page == 0)) chosen.reason = "the caches hold no key";
    if (chosen.reason.empty() && input(kTable).sizes[1] == 0) chosen.reason = "block_table lists no page";
    if (!chosen.reason.empty()) return chosen;
    const DecodeCall call = call_for(places);
    DecodeChoice few = choose_decode(kOp, device, call);
    chosen.decode = few.variant;
    chosen.name = few.variant ? few.variant->name : nullptr;
    chosen.reason = few.reason;
    if (few.is_last) return chosen;
    chosen.reason = why_not_packed(call);
    if (chosen.reason.empty()) chosen.reason = why_not_copied(call);
    if (!chosen.reason.empty()) return chosen;
    AttentionChoice choice = choose_lengths(kOp, device, packed(call.attention));
    chosen.attention = choice.variant;
    chosen.name = choice.variant ? choice.variant->name : nullptr;
    chosen.reason = choice.reason;
    return chosen;
  }

  void launch(Device& device, const ChosenKernel& kernel, const std::vector<Place>& places,
              cudaStream_t stream) const override {
    const NoGrad no_grad;
    DecodeCall call = call_for(places);
    const IndexTensor offsets = offsets_ ? IndexTensor(*offsets_) : IndexTensor();
    const IndexTensor table(input(kTable)), used(input(kLengths));
    call.block_table = table.data;
    call.block_table_stride = table.stride;
    call.cache_seqlens = used.data;
    if (kernel.decode) return launch_decode(device, *kernel.decode, call, input(kQ), options_.sinks, places, stream);
    Lengths lengths = {};
    lengths.requests = input(kTable).sizes[0];
    lengths.queries = most_queries_;
    lengths.most_queries = most_queries_;
    lengths.most_keys = call.table_width * input(kK).sizes[1];
    lengths.cu_seqlens_q = call.packed ? offsets.data : nullptr;
    lengths.seqlens_k = used.data;
    lengths.block_table = table.data;
    lengths.block_table_stride = table.stride;
    lengths.table_width = call.table_width;
    lengths.lse_stride = lse_rows(call.attention);
    const AttentionCopies copies(&call.attention, input(kQ), input(kK), input(kV));
    launch_lengths(device, *kernel.attention, packed(call.attention), lengths, input(kQ), stream);
    copies.bring_back(places[0].handle);
  }

 private:
  const TensorView& input(int number) const { return *inputs[number].tensor; }

  // q and out [requests, queries, heads, columns], or with offsets all rows as those of one request.
  DecodeCall call_for(const std::vector<Place>& places) const {
    const auto rows = [&](const void* data, const int64_t* sizes, const int64_t* strides, bool is_written) {
      if (!offsets_) return tensor_for_tma(type, data, sizes, strides, is_written);
      const int64_t extents[] = {have_one_ ? sizes[0] : 1, have_one_ ? 1 : sizes[0], sizes[1], sizes[2]};
      const int64_t all[] = {strides[0], strides[0], strides[1], strides[2]};
      return tensor_for_tma(type, data, extents, all, is_written);
    };
    const auto cache = [&](const TensorView& t) { return tensor_for_tma(type, const_data(t.handle), t.sizes, t.strides, false); };
    const TensorView& q = input(kQ);
    DecodeCall call = {};
    AttentionCall& a = call.attention;
    a.type = type;
    a.lengths = a.paged = true;
    a.q = rows(const_data(q.handle), q.sizes, q.strides, false);
    a.k = cache(input(kK));
    a.v = cache(input(kV));
    a.out = rows(places[0].data, results[0].sizes.data(), places[0].strides, true);
    a.lse = places[1].data;
    const int64_t* lse = places[1].strides;
    const int64_t of_rows[] = {offsets_ ? lse[1] : lse[0], offsets_ ? lse[0] : lse[1], offsets_ ? lse[1] : lse[2]};
    std::copy(of_rows, of_rows + 3, a.lse_strides);
    set_options(options_, &a);
    call.packed = offsets_ && !have_one_;
    call.table_width = input(kTable).sizes[1];
    call.num_splits = num_splits_;
    return call;
  }

  static bool is_packed(const AttentionTensor& t) {
    return t.extents[0] == 1 || t.extents[1] == 1 || t.strides[0] == t.extents[1] * t.strides[1];
  }

  // How many rows lie between two requests in lse, whose rows tiles have numbers of. 0: there is one request; -1: no whole rows.
  static int64_t lse_rows(const AttentionCall& call) {
    if (call.batches() == 1) return 0;
    const int64_t between = call.lse_strides[0], row = call.sq() > 1 ? call.lse_strides[2] : between;
    return between % row == 0 && between / row <= kMaxExtent / call.batches() ? between / row : -1;
  }

  // Why no kernel takes the rows of all requests as those of one; "" if one may.
  std::string why_not_packed(const DecodeCall& call) const {
    const int64_t page = call.attention.sk(), keys = page * call.table_width;
    if (!can_number(page, call.table_width) || keys + most_queries_ > kMaxExtent) {
      return "block_table lists more keys than a kernel can number";
    }
    if (!is_packed(call.attention.q) || !is_packed(call.attention.out)) return "sequences of q or out do not lie one behind the other";
    return lse_rows(call.attention) < 0 ? "sequences of lse do not lie whole rows apart" : "";
  }

  // Caches are copied whole, so that pages keep their numbers: worth it where calls read about as much.
  std::string why_not_copied(const DecodeCall& call) const {
    const bool copied = call.attention.k.copied || call.attention.v.copied;
    const bool fits = input(kK).sizes[0] <= 2 * call.table_width * input(kTable).sizes[0];
    if (!copied || fits) return "";
    return "rows of the caches are not aligned to 16 bytes, and the caches have more than twice the pages that block_table lists";
  }

  // The rows of all requests as those of one.
  AttentionCall packed(AttentionCall call) const {
    if (call.sq() == 1) call.lse_strides[2] = call.lse_strides[0];
    for (AttentionTensor* t : {&call.q, &call.out}) {
      if (t->extents[1] == 1) t->strides[1] = t->strides[0];
      t->extents[1] *= t->extents[0];
      t->extents[0] = 1;
    }
    return call;
  }

  const TensorView* offsets_;  // NULL: none
  bool have_one_;  // each sequence one query, in its row, with offsets: tileops/ops/flash_attention_paged.py
  int64_t most_queries_, num_splits_;
  AttentionOptions options_;

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
