// Host meaning of csrc/include/tileops/unroll_by.h: none.
#pragma once

#define TILEOPS_UNROLL_BY(n)
