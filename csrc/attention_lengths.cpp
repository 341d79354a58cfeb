#include "attention_lengths.h"

#include <algorithm>
#include <type_traits>

#include "allocate.h"
#include "attention_launch.h"
#include "gemm_problem.h"
#include "kernels/attention_tiles_params.h"
#include "measured_choice.h"
#include "tma.h"

// A build without such kernels has no parameters of theirs.
#if __has_include("flash_attention_sm_90a_lengths_params.h")
#include "flash_attention_sm_90a_lengths_params.h"
#define TILEOPS_LENGTHS
#endif
#if __has_include("flash_attention_sm_90a_paged_params.h")
#include "flash_attention_sm_90a_paged_params.h"
#define TILEOPS_PAGED
#endif
#if __has_include("flash_attention_portable_lengths_params.h")
#include "flash_attention_portable_lengths_params.h"
#define TILEOPS_PORTABLE_LENGTHS
#endif
#if __has_include("flash_attention_portable_paged_params.h")
#include "flash_attention_portable_paged_params.h"
#define TILEOPS_PORTABLE_PAGED
#endif

extern "C" void attention_tiles(tileops::attention_tiles_params);

namespace tileops {

namespace {

// What is computed on the device for a call, and lives until its kernels have been launched.
struct Tiles {
  Owned list, count;
  int64_t most;

  int32_t* data() const { return static_cast<int32_t*>(mutable_data(list.get())); }
};

Tiles list_tiles(const AttentionVariant& v, const AttentionCall& call, const Lengths& lengths, const TensorView& like,
                 cudaStream_t stream) {
  const char* doing = "allocating the list of tiles";
  Tiles tiles;
  // With offsets: of each request, and of the rows behind it that it leaves out; of those in front of all and behind all.
  tiles.most = lengths.cu_seqlens_q ? call.sq() / v.bm + std::min(2 * lengths.requests + 2, call.sq())
                                    : ceil_div(lengths.queries, v.bm) * lengths.requests;
  tiles.list = empty_int32({tiles.most, 8}, like, doing);
  tiles.count = empty_int32({1}, like, doing);
  attention_tiles_params p = {};
  p.cu_seqlens_q = lengths.cu_seqlens_q;
  p.cu_seqlens_k = lengths.cu_seqlens_k;
  p.seqlens_k = lengths.seqlens_k;
  p.tiles = tiles.data();
  p.tile_count = static_cast<int32_t*>(mutable_data(tiles.count.get()));
  p.requests = static_cast<int32_t>(lengths.requests);
  p.queries = static_cast<int32_t>(lengths.queries);
  p.all_queries = static_cast<int32_t>(call.sq());
  p.most_queries = static_cast<int32_t>(lengths.most_queries);
  p.most_keys = static_cast<int32_t>(lengths.most_keys);
  p.lse_stride = static_cast<int32_t>(lengths.lse_stride);
  p.rows = v.bm;
  const auto kernel = reinterpret_cast<const void*>(attention_tiles);
  launch_kernel({v.op, "attention_tiles", kernel, dim3(1, 1, 1), attention_tiles_threads, attention_tiles_shared_bytes, 0}, &p,
                stream);
  return tiles;
}

// Columns, tokens, heads, batch or page. The stride of a dimension of one is any, and 0 always fits.
tensor_map map_tokens(const AttentionTensor& t, DType type, MapBox box, int64_t rows) {
  const auto bytes = [&](int dim) { return t.extents[dim] > 1 ? t.strides[dim] * item_size(type) : 0; };
  box.rows = static_cast<int>(rows);
  return map_of({t.data, 4, {t.columns, t.extents[1], t.extents[2], t.extents[0]}, {bytes(1), bytes(2), bytes(0)}, type, box});
}

// What says where tensors lie: TMA's maps, or addresses and strides.
template <typename Params>
void set_tensors(Params* p, const AttentionVariant& v, const AttentionCall& call, int64_t together) {
  if constexpr (std::is_same_v<decltype(p->q), tensor_map>) {
    p->q = map_tokens(call.q, v.x, v.maps[0], v.maps[0].rows);
    p->k = map_tokens(call.k, v.x, v.maps[1], together);
    p->v = map_tokens(call.v, v.x, v.maps[2], together);
  } else {
    p->q = call.q.data;
    p->k = call.k.data;
    p->v = call.v.data;
    p->head_dim = static_cast<int32_t>(call.head_dim());
    set_strides(p->q_stride, call.q);
    set_strides(p->k_stride, call.k);
    set_strides(p->v_stride, call.v);
  }
}

template <bool kPaged, typename Params>
void set_keys(Params* p, const AttentionCall& call, const Lengths& lengths, int64_t together) {
  if constexpr (kPaged) {
    p->pages = static_cast<int32_t>(call.k.extents[0]);
    p->page = static_cast<int32_t>(call.sk());
    p->block_table = lengths.block_table;
    p->block_table_stride[0] = lengths.block_table_stride;
    p->block_table_stride[1] = 1;
    p->requests = static_cast<int32_t>(lengths.requests);
    p->table = static_cast<int32_t>(lengths.table_width);
    p->unit = static_cast<int32_t>(together);
    p->inverse = inverse_of(call.sk());
  } else {
    p->sk = static_cast<int32_t>(call.sk());
  }
}

template <typename Params, bool kPaged>
void launch_tiles(Device& device, const AttentionVariant& v, const AttentionCall& call, const Lengths& lengths,
                  const TensorView& like, cudaStream_t stream) {
  const Tiles tiles = list_tiles(v, call, lengths, like, stream);
  const int64_t together = v.paged ? rows_together(call.sk(), v.bn) : v.bn;
  Params p = {};
  set_tensors(&p, v, call, together);
  p.out = const_cast<void*>(call.out.data);
  p.lse = call.lse;
  p.batches = 1;
  p.heads = static_cast<int32_t>(call.heads());
  p.kv_heads = static_cast<int32_t>(call.kv_heads());
  p.sq = static_cast<int32_t>(call.sq());
  p.head_dim_v = static_cast<int32_t>(call.head_dim_v());
  p.most_tiles = static_cast<int32_t>(tiles.most);
  const int64_t* out = call.out.strides;
  const int64_t out_strides[] = {0, out[2], out[1], out[3]};
  std::copy(out_strides, out_strides + 4, p.out_stride);
  std::copy(call.lse_strides, call.lse_strides + 3, p.lse_stride);
  p.sinks = call.sinks;
  p.sinks_stride[0] = call.sinks_stride;  // the same for all rows
  p.sinks_dtype = static_cast<int32_t>(call.sinks_type);
  p.tiles = tiles.data();
  p.tiles_stride[0] = 8;
  p.tiles_stride[1] = 1;
  p.tile_count = mutable_data(tiles.count.get());
  set_keys<kPaged>(&p, call, lengths, together);
  p.scale_log2 = call.scale_log2;
  p.unscale = 1 / call.scale_log2;
  p.cap_scale = call.cap_scale;
  p.window_left = static_cast<int32_t>(call.window_left);
  p.window_right = static_cast<int32_t>(call.window_right);
  // A CTA takes tile after tile, so there are no more than run at a time, nor more than may have one.
  const auto grid = static_cast<unsigned>(std::min<int64_t>(resident_ctas(device, v), tiles.most * call.heads()));
  launch_kernel({v.op, v.name, v.kernel, dim3(grid, 1, 1), v.threads, v.shared_bytes, 0}, &p, stream);
}

}  // namespace

int64_t rows_together(int64_t page, int64_t keys) {
  int64_t both = page | keys;
  both &= -both;
  return std::min<int64_t>(both, 128);
}

int64_t inverse_of(int64_t page) { return ceil_div(int64_t{1} << 32, page); }

bool has_exact_pages(int64_t page, int64_t keys) {
  const int64_t error = inverse_of(page) * page - (int64_t{1} << 32);
  return static_cast<double>(keys) * static_cast<double>(error) < 4294967296.0;
}

bool can_number(int64_t page, int64_t pages) {
  return static_cast<double>(page) * static_cast<double>(pages) <= kMaxExtent && has_exact_pages(page, page * pages);
}

void launch_lengths(Device& device, const AttentionVariant& v, const AttentionCall& call, const Lengths& lengths,
                    const TensorView& like, cudaStream_t stream) {
#ifdef TILEOPS_PAGED
  if (v.target == Target::sm_90a && v.paged) {
    return launch_tiles<flash_attention_sm_90a_paged_params, true>(device, v, call, lengths, like, stream);
  }
#endif
#ifdef TILEOPS_LENGTHS
  if (v.target == Target::sm_90a) {
    return launch_tiles<flash_attention_sm_90a_lengths_params, false>(device, v, call, lengths, like, stream);
  }
#endif
#ifdef TILEOPS_PORTABLE_PAGED
  if (v.paged) return launch_tiles<flash_attention_portable_paged_params, true>(device, v, call, lengths, like, stream);
#endif
#ifdef TILEOPS_PORTABLE_LENGTHS
  launch_tiles<flash_attention_portable_lengths_params, false>(device, v, call, lengths, like, stream);
#endif
}

}  // namespace tileops
