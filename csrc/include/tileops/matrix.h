// 8x8 matrices of 16-bit elements between shared memory and the registers of a warp.
#pragma once

#include "tileops/memory.h"
#include "tileops/barrier.h"

namespace tileops {

// Matrix m of the Count has its rows where lanes 8m..8m+7 point, 16 bytes each. Lane l holds of it the elements (row l/4,
// columns 2(l%4) and 2(l%4)+1), in registers k+2m and k+2m+1; transposed: the elements (rows 2(l%4) and + 1, column l/4).
template <int Count, bool Transposed = false, typename T, int N>
TILEOPS_WORD void load_matrix(Fragment<T, N>& f, int k, shared_ptr<T> row, site) {
  static_assert(sizeof(T) == 2 && (Count == 1 || Count == 2 || Count == 4), "1, 2 or 4 matrices of 16-bit elements");
  auto r = [&](int m) -> uint32_t& { return *reinterpret_cast<uint32_t*>(&f.data[k + 2 * m]); };
  const uint32_t a = detail::shared_address(row);
  if constexpr (Count == 1 && !Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r(0)) : "r"(a) : "memory");
  if constexpr (Count == 1 && Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r(0)) : "r"(a) : "memory");
  if constexpr (Count == 2 && !Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r(0)), "=r"(r(1)) : "r"(a) : "memory");
  if constexpr (Count == 2 && Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r(0)), "=r"(r(1)) : "r"(a) : "memory");
  if constexpr (Count == 4 && !Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r(0)), "=r"(r(1)), "=r"(r(2)), "=r"(r(3)) : "r"(a) : "memory");
  if constexpr (Count == 4 && Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r(0)), "=r"(r(1)), "=r"(r(2)), "=r"(r(3)) : "r"(a) : "memory");
}

// The other way (sm_90 on).
template <int Count, bool Transposed = false, typename T, int N>
TILEOPS_WORD void store_matrix(shared_ptr<T> row, const Fragment<T, N>& f, int k, site) {
  static_assert(sizeof(T) == 2 && (Count == 1 || Count == 2 || Count == 4), "1, 2 or 4 matrices of 16-bit elements");
  auto r = [&](int m) { return *reinterpret_cast<const uint32_t*>(&f.data[k + 2 * m]); };
  const uint32_t a = detail::shared_address(row);
  if constexpr (Count == 1 && !Transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(a), "r"(r(0)) : "memory");
  if constexpr (Count == 1 && Transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(a), "r"(r(0)) : "memory");
  if constexpr (Count == 2 && !Transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(a), "r"(r(0)), "r"(r(1)) : "memory");
  if constexpr (Count == 2 && Transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(a), "r"(r(0)), "r"(r(1)) : "memory");
  if constexpr (Count == 4 && !Transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::
                 "r"(a), "r"(r(0)), "r"(r(1)), "r"(r(2)), "r"(r(3)) : "memory");
  if constexpr (Count == 4 && Transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::
                 "r"(a), "r"(r(0)), "r"(r(1)), "r"(r(2)), "r"(r(3)) : "memory");
}

}  // namespace tileops
