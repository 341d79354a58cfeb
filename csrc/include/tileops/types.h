// Element types, their conversions, and the fragment: the registers in which a thread holds its part of a tile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#define TILEOPS_WORD __device__ __forceinline__
#define TILEOPS_UNROLL _Pragma("unroll")
#define TILEOPS_NO_UNROLL _Pragma("unroll 1")

// Opens the definition of a kernel that takes one parameter struct by value. `blocks` CTAs fit on a multiprocessor at least.
#define TILEOPS_KERNEL(name, Params, threads, blocks) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params p)

namespace tileops {

using bf16 = __nv_bfloat16;
using f16 = __half;

// Dtype codes of run-time tensors (a weight may have any); csrc/variant.h has the same numbers for the host.
enum DTypeCode : int32_t { kNone = 0, kBf16 = 1, kF16 = 2, kF32 = 3 };

struct site { int number; TILEOPS_WORD constexpr explicit site(int n) : number(n) {} };

TILEOPS_WORD float to_float(float v) { return v; }
// By bit operations: the compiler folds them with the unpacking of a register; __bfloat162float it does not look into.
TILEOPS_WORD float to_float(bf16 v) { return __uint_as_float(static_cast<uint32_t>(__bfloat16_as_ushort(v)) << 16); }
TILEOPS_WORD float to_float(f16 v) { return __half2float(v); }

// Round to nearest even.
template <typename T> TILEOPS_WORD T from_float(float v);
template <> TILEOPS_WORD float from_float<float>(float v) { return v; }
template <> TILEOPS_WORD bf16 from_float<bf16>(float v) { return __float2bfloat16_rn(v); }
template <> TILEOPS_WORD f16 from_float<f16>(float v) { return __float2half_rn(v); }

// N registers of one thread. Indexed by compile-time constants only (unrolled loops), or it would leave the registers.
template <typename T, int N>
struct Fragment {
  static constexpr int kBytes = N * sizeof(T);
  alignas(kBytes >= 16 ? 16 : kBytes >= 8 ? 8 : kBytes >= 4 ? 4 : 2) T data[N];  // for vector accesses
  TILEOPS_WORD T& operator[](int i) { return data[i]; }
  TILEOPS_WORD const T& operator[](int i) const { return data[i]; }
};

// The element in register i. A pair of bf16 shares a 32-bit register: its upper half is a float32 but for the lower bits.
template <typename T, int N>
TILEOPS_WORD float to_float(const Fragment<T, N>& f, int i) {
  if constexpr (std::is_same_v<T, bf16> && N > 1) {
    if (i == N - 1 && N % 2 == 1) return to_float(f.data[i]);
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(&f.data[i / 2 * 2]);
    return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
  } else {
    return to_float(f.data[i]);
  }
}

// Registers k (even) and k + 1 become a and b, rounded to nearest even: one instruction.
template <int N>
TILEOPS_WORD void round_pair(Fragment<bf16, N>& f, int k, float a, float b) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(reinterpret_cast<uint32_t&>(f.data[k])) : "f"(b), "f"(a));
}
template <int N>
TILEOPS_WORD void round_pair(Fragment<f16, N>& f, int k, float a, float b) {
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(reinterpret_cast<uint32_t&>(f.data[k])) : "f"(b), "f"(a));
}

}  // namespace tileops
