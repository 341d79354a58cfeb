#include "attention_decode.h"

#include <algorithm>
#include <type_traits>

#include "allocate.h"
#include "attention_check.h"
#include "attention_launch.h"
#include "attention_lengths.h"
#include "gemm_problem.h"
#include "measured_choice.h"
#include "split.h"
#include "tma.h"

// A build without such kernels has no parameters of theirs.
#if __has_include("attention_decode_sm_90a_params.h")
#include "attention_decode_sm_90a_params.h"
#define TILEOPS_DECODE
#define TILEOPS_DECODE_SM_90A
#endif
#if __has_include("attention_decode_portable_params.h")
#include "attention_decode_portable_params.h"
#define TILEOPS_DECODE
#define TILEOPS_DECODE_PORTABLE
#endif

namespace tileops {

namespace {

std::string describe(const DecodeCall& call) {
  const AttentionCall& a = call.attention;
  return std::string(dtype_name(a.type)) + " " + head_dims_text(a.head_dim(), a.head_dim_v()) + (a.has_softcap ? " with a softcap" : "") +
         ", page " + std::to_string(a.sk()) + ", " + std::to_string(call.rows()) + " queries and heads of a group";
}

}  // namespace

const char* why_other_kind(const DecodeVariant& v, const DecodeCall& call) {
  const AttentionCall& a = call.attention;
  if (v.x != a.type) return "it is for another dtype";
  if (v.head_dim < a.head_dim() || v.head_dim_v < a.head_dim_v()) return "it is for smaller head dims";
  return v.softcap == a.has_softcap ? nullptr : v.softcap ? "it is for a softcap" : "it has no softcap";
}

const char* why_not(const DecodeVariant& v, const DecodeCall& call) {
  if (const char* reason = why_other_kind(v, call)) return reason;
  const AttentionCall& a = call.attention;
  if (call.packed) return "it is for as many queries of each request";
  if (call.rows() > v.bm) return "it is for fewer queries and heads of a group";
  if (a.k.copied || a.v.copied || a.out.copied) return "rows of the caches or of out are not aligned to 16 bytes";
  if (rows_together(a.sk(), v.bn) * 128 < v.bn) return "a page is not a multiple of 2";
  if (!can_number(a.sk(), call.table_width)) return "block_table lists more keys than it can number";
  if (!combine_for(v.target, v.x, a.head_dim_v())) return "this build has no mla_combine kernel for it";
  const bool counts = a.k.extents[0] <= kMaxExtent && call.requests() * a.kv_heads() <= kMaxExtent;
  return counts ? nullptr : "it counts pages and key heads in 32 bits";
}

namespace {

// Rows of 16 tokens from all over the cache, of long requests, and few for each multiprocessor: less on its way at a time is faster
// then (tileops_dsl/kernels/NOTES.md).
bool is_scattered(const Device& device, const DecodeCall& call) {
  const int64_t page = call.attention.sk(), keys = call.table_width * page;  // of a request, at most
  const int64_t all = call.requests() * call.attention.kv_heads() * keys;
  return rows_together(page, 64) == 16 && keys >= 4096 && all <= int64_t{4096} * device.multiprocessors;
}

// Kernels for the head dims of the call, which differ in the keys of one step.
bool is_better(const DecodeVariant& v, const DecodeVariant& other, bool scattered) {
  const int columns = v.head_dim + v.head_dim_v, others = other.head_dim + other.head_dim_v;
  return columns < others || (columns == others && v.target == other.target && (scattered ? v.bn < other.bn : v.bn > other.bn));
}

}  // namespace

DecodeChoice choose_decode(const char* op, const Device& device, const DecodeCall& call) {
  const Fitting<DecodeVariant> found = fitting(decode_variants, decode_variant_count, device, call);
  const std::string& force = knobs().force;
  const bool is_named = std::any_of(decode_variants, decode_variants + decode_variant_count,
                                    [&](const DecodeVariant& v) { return force == v.name; });
  if (!found.first) return {nullptr, none_fits(op, describe(call), device, found.last_reason), is_named};
  const DecodeVariant* best = found.first;
  for (int i = 0; i < decode_variant_count; ++i) {
    if (found.fits[i] && is_better(decode_variants[i], *best, is_scattered(device, call))) best = &decode_variants[i];
  }
  return {best, force.empty() ? "it serves " + describe(call) : "TILEOPS_FORCE=" + force + " is set", true};
}

#ifdef TILEOPS_DECODE

namespace {

// A tensor as the kernel has it, [request, key head, query and head of the group, column]: the caller's, or one in its place.
struct Rows {
  void* data;
  int64_t strides[4];
  Owned copy;
};

// sizes [request, key head, query, head of the group(, columns)] of a tensor [request, query, head(, columns)], with the strides of
// request, query, head and column given.
Owned view_of_rows(const DecodeCall& call, AtenTensorHandle tensor, int64_t request, int64_t query, int64_t head, int64_t column,
                   int64_t columns) {
  const int64_t sizes[] = {call.requests(), call.attention.kv_heads(), call.queries(), call.group(), columns};
  const int64_t strides[] = {request, call.group() * head, query, head, column};
  return strided_view(tensor, columns ? 5 : 4, sizes, strides);
}

Owned empty_rows(const DecodeCall& call, DType type, int64_t columns, const TensorView& like) {
  std::vector<int64_t> sizes = {call.requests(), call.attention.kv_heads(), call.queries(), call.group()};
  if (columns) sizes.push_back(columns);
  return empty_contiguous(sizes, type, like, "allocating a copy of q, out or lse");
}

void copy(const Owned& to, AtenTensorHandle from) { torch_check(aoti_torch_copy_(to.get(), from, 0), "copying q, out or lse"); }

Rows rows_of_q(const DecodeCall& call, const TensorView& q) {
  const AttentionTensor& t = call.attention.q;
  const int64_t* s = t.strides;
  const int64_t columns = call.attention.head_dim();
  if (!t.copied && (call.queries() == 1 || call.group() == 1)) {
    return {const_cast<void*>(t.data), {s[0], call.group() * s[2], call.queries() == 1 ? s[2] : s[1], 1}, Owned()};
  }
  const int64_t wide = ceil_div(columns, 8) * 8;  // rows of whole 16 bytes, as TMA wants them
  Owned rows = empty_rows(call, call.attention.type, wide, q);
  const int64_t sizes[] = {call.requests(), call.attention.kv_heads(), call.queries(), call.group(), columns};
  const int64_t strides[] = {sizes[1] * call.rows() * wide, call.rows() * wide, sizes[3] * wide, wide, 1};
  const int64_t* given = q.strides;  // without a dimension of queries, there is one of each request
  const Owned from = view_of_rows(call, q.handle, given[0], given[q.ndim - 3], given[q.ndim - 2], given[q.ndim - 1], columns);
  copy(strided_view(rows.get(), 5, sizes, strides), from.get());
  void* data = mutable_data(rows.get());
  return {data, {strides[0], strides[1], wide, 1}, std::move(rows)};
}

// Where the kernel and the merge write out (or lse, without columns): items one behind the other.
Rows rows_of_result(const DecodeCall& call, void* data, DType type, int64_t request, int64_t head, int64_t columns,
                    const TensorView& like) {
  const int64_t wide = columns ? columns : 1, row = call.rows() * wide;
  if (call.queries() == 1 && request == call.attention.heads() * head) {
    return {data, {request, call.group() * head, head, 1}, Owned()};
  }
  Owned rows = empty_rows(call, type, columns, like);
  void* own = mutable_data(rows.get());
  return {own, {call.attention.kv_heads() * row, row, wide, 1}, std::move(rows)};
}

tensor_map map_pages(const AttentionTensor& t, DType type, MapBox box, int64_t rows) {
  const auto bytes = [&](int dim) { return t.extents[dim] > 1 ? t.strides[dim] * item_size(type) : 0; };
  box.rows = static_cast<int>(rows);
  return map_of({t.data, 4, {t.columns, t.extents[1], t.extents[2], t.extents[0]}, {bytes(1), bytes(2), bytes(0)}, type, box});
}

tensor_map map_rows(const DecodeCall& call, const Rows& q, DType type, const MapBox& box) {
  const int64_t extents[] = {call.requests(), call.attention.kv_heads(), call.rows()};
  const auto bytes = [&](int dim) { return extents[dim] > 1 ? q.strides[dim] * item_size(type) : 0; };
  return map_of({q.data, 4, {call.attention.head_dim(), extents[2], extents[1], extents[0]}, {bytes(2), bytes(1), bytes(0)}, type, box});
}

// What says where q and the caches lie: TMA's maps, or addresses and strides.
template <typename Params>
void set_tensors(Params* p, const DecodeVariant& v, const DecodeCall& call, const Rows& q, int64_t together) {
  const AttentionCall& a = call.attention;
  if constexpr (std::is_same_v<decltype(p->q), tensor_map>) {
    p->q = map_rows(call, q, v.x, v.maps[0]);
    p->k = map_pages(a.k, v.x, v.maps[1], together);
    p->v = map_pages(a.v, v.x, v.maps[2], together);
  } else {
    p->q = q.data;
    p->k = a.k.data;
    p->v = a.v.data;
    p->head_dim = static_cast<int32_t>(a.head_dim());
    const int64_t extents[] = {call.requests(), a.kv_heads(), call.rows()};
    for (int dim = 0; dim < 3; ++dim) p->q_stride[dim] = extents[dim] > 1 ? q.strides[dim] : 0;
    p->q_stride[3] = 1;
    set_strides(p->k_stride, a.k);
    set_strides(p->v_stride, a.v);
  }
}

// One for each row of an item: repeated for each query.
template <typename Params>
void bind_sinks(const DecodeCall& call, const TensorView* sinks, Owned* copies, Params* p) {
  if (!sinks) return;
  const int64_t group = call.group(), stride = sinks->strides[0];
  p->sinks_dtype = static_cast<int32_t>(call.attention.sinks_type);
  p->sinks = call.attention.sinks;
  p->sinks_stride[0] = group * stride;
  p->sinks_stride[1] = stride;
  if (call.queries() == 1) return;
  const int64_t sizes[] = {call.attention.kv_heads(), call.queries(), group}, strides[] = {group * stride, 0, stride};
  const Owned repeated = strided_view(sinks->handle, 3, sizes, strides);
  *copies = empty_contiguous({sizes, sizes + 3}, call.attention.sinks_type, *sinks, "allocating a copy of sinks");
  copy(*copies, repeated.get());
  p->sinks = mutable_data(copies->get());
  p->sinks_stride[0] = call.rows();
  p->sinks_stride[1] = 1;
}

template <typename Params>
void launch(Device& device, const DecodeVariant& v, const DecodeCall& call, const TensorView& q, const TensorView* sinks,
            const std::vector<Place>& places, cudaStream_t stream) {
  const NoGrad no_grad;
  const AttentionCall& a = call.attention;
  const int64_t columns = a.head_dim_v(), together = rows_together(a.sk(), v.bn);
  const int resident = resident_ctas(device, v);
  const Rows rows = rows_of_q(call, q);
  const Rows out = rows_of_result(call, places[0].data, v.x, a.out.strides[0], a.out.strides[2], columns, q);
  const Rows lse = rows_of_result(call, a.lse, DType::f32, a.lse_strides[0], a.lse_strides[1], 0, q);
  const int64_t parts = parts_for(device, v.target, resident, ceil_div(call.rows(), v.bm));
  const SplitProblem problem = {v.op, call.requests() * a.kv_heads(), call.rows(), columns, parts, call.num_splits};
  const Split split = allocate_split(problem, q);

  Params p = {};
  Owned repeated;
  bind_sinks(call, sinks, &repeated, &p);
  set_tensors(&p, v, call, rows, together);
  p.out = out.data;
  p.lse = lse.data;
  std::copy(out.strides, out.strides + 4, p.out_stride);
  std::copy(lse.strides, lse.strides + 3, p.lse_stride);
  set_split(&p, problem, split);
  p.block_table = call.block_table;
  p.block_table_stride[0] = call.block_table_stride;
  p.cache_seqlens = call.cache_seqlens;
  p.block_table_stride[1] = 1;
  p.n = static_cast<int32_t>(call.requests());
  p.kv_heads = static_cast<int32_t>(a.kv_heads());
  p.rows = static_cast<int32_t>(call.rows());
  p.pages = static_cast<int32_t>(a.k.extents[0]);
  p.page = static_cast<int32_t>(a.sk());
  p.table = static_cast<int32_t>(call.table_width);
  p.dim_v = static_cast<int32_t>(columns);
  p.unit = static_cast<int32_t>(together);
  p.inverse = inverse_of(a.sk());
  p.shared_by = static_cast<int32_t>(call.group());
  p.scale_log2 = a.scale_log2;
  p.cap_scale = a.cap_scale;
  p.window_left = static_cast<int32_t>(a.window_left);
  p.window_right = static_cast<int32_t>(a.window_right);
  const dim3 grid(static_cast<unsigned>(ceil_div(call.rows(), v.bm)), static_cast<unsigned>(parts), 1);
  launch_kernel({v.op, v.name, v.kernel, grid, v.threads, v.shared_bytes, 0, v.target == Target::sm_90a}, &p, stream);

  SplitResult result = {out.data, lse.data, 1, call.rows(), {out.strides[1], 0, out.strides[2], 1}, {lse.strides[1], 0, lse.strides[2]}};
  launch_combine(device, v.target, v.x, problem, split, result, stream);
  const int64_t *o = a.out.strides, *l = a.lse_strides;
  if (out.copy) copy(view_of_rows(call, places[0].handle, o[0], o[1], o[2], 1, columns), out.copy.get());
  if (lse.copy) copy(view_of_rows(call, places[1].handle, l[0], l[2], l[1], 1, 0), lse.copy.get());
}

}  // namespace

void launch_decode(Device& device, const DecodeVariant& v, const DecodeCall& call, const TensorView& q, const TensorView* sinks,
                   const std::vector<Place>& places, cudaStream_t stream) {
#ifdef TILEOPS_DECODE_PORTABLE
  if (v.target == Target::portable) return launch<attention_decode_portable_params>(device, v, call, q, sinks, places, stream);
#endif
#ifdef TILEOPS_DECODE_SM_90A
  launch<attention_decode_sm_90a_params>(device, v, call, q, sinks, places, stream);
#endif
}

#else

void launch_decode(Device&, const DecodeVariant&, const DecodeCall&, const TensorView&, const TensorView*,
                   const std::vector<Place>&, cudaStream_t) {}

#endif

}  // namespace tileops
