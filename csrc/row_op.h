// What the row operators share: from checked inputs to a launch, a copy or the eager twin.
#pragma once

#include <string>

#include "check.h"
#include "device.h"
#include "row_choice.h"
#include "stable.h"

namespace tileops {

// One call of a row operator, its inputs checked.
struct RowOp {
  RowOp(const char* op, const char* eager_twin, int twin_arguments, const RowTable& kernels, AtenTensorHandle x_handle)
      : name(op), eager(eager_twin), arguments(twin_arguments), table(kernels), x(view_of(x_handle)) {}
  RowOp(const RowOp&) = delete;

  const char* name;
  const char* eager;  // the twin with the same schema, served by Python
  int arguments;  // of that schema
  const RowTable& table;
  TensorView x;
  int64_t dim = 0;  // from 0
  DType x_type = DType::none, y_type = DType::none;
  const TensorView* weight = nullptr;  // NULL: none

  virtual void launch(const RowVariant& variant, const RowCall& call, cudaStream_t stream) const = 0;

 protected:
  ~RowOp() = default;
};

Owned run_row_op(const RowOp& op, Args& args);
void run_row_op_out(const RowOp& op, Args& args, const TensorView& out);
std::string explain_row_op(const RowOp& op);  // "kernel|eager \t variant \t reason"

std::string why_chosen(const RowVariant& variant);

// The part of a call's rows that one grid takes.
struct RowPart {
  const RowVariant& variant;
  const RowCall& call;
  int64_t start[3], extent[3];  // of (batch, outer, inner)

  // Sets a parameter to this part of tensor t: its address, and its last N strides.
  template <typename Pointer, size_t N>
  void bind(int t, Pointer* pointer, int64_t (&stride)[N]) const {
    const int64_t* all = call.problem.stride[t];
    const int64_t offset = start[0] * all[0] + start[1] * all[1] + start[2] * all[2];
    *pointer = static_cast<char*>(const_cast<void*>(call.tensors[t].data)) + offset * item_size(call, t);
    const int first = call.tensors[t].is_value ? 3 - N : 4 - N;
    for (size_t i = 0; i < N; ++i) stride[i] = all[first + i];
  }

  void launch(void* params, cudaStream_t stream) const {
    const int64_t blocks = (extent[2] + variant.rows_per_block - 1) / variant.rows_per_block;
    const dim3 grid(blocks, extent[1], extent[0]);
    launch_kernel({variant.op, variant.name, variant.kernel, grid, variant.threads, variant.shared_bytes, variant.paced}, params,
                  stream);
  }
};

// Calls launch(part) for all rows of a call. A grid has at most 65535 blocks along y and z and 2^31 - 1 along x: more rows take
// more launches, which costs less than the copy that would avoid them.
template <typename Launch>
void for_each_part(const RowVariant& variant, const RowCall& call, Launch launch) {
  const int64_t size[3] = {call.problem.batch, call.problem.outer, call.problem.inner};
  const int64_t step[3] = {65535, 65535, INT32_MAX * static_cast<int64_t>(variant.rows_per_block)};
  const auto rest = [&](int d, int64_t start) { return size[d] - start < step[d] ? size[d] - start : step[d]; };
  for (int64_t b = 0; b < size[0]; b += step[0]) {
    for (int64_t o = 0; o < size[1]; o += step[1]) {
      for (int64_t i = 0; i < size[2]; i += step[2]) {
        launch(RowPart{variant, call, {b, o, i}, {rest(0, b), rest(1, o), rest(2, i)}});
      }
    }
  }
}

// For x and y in two row dimensions; Params is the generated struct of the kernel.
template <typename Params>
void launch_rows(const RowVariant& variant, const RowCall& call, Params params, cudaStream_t stream) {
  params.cols = call.problem.cols;
  for_each_part(variant, call, [&](const RowPart& part) {
    part.bind(0, &params.x, params.x_stride);
    part.bind(1, &params.y, params.y_stride);
    params.outer = part.extent[1];
    params.inner = part.extent[2];
    part.launch(&params, stream);
  });
}

}  // namespace tileops
