// Lists the tiles of queries of all requests for flash_attention with lengths: those of a request from its last one to its first,
// which under a causal mask is from the most work to the least.
//
// Written by hand: it counts, and has no tiles of its own.
#include <tileops/portable.h>
#include <tileops/sum_before.h>

#include "attention_tiles_params.h"

namespace tileops {

constexpr int kThreads = attention_tiles_threads;

TILEOPS_WORD int element(const int32_t* from, int64_t index, site s) {
  Fragment<int32_t, 1> value;
  load_global<1>(value, 0, global<int32_t>(from), index, s);
  return value[0];
}

TILEOPS_WORD int queries_of(const attention_tiles_params& p, int request, site s) {
  if (p.cu_seqlens_q == nullptr) return p.queries;
  return min(element(p.cu_seqlens_q, request + 1, s) - element(p.cu_seqlens_q, request, s), p.most_queries);
}

// Rows of q without a break, which a request has or none; those of none see no key, and their results are 0 and -inf.
struct Segment {
  int first, queries, first_key, keys, lse;
};

TILEOPS_WORD int tiles_in(const attention_tiles_params& p, int queries) { return divide_up(queries, p.rows); }

// Lists the tiles of a segment; returns the place of the next one.
TILEOPS_WORD int list(const attention_tiles_params& p, int place, const Segment& of, site s) {
  for (int row = (tiles_in(p, of.queries) - 1) * p.rows; row >= 0; row -= p.rows) {
    Fragment<int32_t, 8> tile;
    tile[0] = of.first + row;
    tile[1] = row;
    tile[2] = of.queries;
    tile[3] = of.first_key;
    tile[4] = of.keys;
    tile[5] = of.lse + row;
    tile[6] = tile[7] = 0;
    store_global<8>(global<int32_t>(p.tiles), place++ * 8, tile, 0, s);
  }
  return place;
}

// Behind the queries of a request that are left out, or of all requests (`request` is their number); in front of all (-1).
TILEOPS_WORD Segment left_out(const attention_tiles_params& p, int request, site s) {
  if (p.cu_seqlens_q == nullptr) return {0, 0, 0, 0, 0};
  const int from = request < 0 ? 0 : element(p.cu_seqlens_q, request, s);
  const int to = request == p.requests ? p.all_queries : element(p.cu_seqlens_q, request + 1, s);
  const int first = request < 0 || request == p.requests ? from : from + min(to - from, p.most_queries);
  return {first, to - first, 0, 0, first};
}

TILEOPS_KERNEL(attention_tiles, attention_tiles_params, kThreads, 1) {
  const int thread = thread_index();
  const auto sums = shared<int32_t>(0);
  const int share = divide_up(p.requests, kThreads);
  const int begin = min(thread * share, p.requests), end = min(begin + share, p.requests);
  int own = 0;
  for (int request = begin; request < end; ++request) {
    own += tiles_in(p, queries_of(p, request, site(1))) + tiles_in(p, left_out(p, request, site(2)).queries);
  }
  if (thread == 0) own += tiles_in(p, left_out(p, -1, site(3)).queries) + tiles_in(p, left_out(p, p.requests, site(4)).queries);
  int sum = 0;
  int place = sum_before<kThreads / 32>(sums, own, sum, site(5));
  Fragment<int32_t, 1> count;
  count[0] = sum;
  if (thread == 0) store_global<1>(global<int32_t>(p.tile_count), 0, count, 0, site(11));

  if (thread == 0) {
    place = list(p, place, left_out(p, -1, site(12)), site(13));
    place = list(p, place, left_out(p, p.requests, site(14)), site(15));
  }
  for (int request = begin; request < end; ++request) {
    Segment of;
    of.queries = queries_of(p, request, site(16));
    of.first = p.cu_seqlens_q ? element(p.cu_seqlens_q, request, site(17)) : request * p.queries;
    of.first_key = p.cu_seqlens_k ? element(p.cu_seqlens_k, request, site(18)) : request;
    of.keys = p.most_keys;
    if (p.cu_seqlens_k) of.keys = min(of.keys, element(p.cu_seqlens_k, request + 1, site(19)) - of.first_key);
    if (p.seqlens_k) of.keys = min(of.keys, element(p.seqlens_k, request, site(20)));
    of.lse = p.lse_stride ? request * p.lse_stride : of.first;
    place = list(p, place, of, site(21));
    place = list(p, place, left_out(p, request, site(22)), site(23));
  }
}

}  // namespace tileops
