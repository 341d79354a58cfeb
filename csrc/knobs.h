// The switches that Python's knobs.py pushes down: TILEOPS_FORCE, _LOG, _REQUIRE_NATIVE, _DISABLE_NATIVE.
#pragma once

#include <string>

namespace tileops {

struct Knobs {
  std::string force;  // "", eager, portable, sm_90a or the name of a kernel
  bool log = false;
  bool require_native = false;
  bool disable_native = false;
};

const Knobs& knobs();
void set_knob(const char* name,
              const char* value);  // "" unsets; an unknown name is ignored (knobs.py is where they are checked)

}  // namespace tileops
