// Activations of an epilogue, on float32. Written in the other words alone, so that the emulator runs this file.
#pragma once

#include "tileops/math.h"

namespace tileops {

TILEOPS_WORD float relu(float v) { return v > 0.0f ? v : v == v ? 0.0f : v; }  // NaN stays
TILEOPS_WORD float silu(float v) { return v * reciprocal(1.0f + exp2(v * -1.4426950408889634f)); }
// v Phi(v), with log2(Phi(v) / Phi(-v)) as an odd polynomial of degree 13: a third of the instructions of erf, and no cancellation
// where Phi is small. Fitted in float64 on |v| <= 5 to the least error of Phi, 2.9e-8; error at most 1.2e-7 (1 + |v|)|.
TILEOPS_WORD float gelu(float v) {
  const float t = v * v;
  float w = fma(t, -5.067235e-9f, 3.8163125e-7f);
  w = fma(w, t, -1.1439833e-5f);
  w = fma(w, t, 1.5957994e-4f);
  w = fma(w, t, 9.4049225e-5f);
  w = fma(w, t, -1.04835122e-1f);
  w = fma(w, t, -2.3022093f);
  return v * reciprocal(1.0f + exp2(v * w));
}
// The form 0.5 v (1 + tanh(u)), u = sqrt(2/pi) (v + 0.044715 v^3), as v sigmoid(2u): no cancellation where tanh is near -1.
TILEOPS_WORD float gelu_tanh(float v) {
  constexpr float kScale = -2.0f * 1.4426950408889634f * 0.7978845608028654f;
  return v * reciprocal(1.0f + exp2(v * fma(v * v, 0.044715f * kScale, kScale)));
}
}  // namespace tileops
