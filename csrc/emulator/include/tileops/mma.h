// Host meaning of csrc/include/tileops/mma.h.
#pragma once

#include "tileops/types.h"

namespace tileops {

template <typename T, int RD, int RA, int RB>
TILEOPS_WORD void mma(Fragment<float, RD>& d, int k, const Fragment<T, RA>& a, int j, const Fragment<T, RB>& b, int m, site s) {
  static_assert(std::is_same<T, bf16>::value || std::is_same<T, f16>::value, "bf16 or f16");
  float x[8], y[4], z[4];
  for (int i = 0; i < 8; ++i) x[i] = to_float(detail::written(a, j + i, s));
  for (int i = 0; i < 4; ++i) y[i] = to_float(detail::written(b, m + i, s));
  for (int i = 0; i < 4; ++i) z[i] = detail::written(d, k + i, s);
  emulator::machine->mma(z, x, y, s.number);
  for (int i = 0; i < 4; ++i) d[k + i] = z[i];
}

}  // namespace tileops
