// Which kernel serves a product: the rows of the generated table, and where they were measured, against the call.
#pragma once

#include <string>

#include "check.h"
#include "device.h"
#include "gemm_problem.h"
#include "variant.h"

namespace tileops {

struct GemmCall {
  DType x_type, y_type;
  GemmProblem problem;
  // An address of NULL is memory that is yet to be allocated, which is aligned.
  const void* a;
  const void* b;
  void* y;
  const void* residual;
  const void* bias;  // of stride 1
  DType bias_type;  // none: no bias
  bool has_residual;
  Activation activation;

  OperandLayout a_layout() const;
  OperandLayout b_layout() const;
};

struct GemmChoice {
  const ProductVariant* variant = nullptr;  // NULL: the reason says why
  std::string reason;
  const ProductMeasurement* measured = nullptr;  // what the choice rests on; NULL where a kernel was forced that has none
};

// What a kernel has for good: its types and layouts. NULL if they are the call's.
const char* why_other_kind(const ProductVariant& variant, const GemmCall& call);

// NULL if the kernel can serve the call, else what it asks for that the call lacks.
const char* why_not(const ProductVariant& variant, const GemmCall& call);

// The kernel that TILEOPS_FORCE names, or one that was measured to be faster than eager PyTorch near this problem.
GemmChoice choose(const Device& device, const GemmCall& call);

std::string why_chosen(const GemmChoice& choice);

}  // namespace tileops
