// One group writes and announces, the other waits and reads: the hand-over of MLA's factors alone, for racecheck.py.
#include <tileops/sm_90a.h>

namespace tileops {

struct handover_params {
  void* sums;
  int32_t late;  // the group that comes to the barrier last
};

TILEOPS_KERNEL(handover, handover_params, 256, 1) {
  const int group = warp_group_index();
  const int thread = thread_index() % 128;
  const auto box = shared<float>(0);
  Fragment<float, 1> sum;
  fill<1>(sum, 0, 0.0f);
  TILEOPS_NO_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (group == p.late) __nanosleep(20000);
    if (group == 1) {
      store_shared(box, thread, static_cast<float>(i + thread), site(1));
      named_barrier_arrive(1, 256, site(2));
    } else {
      named_barrier_sync(1, 256, site(3));
      sum[0] = sum[0] + load_shared(box, (thread + 37) % 128, site(4));
    }
    sync_threads(site(5));
  }
  if (group == 0) store_global<1>(global<float>(p.sums), thread, sum, 0, site(6));
}

}  // namespace tileops
