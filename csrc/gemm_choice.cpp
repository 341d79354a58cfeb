#include "gemm_choice.h"

#include "knobs.h"
#include "measured_choice.h"

namespace tileops {

namespace {

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

// A kernel of `portable` copies 16 bytes that lie inside a row or behind it, never across its end.
bool ends_with_vectors(const ProductVariant& v, const GemmCall& call) {
  const GemmProblem& p = call.problem;
  const int64_t a = v.transpose_a ? p.m : p.k, b = v.transpose_b ? p.k : p.n, residual = call.has_residual ? p.n : 0;
  return v.target != Target::portable || v.vector == 1 || (a % 8 == 0 && b % 8 == 0 && residual * item_size(v.y) % 16 == 0);
}

// The nearest measurement in rows, columns and depth.
const ProductMeasurement* nearest_product(const Device& device, const GemmCall& call, const std::vector<bool>& fits,
                                          bool fused) {
  const GemmProblem& p = call.problem;
  return nearest(product_measurements, product_measurement_count, device, fits, [&](const ProductMeasurement& row) {
    return row.fused != fused ? INFINITY : apart(row.rows, p.batch * p.m) * apart(row.n, p.n) * apart(row.k, p.k);
  });
}

}  // namespace

OperandLayout GemmCall::a_layout() const {
  return layout_of(address(a), item_size(x_type), {problem.batch, problem.m, problem.k}, problem.a_stride, 2);
}

OperandLayout GemmCall::b_layout() const {
  return layout_of(address(b), item_size(x_type), {problem.batch, problem.k, problem.n}, problem.b_stride, 1);
}

const char* why_other_kind(const ProductVariant& v, const GemmCall& call) {
  if (v.x != call.x_type || v.y != call.y_type) return "it is for other dtypes";
  if (access_of_a(v, call) == Access::copy)
    return v.transpose_a ? "it takes an a stored by columns" : "it takes an a stored by rows";
  if (access_of_b(v, call) == Access::copy)
    return v.transpose_b ? "it takes a b stored by columns" : "it takes a b stored by rows";
  return nullptr;
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
  const Fitting<ProductVariant> found = fitting(product_variants, product_variant_count, device, call);
  const auto problem = [&] {
    return types_text(call.x_type, call.y_type) + " " + describe(call.problem, call.a_layout(), call.b_layout());
  };
  if (!found.first) return {nullptr, none_fits("gemm", problem(), device, found.last_reason), nullptr};
  const ProductMeasurement* measured = nearest_product(device, call, found.fits, is_fused(call));
  // What wins without an epilogue wins with one, too: it costs eager PyTorch passes over memory.
  if (!measured && is_fused(call)) measured = nearest_product(device, call, found.fits, false);
  if (!force.empty()) return {measured ? &product_variants[measured->variant] : found.first, "", measured};
  if (!measured) return {nullptr, "no kernel was measured on " + device.name + " near " + problem(), nullptr};
  if (!won(*measured)) {
    return {nullptr, "cuBLAS measured faster at " + shape_of(measured->rows, measured->n, measured->k), nullptr};
  }
  return {&product_variants[measured->variant], "", measured};
}

std::string why_chosen(const GemmChoice& choice) {
  if (!knobs().force.empty()) return "TILEOPS_FORCE=" + knobs().force + " is set";
  const ProductMeasurement& at = *choice.measured;
  return "measured faster than cuBLAS at " + shape_of(at.rows, at.n, at.k);
}

}  // namespace tileops
