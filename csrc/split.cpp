#include "split.h"

#include <algorithm>

#include "allocate.h"
#include "gemm_problem.h"
#include "kernels/split_schedule_params.h"
#include "row_op.h"

// A build without such kernels has no parameters of theirs.
#if __has_include("mla_combine_params.h")
#include "mla_combine_params.h"
#define TILEOPS_COMBINE
#endif

extern "C" void split_schedule(tileops::split_schedule_params);

namespace tileops {

const RowVariant* combine_for(Target target, DType type, int64_t columns, int64_t rows) {
  constexpr int64_t kFewRows = 256;  // a CTA for each, about one wave
  static const RowTable table("mla_combine");
  const RowVariant* found = nullptr;
  for (const RowVariant* row : table.rows(target, DType::f32, type)) {
    const bool fits = row->max_cols >= columns && columns % row->vector == 0;
    const bool alike = found && row->max_cols == found->max_cols;
    const bool better = alike && (row->rows_per_block < found->rows_per_block) == (rows <= kFewRows);
    if (fits && (!found || row->max_cols < found->max_cols || better)) found = row;
  }
  return found;
}

// A part cuts at most one item at its end, so that fewer items than parts are split, into fewer than 2 * parts pieces.
Split make_schedule(const SplitProblem& problem, const TensorView& like, cudaStream_t stream) {
  Split s;
  const std::string doing = std::string("allocating the workspace of ") + problem.op;
  s.splits = std::min(2 * problem.parts, problem.parts + problem.items);
  s.schedule = empty_int32({problem.parts, 8}, like, doing.c_str());
  s.first_split = empty_int32({problem.items + 1}, like, doing.c_str());
  s.split_items = empty_int32({problem.parts}, like, doing.c_str());
  s.partial = empty_contiguous({s.splits, problem.rows, problem.columns}, DType::f32, like, doing.c_str());
  s.partial_lse = empty_contiguous({s.splits, problem.rows}, DType::f32, like, doing.c_str());
  split_schedule_params p = {};
  p.cache_seqlens = problem.lengths;
  p.schedule = static_cast<int32_t*>(mutable_data(s.schedule.get()));
  p.first_split = static_cast<int32_t*>(mutable_data(s.first_split.get()));
  p.split_items = static_cast<int32_t*>(mutable_data(s.split_items.get()));
  p.items = static_cast<int32_t>(problem.items);
  p.parts = static_cast<int32_t>(problem.parts);
  p.heads = static_cast<int32_t>(problem.heads);
  p.block = static_cast<int32_t>(problem.block);
  p.seen = static_cast<int32_t>(std::min<int64_t>(problem.seen, INT32_MAX));
  p.overhead = static_cast<int32_t>(problem.overhead);
  p.most_pieces = static_cast<int32_t>(std::min<int64_t>(problem.most_pieces, INT32_MAX));
  const auto kernel = reinterpret_cast<const void*>(split_schedule);
  const int shared_bytes = split_schedule_shared_bytes(p.parts);
  launch_kernel({problem.op, "split_schedule", kernel, dim3(1, 1, 1), split_schedule_threads, shared_bytes, 0}, &p, stream);
  return s;
}

int64_t parts_for(const Device& device, Target target, int resident, int64_t tiles) {
  const int ctas = target == Target::portable ? resident : device.multiprocessors;
  return std::max<int64_t>(ctas / tiles, 1);
}

void launch_combine(Device& device, Target target, DType type, const SplitProblem& problem, const Split& split,
                    const SplitResult& result, cudaStream_t stream) {
#ifdef TILEOPS_COMBINE
  if (problem.parts == 1 || problem.most_pieces == 1) return;
  const int64_t merged = std::min(problem.items, problem.parts - 1);  // items, at most
  const RowVariant& v = *combine_for(target, type, problem.columns, merged * problem.rows);
  load_kernel(device, v);
  mla_combine_params p = {};
  p.partial = mutable_data(split.partial.get());
  p.partial_lse = mutable_data(split.partial_lse.get());
  p.first_split = mutable_data(split.first_split.get());
  p.split_requests = mutable_data(split.split_items.get());
  p.out = result.out;
  p.lse = result.lse;
  p.splits = split.splits;
  p.requests = problem.items;
  p.entries = problem.items + 1;
  p.batch = merged;
  p.outer = result.outer;
  p.inner = result.inner;
  p.cols = problem.columns;
  const int64_t partial[] = {problem.rows * problem.columns, result.inner * problem.columns, problem.columns, 1};
  const int64_t partial_lse[] = {problem.rows, result.inner, 1};
  std::copy(partial, partial + 4, p.partial_stride);
  std::copy(partial_lse, partial_lse + 3, p.partial_lse_stride);
  std::copy(result.out_strides, result.out_strides + 4, p.out_stride);
  std::copy(result.lse_strides, result.lse_strides + 3, p.lse_stride);
  p.first_split_stride[0] = p.split_requests_stride[0] = 1;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.inner, v.rows_per_block)), static_cast<unsigned>(p.outer),
                  static_cast<unsigned>(p.batch));
  launch_kernel({problem.op, v.name, v.kernel, grid, v.threads, v.shared_bytes, v.paced}, &p, stream);
#endif
}

}  // namespace tileops
