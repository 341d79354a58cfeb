#include "attention_choice.h"

#include "attention_check.h"
#include "gemm_problem.h"
#include "knobs.h"
#include "measured_choice.h"

namespace tileops {

namespace {

bool fits_tma(const AttentionTensor& t, DType type) {
  return access_along(reinterpret_cast<uintptr_t>(t.data), item_size(type), 4, t.extents, t.strides, 3) == Access::tma;
}

bool counts_in_32_bits(const AttentionVariant& v, const AttentionCall& c) {
  for (const int64_t extent : {c.batches(), c.heads(), c.kv_heads(), c.sq(), c.sk()}) {
    if (extent > kMaxExtent) return false;
  }
  // A mask adds Sk to the number of a query before it takes Sq away.
  if (c.sq() + c.sk() > kMaxExtent) return false;
  return static_cast<double>(ceil_div(c.sq(), v.bm)) * c.heads() * c.batches() <= kMaxExtent;
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

}  // namespace

const char* why_other_kind(const AttentionVariant& v, const AttentionCall& call) {
  if (v.x != call.type) return "it is for another dtype";
  if (v.head_dim != call.head_dim() || v.head_dim_v != call.head_dim_v()) return "it is for another head dim";
  if (v.causal && !call.causal) return "it is for causal attention";
  if (call.causal && !v.causal && !v.window) return "it has no causal mask";
  if (call.has_window() && !v.window) return "it has no window";
  if (call.has_sinks() && !v.sinks) return "it has no sinks";
  if (v.softcap != call.has_softcap) return v.softcap ? "it is for a softcap" : "it has no softcap";
  const bool plain = !call.has_window() && !call.has_sinks() && !call.has_softcap;
  if (plain && (v.window || v.sinks)) return "it is for a window or sinks";
  return nullptr;
}

const char* why_not(const AttentionVariant& v, const AttentionCall& call) {
  if (const char* reason = why_other_kind(v, call)) return reason;
  if (!counts_in_32_bits(v, call)) return "it counts queries, keys, heads and tiles in 32 bits";
  constexpr const char* kNeeds[] = {
      "it needs a q whose head dim has unit stride, with its address and other strides at multiples of 16 bytes",
      "it needs a k whose head dim has unit stride, with its address and other strides at multiples of 16 bytes",
      "it needs a v whose head dim has unit stride, with its address and other strides at multiples of 16 bytes",
      "it needs an out whose head dim has unit stride, with its address and other strides at multiples of 16 bytes"};
  int number = 0;
  for (const AttentionTensor* tensor : {&call.q, &call.k, &call.v, &call.out}) {
    if (!fits_tma(*tensor, call.type)) return kNeeds[number];
    ++number;
  }
  return nullptr;
}

AttentionChoice choose_attention(const Device& device, const AttentionCall& call) {
  const std::string& force = knobs().force;
  const Fitting<AttentionVariant> found = fitting(attention_variants, attention_variant_count, device, call);
  if (!found.first) return {nullptr, none_fits("flash_attention", describe(call), device, found.last_reason)};
  const int64_t batch_heads = call.batches() * call.heads();
  const AttentionMeasurement* measured =
      nearest(attention_measurements, attention_measurement_count, device, found.fits, [&](const AttentionMeasurement& row) {
        return apart(row.batch_heads, batch_heads) * apart(row.sq, call.sq()) * apart(row.sk, call.sk()) *
               windows_apart(row.window, call.window);
      });
  const AttentionVariant* variant = measured ? &attention_variants[measured->variant] : found.first;
  if (!force.empty()) return {variant, "TILEOPS_FORCE=" + force + " is set"};
  if (!measured) {
    return {nullptr, "no kernel was measured on " + device.name + " near " + describe(call) + ", " +
                         shape_of(batch_heads, call.sq(), call.sk())};
  }
  const std::string at = shape_of(measured->batch_heads, measured->sq, measured->sk);
  if (!won(*measured)) return {nullptr, "eager PyTorch measured faster at " + at};
  return {variant, "measured faster than eager PyTorch at " + at};
}

}  // namespace tileops
