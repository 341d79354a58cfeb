#include "attention_choice.h"

#include <limits.h>

#include <algorithm>

#include "attention_check.h"
#include "gemm_problem.h"
#include "knobs.h"
#include "measured_choice.h"

namespace tileops {

namespace {

constexpr int64_t kVector = 8;  // elements of 16 bytes
constexpr int64_t kBoxes = 128;  // of rows that a step's keys may be loaded in: one for each thread of a group

bool counts_in_32_bits(const AttentionVariant& v, const AttentionCall& c) {
  for (const int64_t extent : {c.batches(), c.heads(), c.kv_heads(), c.sq(), c.sk()}) {
    if (extent > kMaxExtent) return false;
  }
  // A mask adds Sk to the number of a query before it takes Sq away.
  if (c.sq() + c.sk() > kMaxExtent) return false;
  const int64_t tiles = v.lengths ? c.sq() : ceil_div(c.sq(), v.bm);  // a request may have one row
  return static_cast<double>(tiles) * c.heads() * c.batches() <= kMaxExtent;
}

std::string describe(const AttentionCall& call) {
  std::string text = std::string(dtype_name(call.type)) + " " + (call.causal ? "causal " : "") +
                     head_dims_text(call.head_dim(), call.head_dim_v());
  const char* join = " with ";
  const auto option = [&](bool has, const char* name) {
    if (!has) return;
    text += join + std::string(name);
    join = " and ";
  };
  option(call.has_window(), "a window");
  option(call.has_sinks(), "sinks");
  option(call.has_softcap, "a softcap");
  return text;
}

double windows_apart(int64_t measured, int64_t wanted) {
  if (measured && wanted) return apart(measured, wanted);
  return measured == wanted ? 1 : INFINITY;
}

std::string shape_of(int64_t batch_heads, int64_t sq, int64_t sk) {
  return std::to_string(batch_heads) + " heads of " + std::to_string(sq) + "x" + std::to_string(sk);
}

// A measurement with its head dims, on contiguous tensors: those whose rows do not end at 16 bytes were copied.
struct Measured {
  const AttentionMeasurement& row;
  int64_t head_dim = row.head_dim ? row.head_dim : attention_variants[row.variant].head_dim;
  int64_t head_dim_v = row.head_dim_v ? row.head_dim_v : attention_variants[row.variant].head_dim_v;

  bool has_copies() const { return head_dim % kVector != 0 || head_dim_v % kVector != 0; }
  double away_from(const AttentionCall& call) const {
    if (has_copies() != call.has_copies()) return INFINITY;
    return apart(row.batch_heads, call.batches() * call.heads()) * apart(row.sq, call.sq()) * apart(row.sk, call.sk()) *
           windows_apart(row.window, call.window) * apart(head_dim, call.head_dim()) * apart(head_dim_v, call.head_dim_v());
  }
  std::string text(const AttentionCall& call) const {
    const bool other = head_dim != call.head_dim() || head_dim_v != call.head_dim_v();
    return shape_of(row.batch_heads, row.sq, row.sk) + (other ? " with " + head_dims_text(head_dim, head_dim_v) : "");
  }
};

// Columns of zeros cost as much as others; kernels of another target are no reason not to take one that was measured.
void keep_narrowest(Fitting<AttentionVariant>* found) {
  const auto columns = [](const AttentionVariant& v) { return v.head_dim + v.head_dim_v; };
  int fewest[] = {INT_MAX, INT_MAX};  // by target
  for (int i = 0; i < attention_variant_count; ++i) {
    int& of_target = fewest[static_cast<int>(attention_variants[i].target)];
    if (found->fits[i]) of_target = std::min(of_target, columns(attention_variants[i]));
  }
  found->first = nullptr;
  for (int i = 0; i < attention_variant_count; ++i) {
    const AttentionVariant& v = attention_variants[i];
    found->fits[i] = found->fits[i] && columns(v) == fewest[static_cast<int>(v.target)];
    if (found->fits[i] && !found->first) found->first = &v;
  }
}

std::string copies_text(const AttentionCall& call) {
  std::string text;
  const auto add = [&](const AttentionTensor& tensor, const char* name) {
    if (tensor.copied) text += (text.empty() ? "" : ", ") + std::string(name);
  };
  add(call.q, "q");
  add(call.k, "k");
  add(call.v, "v");
  add(call.out, "out");
  return text.empty() ? "" : "; by copies with rows of whole 16 bytes: " + text;
}

}  // namespace

AttentionTensor tensor_for_tma(DType type, const void* data, const int64_t* extents, const int64_t* strides, bool is_written) {
  AttentionTensor tensor = {data, {}, {}, extents[3], false};
  std::copy(extents, extents + 4, tensor.extents);
  std::copy(strides, strides + 4, tensor.strides);
  const Access access = access_along(reinterpret_cast<uintptr_t>(data), item_size(type), 4, extents, strides, 3);
  const bool ends_within = is_written && extents[3] % kVector != 0;  // a store writes whole 16 bytes (include/tileops/tma.h)
  if (access == Access::tma && !ends_within) return tensor;
  tensor.data = nullptr;
  tensor.copied = true;
  tensor.strides[3] = 1;
  tensor.strides[2] = ceil_div(extents[3], kVector) * kVector;
  tensor.strides[1] = tensor.strides[2] * extents[2];
  tensor.strides[0] = tensor.strides[1] * extents[1];
  if (is_written) tensor.columns = tensor.strides[2];
  return tensor;
}

const char* why_other_kind(const AttentionVariant& v, const AttentionCall& call) {
  if (v.x != call.type) return "it is for another dtype";
  if (v.lengths != call.lengths || v.paged != call.paged) return "it is for keys that lie otherwise";
  if (v.head_dim < call.head_dim() || v.head_dim_v < call.head_dim_v()) return "it is for smaller head dims";
  if (v.causal && !call.causal) return "it is for causal attention";
  if (call.causal && !v.causal && !v.window) return "it has no causal mask";
  if (call.has_window() && !v.window) return "it has no window";
  if (call.has_sinks() && !v.sinks) return "it has no sinks";
  if (v.softcap != call.has_softcap) return v.softcap ? "it is for a softcap" : "it has no softcap";
  const bool plain = !call.has_window() && !call.has_sinks() && !call.has_softcap;
  if (plain && (v.window || v.sinks) && !v.lengths) return "it is for a window or sinks";
  return nullptr;
}

const char* why_not(const AttentionVariant& v, const AttentionCall& call) {
  if (const char* reason = why_other_kind(v, call)) return reason;
  if (v.paged && v.target == Target::sm_90a && (call.sk() & -call.sk()) * kBoxes < v.bn) return "a page is not a multiple of 2";
  return counts_in_32_bits(v, call) ? nullptr : "it counts queries, keys, heads and tiles in 32 bits";
}

AttentionChoice choose_lengths(const char* op, const Device& device, const AttentionCall& call) {
  Fitting<AttentionVariant> found = fitting(attention_variants, attention_variant_count, device, call);
  const std::string what = describe(call) + (call.paged ? ", page " + std::to_string(call.sk()) : "");
  if (!found.first) return {nullptr, none_fits(op, what, device, found.last_reason)};
  keep_narrowest(&found);
  const std::string& force = knobs().force;
  return {found.first, (force.empty() ? "it serves " + what : "TILEOPS_FORCE=" + force + " is set") + copies_text(call)};
}

AttentionChoice choose_attention(const Device& device, const AttentionCall& call) {
  const std::string& force = knobs().force;
  Fitting<AttentionVariant> found = fitting(attention_variants, attention_variant_count, device, call);
  if (!found.first) return {nullptr, none_fits("flash_attention", describe(call), device, found.last_reason)};
  keep_narrowest(&found);
  const AttentionMeasurement* row = nearest(attention_measurements, attention_measurement_count, device, found.fits,
                                            [&](const AttentionMeasurement& at) { return Measured{at}.away_from(call); });
  const AttentionVariant* variant = row ? &attention_variants[row->variant] : found.first;
  if (!force.empty()) return {variant, "TILEOPS_FORCE=" + force + " is set" + copies_text(call)};
  if (!row) {
    const std::string shape = shape_of(call.batches() * call.heads(), call.sq(), call.sk());
    return {nullptr, "no kernel was measured on " + device.name + " near " + describe(call) + ", " + shape +
                         (call.has_copies() ? ", with copies" : "")};
  }
  const std::string at = Measured{*row}.text(call);
  if (!won(*row)) return {nullptr, "eager PyTorch measured faster at " + at};
  return {variant, "measured faster than eager PyTorch at " + at + copies_text(call)};
}

}  // namespace tileops
