// Elements of each type as float, for the products and for additions in memory.
#pragma once

#include "include/tileops/types.h"
#include "tensor_map.h"

namespace tileops {
namespace emulator {

// 8-bit floats of `mantissa` bits: e4m3 has no infinity and one NaN of each sign, e5m2 is the upper half of a float16.
inline float from_e5m2(uint8_t v) { return to_float(f16{static_cast<uint16_t>(v << 8)}); }
inline float from_e4m3(uint8_t v) {
  if ((v & 0x7f) == 0x7f) return detail::bits_float(0x7fc00000u);
  const int exponent = v >> 3 & 15, mantissa = v & 7;
  const float m = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9);
  return v & 0x80 ? -m : m;
}

inline float as_float(Type type, const void* p) {
  uint16_t h;
  uint8_t b;
  switch (type) {
    case Type::bf16: memcpy(&h, p, 2); return to_float(bf16{h});
    case Type::f16: memcpy(&h, p, 2); return to_float(f16{h});
    case Type::e4m3: memcpy(&b, p, 1); return from_e4m3(b);
    case Type::e5m2: memcpy(&b, p, 1); return from_e5m2(b);
  }
  return 0;
}

template <typename T>
void add_each(char* target, const char* data, int bytes) {
  for (int i = 0; i < bytes; i += sizeof(T)) {
    T a, b;
    memcpy(&a, target + i, sizeof(T));
    memcpy(&b, data + i, sizeof(T));
    if constexpr (std::is_same<T, int32_t>::value) {
      a += b;
    } else {
      a = from_float<T>(to_float(a) + to_float(b));
    }
    memcpy(target + i, &a, sizeof(T));
  }
}
inline void add_elements(Element element, char* target, const char* data, int bytes) {
  switch (element) {
    case Element::bf16: return add_each<bf16>(target, data, bytes);
    case Element::f16: return add_each<f16>(target, data, bytes);
    case Element::f32: return add_each<float>(target, data, bytes);
    case Element::i32: return add_each<int32_t>(target, data, bytes);
    case Element::u8: break;
  }
}

}  // namespace emulator
}  // namespace tileops
