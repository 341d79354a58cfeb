// Host meaning of csrc/include/tileops/types.h: element types, their conversions, and a fragment that knows which of its
// registers were written, and which a wgmma in flight uses.
#pragma once

#include <stdint.h>
#include <string.h>

#include <exception>
#include <type_traits>

#include "tileops/emulator.h"

#define TILEOPS_WORD inline
#define TILEOPS_UNROLL
#define TILEOPS_NO_UNROLL

// The kernel as a C function on the address of its parameters, and what the driver checks a launch against.
#define TILEOPS_KERNEL(name, Params, threads, blocks)                                                    \
  static void name##_body(const Params& p);                                                              \
  extern "C" void name(const void* params) { name##_body(*static_cast<const Params*>(params)); }         \
  extern "C" int name##_params_bytes() { return static_cast<int>(sizeof(Params)); }                      \
  extern "C" int name##_max_threads() { return threads; }                                                \
  extern "C" int name##_min_blocks() { return blocks; }                                                  \
  static void name##_body(const Params& p)

namespace tileops {

// Only the bits: arithmetic on them is no word, so it does not compile.
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

enum DTypeCode : int32_t { kNone = 0, kBf16 = 1, kF16 = 2, kF32 = 3 };

struct site { int number; TILEOPS_WORD constexpr explicit site(int n) : number(n) {} };

namespace detail {
TILEOPS_WORD uint32_t float_bits(float v) { uint32_t u; memcpy(&u, &v, 4); return u; }
TILEOPS_WORD float bits_float(uint32_t u) { float v; memcpy(&v, &u, 4); return v; }
template <typename T> struct identity { using type = T; };
}  // namespace detail

TILEOPS_WORD float to_float(float v) { return v; }
TILEOPS_WORD float to_float(bf16 v) { return detail::bits_float(static_cast<uint32_t>(v.bits) << 16); }
TILEOPS_WORD float to_float(f16 v) {
  const uint32_t sign = (v.bits & 0x8000u) << 16, rest = v.bits & 0x7fffu;
  if (rest >= 0x7c00u) return detail::bits_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x0400u) return detail::bits_float(sign | ((rest << 13) + ((127 - 15) << 23)));
  const float subnormal = static_cast<float>(rest) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
}

// Round to nearest even. A NaN becomes 0x7fff, as cvt.rn makes it.
template <typename T> TILEOPS_WORD T from_float(float v);
template <> TILEOPS_WORD float from_float<float>(float v) { return v; }
template <> TILEOPS_WORD bf16 from_float<bf16>(float v) {
  const uint32_t u = detail::float_bits(v);
  if (v != v) return {0x7fff};
  return {static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16)};
}
template <> TILEOPS_WORD f16 from_float<f16>(float v) {
  const uint32_t u = detail::float_bits(v), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
  if (v != v) return {0x7fff};
  uint32_t h;
  if (magnitude >= 0x47800000u) {  // 65536 and more
    h = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal: from 2^-14; the carry of 65520 reaches infinity
    h = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - ((127 - 15) << 23)) >> 13;
  } else {  // subnormal: adding 0.5 puts units of 2^-24 in the last place and rounds to them
    h = detail::float_bits(detail::bits_float(magnitude) + 0.5f) - detail::float_bits(0.5f);
  }
  return {static_cast<uint16_t>(sign | h)};
}

// A Cell with a type. No constructor from T: `c ? f[i] : 0.0f` would be ambiguous. A copy carries the mark, so `auto v = f[i]`
// is checked at use; a copy of an operand of a wgmma in flight is free.
template <typename T>
class Register {
 public:
  Register() = default;
  Register(const Register& other) : value_(other.value_), mark_(other.mark_) {
    if (state() == emulator::kOperand) mark_ = emulator::kWritten;
  }
  Register& operator=(const Register& other) { return *this = static_cast<T>(other); }
  Register& operator=(T v) {
    if (in_flight()) emulator::machine->register_in_flight(mark_, true, 0);
    value_ = v;
    mark_ = emulator::machine->wgmma_fences << 3 | emulator::kWritten;
    return *this;
  }
  Register& operator+=(T v) { return written() ? *this = *this + v : *this; }
  Register& operator-=(T v) { return written() ? *this = *this - v : *this; }
  Register& operator*=(T v) { return written() ? *this = *this * v : *this; }
  Register& operator/=(T v) { return written() ? *this = *this / v : *this; }
  // (Above: what was never written may be scaled in place, as before a product that starts from zero, and stays unwritten.)
  operator T() const {
    if (state() == emulator::kUnwritten) emulator::machine->register_unwritten(-1, 0);
    if (state() == emulator::kAccumulating || state() == emulator::kDelivered)
      emulator::machine->register_in_flight(mark_, false, 0);
    return value_;
  }
  bool written() const { return state() != emulator::kUnwritten; }
  bool in_flight() const { return state() == emulator::kAccumulating || state() == emulator::kOperand; }
  void fence() { if (state() == emulator::kDelivered) mark_ = emulator::kWritten; }

 private:
  uint32_t state() const { return mark_ & 7; }
  alignas(4) T value_{};
  alignas(4) uint32_t mark_ = emulator::kUnwritten;
};

template <typename T, int N>
struct Fragment {
  Register<T> data[N];
  Fragment() = default;
  Fragment(const Fragment&) = default;
  Fragment& operator=(const Fragment&) = default;
  ~Fragment() {
    for (const Register<T>& r : data)
      if (r.in_flight() && !std::uncaught_exceptions()) emulator::machine->fragment_ends_in_flight();
  }
  Register<T>& operator[](int i) { return data[checked(i)]; }
  const Register<T>& operator[](int i) const { return data[checked(i)]; }

 private:
  static int checked(int i) {
    if (i < 0 || i >= N) emulator::machine->register_index(i, N, 0);
    return i;
  }
};

namespace detail {
// Registers k..k+count-1 for the driver.
template <typename T, int N>
TILEOPS_WORD emulator::Cell* cells(Fragment<T, N>& f, int k, int count, site s) {
  static_assert(sizeof(Register<T>) == sizeof(emulator::Cell) && sizeof(T) <= 4, "a register is a cell");
  if (k < 0 || k + count > N) emulator::machine->register_index(k < 0 ? k : k + count - 1, N, s.number);
  return reinterpret_cast<emulator::Cell*>(&f.data[k]);
}
template <typename T, int N>
TILEOPS_WORD T written(const Fragment<T, N>& f, int i, site s) {
  if (i < 0 || i >= N) emulator::machine->register_index(i, N, s.number);
  if (!f.data[i].written()) emulator::machine->register_unwritten(i, s.number);
  return f.data[i];
}
}  // namespace detail

// The element in register i.
template <typename T, int N>
TILEOPS_WORD float to_float(const Fragment<T, N>& f, int i) { return to_float(static_cast<T>(f[i])); }

template <typename T, int N>
TILEOPS_WORD void round_pair(Fragment<T, N>& f, int k, float a, float b) {
  f[k] = from_float<T>(a);
  f[k + 1] = from_float<T>(b);
}

}  // namespace tileops
