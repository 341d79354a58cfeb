// Host meaning of csrc/include/tileops/matrix.h.
#pragma once

#include "tileops/barrier.h"
#include "tileops/memory.h"

namespace tileops {

template <int Count, bool Transposed = false, typename T, int N>
TILEOPS_WORD void load_matrix(Fragment<T, N>& f, int k, shared_ptr<T> row, site s) {
  static_assert(sizeof(T) == 2 && (Count == 1 || Count == 2 || Count == 4), "1, 2 or 4 matrices of 16-bit elements");
  if (k < 0 || k + 2 * Count > N) emulator::machine->register_index(k < 0 ? k : k + 2 * Count - 1, N, s.number);
  if (k % 2) emulator::machine->register_misaligned(k, 4, s.number);
  uint16_t values[2 * Count];
  emulator::machine->matrices(row.byte_offset, values, Count, Transposed, false, s.number);
  for (int i = 0; i < 2 * Count; ++i) {
    T v;
    memcpy(&v, &values[i], 2);
    f[k + i] = v;
  }
}

template <int Count, bool Transposed = false, typename T, int N>
TILEOPS_WORD void store_matrix(shared_ptr<T> row, const Fragment<T, N>& f, int k, site s) {
  static_assert(sizeof(T) == 2 && (Count == 1 || Count == 2 || Count == 4), "1, 2 or 4 matrices of 16-bit elements");
  if (k % 2) emulator::machine->register_misaligned(k, 4, s.number);
  uint16_t values[2 * Count];
  for (int i = 0; i < 2 * Count; ++i) {
    const T v = detail::written(f, k + i, s);
    memcpy(&values[i], &v, 2);
  }
  emulator::machine->matrices(row.byte_offset, values, Count, Transposed, true, s.number);
}

}  // namespace tileops
