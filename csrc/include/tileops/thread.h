// Indices, barriers and shuffles.
#pragma once

#include "tileops/types.h"

namespace tileops {

TILEOPS_WORD int thread_index() { return static_cast<int>(threadIdx.x); }
TILEOPS_WORD int64_t block_index_x() { return static_cast<int64_t>(blockIdx.x); }
TILEOPS_WORD int64_t block_index_y() { return static_cast<int64_t>(blockIdx.y); }
TILEOPS_WORD int64_t block_index_z() { return static_cast<int64_t>(blockIdx.z); }
TILEOPS_WORD int64_t grid_size_x() { return static_cast<int64_t>(gridDim.x); }

// Barrier of all threads of the CTA; orders their shared and global accesses.
TILEOPS_WORD void sync_threads(site) { __syncthreads(); }

// The value of the lane whose index differs in the bits of lane_mask; all 32 lanes take part.
TILEOPS_WORD float shuffle_xor(float v, int lane_mask, site) { return __shfl_xor_sync(0xffffffffu, v, lane_mask); }

}  // namespace tileops
