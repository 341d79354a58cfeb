#include "knobs.h"

#include <string.h>

#include <atomic>
#include <mutex>

namespace tileops {

namespace {

const Knobs kDefaults;
std::atomic<const Knobs*> current{&kDefaults};

}  // namespace

const Knobs& knobs() { return *current.load(std::memory_order_acquire); }

void set_knob(const char* name, const char* value) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  Knobs changed = knobs();
  const bool on = value[0] != '\0' && strcmp(value, "0") != 0;
  if (strcmp(name, "force") == 0) changed.force = value;
  if (strcmp(name, "log") == 0) changed.log = strcmp(value, "dispatch") == 0;
  if (strcmp(name, "require_native") == 0) changed.require_native = on;
  if (strcmp(name, "disable_native") == 0) changed.disable_native = on;
  // The old value is never freed: a call on another thread may be reading it, and changes are few.
  current.store(new Knobs(changed), std::memory_order_release);
}

}  // namespace tileops
