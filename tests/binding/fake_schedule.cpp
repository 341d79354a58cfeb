// The made-up CUDA's kernels that are written by hand: tiles are listed by a copy of the rule.
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include <algorithm>

#include "fake_cuda.h"
#include "kernels/attention_tiles_params.h"

extern "C" void attention_tiles(tileops::attention_tiles_params) {}

namespace {

using tileops::attention_tiles_params;

// csrc/kernels/attention_tiles.cu, with one thread.
class Lister {
 public:
  explicit Lister(const attention_tiles_params& params) : p(params) {}

  void list_all() {
    if (p.cu_seqlens_q) {
      list(0, p.cu_seqlens_q[0], 0, 0, 0);
      const int end = p.cu_seqlens_q[p.requests];
      list(end, p.all_queries - end, 0, 0, end);
    }
    for (int request = 0; request < p.requests; ++request) list_request(request);
    *p.tile_count = count_;
  }

 private:
  void list_request(int request) {
    const int first = p.cu_seqlens_q ? p.cu_seqlens_q[request] : request * p.queries;
    const int all = p.cu_seqlens_q ? p.cu_seqlens_q[request + 1] - first : p.queries;
    const int queries = p.cu_seqlens_q ? std::min(all, p.most_queries) : all;
    const int first_key = p.cu_seqlens_k ? p.cu_seqlens_k[request] : request;
    int keys = p.most_keys;
    if (p.cu_seqlens_k) keys = std::min(keys, p.cu_seqlens_k[request + 1] - first_key);
    if (p.seqlens_k) keys = std::min(keys, p.seqlens_k[request]);
    list(first, queries, first_key, keys, p.lse_stride ? request * p.lse_stride : first);
    list(first + queries, all - queries, 0, 0, first + queries);
  }

  void list(int first, int queries, int first_key, int keys, int lse) {
    for (int row = (queries + p.rows - 1) / p.rows * p.rows - p.rows; row >= 0; row -= p.rows) {
      const int tile[] = {first + row, row, queries, first_key, keys, lse + row, 0, 0};
      std::copy(tile, tile + 8, p.tiles + 8 * count_++);
    }
  }

  const attention_tiles_params& p;
  int count_ = 0;
};

void check_launch(const cudaLaunchConfig_t& config, int threads, int shared_bytes) {
  const dim3 grid = config.gridDim;
  const bool right = grid.x * grid.y * grid.z == 1 && int(config.blockDim.x) == threads && config.numAttrs == 0 &&
                     int(config.dynamicSmemBytes) == shared_bytes && config.stream == reinterpret_cast<cudaStream_t>(0x5);
  if (!right) abort();
}

}  // namespace

namespace fake {

bool launch_by_hand(const cudaLaunchConfig_t& config, const void* kernel, const void* params) {
  if (kernel != reinterpret_cast<const void*>(&attention_tiles)) return false;
  check_launch(config, tileops::attention_tiles_threads, tileops::attention_tiles_shared_bytes);
  Lister(*static_cast<const attention_tiles_params*>(params)).list_all();
  return true;
}

}  // namespace fake
