// What no kernel serves: the eager twin of an operator, which Python serves.
#pragma once

#include <string>
#include <vector>

#include "device.h"
#include "stable.h"

namespace tileops {

struct EagerTwin {
  const char* op;
  const char* name;  // qualified
  int arguments;  // of its schema: the first ones of the call
  const TensorView* operands[5];  // what the log shows; all but the first may be NULL
};

// Hands the arguments over, with gradients off. Throws where TILEOPS_REQUIRE_NATIVE forbids it.
Owned run_eager(const EagerTwin& twin, Args& args, Device& device, const std::string& reason);
std::vector<Owned> run_eager_all(const EagerTwin& twin, Args& args, Device& device, const std::string& reason, int results);

void copy_to(const TensorView& out, const Owned& result);

// One line on stderr for each decision not seen before: for TILEOPS_LOG=dispatch.
void log_path(const EagerTwin& twin, const char* path, const std::string& reason);

}  // namespace tileops
