// T.deal alone: a CTA for each part writes what it found.
#include <tileops/portable.h>
#include <tileops/deal_part.h>

namespace tileops {

struct deal_params {
  const void* lengths;
  void* found;  // [parts, 5]: first, begin, behind, last, end
  void* pieces;
  int32_t requests, heads, parts, seen, overhead, most_pieces;
};

TILEOPS_KERNEL(deal, deal_params, 128, 1) {
  const auto dealt = shared<int32_t>(0);
  const int part = static_cast<int>(block_index_x());
  deal_part<128, 64>({p.requests, p.heads, p.parts, p.seen, p.overhead, p.most_pieces}, part, global<int32_t>(p.lengths),
                     global<int32_t>(p.pieces), true, dealt, site(1));
  const int places[] = {0, 1, 7, 4, 5};
  Fragment<int32_t, 1> number;
  TILEOPS_NO_UNROLL
  for (int n = 0; n < 5 && thread_index() == 0; ++n) {
    number[0] = load_shared(dealt, places[n], site(2));
    store_global<1>(global<int32_t>(p.found), part * 5 + n, number, 0, site(3));
  }
}

}  // namespace tileops
