// Clusters of CTAs, and the shared memory of the others (distributed shared memory).
#pragma once

#include "tileops/barrier.h"

namespace tileops {

TILEOPS_WORD int cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return static_cast<int>(r);
}
TILEOPS_WORD int cluster_size() {
  uint32_t n;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return static_cast<int>(n);
}

// Barrier of all threads of the cluster, whole or in its two halves.
TILEOPS_WORD void cluster_arrive(site) { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
TILEOPS_WORD void cluster_wait(site) { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
TILEOPS_WORD void cluster_sync(site s) { cluster_arrive(s); cluster_wait(s); }

// A value at the place of p in the shared memory of the CTA of that rank.
TILEOPS_WORD float load_shared_of_rank(shared_ptr<float> p, int offset, int rank, site) {
  float v;
  asm volatile(
      "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %1, %2;\n ld.shared::cluster.f32 %0, [remote];\n}\n"
      : "=f"(v) : "r"(detail::shared_address(p + offset)), "r"(rank) : "memory");
  return v;
}
TILEOPS_WORD void store_shared_of_rank(shared_ptr<float> p, int offset, int rank, float v, site) {
  asm volatile(
      "{\n .reg .b32 remote;\n mapa.shared::cluster.u32 remote, %0, %1;\n st.shared::cluster.f32 [remote], %2;\n}\n" ::
      "r"(detail::shared_address(p + offset)), "r"(rank), "f"(v) : "memory");
}
// The same without waiting: its 4 bytes count on the barrier at the place of b in that CTA.
TILEOPS_WORD void store_async_of_rank(shared_ptr<float> p, int offset, int rank, float v, shared_ptr<mbarrier> b, site) {
  asm volatile(
      "{\n .reg .b32 remote, there;\n mapa.shared::cluster.u32 remote, %0, %1;\n mapa.shared::cluster.u32 there, %2, %1;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [remote], %3, [there];\n}\n" ::
      "r"(detail::shared_address(p + offset)), "r"(rank), "r"(detail::shared_address(b)), "r"(__float_as_uint(v)) : "memory");
}

}  // namespace tileops
