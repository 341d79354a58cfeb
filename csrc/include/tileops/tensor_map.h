// What cuTensorMapEncodeTiled writes; a member of a kernel's parameters. The same type for the host, the device and the emulator.
#pragma once

#include <stdint.h>

namespace tileops {

struct alignas(64) tensor_map { uint64_t opaque[16]; };

}  // namespace tileops
