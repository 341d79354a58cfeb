// Keys of items (requests, or their key heads) that are split over the CTAs of a kernel, which find their parts themselves: where it
// leaves what is not whole, and the merge behind it.
#pragma once

#include <algorithm>

#include "allocate.h"
#include "check.h"
#include "device.h"
#include "stable.h"

namespace tileops {

struct SplitProblem {
  const char* op;
  int64_t items;          // requests, or their key heads
  int64_t rows, columns;  // of an item
  int64_t parts;          // CTAs that deal with all items, for some rows
  int64_t most_pieces;    // of an item; 0: any number
};

// What the kernel writes for the merge; lives until both have been launched.
struct Split {
  Owned partial, partial_lse;  // [2, parts, rows(, columns)]: in [1] pieces that begin an item
  Owned pieces;                // [parts, 4], see csrc/include/tileops/deal_part.h
};

// Where the results lie: rows of an item in `outer` lines of `inner` rows.
struct SplitResult {
  void *out, *lse;
  int64_t outer, inner;
  int64_t out_strides[4];  // of (item, line, row, column)
  int64_t lse_strides[3];
};

// The merge for so many rows of so many columns, or NULL.
const RowVariant* combine_for(Target target, DType type, int64_t columns, int64_t rows = INT64_MAX);

// Parts for a kernel that takes so many tiles of rows of each: on portable as many CTAs as run at a time, of which one loads while
// another computes; else one for each multiprocessor.
int64_t parts_for(const Device& device, Target target, int resident, int64_t tiles);

Split allocate_split(const SplitProblem& problem, const TensorView& like);

// What p takes of them.
template <typename Params>
void set_split(Params* p, const SplitProblem& problem, const Split& split) {
  p->parts = static_cast<int32_t>(problem.parts);
  p->most_pieces = static_cast<int32_t>(std::min<int64_t>(problem.most_pieces, INT32_MAX));
  p->partial = mutable_data(split.partial.get());
  p->partial_lse = mutable_data(split.partial_lse.get());
  p->pieces = mutable_data(split.pieces.get());
  const int64_t row = problem.rows * problem.columns;
  const int64_t partial[] = {problem.parts * row, row, problem.columns, 1};
  const int64_t partial_lse[] = {problem.parts * problem.rows, problem.rows, 1};
  std::copy(partial, partial + 4, p->partial_stride);
  std::copy(partial_lse, partial_lse + 3, p->partial_lse_stride);
  p->pieces_stride[0] = 4;
  p->pieces_stride[1] = 1;
}

// Merges what is in several pieces, into rows of that type.
void launch_combine(Device& device, Target target, DType type, const SplitProblem& problem, const Split& split,
                    const SplitResult& result, cudaStream_t stream);

}  // namespace tileops
