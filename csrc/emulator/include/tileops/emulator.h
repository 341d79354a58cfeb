// What the words ask of the emulator. The driver implements Machine; a kernel's shared object gets it by attach().
#pragma once

#include <stdint.h>

namespace tileops {
namespace emulator {

struct Machine {
  int thread = 0;
  int64_t block_x = 0, block_y = 0, grid_x = 1;

  // Each checks one access and returns the address to copy from or to. `origin` is the pointer that the kernel was given:
  // it names the buffer, so that running from one buffer into its neighbour is noticed.
  virtual void* access_global(const void* origin, int64_t byte_offset, int element_bytes, int count, bool write, int site) = 0;
  virtual void* access_shared(int64_t byte_offset, int bytes, bool write, int site) = 0;

  virtual void sync_threads(int site) = 0;
  virtual float shuffle_xor(float v, int lane_mask, int site) = 0;

  // Faults of registers; a site of 0 stands for the last word that this thread went through.
  [[noreturn]] virtual void register_index(int index, int count, int site) = 0;
  [[noreturn]] virtual void register_unwritten(int index, int site) = 0;
  [[noreturn]] virtual void register_misaligned(int index, int access_bytes, int site) = 0;

 protected:
  ~Machine() = default;
};

// Static, not inline: each shared object has its own.
static Machine* machine = nullptr;

}  // namespace emulator
}  // namespace tileops

extern "C" __attribute__((used, weak)) void tileops_emulator_attach(tileops::emulator::Machine* m) {
  tileops::emulator::machine = m;
}
