#include "mla_launch.h"

#include <algorithm>

#include "allocate.h"
#include "attention_check.h"
#include "gemm_problem.h"
#include "measured_choice.h"
#include "row_op.h"
#include "tma.h"

// A build without such kernels has no parameters of theirs.
#if __has_include("mla_decode_sm_90a_params.h") && __has_include("mla_combine_params.h")
#define TILEOPS_MLA
#include "kernels/mla_schedule_params.h"
#include "mla_combine_params.h"
#include "mla_decode_sm_90a_params.h"

extern "C" void mla_schedule(tileops::mla_schedule_params);
#endif

namespace tileops {

namespace {

constexpr const char *kOp = "mla_decode", *kCombine = "mla_combine";

const RowVariant* combine_for(Target target, DType type) {
  static const RowTable table(kCombine);
  const auto& rows = table.rows(target, DType::f32, type);
  return rows.empty() ? nullptr : rows[0];
}

std::string describe(const MlaCall& call) {
  return std::string(dtype_name(call.type)) + " " + head_dims_text(call.head_dim, call.head_dim_v) + ", page " +
         std::to_string(call.page);
}

// Tokens of a page that a box of the cache has: the largest power of 2 that divides it, up to a block.
int unit_of(const MlaVariant& v, const MlaCall& call) {
  return static_cast<int>(std::min<int64_t>(call.page & -call.page, v.block));
}

// 2^32 / page, rounded up: the high half of its product with a token is the token's page, as long as the product's error,
// token * (inverse * page - 2^32), stays below 2^32.
int64_t inverse_of(const MlaCall& call) { return ceil_div(int64_t{1} << 32, call.page); }

bool has_exact_pages(const MlaCall& call) {
  const int64_t error = inverse_of(call) * call.page - (int64_t{1} << 32);
  return static_cast<double>(call.table_width * call.page) * static_cast<double>(error) < 4294967296.0;
}

// Rows [batch, query and head] with one stride over the latter.
bool has_rows(const MlaCall& call, const int64_t* strides) {
  return call.sq == 1 || call.heads == 1 || strides[1] == call.heads * strides[2];
}

// Whether it is the kernel's but for the page size.
bool has_type_and_dims(const MlaVariant& v, const MlaCall& call) {
  return v.x == call.type && v.head_dim == call.head_dim && v.head_dim_v == call.head_dim_v;
}

// What the pages have that kernels of the device for such a call serve, though not this one.
std::string other_pages(const Device& device, const MlaCall& call) {
  std::string found;
  for (const MlaVariant* v = mla_variants; v != mla_variants + mla_variant_count; ++v) {
    if (!device.runs(v->target) || !has_type_and_dims(*v, call) || !why_other_kind(*v, call)) continue;
    found += (found.empty() ? "; there is one for pages of " : " or ") + std::string(v->unit > 0 ? "a multiple of " : "") +
             std::to_string(v->unit > 0 ? v->unit : v->block);
  }
  return found;
}

}  // namespace

const char* why_other_kind(const MlaVariant& v, const MlaCall& call) {
  if (!has_type_and_dims(v, call)) return "it is for another dtype or other head dims";
  const bool right = v.unit > 0 ? call.page > 0 && call.page % v.unit == 0 : call.page == v.block;
  return right ? nullptr : "it is for other page sizes";
}

const char* why_not(const MlaVariant& v, const MlaCall& call) {
  if (const char* reason = why_other_kind(v, call)) return reason;
  if (!combine_for(v.target, v.x)) return "this build has no mla_combine kernel for it";
  if (call.table_width == 0) return "block_table lists no page";
  if (call.page >= kMaxExtent || !has_exact_pages(call)) return "block_table lists more tokens than it can number";
  const int64_t cache[] = {call.pages, call.page, call.head_dim};
  const auto address = reinterpret_cast<uintptr_t>(call.cache);
  if (access_along(address, item_size(v.x), cache, {call.cache_strides[0], call.cache_strides[1], call.cache_strides[2]}, 2) !=
      Access::tma) {
    return "kv_cache is not aligned to 16 bytes";
  }
  const int64_t out[] = {call.batches, call.sq, call.heads, call.head_dim_v};
  const int64_t* s = call.out_strides;
  if (!has_rows(call, s) || access_along(0, item_size(v.x), out, {s[0], s[1], s[2], s[3]}, 3) != Access::tma) {
    return "out has other strides than those of whole rows of queries and heads, aligned to 16 bytes";
  }
  if (call.sq > 1 && call.lse_strides[2] != 1) return "lse has a stride between queries";
  const bool counts = call.batches < kMaxExtent && call.rows() < kMaxExtent && call.pages < kMaxExtent;
  return counts && call.batches <= 65535 && call.sq <= 65535 ? nullptr : "it has room for 65535 requests and queries";
}

MlaChoice choose_mla(const Device& device, const MlaCall& call) {
  const Fitting<MlaVariant> found = fitting(mla_variants, mla_variant_count, device, call);
  if (!found.first) {
    const std::string others = found.last_reason ? "" : other_pages(device, call);
    return {nullptr, none_fits(kOp, describe(call), device, found.last_reason) + others};
  }
  const std::string& force = knobs().force;
  return {found.first, force.empty() ? "it serves " + describe(call) : "TILEOPS_FORCE=" + force + " is set"};
}

#ifdef TILEOPS_MLA

namespace {

// What is computed on the device for a call, and lives until its kernels have been launched.
struct Workspace {
  Owned schedule, first_split, split_requests, partial, partial_lse;
  int64_t parts, splits;
};

// A part cuts at most one request, so that fewer requests than parts are split, into fewer than 2 * parts pieces.
Workspace allocate(const MlaVariant& v, const Device& device, const MlaCall& call, const TensorView& like) {
  Workspace w;
  const char* doing = "allocating the workspace of mla_decode";
  w.parts = std::max<int64_t>(device.multiprocessors / ceil_div(call.rows(), v.bm), 1);
  w.splits = std::min(2 * w.parts, w.parts + call.batches);
  w.schedule = empty_int32({w.parts, 8}, like, doing);
  w.first_split = empty_int32({call.batches + 1}, like, doing);
  w.split_requests = empty_int32({w.parts}, like, doing);
  w.partial = empty_contiguous({w.splits, call.rows(), call.head_dim_v}, DType::f32, like, doing);
  w.partial_lse = empty_contiguous({w.splits, call.rows()}, DType::f32, like, doing);
  return w;
}

void launch_schedule(const MlaVariant& v, const MlaCall& call, const Workspace& w, cudaStream_t stream) {
  mla_schedule_params p = {};
  p.cache_seqlens = call.cache_seqlens;
  p.schedule = static_cast<int32_t*>(mutable_data(w.schedule.get()));
  p.first_split = static_cast<int32_t*>(mutable_data(w.first_split.get()));
  p.split_requests = static_cast<int32_t*>(mutable_data(w.split_requests.get()));
  p.requests = static_cast<int32_t>(call.batches);
  p.parts = static_cast<int32_t>(w.parts);
  p.block = v.block;
  p.most_pieces = static_cast<int32_t>(std::min<int64_t>(call.num_splits, INT32_MAX));
  const auto kernel = reinterpret_cast<const void*>(mla_schedule);
  const int shared_bytes = mla_schedule_shared_bytes(p.parts);
  launch_kernel({kOp, "mla_schedule", kernel, dim3(1, 1, 1), mla_schedule_threads, shared_bytes, 0}, &p, stream);
}

tensor_map map_rows(const MlaVariant& v, MapBox box, const void* data, int64_t columns, int64_t rows, int64_t count,
                    const int64_t* strides) {
  const auto bytes = [&](int64_t extent, int64_t stride) { return extent > 1 ? stride * item_size(v.x) : 0; };
  return map_of({data, 3, {columns, rows, count}, {bytes(rows, strides[1]), bytes(count, strides[0])}, v.x, box});
}

void launch_decode(const MlaVariant& v, const MlaCall& call, const Workspace& w, cudaStream_t stream) {
  mla_decode_sm_90a_params p = {};
  const int64_t out_strides[] = {call.out_strides[0], call.heads > 1 ? call.out_strides[2] : call.out_strides[1]};
  p.unit = unit_of(v, call);
  p.inverse = inverse_of(call);
  const MapBox cache = {v.maps[1].columns, p.unit, v.maps[1].swizzle};
  p.q = map_rows(v, v.maps[0], call.q, v.head_dim, call.rows(), call.batches, call.q_strides);
  p.kv_cache = map_rows(v, cache, call.cache, v.head_dim, call.page, call.pages, call.cache_strides);
  p.out = map_rows(v, v.maps[2], call.out, v.head_dim_v, call.rows(), call.batches, out_strides);
  p.lse = call.lse;
  p.partial = mutable_data(w.partial.get());
  p.partial_lse = mutable_data(w.partial_lse.get());
  p.block_table = call.block_table;
  p.cache_seqlens = call.cache_seqlens;
  p.schedule = mutable_data(w.schedule.get());
  p.first_split = mutable_data(w.first_split.get());
  p.n = static_cast<int32_t>(call.batches);
  p.rows = static_cast<int32_t>(call.rows());
  p.pages = static_cast<int32_t>(call.pages);
  p.page = static_cast<int32_t>(call.page);
  p.table = static_cast<int32_t>(call.table_width);
  p.parts = static_cast<int32_t>(w.parts);
  p.splits = static_cast<int32_t>(w.splits);
  p.heads = static_cast<int32_t>(call.heads);
  p.sq = static_cast<int32_t>(call.sq);
  std::copy(call.lse_strides, call.lse_strides + 3, p.lse_stride);
  p.partial_stride[0] = call.rows() * v.head_dim_v;
  p.partial_stride[1] = v.head_dim_v;
  p.partial_stride[2] = p.partial_lse_stride[1] = p.block_table_stride[1] = p.schedule_stride[1] = 1;
  p.partial_lse_stride[0] = call.rows();
  p.block_table_stride[0] = call.block_table_stride;
  p.schedule_stride[0] = 8;
  p.causal = call.causal;
  p.scale_log2 = call.scale_log2;
  const dim3 grid(static_cast<unsigned>(ceil_div(call.rows(), v.bm)), static_cast<unsigned>(w.parts), 1);
  launch_kernel({kOp, v.name, v.kernel, grid, v.threads, v.shared_bytes, 0}, &p, stream);
}

// Rows [request, query, head].
void launch_combine(const RowVariant& v, const MlaCall& call, const Workspace& w, cudaStream_t stream) {
  mla_combine_params p = {};
  p.partial = mutable_data(w.partial.get());
  p.partial_lse = mutable_data(w.partial_lse.get());
  p.first_split = mutable_data(w.first_split.get());
  p.split_requests = mutable_data(w.split_requests.get());
  p.out = call.out;
  p.lse = call.lse;
  p.splits = w.splits;
  p.requests = call.batches;
  p.entries = call.batches + 1;
  p.batch = std::min(call.batches, w.parts - 1);
  p.outer = call.sq;
  p.inner = call.heads;
  p.cols = call.head_dim_v;
  const int64_t partial[] = {call.rows() * call.head_dim_v, call.heads * call.head_dim_v, call.head_dim_v, 1};
  const int64_t partial_lse[] = {call.rows(), call.heads, 1}, *lse = call.lse_strides;
  std::copy(partial, partial + 4, p.partial_stride);
  std::copy(partial_lse, partial_lse + 3, p.partial_lse_stride);
  std::copy(call.out_strides, call.out_strides + 4, p.out_stride);
  p.first_split_stride[0] = p.split_requests_stride[0] = 1;
  p.lse_stride[0] = lse[0];
  p.lse_stride[1] = lse[2];
  p.lse_stride[2] = lse[1];
  const dim3 grid(static_cast<unsigned>(ceil_div(call.heads, v.rows_per_block)), static_cast<unsigned>(call.sq),
                  static_cast<unsigned>(p.batch));
  launch_kernel({kOp, v.name, v.kernel, grid, v.threads, v.shared_bytes, v.paced}, &p, stream);
}

}  // namespace

void launch_mla(Device& device, const MlaVariant& v, const MlaCall& call, const TensorView& like, cudaStream_t stream) {
  const RowVariant& combine = *combine_for(v.target, v.x);
  resident_ctas(device, v);
  load_kernel(device, combine);
  const Workspace w = allocate(v, device, call, like);
  launch_schedule(v, call, w, stream);
  launch_decode(v, call, w, stream);
  if (w.parts > 1 && call.num_splits != 1) launch_combine(combine, call, w, stream);
}

#else

void launch_mla(Device&, const MlaVariant&, const MlaCall&, const TensorView&, cudaStream_t) {}

#endif

}  // namespace tileops
