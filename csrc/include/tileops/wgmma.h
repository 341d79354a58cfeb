// Warp-group matrix products: D (64 x N, float32, registers) = A (64 x K) B (K x N) + D, asynchronous.
#pragma once

#include <cuda_fp8.h>

#include "tileops/barrier.h"
#include "tileops/wgmma_shapes.h"

namespace tileops {

using e4m3 = __nv_fp8_e4m3;
using e5m2 = __nv_fp8_e5m2;

// The layout of a tile in shared memory as both TMA and wgmma know it: 16-byte pieces of a row of 128, 64 or 32 bytes are
// permuted within 8 rows. The numbers are those of the matrix descriptor; tensor maps count the other way (32B is 1).
enum class Swizzle : int { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

// Which dimension has unit stride: the product's (K) or the result's (M of A, N of B).
enum class Major : int { kK = 0, kMN = 1 };

// PTX ISA, "Matrix descriptor": address, leading and stride byte offset in units of 16 bytes, swizzle in the top bits. The
// base offset (bits 49..51) is 0: tiles start where their swizzle pattern does (1024, 512 or 256 bytes).
__host__ __device__ constexpr uint32_t descriptor_low(uint32_t address, int leading_bytes) {
  return (address & 0x3ffffu) >> 4 | static_cast<uint32_t>(leading_bytes >> 4 & 0x3fff) << 16;
}
__host__ __device__ constexpr uint32_t descriptor_high(int stride_bytes, Swizzle swizzle) {
  return static_cast<uint32_t>(stride_bytes >> 4 & 0x3fff) | static_cast<uint32_t>(swizzle) << 30;
}

// An operand in shared memory.
//   K-major: rows of M or N, each as long as the swizzle; `Stride` bytes between groups of 8 rows; `Leading` is not used.
//   MN-major: rows of K; `Stride` bytes between groups of 8 rows of K, `Leading` between pieces of M or N as long as the swizzle.
// Without a swizzle the pieces are 8 rows x 16 bytes. Only what differs at run time is held in a register.
template <typename T, Swizzle S, Major M, int Stride, int Leading>
struct shared_matrix {
  uint32_t low;
  static constexpr Major major = M;
  using type = T;
  // The operand that starts so many bytes further: the next K (32 bytes if K-major), the next rows, the next stage.
  TILEOPS_WORD shared_matrix operator+(int bytes) const { return {low + static_cast<uint32_t>(bytes >> 4)}; }
  TILEOPS_WORD uint64_t descriptor() const {
    return static_cast<uint64_t>(descriptor_high(Stride, S)) << 32 | low;
  }
};

template <Swizzle S, Major M, int Stride, int Leading = 16, typename T>
TILEOPS_WORD shared_matrix<T, S, M, Stride, Leading> matrix_at(shared_ptr<T> p) {
  return {descriptor_low(detail::shared_address(p), Leading)};
}

// The same at a byte offset of the shared-memory plan, as a constant. Without static shared memory the plan starts behind the 1024
// bytes that sm_90 keeps for the system. From an address in a register, dozens of descriptors leave a loop and are spilled.
template <Swizzle S, Major M, int Stride, int Leading = 16>
TILEOPS_WORD constexpr shared_matrix<bf16, S, M, Stride, Leading> matrix_at_offset(int byte_offset) {
  return {descriptor_low(static_cast<uint32_t>(1024 + byte_offset), Leading)};
}

// Before the first product after this thread has written its accumulators or A registers.
TILEOPS_WORD void wgmma_fence(site) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Products since the last commit become a group.
TILEOPS_WORD void wgmma_commit(site) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `Pending` groups are unfinished.
template <int Pending>
TILEOPS_WORD void wgmma_wait(site) { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory"); }

// The arithmetic that leads to v, which is never negative, is done before the waits below. ptxas orders a wait against accesses to
// memory but not against arithmetic: without this it moves a softmax behind the wait that the softmax is to overlap.
TILEOPS_WORD void before_wait(float v, site) {
  asm volatile("{\n .reg .pred p;\n setp.lt.f32 p, %0, 0f00000000;\n @p st.shared.f32 [%1], %0;\n}\n" ::"f"(v), "r"(0) : "memory");
}

// Registers that a product reads or writes: the compiler moves no access of them across this line. After the wait.
template <int N>
TILEOPS_WORD void fence_operand(Fragment<float, N>& f) {
  TILEOPS_UNROLL
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(f.data[i])::"memory");
}
template <typename T, int N>
TILEOPS_WORD void fence_operand(Fragment<T, N>& f) {
  TILEOPS_UNROLL
  for (int i = 0; i < N * static_cast<int>(sizeof(T)) / 4; ++i)
    asm volatile("" : "+r"(reinterpret_cast<uint32_t*>(f.data)[i])::"memory");
}

namespace detail {
template <typename A, typename B> struct WgmmaTypes;
template <> struct WgmmaTypes<bf16, bf16> { static constexpr char kPtx[] = "bf16.bf16"; };
template <> struct WgmmaTypes<f16, f16> { static constexpr char kPtx[] = "f16.f16"; };
template <> struct WgmmaTypes<e4m3, e4m3> { static constexpr char kPtx[] = "e4m3.e4m3"; };
template <> struct WgmmaTypes<e4m3, e5m2> { static constexpr char kPtx[] = "e4m3.e5m2"; };
template <> struct WgmmaTypes<e5m2, e4m3> { static constexpr char kPtx[] = "e5m2.e4m3"; };
template <> struct WgmmaTypes<e5m2, e5m2> { static constexpr char kPtx[] = "e5m2.e5m2"; };
}  // namespace detail

// Registers k..k+N/2-1 of d += a b, over 32 bytes of K; from zero where `accumulate` is 0. Thread t of the group holds, in
// register i, row 16 (t/32) + (t%32)/4 + 8 (i/2 % 2) and column 8 (i/4) + 2 (t%4) + i%2.
template <int N, typename A, typename B, int R>
TILEOPS_WORD void wgmma(Fragment<float, R>& d, int k, A a, B b, int accumulate, site) {
  using Types = detail::WgmmaTypes<typename A::type, typename B::type>;
  if constexpr (sizeof(typename A::type) == 2) {
    detail::Wgmma<N>::template ss16<Types, static_cast<int>(A::major), static_cast<int>(B::major)>(
        &d.data[k], a.descriptor(), b.descriptor(), accumulate);
  } else {
    static_assert(A::major == Major::kK && B::major == Major::kK, "8-bit operands are K-major");
    detail::Wgmma<N>::template ss8<Types>(&d.data[k], a.descriptor(), b.descriptor(), accumulate);
  }
}

// The same with A in registers j..j+3 words of a: of 16 bits, word r of thread t holds row 16 (t/32) + (t%32)/4 + 8 (r%2) and
// K = 8 (r/2) + 2 (t%4) + {0, 1}; of 8 bits, K = 16 (r/2) + 4 (t%4) + {0..3}. Unwritten until the wait that covers it.
template <int N, typename T, int RA, typename B, int R>
TILEOPS_WORD void wgmma(Fragment<float, R>& d, int k, const Fragment<T, RA>& a, int j, B b, int accumulate, site) {
  using Types = detail::WgmmaTypes<T, typename B::type>;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(&a.data[j]);
  const uint32_t registers[4] = {words[0], words[1], words[2], words[3]};
  if constexpr (sizeof(T) == 2) {
    detail::Wgmma<N>::template rs16<Types, static_cast<int>(B::major)>(&d.data[k], registers, b.descriptor(), accumulate);
  } else {
    static_assert(B::major == Major::kK, "8-bit operands are K-major");
    detail::Wgmma<N>::template rs8<Types>(&d.data[k], registers, b.descriptor(), accumulate);
  }
}

}  // namespace tileops
