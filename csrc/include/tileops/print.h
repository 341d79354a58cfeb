// A line from a thread, for debugging: block 3 0 0, thread 5: softmax.py:31: peak[0] = 1.5
#pragma once

#include <stdio.h>

#include "tileops/thread.h"

namespace tileops {

namespace detail {
template <typename V>
TILEOPS_WORD void print_line(const char* form, const char* name, V v) {
  printf(form, static_cast<long long>(block_index_x()), static_cast<long long>(block_index_y()),
         static_cast<long long>(block_index_z()), thread_index(), name, v);
}
}  // namespace detail

TILEOPS_WORD void print(const char* name, float v, site) {
  detail::print_line("block %lld %lld %lld, thread %d: %s = %.9g\n", name, static_cast<double>(v));
}
TILEOPS_WORD void print(const char* name, int64_t v, site) {
  detail::print_line("block %lld %lld %lld, thread %d: %s = %lld\n", name, static_cast<long long>(v));
}
TILEOPS_WORD void print(const char* name, int v, site s) { print(name, static_cast<int64_t>(v), s); }

}  // namespace tileops
