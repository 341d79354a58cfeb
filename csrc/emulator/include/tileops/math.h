// Host meaning of csrc/include/tileops/math.h: the flushes of subnormals are kept, the last bits may differ.
#pragma once

#include <cmath>

#include "tileops/types.h"

namespace tileops {

namespace detail {
TILEOPS_WORD float flush(float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }
}  // namespace detail

TILEOPS_WORD float exp2(float v) { return detail::flush(std::exp2(detail::flush(v))); }
TILEOPS_WORD float rsqrt(float v) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(v))); }
TILEOPS_WORD float reciprocal(float v) { return detail::flush(1.0f / detail::flush(v)); }
TILEOPS_WORD float divide(float a, float b) { return a / b; }
TILEOPS_WORD float max(float a, float b) { return std::fmax(a, b); }
TILEOPS_WORD float min(float a, float b) { return std::fmin(a, b); }
TILEOPS_WORD int min(int a, int b) { return a < b ? a : b; }
TILEOPS_WORD float fma(float a, float b, float c) { return std::fma(a, b, c); }
TILEOPS_WORD float infinity() { return detail::bits_float(0x7f800000u); }

}  // namespace tileops
