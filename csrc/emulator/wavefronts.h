// Wavefronts: the passes over the banks of shared memory that an instruction of a warp takes.
#pragma once

#include <stdint.h>

#include <algorithm>

namespace tileops {
namespace emulator {

// What the lanes of a warp access at once, `width` bytes each; of a matrix instruction, the rows that its lanes point to.
struct SharedAccess {
  int32_t at[32];
  uint32_t lanes;  // a bit for each that takes part
  int width;
};
struct Cost { int64_t wavefronts, least; };  // least: with no conflict

// The most words of 4 bytes that lanes first..last-1 want of one of the 32 banks. A word that several want counts once.
inline int fullest_bank(const SharedAccess& a, int first, int last) {
  int32_t words[128];
  int8_t earlier[128], of_bank[32];  // the word before it in its bank; the last word of a bank
  int count = 0, sizes[32] = {}, most = 0;
  std::fill_n(of_bank, 32, static_cast<int8_t>(-1));
  for (int lane = first; lane < last; ++lane) {
    if (!(a.lanes >> lane & 1)) continue;
    for (int32_t word = a.at[lane] / 4; word <= (a.at[lane] + a.width - 1) / 4; ++word) {
      int8_t& latest = of_bank[word % 32];
      int same = latest;
      while (same >= 0 && words[same] != word) same = earlier[same];
      if (same >= 0) continue;
      words[count] = word;
      earlier[count] = latest;
      latest = static_cast<int8_t>(count++);
      most = std::max(most, ++sizes[word % 32]);
    }
  }
  return most;
}

// Whether all lanes want what their neighbour does: the next one, or the next but one.
inline bool paired(const SharedAccess& a, int distance) {
  for (int lane = 0; lane < 32; ++lane) {
    const int other = lane ^ distance;
    if ((a.lanes >> lane & 1) && (a.lanes >> other & 1) && a.at[lane] != a.at[other]) return false;
  }
  return true;
}

// A pass moves 128 bytes: of 32 lanes that access 4 bytes or fewer, of 16 with 8, of 8 with 16. Loads of lanes in pairs return
// in half as many (forums.developer.nvidia.com/t/unexpected-shared-memory-bank-conflict/77228).
inline Cost cost_of(const SharedAccess& a, bool pairs) {
  int lanes = 128 / std::max(a.width, 4);
  if (lanes < 32 && pairs && (paired(a, 1) || paired(a, 2))) lanes *= 2;
  Cost cost = {0, 0};
  for (int first = 0; first < 32; first += lanes) {
    const int most = fullest_bank(a, first, first + lanes);
    cost.wavefronts += most;
    cost.least += most > 0;
  }
  return cost;
}

}  // namespace emulator
}  // namespace tileops
