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
TILEOPS_WORD int min(int a, int b) { return a < b ? a : b; }
TILEOPS_WORD float fma(float a, float b, float c) { return fmaf(a, b, c); }
TILEOPS_WORD float infinity() { return __int_as_float(0x7f800000); }

}  // namespace tileops
