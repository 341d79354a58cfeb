#include "split.h"

#include <algorithm>

#include "allocate.h"
#include "gemm_problem.h"
#include "row_op.h"

// A build without such kernels has no parameters of theirs.
#if __has_include("mla_combine_params.h")
#include "mla_combine_params.h"
#define TILEOPS_COMBINE
#endif

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

Split allocate_split(const SplitProblem& problem, const TensorView& like) {
  const std::string doing = std::string("allocating the workspace of ") + problem.op;
  return {empty_contiguous({2, problem.parts, problem.rows, problem.columns}, DType::f32, like, doing.c_str()),
          empty_contiguous({2, problem.parts, problem.rows}, DType::f32, like, doing.c_str()),
          empty_int32({problem.parts, 4}, like, doing.c_str())};
}

int64_t parts_for(const Device& device, Target target, int resident, int64_t tiles) {
  const int ctas = target == Target::portable ? resident : device.multiprocessors;
  return std::max<int64_t>(ctas / tiles, 1);
}

void launch_combine(Device& device, Target target, DType type, const SplitProblem& problem, const Split& split,
                    const SplitResult& result, cudaStream_t stream) {
#ifdef TILEOPS_COMBINE
  if (problem.parts == 1 || problem.most_pieces == 1) return;
  const int64_t entries = std::min(problem.items, problem.parts);
  const RowVariant& v = *combine_for(target, type, problem.columns, entries * problem.rows);
  load_kernel(device, v);
  mla_combine_params p = {};
  p.partial = mutable_data(split.partial.get());
  p.partial_lse = mutable_data(split.partial_lse.get());
  p.pieces = mutable_data(split.pieces.get());
  p.out = result.out;
  p.lse = result.lse;
  p.parts = problem.parts;
  p.requests = problem.items;
  p.batch = entries;
  p.outer = result.outer;
  p.inner = result.inner;
  p.cols = problem.columns;
  const int64_t row = problem.rows * problem.columns;
  const int64_t partial[] = {problem.parts * row, row, result.inner * problem.columns, problem.columns, 1};
  const int64_t partial_lse[] = {problem.parts * problem.rows, problem.rows, result.inner, 1};
  std::copy(partial, partial + 5, p.partial_stride);
  std::copy(partial_lse, partial_lse + 4, p.partial_lse_stride);
  std::copy(result.out_strides, result.out_strides + 4, p.out_stride);
  std::copy(result.lse_strides, result.lse_strides + 3, p.lse_stride);
  p.pieces_stride[0] = 4;
  p.pieces_stride[1] = 1;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.inner, v.rows_per_block)), static_cast<unsigned>(p.outer),
                  static_cast<unsigned>(p.batch));
  launch_kernel({problem.op, v.name, v.kernel, grid, v.threads, v.shared_bytes, v.paced, v.target == Target::sm_90a}, &p, stream);
#endif
}

}  // namespace tileops
