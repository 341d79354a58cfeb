// Which kernel serves a row problem: the rows of the generated table against the call.
#pragma once

#include <string>
#include <vector>

#include "device.h"
#include "row_problem.h"
#include "variant.h"

namespace tileops {

// A tensor of a call: a row of columns, or (is_value) a single float32 for each row.
struct RowTensor {
  const void* data;  // NULL: a result that is not allocated yet, and will be aligned
  bool is_value;
  bool is_result;
};

struct RowCall {
  DType x_type, y_type;  // of the columns that are read, and of those that are written
  RowProblem problem;
  int count;  // of tensors
  RowTensor tensors[kMaxRowTensors];  // in the order of the problem's strides
  const void* weight = nullptr;  // NULL: none
  int64_t weight_stride = 0;  // in elements
};

inline int64_t item_size(const RowCall& call, int t) {
  return call.tensors[t].is_value ? 4 : item_size(call.tensors[t].is_result ? call.y_type : call.x_type);
}

// NULL if the kernel can serve the call, else what it asks for that the call lacks.
const char* why_not(const RowVariant& variant, const RowCall& call);

// The kernels of one operator by target and types, in table order.
class RowTable {
 public:
  explicit RowTable(const char* op);
  const std::vector<const RowVariant*>& rows(Target target, DType x, DType y) const {
    return rows_[static_cast<int>(target)][static_cast<int>(x)][static_cast<int>(y)];
  }

 private:
  std::vector<const RowVariant*> rows_[2][4][4];
};

// RuntimeError: TILEOPS_FORCE asks for what cannot serve the call.
[[noreturn]] void cannot_force(const char* op, const std::string& force, const std::string& why);

// Why no kernel may be used on this device as the knobs stand, before the call itself is looked at; "" if one may.
std::string refusal(const char* op, const Device& device);

// The kernel for the call, or NULL with the reason. Throws if TILEOPS_FORCE names what cannot serve it.
const RowVariant* choose(const char* op, const RowTable& table, const Device& device, const RowCall& call, std::string* reason);

// One line on stderr for each decision not seen before, if TILEOPS_LOG=dispatch.
void log_decision(const char* op, const char* type, const std::string& shape, const char* path, const std::string& reason);

}  // namespace tileops
