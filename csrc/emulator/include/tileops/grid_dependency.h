// Host meaning of csrc/include/tileops/grid_dependency.h: kernels run one after the other.
#pragma once

#include "tileops/types.h"

namespace tileops {

TILEOPS_WORD void grid_dependency_wait(site) {}
TILEOPS_WORD void grid_dependency_launch(site) {}

}  // namespace tileops
