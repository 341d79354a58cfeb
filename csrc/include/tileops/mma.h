// Matrix products of a warp on registers (mma.sync, sm_80 on).
#pragma once

#include "tileops/types.h"

namespace tileops {

namespace detail {
template <typename T> struct MmaType;
template <> struct MmaType<bf16> { static constexpr char kPtx[] = "bf16"; };
template <> struct MmaType<f16> { static constexpr char kPtx[] = "f16"; };
}  // namespace detail

// d (16 x 8, float32) += a (16 x 16) b (16 x 8). Lane l holds
//   of d, in register k+i (i < 4), row l/4 + 8 (i/2) and column 2 (l%4) + i%2;
//   of a, in register j+i (i < 8), row l/4 + 8 (i/2 % 2) and K = 2 (l%4) + i%2 + 8 (i/4);
//   of b, in register m+i (i < 4), K = 2 (l%4) + i%2 + 8 (i/2) and column l/4.
template <typename T, int RD, int RA, int RB>
TILEOPS_WORD void mma(Fragment<float, RD>& d, int k, const Fragment<T, RA>& a, int j, const Fragment<T, RB>& b, int m, site) {
  const uint32_t* x = reinterpret_cast<const uint32_t*>(&a.data[j]);
  const uint32_t* y = reinterpret_cast<const uint32_t*>(&b.data[m]);
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.%10.%10.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d.data[k]), "+f"(d.data[k + 1]), "+f"(d.data[k + 2]), "+f"(d.data[k + 3])
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]), "C"(detail::MmaType<T>::kPtx));
}

}  // namespace tileops
