// What tileops_dsl/emulate.py writes where the device has a CUtensorMap, and the swizzles of shared memory.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <vector>

namespace tileops {
namespace emulator {

enum class Element : int32_t { u8 = 0, i32 = 3, f16 = 6, f32 = 7, bf16 = 9 };  // as CUtensorMapDataType counts

struct TensorMap {
  static constexpr uint64_t kMagic = 0x70616d726f736e74;
  uint64_t magic;
  char* address;
  int64_t extents[5];  // in elements, innermost first
  int64_t strides[4];  // in bytes, of the dimensions after the first
  int32_t box[5];
  int16_t rank, element_bytes;
  Element element;
  int32_t swizzle;  // bytes: 0, 32, 64 or 128
};
static_assert(sizeof(TensorMap) <= 128, "fits where the device has its own");

// The place in shared memory of the byte at `address` of the plain layout: its 16-byte pieces change places within 8 rows.
// 128 bytes: bits 4..6 are changed by bits 7..9; 64 bytes: 4..5 by 7..8; 32 bytes: 4 by 7.
inline int64_t swizzled(int64_t address, int span) {
  const int64_t bits = span == 128 ? 7 : span == 64 ? 3 : span == 32 ? 1 : 0;
  return address ^ (address >> 3 & bits << 4);
}
// Where the pattern starts again.
inline int swizzle_period(int span) { return span ? span * 8 : 128; }

// 16 bytes or fewer of shared memory, and the bytes of global memory (a part of them, from the first on) that go there.
struct Piece { int64_t shared; const void* origin; int64_t global; int inside, bytes; };

inline int64_t box_bytes(const TensorMap& t) {
  int64_t bytes = t.element_bytes;
  for (int d = 0; d < t.rank; ++d) bytes *= t.box[d];
  return bytes;
}

// The box at `coordinates`, in order; what lies outside the tensor has no global bytes.
inline std::vector<Piece> pieces_of_box(const TensorMap& t, const int* coordinates, int64_t offset, int swizzle) {
  const int64_t row_bytes = static_cast<int64_t>(t.box[0]) * t.element_bytes, rows = box_bytes(t) / row_bytes;
  std::vector<Piece> pieces;
  for (int64_t row = 0; row < rows; ++row) {
    int64_t at = 0, rest = row;
    bool inside = true;
    for (int d = 1; d < t.rank; ++d) {
      const int64_t c = coordinates[d] + rest % t.box[d];
      rest /= t.box[d];
      inside = inside && c >= 0 && c < t.extents[d];
      at += c * t.strides[d - 1];
    }
    for (int64_t b = 0; b < row_bytes; b += 16) {
      const int64_t first = static_cast<int64_t>(coordinates[0]) * t.element_bytes + b;
      const int64_t left = inside && first >= 0 ? t.extents[0] * t.element_bytes - first : 0;
      const int bytes = static_cast<int>(std::clamp<int64_t>(left, 0, 16));
      pieces.push_back({swizzled(offset + row * row_bytes + b, swizzle), t.address, at + first, bytes, 16});
    }
  }
  return pieces;
}

}  // namespace emulator
}  // namespace tileops
