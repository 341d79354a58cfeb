// Keys of items (requests, or their key heads) that are split over the CTAs of a kernel: the schedule in front of it and the merge
// behind it, both made on the device.
#pragma once

#include "check.h"
#include "device.h"
#include "stable.h"

namespace tileops {

struct SplitProblem {
  const char* op;
  const int32_t* lengths;  // of requests, in keys
  int64_t items, heads;    // heads: items of a request
  int64_t rows, columns;  // of an item
  int64_t parts;          // CTAs that deal with all items, for some rows
  int64_t block;          // keys in one step
  int64_t seen;           // keys at the end of a request, which alone count
  int64_t overhead;       // what starting and storing a piece costs, in blocks
  int64_t most_pieces;    // of an item; 0: any number
};

// What is computed on the device for a call, and lives until its kernels have been launched.
struct Split {
  Owned schedule, first_split, split_items, partial, partial_lse;
  int64_t splits;  // that fit into partial
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

// Launches the schedule.
Split make_schedule(const SplitProblem& problem, const TensorView& like, cudaStream_t stream);

// Merges what is in several pieces, into rows of that type.
void launch_combine(Device& device, Target target, DType type, const SplitProblem& problem, const Split& split,
                    const SplitResult& result, cudaStream_t stream);

}  // namespace tileops
