#include "row_choice.h"

#include <stdio.h>
#include <string.h>

#include <mutex>
#include <set>
#include <stdexcept>

#include "check.h"
#include "knobs.h"

namespace tileops {

namespace {

// Kernels count columns in 32 bits, up to a tile past the end.
constexpr int64_t kMaxColumns = INT32_MAX - 65536;

// f(tensor, its strides, bytes of an element) of each tensor with columns until one is not true.
template <typename F>
bool each_with_columns(const RowCall& call, F f) {
  for (int t = 0; t < call.count; ++t) {
    if (!call.tensors[t].is_value && !f(call.tensors[t], call.problem.stride[t], item_size(call, t))) return false;
  }
  return true;
}

// A vector of more than 16 bytes is read and written in pieces of 16.
const char* why_unaligned(int vector, const RowCall& call) {
  const bool aligned = each_with_columns(call, [&](const RowTensor& tensor, const int64_t*, int64_t size) {
    const int64_t bytes = vector * size;
    return reinterpret_cast<uintptr_t>(tensor.data) % (bytes < 16 ? bytes : 16) == 0;
  });
  return aligned ? nullptr : "it needs tensors aligned to its vector";
}

// The rows of all tensors start at the same place of a vector, wherever that is.
bool lie_alike(int vector, const RowCall& call) {
  const int64_t* first = call.problem.stride[0];
  return call.x_type == call.y_type && each_with_columns(call, [&](const RowTensor& tensor, const int64_t* stride, int64_t size) {
    const uintptr_t apart = reinterpret_cast<uintptr_t>(tensor.data) - reinterpret_cast<uintptr_t>(call.tensors[0].data);
    const int64_t strides = (first[0] - stride[0]) | (first[1] - stride[1]) | (first[2] - stride[2]);
    return apart % (vector * size) == 0 && strides % vector == 0;
  });
}

const char* why_no_vectors(int vector, bool shifted, const RowCall& call) {
  const bool unit = each_with_columns(call, [](const RowTensor&, const int64_t* stride, int64_t) { return stride[3] == 1; });
  if (!unit) return "it needs neighbouring columns to be neighbours in memory";
  if (shifted) {
    if (call.weight && call.weight_stride != 1) return "it needs a weight without gaps";
    return lie_alike(vector, call) ? nullptr : "it needs rows that are equally far from an aligned address in all tensors";
  }
  if (call.problem.cols % vector != 0) return "it needs a number of columns that is a multiple of its vector";
  const bool starts = each_with_columns(call, [&](const RowTensor&, const int64_t* stride, int64_t) {
    return (stride[0] | stride[1] | stride[2]) % vector == 0;
  });
  if (!starts) return "it needs rows that start at multiples of its vector";
  if (const char* reason = why_unaligned(vector, call)) return reason;
  if (call.weight && (call.weight_stride != 1 || reinterpret_cast<uintptr_t>(call.weight) % 16 != 0)) {
    return "it needs a weight without gaps and aligned to 16 bytes";
  }
  return nullptr;
}

const char* why_not_across(int vector, const RowCall& call) {
  const RowProblem& p = call.problem;
  const int64_t* first = p.stride[0];
  if (first[2] != 1 || p.inner <= 1 || first[3] == 1) return "it needs neighbouring rows to be neighbours in memory";
  if (vector == 1) return nullptr;
  const bool unit = each_with_columns(call, [](const RowTensor&, const int64_t* stride, int64_t) { return stride[2] == 1; });
  if (!unit) return "it needs neighbouring rows of the result to be neighbours in memory";
  const bool starts = each_with_columns(call, [&](const RowTensor&, const int64_t* stride, int64_t) {
    return (stride[0] | stride[1] | stride[3]) % vector == 0;
  });
  if (p.inner % vector != 0 || !starts) return "it needs a number of rows, and columns that start, at multiples of its vector";
  return why_unaligned(vector, call);
}

const RowVariant* first_fit(const std::vector<const RowVariant*>& rows, const RowCall& call, const char** last_reason) {
  for (const RowVariant* variant : rows) {
    const char* reason = why_not(*variant, call);
    if (!reason) return variant;
    *last_reason = reason;
  }
  return nullptr;
}

std::string none_fits(const std::string& which, const RowCall& call, const char* last_reason) {
  const std::string what = which + "kernel for " + types_text(call.x_type, call.y_type);
  if (!last_reason) return "this build has no " + what;
  return "no " + what + " fits (the last one tried: " + last_reason + ")";
}

const RowVariant* forced_target(const char* op, const RowTable& table, const Device& device, const RowCall& call,
                                Target target) {
  const char* name = target_name(target);
  if (!device.runs(target)) cannot_force(op, name, device.name + " does not run it, or this build lacks it");
  const char* last_reason = nullptr;
  const RowVariant* variant = first_fit(table.rows(target, call.x_type, call.y_type), call, &last_reason);
  if (!variant) cannot_force(op, name, none_fits(std::string(name) + " ", call, last_reason));
  return variant;
}

const RowVariant* forced_variant(const char* op, const Device& device, const RowCall& call, const std::string& name) {
  for (int i = 0; i < row_variant_count; ++i) {
    const RowVariant& variant = row_variants[i];
    if (name != variant.name) continue;
    if (strcmp(variant.op, op) != 0) cannot_force(op, name, std::string("it is a kernel of ") + variant.op);
    if (!device.runs(variant.target))
      cannot_force(op, name, device.name + " does not run " + target_name(variant.target) + " kernels");
    const char* reason = why_not(variant, call);
    if (reason) cannot_force(op, name, reason);
    return &variant;
  }
  cannot_force(op, name, "this build has no kernel of that name");
}

}  // namespace

void cannot_force(const char* op, const std::string& force, const std::string& why) {
  throw std::runtime_error(std::string(op) + ": TILEOPS_FORCE=" + force + " cannot apply: " + why +
                           "; unset it, or force a target or kernel that fits");
}

const char* why_not(const RowVariant& variant, const RowCall& call) {
  const RowProblem& p = call.problem;
  if (variant.x != call.x_type || variant.y != call.y_type) return "it is for other dtypes";
  if (variant.max_cols != 0 && p.cols > variant.max_cols) return "it is for shorter rows";
  if (p.cols > kMaxColumns) return "it counts columns in 32 bits";
  if (variant.lanes_on_rows) return why_not_across(variant.vector, call);
  return variant.vector > 1 ? why_no_vectors(variant.vector, variant.shifted, call) : nullptr;
}

RowTable::RowTable(const char* op) {
  for (int i = 0; i < row_variant_count; ++i) {
    const RowVariant& v = row_variants[i];
    if (strcmp(v.op, op) == 0) rows_[static_cast<int>(v.target)][static_cast<int>(v.x)][static_cast<int>(v.y)].push_back(&v);
  }
}

std::string refusal(const char* op, const Device& device) {
  const Knobs& k = knobs();
  if (k.disable_native) return "TILEOPS_DISABLE_NATIVE is set";
  if (k.force == "eager") return "TILEOPS_FORCE=eager is set";
  if (device.target_count > 0) return "";
  if (!k.force.empty()) cannot_force(op, k.force, device.reason);
  return device.reason;
}

const RowVariant* choose(const char* op, const RowTable& table, const Device& device, const RowCall& call,
                         std::string* reason) {
  const std::string& force = knobs().force;
  if (!force.empty()) {
    if (force == "portable") return forced_target(op, table, device, call, Target::portable);
    if (force == "sm_90a") return forced_target(op, table, device, call, Target::sm_90a);
    return forced_variant(op, device, call, force);
  }
  const char* last_reason = nullptr;
  for (int i = 0; i < device.target_count; ++i) {
    const RowVariant* variant = first_fit(table.rows(device.targets[i], call.x_type, call.y_type), call, &last_reason);
    if (variant) return variant;
  }
  *reason = none_fits("", call, last_reason);
  return nullptr;
}

void log_decision(const char* op, const char* type, const std::string& shape, const char* path, const std::string& reason) {
  static std::mutex mutex;
  static std::set<std::string> seen;
  const std::string line = std::string("tileops: ") + op + " " + type + " " + shape + " -> " + path + " (" + reason + ")\n";
  const std::lock_guard<std::mutex> lock(mutex);
  if (seen.size() > 4096) seen.clear();  // shapes may change without end: rather say a decision again than grow
  if (seen.insert(line).second) fputs(line.c_str(), stderr);
}

}  // namespace tileops
