// The device words: everything that generated kernels may call. One instruction or idiom each, named in the field's terms.
//
// Contract (what lets csrc/emulator run the same text on a CPU): a kernel touches shared and global memory only through
// the words of memory.h, holds the registers of a tile in a Fragment, and reads thread indices through thread.h. Words
// that have an effect take the `site` last: a number that csrc/generated/manifest.json maps to the tile program's line.
#pragma once

#include "tileops/types.h"
#include "tileops/thread.h"
#include "tileops/memory.h"
#include "tileops/math.h"
#include "tileops/tile.h"
#include "tileops/activation.h"
#include "tileops/reduce.h"
#include "tileops/print.h"
