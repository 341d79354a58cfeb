// Scalar float32 mathematics. The fast forms use the special-function unit; each states its error.
#pragma once

#include "tileops/types.h"

namespace tileops {

// 2 ulp, subnormal results are flushed to 0; exp2(-inf) = 0, exp2(NaN) = NaN.
TILEOPS_WORD float exp2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
// Both registers of an even pair k, k+1, for P in bf16 (sm_90 on). Relative error 2^-7, four times that of rounding to bf16;
// subnormals are flushed to 0.
template <int N>
TILEOPS_WORD void exp2_pair(Fragment<bf16, N>& f, int k) {
  uint32_t& r = *reinterpret_cast<uint32_t*>(&f.data[k]);
  asm("ex2.approx.ftz.bf16x2 %0, %0;" : "+r"(r));
}
// exp2 of v below 127.5 without the special-function unit. Relative error 1.02e-4 (2^-13.2); exact at integers; 0
// below -126.5; NaN stays NaN. v = n + f with |f| <= 1/2 (n drops into the low bits of v + 1.5 * 2^23); 2^f is a cubic
// through 1 at 0, fitted in float64 to the least maximum of the relative error (Lawson's reweighted least squares).
TILEOPS_WORD float exp2_polynomial(float v) {
  asm("max.NaN.f32 %0, %0, 0fC2FE0000;" : "+f"(v));  // -127, whose scale is 0
  const float shifted = __fadd_rn(v, 12582912.0f);
  const float f = __fsub_rn(v, __fsub_rn(shifted, 12582912.0f));
  const float scale = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
  return fmaf(fmaf(fmaf(5.5008933e-2f, f, 2.4221100e-1f), f, 6.9328290e-1f), f, 1.0f) * scale;
}
// Absolute error 2^-22 for v in (0.5, 2), else relative 2^-22; subnormals are flushed to 0; log2(0) = -inf, of less NaN.
TILEOPS_WORD float log2(float v) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
// Relative error 2^-11.
TILEOPS_WORD float tanh(float v) {
  float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
// 2 ulp.
TILEOPS_WORD float erf(float v) { return erff(v); }
// 2 ulp; rsqrt(0) = inf.
TILEOPS_WORD float rsqrt(float v) { return rsqrtf(v); }
// 1 ulp, subnormals are flushed to 0: the reciprocal of |v| > 2^126 is 0.
TILEOPS_WORD float reciprocal(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
// Correctly rounded.
TILEOPS_WORD float divide(float a, float b) { return __fdiv_rn(a, b); }
// fmax and fmin drop a NaN: one that must survive has to reach the result by another way.
TILEOPS_WORD float max(float a, float b) { return fmaxf(a, b); }
TILEOPS_WORD float min(float a, float b) { return fminf(a, b); }
// The largest of three if one is not negative (the order of floats is that of integers then, but NaN is the largest), else one of
// them. One instruction from sm_90 on, where floats have one for two only.
TILEOPS_WORD float max_of_nonnegative(float a, float b, float c) {
  return __int_as_float(__vimax3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
}
TILEOPS_WORD int max(int a, int b) { return a > b ? a : b; }
TILEOPS_WORD int min(int a, int b) { return a < b ? a : b; }
TILEOPS_WORD float fma(float a, float b, float c) { return fmaf(a, b, c); }
TILEOPS_WORD float infinity() { return __int_as_float(0x7f800000); }

}  // namespace tileops
