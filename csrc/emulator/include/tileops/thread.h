// Host meaning of csrc/include/tileops/thread.h. The collective words switch to another thread of the CTA.
#pragma once

#include "tileops/types.h"

namespace tileops {

TILEOPS_WORD int thread_index() { return emulator::machine->thread; }
TILEOPS_WORD int64_t block_index_x() { return emulator::machine->block_x; }
TILEOPS_WORD int64_t block_index_y() { return emulator::machine->block_y; }
TILEOPS_WORD int64_t block_index_z() { return emulator::machine->block_z; }
TILEOPS_WORD int64_t grid_size_x() { return emulator::machine->grid_x; }

TILEOPS_WORD void sync_threads(site s) { emulator::machine->sync_threads(s.number); }
TILEOPS_WORD float shuffle_xor(float v, int lane_mask, site s) {
  const uint32_t bits = detail::float_bits(v);
  return detail::bits_float(emulator::machine->warp(emulator::WarpWord::shuffle_xor, bits, lane_mask, s.number));
}

}  // namespace tileops
