// Host meaning of csrc/include/tileops/wgmma.h. An operand keeps the fields of its descriptor apart.
#pragma once

#include "tileops/barrier.h"

namespace tileops {

struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };

enum class Swizzle : int { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };
enum class Major : int { kK = 0, kMN = 1 };

template <typename T, Swizzle S, Major M, int Stride, int Leading>
struct shared_matrix {
  int64_t byte_offset;
  static constexpr Major major = M;
  using type = T;
  shared_matrix operator+(int bytes) const { return {byte_offset + bytes}; }
  emulator::Matrix descriptor() const {
    static_assert(Stride % 16 == 0 && Leading % 16 == 0, "a descriptor counts in units of 16 bytes");
    static_assert(Stride < 1 << 18 && Leading < 1 << 18, "a descriptor has 14 bits for each");
    return {byte_offset, static_cast<int>(S), static_cast<int>(M), Stride, Leading};
  }
};

template <Swizzle S, Major M, int Stride, int Leading = 16, typename T>
TILEOPS_WORD shared_matrix<T, S, M, Stride, Leading> matrix_at(shared_ptr<T> p) { return {p.byte_offset}; }

template <Swizzle S, Major M, int Stride, int Leading = 16>
TILEOPS_WORD constexpr shared_matrix<bf16, S, M, Stride, Leading> matrix_at_offset(int byte_offset) { return {byte_offset}; }

TILEOPS_WORD void wgmma_fence(site s) { emulator::machine->wgmma_fence(s.number); }
TILEOPS_WORD void wgmma_commit(site s) { emulator::machine->wgmma_commit(s.number); }
template <int Pending>
TILEOPS_WORD void wgmma_wait(site s) { emulator::machine->wgmma_wait(Pending, s.number); }

// On the device it stores a negative v over the first bytes.
TILEOPS_WORD void before_wait(float v, site s) { if (v < 0) store_shared(shared<float>(0), 0, v, s); }

template <typename T, int N>
TILEOPS_WORD void fence_operand(Fragment<T, N>& f) {
  for (Register<T>& r : f.data) r.fence();
}

namespace detail {
template <typename T> struct ProductType;
template <> struct ProductType<bf16> { static constexpr emulator::Type type = emulator::Type::bf16; };
template <> struct ProductType<f16> { static constexpr emulator::Type type = emulator::Type::f16; };
template <> struct ProductType<e4m3> { static constexpr emulator::Type type = emulator::Type::e4m3; };
template <> struct ProductType<e5m2> { static constexpr emulator::Type type = emulator::Type::e5m2; };

template <int N, typename A, typename B>
TILEOPS_WORD emulator::Product product(emulator::Cell* d, emulator::Cell* a_registers, B b, int accumulate) {
  using T = typename B::type;
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8 up to 256");
  static_assert(sizeof(A) == sizeof(T) && (sizeof(T) == 1 || std::is_same<A, T>::value), "dtypes that wgmma multiplies");
  static_assert(sizeof(T) == 2 || B::major == Major::kK, "8-bit operands are K-major");
  return {N, ProductType<A>::type, ProductType<T>::type, d, a_registers, {}, b.descriptor(), accumulate != 0};
}
}  // namespace detail

template <int N, typename A, typename B, int R>
TILEOPS_WORD void wgmma(Fragment<float, R>& d, int k, A a, B b, int accumulate, site s) {
  using T = typename A::type;
  static_assert(sizeof(T) == 2 || A::major == Major::kK, "8-bit operands are K-major");
  emulator::Product p = detail::product<N, T>(detail::cells(d, k, N / 2, s), nullptr, b, accumulate);
  p.a = a.descriptor();
  emulator::machine->wgmma(p, s.number);
}

template <int N, typename T, int RA, typename B, int R>
TILEOPS_WORD void wgmma(Fragment<float, R>& d, int k, const Fragment<T, RA>& a, int j, B b, int accumulate, site s) {
  emulator::Cell* registers = detail::cells(const_cast<Fragment<T, RA>&>(a), j, 16 / static_cast<int>(sizeof(T)), s);
  emulator::machine->wgmma(detail::product<N, T>(detail::cells(d, k, N / 2, s), registers, b, accumulate), s.number);
}

}  // namespace tileops
