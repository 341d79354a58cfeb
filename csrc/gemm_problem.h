// A product of stacks of matrices of any rank, as kernels see it: y [batch, m, n] = a [batch, m, k] b [batch, k, n]. Plain C++.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>

namespace tileops {

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

// A tensor broadcast to the batch dimensions of the result; its last two dimensions are those of a matrix.
struct MatrixStack {
  int64_t ndim;
  const int64_t* sizes;
  const int64_t* strides;  // in elements
};

struct GemmProblem {
  int64_t batch, m, n, k;
  int64_t a_stride[3], b_stride[3], y_stride[3], residual_stride[3];  // of (batch, row, column); batch 0: broadcast
};

// Writes the problem for a result y of which no extent is 0. Batch dimensions of size 1 vanish and neighbours merge where all
// tensors allow; those along which b stays the same become rows where a and y allow, so that a linear layer is one product.
// residual (NULL: none) broadcasts in every dimension. False if more than one batch dimension remains.
bool collapse_gemm(const MatrixStack& a, const MatrixStack& b, const MatrixStack& y, const MatrixStack* residual,
                   GemmProblem* out);

// What memory allows for an operand, the best first.
enum class Access : int {
  tma = 0,     // base and strides are multiples of 16 bytes
  vector = 1,  // neighbours along one dimension, but not that
  copy = 2,    // no unit stride
};

struct OperandLayout {
  bool along_k;  // neighbours in memory are neighbours along k; else along m or n
  Access access;
};

// Of a tensor of any rank, if neighbours are to be those along `dim`. A product's are (batch, rows, columns).
Access access_along(uintptr_t address, int64_t item_size, int rank, const int64_t* extents, const int64_t* strides, int dim);

template <size_t N>
Access access_along(uintptr_t address, int64_t item_size, const int64_t (&extents)[N], const int64_t (&strides)[N], int dim) {
  return access_along(address, item_size, N, extents, strides, dim);
}

// Of a or b; k_dim says which one is k.
OperandLayout layout_of(uintptr_t address, int64_t item_size, const int64_t (&extents)[3], const int64_t (&strides)[3],
                        int k_dim);

// 256x128x64 nt: m, n, k, then a and b; n has unit stride along its columns and t along its rows, as in BLAS.
std::string describe(const GemmProblem& problem, OperandLayout a, OperandLayout b);

}  // namespace tileops
