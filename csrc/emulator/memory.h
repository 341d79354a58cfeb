// What the emulator knows of each byte of global and shared memory.
#pragma once

#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

namespace tileops {
namespace emulator {

// Texts say "site 12"; tileops_dsl/emulate.py puts the line of the tile program there. A thread of -1: the block's fault.
struct Fault {
  std::string kind;
  int site;
  std::string text;
  int thread = -1;
};

inline std::string site_text(int site) { return "site " + std::to_string(site); }

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

  void* access(const void* origin, int64_t byte_offset, int element, int count, bool write, uint32_t thread, int site) {
    const std::string verb = write ? "writes " : "reads ";
    Buffer* b = find(origin, write);
    if (!b)
      throw Fault{"out_of_bounds", site, verb + "through a " + (origin ? "pointer into no buffer of" : "null pointer in")
                  + " this launch; give global() a pointer of the parameters as it came"};
    const int64_t bytes = static_cast<int64_t>(element) * count, alignment = bytes < 16 ? bytes : 16;
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
    record(*b, at, bytes, write, thread);
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
  static std::string elements(int64_t at, int element, int count) {
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

// The arena of one CTA. Two accesses of one byte by different threads, one of them a write, are a race unless a barrier
// lies between: `epoch` counts the barriers that the CTA has passed.
class SharedMemory {
 public:
  explicit SharedMemory(int bytes) : bytes_(bytes), storage_(new char[bytes + kAlignment]), shadow_(bytes) {
    const uintptr_t p = reinterpret_cast<uintptr_t>(storage_.get());
    arena_ = storage_.get() + (kAlignment - p % kAlignment);
  }

  void reset() {
    for (int i = 0; i < bytes_; ++i) arena_[i] = '\xff';  // NaN in each of the element types
    shadow_.assign(bytes_, Shadow());
  }

  void* access(int64_t at, int bytes, bool write, int thread, int64_t epoch, int site) {
    const std::string verb = write ? "writes " : "reads ";
    const auto where = [&] { return "shared bytes " + std::to_string(at) + ".." + std::to_string(at + bytes - 1); };
    if (at < 0 || at > bytes_ - bytes)
      throw Fault{"out_of_bounds", site, verb + where() + " of the " + std::to_string(bytes_)
                  + " that this launch has; raise the launch's shared bytes or bound the offset"};
    if (at % bytes)
      throw Fault{"misaligned", site, verb + where() + ", but the offset is no multiple of " + std::to_string(bytes)
                  + "; align the buffer in the shared-memory plan"};
    const Event self{epoch, thread, site};
    for (int64_t i = at; i < at + bytes; ++i) {
      Shadow& s = shadow_[i];
      if (!write && s.write.thread < 0)
        throw Fault{"unwritten_shared", site, "reads " + where()
                      + ", which no thread of the block has written yet; store them first, with a barrier between"};
      if (races(s.write, self)) throw race(verb + where(), "wrote", s.write, site);
      if (write && races(s.read, self)) throw race(verb + where(), "reads", s.read, site);
      if (write && races(s.other_read, self)) throw race(verb + where(), "reads", s.other_read, site);
      if (write) {
        s.write = self;
      } else if (s.read.epoch != epoch || s.read.thread == thread) {
        s.read = self;
      } else {
        s.other_read = self;
      }
    }
    return arena_ + at;
  }

 private:
  struct Event { int64_t epoch = -1; int thread = -1; int site = 0; };
  struct Shadow { Event write, read, other_read; };  // two readers: a later writer may be one of them

  static bool races(const Event& e, const Event& self) { return e.epoch == self.epoch && e.thread != self.thread; }
  static Fault race(const std::string& what, const std::string& did, const Event& other, int site) {
    return Fault{"race", site, what + ", which thread " + std::to_string(other.thread) + " " + did + " at "
                 + site_text(other.site) + " with no barrier between; put a barrier after the earlier of the two"};
  }

  static constexpr int kAlignment = 1024;
  int bytes_;
  std::unique_ptr<char[]> storage_;
  char* arena_;
  std::vector<Shadow> shadow_;
};

}  // namespace emulator
}  // namespace tileops
