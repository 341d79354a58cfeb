// One launch: clusters of CTAs one after the other, in an order drawn from the seed; the threads of each as fibers.
#pragma once

#include "products.h"

namespace tileops {
namespace emulator {

class Launch : public Products {
 public:
  using Products::Products;

  void* access_global(const void* origin, int64_t byte_offset, int element, int count, bool write, int site) override {
    at_site(site);
    return memory.access(origin, byte_offset, element, count, write, launch_thread(self()), site);
  }

  void register_index(int index, int count, int site) override {
    throw Fault{"register_index", near(site), "uses register " + text_of(index) + " of a fragment of "
                + text_of(count) + "; bound the index by the fragment's size"};
  }
  void register_unwritten(int index, int site) override {
    throw Fault{"unwritten_register", near(site), "reads " + (index < 0 ? "a register" : "register " + text_of(index))
                + " of a fragment before anything was written to it; fill the fragment or load it first"};
  }
  void register_misaligned(int index, int access_bytes, int site) override {
    throw Fault{"misaligned", site, "moves " + text_of(access_bytes) + " bytes at once from or to register "
                + text_of(index) + " of a fragment, which is not aligned to that; start at a multiple"};
  }

 private:
  int near(int site) { return site ? site : self().site; }
};

}  // namespace emulator
}  // namespace tileops
