// Launches that overlap: a kernel may be launched while the one before it on the stream still runs. Below sm_90 none is.
#pragma once

#include "tileops/types.h"

namespace tileops {

// Until the kernel before is over and its writes are seen. Before, nothing is read that others write, nor written.
TILEOPS_WORD void grid_dependency_wait(site) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel, if it is one that waits so, may start once all CTAs have come here. Too early, its CTAs crowd on the
// multiprocessors that are free first.
TILEOPS_WORD void grid_dependency_launch(site) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace tileops
