// Which of the kernels that must be measured to win serves a call. A table of such kernels has a Variant, and one of timings a
// Measurement, with `variant` (an index of the former), `gpu`, `us` and `baseline_us`; for a Call there are
//   why_other_kind(variant, call)  what the kernel is for and the call is not (types, layouts: never to change), or NULL
//   why_not(variant, call)         that, or what the kernel asks for that the call lacks, or NULL
#pragma once

#include <math.h>

#include <string>
#include <vector>

#include "device.h"
#include "knobs.h"
#include "variant.h"

namespace tileops {

// Kernels count elements of a dimension in 32 bits, up to a tile past the end, and tiles as well.
constexpr int64_t kMaxExtent = INT32_MAX - 65536;

// By which factor two extents differ; infinite beyond 2.
double apart(int64_t measured, int64_t wanted);

template <typename Variant>
struct Fitting {
  std::vector<bool> fits;  // per row of the table
  const Variant* first = nullptr;  // NULL: none fits
  const char* last_reason = nullptr;  // why the last one of the call's kind does not; NULL: there is no such
};

// Of the kernels that run on the device and that TILEOPS_FORCE allows, those that can serve the call.
template <typename Variant, typename Call>
Fitting<Variant> fitting(const Variant* variants, int count, const Device& device, const Call& call) {
  const std::string& force = knobs().force;
  Fitting<Variant> found;
  found.fits.resize(count);
  for (int i = 0; i < count; ++i) {
    const Variant& v = variants[i];
    const bool allowed = force.empty() || force == target_name(v.target);
    if (!device.runs(v.target) || (force != v.name && (!allowed || why_other_kind(v, call)))) continue;
    const char* reason = why_not(v, call);
    found.fits[i] = reason == nullptr;
    if (reason) found.last_reason = reason;
    if (!reason && !found.first) found.first = &v;
  }
  return found;
}

// Of the measurements on this GPU of kernels that fit, the nearest to the call; of equals, the one that won most. `distance` of
// one beyond reach is infinite.
template <typename Measurement, typename Distance>
const Measurement* nearest(const Measurement* rows, int count, const Device& device, const std::vector<bool>& fits,
                           Distance distance) {
  const Measurement* best = nullptr;
  double best_distance = INFINITY, best_gain = 0;
  for (int i = 0; i < count; ++i) {
    const Measurement& row = rows[i];
    if (!fits[row.variant]) continue;
    const double away = distance(row), gain = row.baseline_us / row.us;
    const bool nearer = away < best_distance || (away == best_distance && gain > best_gain);
    if (!nearer || away == INFINITY || device.name != row.gpu) continue;
    best = &row;
    best_distance = away;
    best_gain = gain;
  }
  return best;
}

// Whether the kernel was at least as fast as eager PyTorch.
template <typename Measurement>
bool won(const Measurement& row) {
  constexpr double kTie = 0.985;  // of the other's speed: the noise of a measurement
  return row.us * kTie <= row.baseline_us;
}

// Why there is no kernel of `op` for a call, which `problem` describes: types first, then sizes.
std::string none_fits(const char* op, const std::string& problem, const Device& device, const char* last_reason);

}  // namespace tileops
