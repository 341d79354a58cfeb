// Activations of an epilogue, on float32. Written in the other words alone, so that the emulator runs this file.
#pragma once

#include "tileops/math.h"

namespace tileops {

TILEOPS_WORD float relu(float v) { return v > 0.0f ? v : v == v ? 0.0f : v; }  // NaN stays
TILEOPS_WORD float silu(float v) { return v * reciprocal(1.0f + exp2(v * -1.4426950408889634f)); }
// v Phi(v); Phi by the error function.
TILEOPS_WORD float gelu(float v) { return 0.5f * v * (1.0f + erf(v * 0.7071067811865476f)); }
// The form 0.5 v (1 + tanh(u)), u = sqrt(2/pi) (v + 0.044715 v^3), as v sigmoid(2u): no cancellation where tanh is near -1.
TILEOPS_WORD float gelu_tanh(float v) {
  constexpr float kScale = -2.0f * 1.4426950408889634f * 0.7978845608028654f;
  return v * reciprocal(1.0f + exp2(v * fma(v * v, 0.044715f * kScale, kScale)));
}
// gelu for a result that is rounded to 16 bits, in a third of its instructions: log2(Phi(v) / Phi(-v)) as an odd polynomial of
// degree 7, fitted in float64 on |v| <= 6 to the least error relative to 1 + v^2, which is how rounding v to 16 bits acts there.
// Error at most 1.2e-4, and 3.7e-4 (1 + v^2) of the result for |v| <= 6.
TILEOPS_WORD float gelu_rounded(float v) {
  const float t = v * v;
  const float w = fma(fma(fma(t, -1.0625622e-5f, 1.3190823e-3f), t, -1.08249355e-1f), t, -2.3001858f);
  return v * reciprocal(1.0f + exp2(v * w));
}

}  // namespace tileops
