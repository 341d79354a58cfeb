// mbarriers: arrivals and transferred bytes that complete a phase; and the fences between generic and asynchronous accesses.
#pragma once

#include "tileops/memory.h"

namespace tileops {

// Eight bytes of shared memory. A phase completes when its arrivals and its expected bytes are all there; the phases have
// parity 0, 1, 0, ... A wait for parity 1 on a fresh barrier therefore passes at once.
struct mbarrier { uint64_t state; };

namespace detail {
template <typename T> TILEOPS_WORD uint32_t shared_address(const T* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
}  // namespace detail

// By one thread; then fence_barrier_init, then a barrier of all who use it (of the cluster, if a peer does).
TILEOPS_WORD void init_barrier(shared_ptr<mbarrier> b, int arrivals, site) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(detail::shared_address(b)), "r"(arrivals) : "memory");
}
TILEOPS_WORD void fence_barrier_init(site) { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival, which releases what this thread has done.
TILEOPS_WORD void arrive(shared_ptr<mbarrier> b, site) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(detail::shared_address(b)) : "memory");
}
// One arrival, and `bytes` more that asynchronous copies must bring before the phase completes.
TILEOPS_WORD void arrive_expect_bytes(shared_ptr<mbarrier> b, int bytes, site) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(detail::shared_address(b)), "r"(bytes) : "memory");
}
// One arrival on the barrier at the same place in the CTA of that rank in the cluster (which may be this one). Hands back what
// was only read: it orders no writes beyond this CTA. (With release.cluster it would, by a memory barrier of the whole GPU.)
TILEOPS_WORD void arrive_at_rank(shared_ptr<mbarrier> b, int rank, site) {
  asm volatile(
      "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(detail::shared_address(b)), "r"(rank)
      : "memory");
}

// Until the phase of this parity has completed.
TILEOPS_WORD void wait(shared_ptr<mbarrier> b, uint32_t parity, site) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "RETRY:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @done bra DONE;\n bra RETRY;\n"
      "DONE:\n}\n" ::"r"(detail::shared_address(b)), "r"(parity)
      : "memory");
}
// The same where arrivals come from other CTAs of the cluster.
TILEOPS_WORD void wait_cluster(shared_ptr<mbarrier> b, uint32_t parity, site) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "RETRY:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n @done bra DONE;\n bra RETRY;\n"
      "DONE:\n}\n" ::"r"(detail::shared_address(b)), "r"(parity)
      : "memory");
}
// Whether it has completed, without waiting.
TILEOPS_WORD bool test_wait(shared_ptr<mbarrier> b, uint32_t parity, site) {
  uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.b32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(detail::shared_address(b)), "r"(parity) : "memory");
  return done != 0;
}

// What this thread has written to shared memory becomes visible to wgmma and TMA. Each writing thread, before the barrier.
TILEOPS_WORD void fence_async_shared(site) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for global memory that TMA will read.
TILEOPS_WORD void fence_async_global(site) { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace tileops
