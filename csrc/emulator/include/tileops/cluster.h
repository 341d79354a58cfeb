// Host meaning of csrc/include/tileops/cluster.h.
#pragma once

#include "tileops/barrier.h"

namespace tileops {

TILEOPS_WORD int cluster_rank() { return emulator::machine->rank; }
TILEOPS_WORD int cluster_size() { return emulator::machine->cluster; }

TILEOPS_WORD void cluster_arrive(site s) { emulator::machine->cluster_arrive(s.number); }
TILEOPS_WORD void cluster_wait(site s) { emulator::machine->cluster_wait(s.number); }
TILEOPS_WORD void cluster_sync(site s) { cluster_arrive(s); cluster_wait(s); }

TILEOPS_WORD float load_shared_of_rank(shared_ptr<float> p, int offset, int rank, site s) {
  float v;
  memcpy(&v, emulator::machine->access_shared((p + offset).byte_offset, 4, false, rank, s.number), 4);
  return v;
}
TILEOPS_WORD void store_shared_of_rank(shared_ptr<float> p, int offset, int rank, float v, site s) {
  memcpy(emulator::machine->access_shared((p + offset).byte_offset, 4, true, rank, s.number), &v, 4);
}
TILEOPS_WORD void store_async_of_rank(shared_ptr<float> p, int offset, int rank, float v, shared_ptr<mbarrier> b, site s) {
  emulator::machine->store_async((p + offset).byte_offset, rank, detail::float_bits(v), b.byte_offset, s.number);
}

}  // namespace tileops
