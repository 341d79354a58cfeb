// The words of the sm_90a target: those of every GPU (device.h), and Hopper's own.
#pragma once

#include "tileops/device.h"
#include "tileops/warp_group.h"
#include "tileops/barrier.h"
#include "tileops/cluster.h"
#include "tileops/tma.h"
#include "tileops/matrix.h"
#include "tileops/wgmma.h"
