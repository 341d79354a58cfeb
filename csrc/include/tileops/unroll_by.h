// Loops of run-time length.
#pragma once

#define TILEOPS_PRAGMA(text) _Pragma(#text)
#define TILEOPS_UNROLL_BY(n) TILEOPS_PRAGMA(unroll n)  // n iterations side by side
