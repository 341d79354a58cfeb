// The tensor memory accelerator: tiles between global and shared memory, issued by one thread, completed on an mbarrier.
#pragma once

#include "tileops/barrier.h"
#include "tileops/tensor_map.h"

namespace tileops {

// Which lines leave the L2 cache first.
enum class L2 : uint64_t {
  kEvictNormal = 0x1000000000000000, kEvictFirst = 0x12f0000000000000, kEvictLast = 0x14f0000000000000,
};

// Coordinates of a box in elements, innermost first. A box may lie outside the tensor: what is read there is zero, what is written
// there is dropped. Seen on an H200 to be illegal instructions: an innermost coordinate that is no multiple of 16 bytes, and a
// store or reduction with any coordinate below 0 (loads take those). A store writes whole 16 bytes, also where the tensor's row
// ends within them (seen there, too): rows that are written have a multiple of 16 bytes.
template <int Rank> struct coordinates { int v[Rank]; };
template <typename... I> TILEOPS_WORD coordinates<sizeof...(I)> at(I... i) { return {{static_cast<int>(i)...}}; }

TILEOPS_WORD void prefetch_tensor_map(const tensor_map& map, site) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

#define TILEOPS_TMA_LOAD(rank, box, ...)                                                                                   \
  asm volatile("cp.async.bulk.tensor." rank ".shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "         \
               "[%0], [%1, " box "], [%2], %3;" ::"r"(detail::shared_address(dst)), "l"(&map),                             \
               "r"(detail::shared_address(b)), "l"(static_cast<uint64_t>(hint)), __VA_ARGS__ : "memory")
#define TILEOPS_TMA_MULTICAST(rank, box, ...)                                                                              \
  asm volatile("cp.async.bulk.tensor." rank ".shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"      \
               ".L2::cache_hint [%0], [%1, " box "], [%2], %4, %3;" ::"r"(detail::shared_address(dst)), "l"(&map),         \
               "r"(detail::shared_address(b)), "l"(static_cast<uint64_t>(hint)), "h"(ctas), __VA_ARGS__ : "memory")
#define TILEOPS_TMA_STORE(op, kind, rank, box, ...)                                                                        \
  asm volatile(op "." rank ".global.shared::cta" kind ".bulk_group [%0, " box "], [%1];" ::"l"(&map),                      \
               "r"(detail::shared_address(src)), __VA_ARGS__ : "memory")

// The box at `c` into shared memory; its bytes count on the barrier `b`.
template <L2 hint = L2::kEvictNormal, typename T, int Rank>
TILEOPS_WORD void tma_load(shared_ptr<T> dst, const tensor_map& map, coordinates<Rank> c, shared_ptr<mbarrier> b, site) {
  static_assert(Rank >= 2 && Rank <= 4, "boxes have 2 to 4 dimensions");
  if constexpr (Rank == 2) TILEOPS_TMA_LOAD("2d", "{%4, %5}", "r"(c.v[0]), "r"(c.v[1]));
  if constexpr (Rank == 3) TILEOPS_TMA_LOAD("3d", "{%4, %5, %6}", "r"(c.v[0]), "r"(c.v[1]), "r"(c.v[2]));
  if constexpr (Rank == 4) TILEOPS_TMA_LOAD("4d", "{%4, %5, %6, %7}", "r"(c.v[0]), "r"(c.v[1]), "r"(c.v[2]), "r"(c.v[3]));
}

// The same into each CTA of the cluster whose bit is set, at the same place, on its own barrier at the same place.
template <L2 hint = L2::kEvictNormal, typename T, int Rank>
TILEOPS_WORD void tma_load_multicast(shared_ptr<T> dst, const tensor_map& map, coordinates<Rank> c, shared_ptr<mbarrier> b,
                                     uint16_t ctas, site) {
  static_assert(Rank >= 2 && Rank <= 4, "boxes have 2 to 4 dimensions");
  if constexpr (Rank == 2) TILEOPS_TMA_MULTICAST("2d", "{%5, %6}", "r"(c.v[0]), "r"(c.v[1]));
  if constexpr (Rank == 3) TILEOPS_TMA_MULTICAST("3d", "{%5, %6, %7}", "r"(c.v[0]), "r"(c.v[1]), "r"(c.v[2]));
  if constexpr (Rank == 4) TILEOPS_TMA_MULTICAST("4d", "{%5, %6, %7, %8}", "r"(c.v[0]), "r"(c.v[1]), "r"(c.v[2]), "r"(c.v[3]));
}

// The box at `c` from shared memory. What other threads wrote there: fence_async_shared by each, then a barrier, then this.
template <typename T, int Rank>
TILEOPS_WORD void tma_store(const tensor_map& map, coordinates<Rank> c, shared_ptr<T> src, site) {
  static_assert(Rank >= 2 && Rank <= 4, "boxes have 2 to 4 dimensions");
  if constexpr (Rank == 2) TILEOPS_TMA_STORE("cp.async.bulk.tensor", "", "2d", "{%2, %3}", "r"(c.v[0]), "r"(c.v[1]));
  if constexpr (Rank == 3) TILEOPS_TMA_STORE("cp.async.bulk.tensor", "", "3d", "{%2, %3, %4}", "r"(c.v[0]), "r"(c.v[1]), "r"(c.v[2]));
  if constexpr (Rank == 4)
    TILEOPS_TMA_STORE("cp.async.bulk.tensor", "", "4d", "{%2, %3, %4, %5}", "r"(c.v[0]), "r"(c.v[1]), "r"(c.v[2]), "r"(c.v[3]));
}

// The same, added to what is there (in the tensor map's dtype), one element at a time atomically, in no fixed order.
template <typename T, int Rank>
TILEOPS_WORD void tma_reduce_add(const tensor_map& map, coordinates<Rank> c, shared_ptr<T> src, site) {
  static_assert(Rank >= 2 && Rank <= 4, "boxes have 2 to 4 dimensions");
  if constexpr (Rank == 2) TILEOPS_TMA_STORE("cp.reduce.async.bulk.tensor", ".add.tile", "2d", "{%2, %3}", "r"(c.v[0]), "r"(c.v[1]));
  if constexpr (Rank == 3)
    TILEOPS_TMA_STORE("cp.reduce.async.bulk.tensor", ".add.tile", "3d", "{%2, %3, %4}", "r"(c.v[0]), "r"(c.v[1]), "r"(c.v[2]));
  if constexpr (Rank == 4)
    TILEOPS_TMA_STORE("cp.reduce.async.bulk.tensor", ".add.tile", "4d", "{%2, %3, %4, %5}", "r"(c.v[0]), "r"(c.v[1]), "r"(c.v[2]), "r"(c.v[3]));
}

#undef TILEOPS_TMA_LOAD
#undef TILEOPS_TMA_MULTICAST
#undef TILEOPS_TMA_STORE

// `bytes` consecutive bytes, a multiple of 16 at addresses of 16; no tensor map.
template <typename T>
TILEOPS_WORD void bulk_load(shared_ptr<T> dst, global_ptr<const T> src, int64_t offset, int bytes, shared_ptr<mbarrier> b, site) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
               "r"(detail::shared_address(dst)), "l"(src + offset), "r"(bytes), "r"(detail::shared_address(b)) : "memory");
}
template <typename T>
TILEOPS_WORD void bulk_store(global_ptr<T> dst, int64_t offset, shared_ptr<T> src, int bytes, site) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::
               "l"(dst + offset), "r"(detail::shared_address(src)), "r"(bytes) : "memory");
}

// Stores since the last commit, by this thread, become a group.
TILEOPS_WORD void store_commit(site) { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most `Pending` groups of this thread are unfinished: their shared memory has been read, or all is written.
template <int Pending>
TILEOPS_WORD void store_wait_read(site) { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory"); }
template <int Pending>
TILEOPS_WORD void store_wait(site) { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory"); }

}  // namespace tileops
