// What the emulator knows of each byte of global memory.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

#include "fault.h"

namespace tileops {
namespace emulator {

struct Buffer {
  char* address;
  int64_t bytes;
  bool writable;
  std::string name;
  std::string mask;               // per byte, 0 where it lies between the elements of a strided tensor; empty: all belong
  std::vector<uint32_t> writers;  // per byte of a writable buffer: 1 + the launch-wide number of its last writer, 0: none
  int64_t bytes_read = 0, bytes_written = 0, rewritten = 0;

  int64_t unwritten() const {
    int64_t n = 0;
    for (size_t i = 0; i < writers.size(); ++i) n += writers[i] == 0 && (mask.empty() || mask[i]);
    return n;
  }
};

class GlobalMemory {
 public:
  explicit GlobalMemory(std::vector<Buffer> buffers) : buffers_(std::move(buffers)) {
    for (Buffer& b : buffers_)
      if (b.writable) b.writers.assign(b.bytes, 0);
  }
  const std::vector<Buffer>& buffers() const { return buffers_; }

  // `alignment` of 0: that of an access of a thread, which moves at most 16 bytes at once. counts: whether the report says it.
  char* access(const void* origin, int64_t byte_offset, int element, int64_t count, bool write, uint32_t thread, int site,
               int64_t alignment = 0, bool counts = true) {
    const std::string verb = write ? "writes " : "reads ";
    Buffer* b = find(origin, write);
    if (!b)
      throw Fault{"out_of_bounds", site, verb + "through a " + (origin ? "pointer into no buffer of" : "null pointer in")
                  + " this launch; give global() a pointer of the parameters as it came"};
    const int64_t bytes = element * count;
    if (alignment == 0) alignment = bytes < 16 ? bytes : 16;
    const int64_t at = static_cast<const char*>(origin) - b->address + byte_offset;
    const auto what = [&] { return verb + elements(at, element, count) + " of " + b->name; };
    if (at < 0 || at > b->bytes - bytes)
      throw Fault{"out_of_bounds", site, what() + ", which has " + std::to_string(b->bytes / element)
                  + "; bound the access by the extents of the problem"};
    if (write && !b->writable)
      throw Fault{"read_only", site, what() + ", which this launch only reads; store to a field that is void*"};
    if ((reinterpret_cast<uintptr_t>(b->address) + at) % alignment)
      throw Fault{"misaligned", site, what() + " in accesses of " + std::to_string(alignment)
                  + " bytes, but the address is no multiple of that; use a narrower vector"};
    for (int64_t i = at; !b->mask.empty() && i < at + bytes; ++i)
      if (!b->mask[i])
        throw Fault{"out_of_bounds", site, verb + "the gap between two elements of " + b->name + ", at byte "
                    + std::to_string(i) + " of its storage; check the strides"};
    if (counts) record(*b, at, bytes, write, thread);
    return b->address + at;
  }

 private:
  // Where a buffer that is written overlaps one that is only read, each access means the one it may use.
  Buffer* find(const void* origin, bool write) {
    Buffer* found = nullptr;
    const char* p = static_cast<const char*>(origin);
    for (Buffer& b : buffers_)
      if (p >= b.address && p < b.address + b.bytes && (!found || b.writable == write)) found = &b;
    return found;
  }
  static std::string elements(int64_t at, int element, int64_t count) {
    const int64_t first = at >= 0 ? at / element : -((-at + element - 1) / element);
    if (count == 1) return "element " + std::to_string(first);
    return "elements " + std::to_string(first) + ".." + std::to_string(first + count - 1);
  }
  static void record(Buffer& b, int64_t at, int64_t bytes, bool write, uint32_t thread) {
    if (!write) { b.bytes_read += bytes; return; }
    b.bytes_written += bytes;
    for (int64_t i = at; i < at + bytes; ++i) {
      b.rewritten += b.writers[i] != 0 && b.writers[i] != thread + 1;
      b.writers[i] = thread + 1;
    }
  }

  std::vector<Buffer> buffers_;
};

}  // namespace emulator
}  // namespace tileops
