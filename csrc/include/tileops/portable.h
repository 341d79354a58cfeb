// The words of the portable target (sm_80 on): those of every GPU (device.h), asynchronous copies, and products of a warp.
// Not of what is included: elect_one, register budgets, store_matrix, exp2_pair and the mbarriers, which need sm_90.
#pragma once

#include "tileops/device.h"
#include "tileops/warp_group.h"
#include "tileops/matrix.h"
#include "tileops/async_copy.h"
#include "tileops/mma.h"
