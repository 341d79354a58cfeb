// Host meaning of csrc/include/tileops/barrier.h: the state of an mbarrier is the emulator's, its bytes are not to be touched.
#pragma once

#include "tileops/memory.h"

namespace tileops {

struct mbarrier { uint64_t state; };

TILEOPS_WORD void init_barrier(shared_ptr<mbarrier> b, int arrivals, site s) {
  emulator::machine->init_barrier(b.byte_offset, arrivals, s.number);
}
TILEOPS_WORD void fence_barrier_init(site s) { emulator::machine->fence_barrier_init(s.number); }

TILEOPS_WORD void arrive(shared_ptr<mbarrier> b, site s) { emulator::machine->arrive(b.byte_offset, -1, false, 0, s.number); }
TILEOPS_WORD void arrive_expect_bytes(shared_ptr<mbarrier> b, int bytes, site s) {
  emulator::machine->arrive(b.byte_offset, -1, true, bytes, s.number);
}
TILEOPS_WORD void arrive_at_rank(shared_ptr<mbarrier> b, int rank, site s) {
  emulator::machine->arrive(b.byte_offset, rank, false, 0, s.number);
}

TILEOPS_WORD void wait(shared_ptr<mbarrier> b, uint32_t parity, site s) {
  emulator::machine->wait(b.byte_offset, parity, false, true, s.number);
}
TILEOPS_WORD void wait_cluster(shared_ptr<mbarrier> b, uint32_t parity, site s) {
  emulator::machine->wait(b.byte_offset, parity, true, true, s.number);
}
TILEOPS_WORD bool test_wait(shared_ptr<mbarrier> b, uint32_t parity, site s) {
  return emulator::machine->wait(b.byte_offset, parity, false, false, s.number);
}

TILEOPS_WORD void fence_async_shared(site s) { emulator::machine->fence_async(true, s.number); }
TILEOPS_WORD void fence_async_global(site s) { emulator::machine->fence_async(false, s.number); }

}  // namespace tileops
