// What the words ask of the emulator. The driver implements Machine; a kernel's shared object gets it by attach().
#pragma once

#include <stdint.h>

namespace tileops {
namespace emulator {

// One register of a thread: the value in the first bytes, and what is known of it.
struct Cell { uint32_t bits, mark; };
// The low three bits of a mark; above them the number of wgmma_fence words that the thread had passed when it wrote.
//   accumulating: a product in flight will write it; operand: one reads it; delivered: written by a product, not yet fenced.
enum Mark : uint32_t { kUnwritten = 0, kWritten = 1, kAccumulating = 2, kOperand = 3, kDelivered = 4 };

enum class WarpWord { shuffle_xor, shuffle, all, any, ballot, elect, sync };
enum class Type { bf16, f16, e4m3, e5m2 };

// An operand in shared memory, as a matrix descriptor says it. swizzle: 0 none, 1 of 128 bytes, 2 of 64, 3 of 32.
struct Matrix { int64_t address; int swizzle, major, stride, leading; };
struct Product {
  int n;
  Type type_a, type_b;
  Cell* d;           // n / 2 registers
  Cell* a_registers; // of 16 bits 8, of 8 bits 16; null: a is in shared memory
  Matrix a, b;
  bool accumulate;
};

// A copy by the tensor memory accelerator: a box of a tensor map, or consecutive bytes.
enum class Direction { load, store, add };
struct Box { const void* map; int rank; int coordinates[5]; int element_bytes; };

struct Machine {
  int thread = 0, rank = 0, cluster = 1;
  int64_t block_x = 0, block_y = 0, block_z = 0, grid_x = 1;
  uint32_t wgmma_fences = 0;  // of this thread

  // Each checks one access and returns the address to copy from or to. `origin` is the pointer that the kernel was given:
  // it names the buffer, so that running from one buffer into its neighbour is noticed.
  virtual void* access_global(const void* origin, int64_t byte_offset, int element_bytes, int count, bool write, int site) = 0;
  virtual void* access_shared(int64_t byte_offset, int bytes, bool write, int rank, int site) = 0;

  virtual void sync_threads(int site) = 0;
  virtual void named_barrier(int id, int threads, bool waits, int site) = 0;
  virtual uint32_t warp(WarpWord word, uint32_t value, int argument, int site) = 0;
  virtual void register_budget(int registers, bool increase, int site) = 0;
  // `count` 8x8 matrices: the lane's two elements of each, and the row that it points to.
  virtual void matrices(int64_t row_offset, uint16_t* values, int count, bool transposed, bool write, int site) = 0;
  virtual void mma(float* d, const float* a, const float* b, int site) = 0;

  virtual void init_barrier(int64_t offset, int arrivals, int site) = 0;
  virtual void fence_barrier_init(int site) = 0;
  virtual void arrive(int64_t offset, int rank, bool expects, int bytes, int site) = 0;
  virtual bool wait(int64_t offset, uint32_t parity, bool cluster_wide, bool blocks, int site) = 0;
  virtual void fence_async(bool shared, int site) = 0;
  virtual void cluster_arrive(int site) = 0;
  virtual void cluster_wait(int site) = 0;

  virtual void load_box(int64_t offset, const Box& box, int64_t barrier, uint32_t ctas, bool multicast, int site) = 0;
  virtual void store_box(int64_t offset, const Box& box, Direction direction, int site) = 0;
  virtual void bulk_load(int64_t offset, const void* origin, int64_t at, int bytes, int64_t barrier, int site) = 0;
  virtual void bulk_store(int64_t offset, void* origin, int64_t at, int bytes, int site) = 0;
  virtual void prefetch_tensor_map(const void* map, int site) = 0;
  virtual void store_commit(int site) = 0;
  virtual void store_wait(int pending, bool read_only, int site) = 0;
  virtual void store_async(int64_t offset, int rank, uint32_t bits, int64_t barrier, int site) = 0;
  virtual void copy_async(int64_t offset, const void* origin, int64_t at, int bytes, int read, int site) = 0;
  virtual void copy_commit(int site) = 0;
  virtual void copy_wait(int pending, int site) = 0;
  virtual void arrive_after_copies(int64_t barrier, int site) = 0;

  virtual void wgmma(const Product& product, int site) = 0;
  virtual void wgmma_fence(int site) = 0;
  virtual void wgmma_commit(int site) = 0;
  virtual void wgmma_wait(int pending, int site) = 0;

  // Faults of registers; a site of 0 stands for the last word that this thread went through.
  [[noreturn]] virtual void register_index(int index, int count, int site) = 0;
  [[noreturn]] virtual void register_misaligned(int index, int access_bytes, int site) = 0;
  // Reading a register that holds nothing yet, or one in flight; writing one in flight.
  [[noreturn]] virtual void register_unwritten(int index, int site) = 0;
  [[noreturn]] virtual void register_in_flight(uint32_t mark, bool write, int site) = 0;
  virtual void fragment_ends_in_flight() = 0;

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
