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

void launch_kernel(const RowVariant& variant, unsigned grid_x, unsigned grid_y, void* params, cudaStream_t stream);

// Launches over all rows; Params is the generated struct of the kernel. A grid has at most 65535 blocks along y and 2^31 - 1
// along x: more rows take more launches, which costs less than the copy that would avoid them.
template <typename Params>
void launch_rows(const RowVariant& variant, const RowCall& call, Params params, cudaStream_t stream) {
  const RowProblem& p = call.problem;
  const int64_t x_size = call.x_type == DType::f32 ? 4 : 2, y_size = call.y_type == DType::f32 ? 4 : 2;
  const int64_t outer_step = 65535, inner_step = INT32_MAX * static_cast<int64_t>(variant.rows_per_block);
  params.cols = p.cols;
  for (int i = 0; i < 3; ++i) {
    params.x_stride[i] = p.x_stride[i];
    params.y_stride[i] = p.y_stride[i];
  }
  for (int64_t outer = 0; outer < p.outer; outer += outer_step) {
    for (int64_t inner = 0; inner < p.inner; inner += inner_step) {
      params.x = static_cast<const char*>(call.x) + x_size * (outer * p.x_stride[0] + inner * p.x_stride[1]);
      params.y = static_cast<char*>(const_cast<void*>(call.y)) + y_size * (outer * p.y_stride[0] + inner * p.y_stride[1]);
      params.outer = p.outer - outer < outer_step ? p.outer - outer : outer_step;
      params.inner = p.inner - inner < inner_step ? p.inner - inner : inner_step;
      const int64_t blocks = (params.inner + variant.rows_per_block - 1) / variant.rows_per_block;
      launch_kernel(variant, static_cast<unsigned>(blocks), static_cast<unsigned>(params.outer), &params, stream);
    }
  }
}

}  // namespace tileops
