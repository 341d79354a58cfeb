// Host meaning of csrc/include/tileops/math.h: the flushes of subnormals are kept, the last bits may differ.
#pragma once

#include <algorithm>
#include <cmath>

#include "tileops/types.h"

namespace tileops {

namespace detail {
TILEOPS_WORD float flush(float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }
}  // namespace detail

TILEOPS_WORD float exp2(float v) { return detail::flush(std::exp2(detail::flush(v))); }
template <int N>
TILEOPS_WORD void exp2_pair(Fragment<bf16, N>& f, int k) {
  for (int i = k; i < k + 2; ++i) f[i] = from_float<bf16>(exp2(to_float(f, i)));
}
TILEOPS_WORD float exp2_polynomial(float v) {
  v = v < -127.0f ? -127.0f : v;
  const volatile float shifted = v + 12582912.0f;  // volatile: rounded to float32
  const float f = v - (shifted - 12582912.0f);
  const float scale = detail::bits_float((detail::float_bits(shifted) << 23) + 0x3f800000u);
  return std::fma(std::fma(std::fma(5.5008933e-2f, f, 2.4221100e-1f), f, 6.9328290e-1f), f, 1.0f) * scale;
}
TILEOPS_WORD float log2(float v) { return std::log2(detail::flush(v)); }
TILEOPS_WORD float tanh(float v) { return std::tanh(v); }
TILEOPS_WORD float erf(float v) { return std::erf(v); }
TILEOPS_WORD float rsqrt(float v) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(v))); }
TILEOPS_WORD float reciprocal(float v) { return detail::flush(1.0f / detail::flush(v)); }
TILEOPS_WORD float divide(float a, float b) { return a / b; }
TILEOPS_WORD float max(float a, float b) { return std::fmax(a, b); }
TILEOPS_WORD float min(float a, float b) { return std::fmin(a, b); }
TILEOPS_WORD float max_of_nonnegative(float a, float b, float c) {
  int32_t most = INT32_MIN;
  for (const float v : {a, b, c}) most = std::max(most, static_cast<int32_t>(detail::float_bits(v)));
  return detail::bits_float(static_cast<uint32_t>(most));
}
TILEOPS_WORD int max(int a, int b) { return a > b ? a : b; }
TILEOPS_WORD int min(int a, int b) { return a < b ? a : b; }
TILEOPS_WORD float fma(float a, float b, float c) { return std::fma(a, b, c); }
TILEOPS_WORD float infinity() { return detail::bits_float(0x7f800000u); }

}  // namespace tileops
