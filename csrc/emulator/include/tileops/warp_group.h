// Host meaning of csrc/include/tileops/warp_group.h. All lanes of a warp must meet in each collective word.
#pragma once

#include "tileops/thread.h"

namespace tileops {

TILEOPS_WORD int warp_index() { return thread_index() / 32; }
TILEOPS_WORD int warp_group_index() { return thread_index() / 128; }
TILEOPS_WORD int lane_index() { return thread_index() % 32; }

namespace detail {
TILEOPS_WORD uint32_t warp(emulator::WarpWord word, uint32_t v, int argument, int site) {
  return emulator::machine->warp(word, v, argument, site);
}
}  // namespace detail

// In a lane that the seed draws.
TILEOPS_WORD bool elect_one(site s) { return detail::warp(emulator::WarpWord::elect, 0, 0, s.number) != 0; }
TILEOPS_WORD bool all_of_warp(bool v, site s) { return detail::warp(emulator::WarpWord::all, v, 0, s.number) != 0; }
TILEOPS_WORD bool any_of_warp(bool v, site s) { return detail::warp(emulator::WarpWord::any, v, 0, s.number) != 0; }
TILEOPS_WORD uint32_t ballot_of_warp(bool v, site s) { return detail::warp(emulator::WarpWord::ballot, v, 0, s.number); }

TILEOPS_WORD int shuffle(int v, int lane, site s) {
  return static_cast<int>(detail::warp(emulator::WarpWord::shuffle, static_cast<uint32_t>(v), lane, s.number));
}
TILEOPS_WORD float shuffle(float v, int lane, site s) {
  return detail::bits_float(detail::warp(emulator::WarpWord::shuffle, detail::float_bits(v), lane, s.number));
}
TILEOPS_WORD uint32_t shuffle_xor(uint32_t v, int lane_mask, site s) {
  return detail::warp(emulator::WarpWord::shuffle_xor, v, lane_mask, s.number);
}

TILEOPS_WORD void sync_warp(site s) { detail::warp(emulator::WarpWord::sync, 0, 0, s.number); }

TILEOPS_WORD void named_barrier_sync(int id, int threads, site s) {
  emulator::machine->named_barrier(id, threads, true, s.number);
}
TILEOPS_WORD void named_barrier_arrive(int id, int threads, site s) {
  emulator::machine->named_barrier(id, threads, false, s.number);
}

template <int Registers>
TILEOPS_WORD void register_budget_decrease(site s) {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256, "a multiple of 8 in 24..256");
  emulator::machine->register_budget(Registers, false, s.number);
}
template <int Registers>
TILEOPS_WORD void register_budget_increase(site s) {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256, "a multiple of 8 in 24..256");
  emulator::machine->register_budget(Registers, true, s.number);
}

}  // namespace tileops
