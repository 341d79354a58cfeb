// What Python loads: registration without static initialisers, the knobs and the status.
//
// Every return code of the shim is checked and becomes a sentence. torch's own macros register in a static initialiser and
// ignore the codes, so that a second copy of the library is a segmentation fault.
#include <string.h>

#include <string>

#include "check.h"
#include "device.h"
#include "knobs.h"
#include "ops.h"
#include "schemas.h"
#include "stable.h"

#define TILEOPS_EXPORT extern "C" __attribute__((visibility("default")))

namespace tileops {

namespace {

constexpr const char* kNamespace = TILEOPS_STRING(TILEOPS_NAMESPACE);

// A torch::Library: what was registered through it is taken back when it is deleted.
class Library {
 public:
  ~Library() {
    if (handle) aoti_torch_delete_library_object(handle);
  }
  void keep() { handle = nullptr; }
  TorchLibraryHandle handle = nullptr;
};

std::string with_torch_text(std::string message) {
  const std::string text = torch_error_text();
  return text.empty() ? message : message + " (torch: " + text.substr(0, text.find('\n')) + ")";
}

std::string name_of(const char* schema) { return std::string(schema, strcspn(schema, "(")); }

// An eager twin takes the number of an activation in place of its name: torch before 2.14 loses a copy of each str that C++
// passes to an operator, and every fallback would pass one.
std::string as_defined(const char* schema) {
  std::string text = schema;
  const std::string argument = "str activation='";
  const size_t start = text.find(argument);
  if (text.rfind("_eager_", 0) != 0 || start == std::string::npos) return text;
  const size_t name = start + argument.size(), end = text.find('\'', name);
  Activation number;
  if (!find_activation(text.substr(name, end - name), &number)) {
    throw std::logic_error("no such activation in " + text);
  }
  return text.replace(start, end + 1 - start, "int activation=" + std::to_string(static_cast<int32_t>(number)));
}

// No tag on `.out`: for torch.Tag.out, Inductor (torch 2.13, 2.14) rewrites a call of the functional overload into one of
// `.out` and passes each keyword-only argument twice.
// The shim cannot look a name up: the definition's own return code is the check. The names that only we use come first, so that
// the first one taken means a second copy of us, and a later one another project in the same namespace.
std::string define_all(TorchLibraryHandle library) {
  for (const bool is_private : {true, false}) {
    for (const char* schema : schemas) {
      if ((schema[0] == '_') != is_private) continue;
      if (aoti_torch_library_def(library, as_defined(schema).c_str()) == 0) continue;
      const std::string name = std::string(kNamespace) + "::" + name_of(schema);
      return with_torch_text(
          is_private ? "another copy of this library, or of the package it belongs to, has already defined " + name +
                           "; load one copy in a process"
                     : "another library has already defined " + name + "; keep one of the two in a process, or build this " +
                           "one with another TILEOPS_NAMESPACE");
    }
  }
  return "";
}

std::string register_all() {
  Library definitions, kernels;
  if (aoti_torch_library_init_fragment(kNamespace, "tileops", 0, &definitions.handle) != 0) {
    return with_torch_text(std::string("torch refused the operator namespace ") + kNamespace);
  }
  const std::string message = define_all(definitions.handle);
  if (!message.empty()) return message;
  if (aoti_torch_library_init_impl(kNamespace, "CUDA", "tileops", 0, &kernels.handle) != 0) {
    return with_torch_text("torch refused kernels for CUDA");
  }
  for (const auto& row : boxed_kernels) {
    if (torch_library_impl(kernels.handle, row.op, row.kernel, kBuildVersion) != 0) {
      return with_torch_text(std::string("torch refused the CUDA kernel of ") + row.op);
    }
  }
  definitions.keep();
  kernels.keep();
  return "";
}

}  // namespace

}  // namespace tileops

// Where the operators are registered: what TILEOPS_NAMESPACE was when the library was built.
TILEOPS_EXPORT const char* tileops_namespace() { return tileops::kNamespace; }

// NULL, or why the operators could not be registered (then none is). Again: the answer of the first time.
TILEOPS_EXPORT const char* tileops_register() {
  static const std::string message = [] {
    try {
      return tileops::register_all();
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
  }();
  return message.empty() ? nullptr : message.c_str();
}

TILEOPS_EXPORT void tileops_set_knob(const char* name, const char* value) { tileops::set_knob(name, value); }

// JSON; the text lives until the next call of this thread. Starts no CUDA.
TILEOPS_EXPORT const char* tileops_status() {
  thread_local std::string text;
  text = tileops::status_json();
  return text.c_str();
}
