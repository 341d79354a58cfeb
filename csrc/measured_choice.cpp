#include "measured_choice.h"

namespace tileops {

double apart(int64_t measured, int64_t wanted) {
  const double ratio = static_cast<double>(wanted) / static_cast<double>(measured);
  const double factor = ratio < 1 ? 1 / ratio : ratio;
  return factor > 2 ? INFINITY : factor;
}

std::string none_fits(const char* op, const std::string& problem, const Device& device, const char* last_reason) {
  const std::string &force = knobs().force, kernel = std::string(op) + " kernel";
  const bool is_target = force == target_name(Target::portable) || force == target_name(Target::sm_90a);
  if (!last_reason && !force.empty() && !is_target) return "this build has no " + kernel + " of that name for " + device.name;
  const std::string what = (is_target ? force + " " : "") + kernel + " for " + problem;
  if (!last_reason) return "this build has no " + what;
  return "no " + what + " fits (the last one tried: " + last_reason + ")";
}

}  // namespace tileops
