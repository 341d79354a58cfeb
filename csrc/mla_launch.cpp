#include "mla_launch.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention_check.h"
#include "attention_lengths.h"
#include "gemm_problem.h"
#include "measured_choice.h"
#include "split.h"
#include "tma.h"

// A build without such kernels has no parameters of theirs.
#if __has_include("mla_decode_sm_90a_params.h") && __has_include("mla_decode_few_sm_90a_params.h")
#define TILEOPS_MLA
#define TILEOPS_MLA_SM_90A
#include "mla_decode_few_sm_90a_params.h"
#include "mla_decode_sm_90a_params.h"
#endif
#if __has_include("mla_decode_few_portable_params.h")
#define TILEOPS_MLA
#define TILEOPS_MLA_PORTABLE
#include "mla_decode_few_portable_params.h"
#endif

namespace tileops {

namespace {

constexpr const char* kOp = "mla_decode";

std::string describe(const MlaCall& call) {
  return std::string(dtype_name(call.type)) + " " + head_dims_text(call.head_dim, call.head_dim_v) + ", page " +
         std::to_string(call.page);
}

// Tokens of a page that a box of the cache has: the largest power of 2 that divides it, up to a block.
int unit_of(const MlaVariant& v, const MlaCall& call) {
  return static_cast<int>(std::min<int64_t>(call.page & -call.page, v.block));
}

// Rows [batch, query and head] with one stride over the latter.
bool has_rows(const MlaCall& call, const int64_t* strides) {
  return call.sq == 1 || call.heads == 1 || strides[1] == call.heads * strides[2];
}

// Each tile of rows reads the cache: as few tiles as can be; then as few rows beyond the call's. Warp groups before warps.
bool is_better(const MlaVariant& v, const MlaVariant& other, int64_t rows) {
  if (v.target != other.target) return v.target == Target::sm_90a;
  const int64_t tiles = ceil_div(rows, v.bm), others = ceil_div(rows, other.bm);
  return tiles < others || (tiles == others && v.bm < other.bm);
}

// Whether it is the kernel's but for the page size.
bool has_type_and_dims(const MlaVariant& v, const MlaCall& call) {
  return v.x == call.type && v.head_dim == call.head_dim && v.head_dim_v == call.head_dim_v;
}

// What the pages have that kernels of the device for such a call serve, though not this one.
std::string other_pages(const Device& device, const MlaCall& call) {
  std::vector<std::string> sizes;
  for (const MlaVariant* v = mla_variants; v != mla_variants + mla_variant_count; ++v) {
    if (!device.runs(v->target) || !has_type_and_dims(*v, call) || !why_other_kind(*v, call)) continue;
    const std::string size = v->unit > 0 ? "a multiple of " + std::to_string(v->unit) : std::to_string(v->block);
    if (std::find(sizes.begin(), sizes.end(), size) == sizes.end()) sizes.push_back(size);
  }
  std::string found;
  for (const std::string& size : sizes) found += (found.empty() ? "; there is one for pages of " : " or ") + size;
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
  if (!combine_for(v.target, v.x, v.head_dim_v)) return "this build has no mla_combine kernel for it";
  if (call.table_width == 0) return "block_table lists no page";
  if (call.page >= kMaxExtent || !has_exact_pages(call.page, call.table_width * call.page)) return "block_table lists more tokens than it can number";
  const int64_t cache[] = {call.pages, call.page, call.head_dim};
  const auto address = reinterpret_cast<uintptr_t>(call.cache);
  if (access_along(address, item_size(v.x), cache, {call.cache_strides[0], call.cache_strides[1], call.cache_strides[2]}, 2) !=
      Access::tma) {
    return "kv_cache is not aligned to 16 bytes";
  }
  const int64_t out[] = {call.batches, call.sq, call.heads, call.head_dim_v};
  const int64_t* s = call.out_strides;
  const auto out_address = reinterpret_cast<uintptr_t>(call.out);  // 0: to be allocated
  if (!has_rows(call, s) || access_along(out_address, item_size(v.x), out, {s[0], s[1], s[2], s[3]}, 3) != Access::tma) {
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
  const MlaVariant* best = found.first;
  for (int i = 0; i < mla_variant_count; ++i) {
    if (found.fits[i] && is_better(mla_variants[i], *best, call.rows())) best = &mla_variants[i];
  }
  const std::string& force = knobs().force;
  return {best, force.empty() ? "it serves " + describe(call) : "TILEOPS_FORCE=" + force + " is set"};
}

#ifdef TILEOPS_MLA

namespace {

tensor_map map_rows(const MlaVariant& v, MapBox box, const void* data, int64_t columns, int64_t rows, int64_t count,
                    const int64_t* strides) {
  const auto bytes = [&](int64_t extent, int64_t stride) { return extent > 1 ? stride * item_size(v.x) : 0; };
  return map_of({data, 3, {columns, rows, count}, {bytes(rows, strides[1]), bytes(count, strides[0])}, v.x, box});
}

// What all programs take: all but out, and what says how pages are read.
template <typename Params>
Params parameters(const MlaVariant& v, const MlaCall& call, const SplitProblem& problem, const Split& split) {
  Params p = {};
  if constexpr (std::is_same_v<decltype(p.q), tensor_map>) {
    const MapBox cache = {v.maps[1].columns, unit_of(v, call), v.maps[1].swizzle};
    p.q = map_rows(v, v.maps[0], call.q, v.head_dim, call.rows(), call.batches, call.q_strides);
    p.kv_cache = map_rows(v, cache, call.cache, v.head_dim, call.page, call.pages, call.cache_strides);
  } else {  // the stride of a dimension of one may be no multiple of 16 bytes
    p.q = call.q;
    p.kv_cache = call.cache;
    const int64_t q[] = {call.batches, call.rows()}, cache[] = {call.pages, call.page};
    for (int dim = 0; dim < 2; ++dim) {
      p.q_stride[dim] = q[dim] > 1 ? call.q_strides[dim] : 0;
      p.kv_cache_stride[dim] = cache[dim] > 1 ? call.cache_strides[dim] : 0;
    }
    p.q_stride[2] = p.kv_cache_stride[2] = 1;
  }
  p.lse = call.lse;
  p.block_table = call.block_table;
  p.cache_seqlens = call.cache_seqlens;
  set_split(&p, problem, split);
  p.n = static_cast<int32_t>(call.batches);
  p.rows = static_cast<int32_t>(call.rows());
  p.pages = static_cast<int32_t>(call.pages);
  p.table = static_cast<int32_t>(call.table_width);
  p.heads = static_cast<int32_t>(call.heads);
  p.sq = static_cast<int32_t>(call.sq);
  std::copy(call.lse_strides, call.lse_strides + 3, p.lse_stride);
  p.block_table_stride[0] = call.block_table_stride;
  p.block_table_stride[1] = 1;
  p.causal = call.causal;
  p.scale_log2 = call.scale_log2;
  return p;
}

// Of mla_decode_few.
template <typename Params>
void set_out(Params* p, const MlaCall& call, const int64_t* strides) {
  p->out = call.out;
  std::copy(strides, strides + 2, p->out_stride);
  p->out_stride[2] = 1;
}

void launch_decode(const MlaVariant& v, const MlaCall& call, const SplitProblem& problem, const Split& split, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(call.rows(), v.bm)), static_cast<unsigned>(problem.parts), 1);
  const Launch launch = {kOp, v.name, v.kernel, grid, v.threads, v.shared_bytes, 0, v.target == Target::sm_90a};
  const int64_t out_strides[] = {call.out_strides[0], call.heads > 1 ? call.out_strides[2] : call.out_strides[1]};
#ifdef TILEOPS_MLA_PORTABLE
  if (v.target == Target::portable) {
    auto p = parameters<mla_decode_few_portable_params>(v, call, problem, split);
    p.page = static_cast<int32_t>(call.page);
    p.inverse = inverse_of(call.page);
    set_out(&p, call, out_strides);
    return launch_kernel(launch, &p, stream);
  }
#endif
#ifdef TILEOPS_MLA_SM_90A
  if (v.maps[2].columns > 0) {
    auto p = parameters<mla_decode_sm_90a_params>(v, call, problem, split);
    p.page = static_cast<int32_t>(call.page);
    p.unit = unit_of(v, call);
    p.inverse = inverse_of(call.page);
    p.out = map_rows(v, v.maps[2], call.out, v.head_dim_v, call.rows(), call.batches, out_strides);
    launch_kernel(launch, &p, stream);
  } else {
    auto p = parameters<mla_decode_few_sm_90a_params>(v, call, problem, split);
    set_out(&p, call, out_strides);
    launch_kernel(launch, &p, stream);
  }
#endif
}

}  // namespace

void launch_mla(Device& device, const MlaVariant& v, const MlaCall& call, const TensorView& like, cudaStream_t stream) {
  const int resident = resident_ctas(device, v);
  const int64_t parts = parts_for(device, v.target, resident, ceil_div(call.rows(), v.bm));
  const SplitProblem problem = {kOp, call.batches, call.rows(), call.head_dim_v, parts, call.num_splits};
  const Split split = allocate_split(problem, like);
  launch_decode(v, call, problem, split, stream);
  SplitResult result = {call.out, call.lse, call.sq, call.heads, {}, {call.lse_strides[0], call.lse_strides[2], call.lse_strides[1]}};
  std::copy(call.out_strides, call.out_strides + 4, result.out_strides);
  launch_combine(device, v.target, v.x, problem, split, result, stream);
}

#else

void launch_mla(Device&, const MlaVariant&, const MlaCall&, const TensorView&, cudaStream_t) {}

#endif

}  // namespace tileops
