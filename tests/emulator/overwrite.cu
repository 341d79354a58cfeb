// Warp group 0 writes a row, warp group 1 writes it again, all read: the order of two writes alone, for planted.py.
#include <tileops/sm_90a.h>

namespace tileops {

struct overwrite_params {
  const void* x;
  void* y;
  int32_t rows;
};

TILEOPS_KERNEL(overwrite, overwrite_params, 256, 1) {
  const int group = warp_group_index();
  const int thread = thread_index() % 128;
  const auto row = shared<float>(0);
  Fragment<float, 1> value;
  TILEOPS_NO_UNROLL
  for (int i = 0; i < p.rows; ++i) {
    if (group == 0) {
      load_global<1>(value, 0, global<float>(p.x), i * 128 + thread, site(1));
      store_shared(row, thread, value[0], site(2));
    }
    sync_threads(site(3));
    if (group == 1) store_shared(row, thread, 2.0f, site(4));
    sync_threads(site(5));
    value[0] = load_shared(row, (thread + 37) % 128, site(6));
    if (group == 0) store_global<1>(global<float>(p.y), i * 128 + thread, value, 0, site(7));
    sync_threads(site(8));
  }
}

}  // namespace tileops
