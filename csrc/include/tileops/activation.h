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
  const float u = v * fma(v * v, 0.044715f * 0.7978845608028654f, 0.7978845608028654f);
  return v * reciprocal(1.0f + exp2(u * (-2.0f * 1.4426950408889634f)));
}

}  // namespace tileops
