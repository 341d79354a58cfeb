#include "gemm_choice.h"

#include <math.h>
#include <string.h>

#include <vector>

#include "knobs.h"

namespace tileops {

namespace {

// Kernels count elements of a dimension in 32 bits, up to a tile past the end, and tiles as well.
constexpr int64_t kMaxExtent = INT32_MAX - 65536;

// "At least as fast" is 0.985 or better: the noise of a measurement.
constexpr double kTie = 0.985;

uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

Access access_of_a(const ProductVariant& v, const GemmCall& call) {
  const GemmProblem& p = call.problem;
  return access_along(address(call.a), item_size(call.x_type), {p.batch, p.m, p.k}, p.a_stride, v.transpose_a ? 1 : 2);
}

Access access_of_b(const ProductVariant& v, const GemmCall& call) {
  const GemmProblem& p = call.problem;
  return access_along(address(call.b), item_size(call.x_type), {p.batch, p.k, p.n}, p.b_stride, v.transpose_b ? 1 : 2);
}

bool counts_in_32_bits(const ProductVariant& v, const GemmProblem& p) {
  if (p.batch > kMaxExtent || p.m > kMaxExtent || p.n > kMaxExtent || p.k > kMaxExtent) return false;
  const double tiles = static_cast<double>(ceil_div(p.m, v.bm)) * ceil_div(p.n, v.bn) * p.batch;
  return tiles <= kMaxExtent;
}

std::string shape_of(int64_t m, int64_t n, int64_t k) {
  return std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
}

bool is_fused(const GemmCall& call) {
  return call.activation != Activation::none || call.has_residual;
}

// Types and layout, which a kernel has for good.
const char* why_other_kind(const ProductVariant& v, const GemmCall& call) {
  if (v.x != call.x_type || v.y != call.y_type) return "it is for other dtypes";
  if (access_of_a(v, call) == Access::copy)
    return v.transpose_a ? "it takes an a stored by columns" : "it takes an a stored by rows";
  if (access_of_b(v, call) == Access::copy)
    return v.transpose_b ? "it takes a b stored by columns" : "it takes a b stored by rows";
  return nullptr;
}

// A kernel of `portable` copies 16 bytes that lie inside a row or behind it, never across its end.
bool ends_with_vectors(const ProductVariant& v, const GemmCall& call) {
  const GemmProblem& p = call.problem;
  const int64_t a = v.transpose_a ? p.m : p.k, b = v.transpose_b ? p.k : p.n, residual = call.has_residual ? p.n : 0;
  return v.target != Target::portable || v.vector == 1 || (a % 8 == 0 && b % 8 == 0 && residual * item_size(v.y) % 16 == 0);
}

// By which factor two extents differ; infinite beyond 2.
double apart(int64_t measured, int64_t wanted) {
  const double ratio = static_cast<double>(wanted) / static_cast<double>(measured);
  const double factor = ratio < 1 ? 1 / ratio : ratio;
  return factor > 2 ? INFINITY : factor;
}

// Of the measurements of kernels that fit, the nearest to the call by the product of those factors; of equals, the one that won
// most.
const ProductMeasurement* nearest(const Device& device, const GemmCall& call, const std::vector<bool>& fits, bool fused) {
  const GemmProblem& p = call.problem;
  const ProductMeasurement* best = nullptr;
  double best_distance = INFINITY, best_gain = 0;
  for (int i = 0; i < product_measurement_count; ++i) {
    const ProductMeasurement& row = product_measurements[i];
    if (!fits[row.product] || row.fused != fused) continue;
    const double distance = apart(row.rows, p.batch * p.m) * apart(row.n, p.n) * apart(row.k, p.k);
    const double gain = row.baseline_us / row.us;
    const bool nearer = distance < best_distance || (distance == best_distance && gain > best_gain);
    if (!nearer || distance == INFINITY || device.name != row.gpu) continue;
    best = &row;
    best_distance = distance;
    best_gain = gain;
  }
  return best;
}

std::string none_fits(const Device& device, const GemmCall& call, const std::string& force, const char* last_reason) {
  const bool is_target = force == target_name(Target::portable) || force == target_name(Target::sm_90a);
  if (!last_reason && !force.empty() && !is_target) return "this build has no gemm kernel of that name for " + device.name;
  const std::string which = is_target ? force + " " : "";
  const std::string what = which + "gemm kernel for " + types_text(call.x_type, call.y_type) + " " +
                           describe(call.problem, call.a_layout(), call.b_layout());
  if (!last_reason) return "this build has no " + what;
  return "no " + what + " fits (the last one tried: " + last_reason + ")";
}

}  // namespace

OperandLayout GemmCall::a_layout() const {
  return layout_of(address(a), item_size(x_type), {problem.batch, problem.m, problem.k}, problem.a_stride, 2);
}

OperandLayout GemmCall::b_layout() const {
  return layout_of(address(b), item_size(x_type), {problem.batch, problem.k, problem.n}, problem.b_stride, 1);
}

const char* why_not(const ProductVariant& v, const GemmCall& call) {
  if (const char* reason = why_other_kind(v, call)) return reason;
  const GemmProblem& p = call.problem;
  if (!counts_in_32_bits(v, p)) return "it counts rows, columns and tiles in 32 bits";
  const Access needed = v.vector > 1 ? Access::tma : Access::vector;
  if (access_of_a(v, call) > needed || access_of_b(v, call) > needed)
    return "it needs a and b, and their strides, at multiples of 16 bytes";
  if (!ends_with_vectors(v, call)) return "it needs rows of a, b and residual that end at multiples of 16 bytes";
  const int64_t y_size = item_size(v.y), result[3] = {p.batch, p.m, p.n};
  if (v.target == Target::sm_90a && p.n * y_size % 16 != 0)
    return "it writes 16 bytes at a time, so rows of the result must have a multiple of 16 bytes";
  const Access y = access_along(address(call.y), y_size, result, p.y_stride, 2);
  if (y > needed) return "it needs rows of the result that are contiguous and start at multiples of 16 bytes";
  if (!call.has_residual) return nullptr;
  const Access residual = access_along(address(call.residual), y_size, result, p.residual_stride, 2);
  return residual > needed ? "it needs rows of residual that are contiguous and start at multiples of 16 bytes" : nullptr;
}

GemmChoice choose(const Device& device, const GemmCall& call) {
  const std::string& force = knobs().force;
  std::vector<bool> fits(product_variant_count);
  const ProductVariant* first = nullptr;
  const char* last_reason = nullptr;
  for (int i = 0; i < product_variant_count; ++i) {
    const ProductVariant& v = product_variants[i];
    const bool allowed = force.empty() || force == target_name(v.target);
    if (!device.runs(v.target) || (force != v.name && (!allowed || why_other_kind(v, call)))) continue;
    const char* reason = why_not(v, call);
    fits[i] = reason == nullptr;
    if (reason) last_reason = reason;
    if (!reason && !first) first = &v;
  }
  if (!first) return {nullptr, none_fits(device, call, force, last_reason), nullptr};
  const ProductMeasurement* measured = nearest(device, call, fits, is_fused(call));
  // What wins without an epilogue wins with one, too: it costs eager PyTorch passes over memory.
  if (!measured && is_fused(call)) measured = nearest(device, call, fits, false);
  if (!force.empty()) return {measured ? &product_variants[measured->product] : first, "", measured};
  if (!measured) {
    return {nullptr, "no kernel was measured on " + device.name + " near " + types_text(call.x_type, call.y_type) + " " +
                         describe(call.problem, call.a_layout(), call.b_layout()), nullptr};
  }
  if (measured->us * kTie > measured->baseline_us) {
    return {nullptr, "cuBLAS measured faster at " + shape_of(measured->rows, measured->n, measured->k), nullptr};
  }
  return {&product_variants[measured->product], "", measured};
}

std::string why_chosen(const GemmChoice& choice) {
  if (!knobs().force.empty()) return "TILEOPS_FORCE=" + knobs().force + " is set";
  const ProductMeasurement& at = *choice.measured;
  return "measured faster than cuBLAS at " + shape_of(at.rows, at.n, at.k);
}

}  // namespace tileops
