"""mla_decode_few: mla_decode for few rows (queries x heads), where reading the cache takes all the time.

Parameters and results are those of mla_decode.py, of which this is the transpose: a page's 64 tokens are the rows of the scores
and the columns of its values those of o, so that products of 64 rows waste nothing. The maximum of a query runs down the rows.
"""

import tileops_dsl.language as T
from tileops_dsl.kernels import attention as steps
from tileops_dsl.kernels.mla_decode_config import FewMlaConfig


def mla_decode_few(config: FewMlaConfig):
    bm, bn, d, dv = config.tile
    x, f32, vector = config.x, "float32", ((bm,), "float32")
    n, rows, pages, table = T.dynamic("n, rows, pages, table", "int32")
    parts, heads, sq = T.dynamic("parts, heads, sq", "int32")
    page = T.dynamic("page", "int32") if config.unit else bn

    @T.prim_func
    def mla_decode_few(
        q: T.Tensor((n, rows, d), x, vector=8),
        kv_cache: T.Tensor((pages, page, d), x, vector=8),
        out: T.Tensor((n, rows, dv), x),
        lse: T.Tensor((n, heads, sq), "float32"),
        partial: T.Tensor((2, parts, rows, dv), "float32"),
        partial_lse: T.Tensor((2, parts, rows), "float32"),
        block_table: T.Tensor((n, table), "int32"),
        cache_seqlens: T.Tensor((n,), "int32"),
        pieces: T.Tensor((parts, 4), "int32"),  # of T.deal, for mla_combine
        most_pieces: T.Scalar("int32"),  # of a request; 0: any number
        inverse: T.Scalar("int64") if config.unit else None,  # 2^32 / page, rounded up
        causal: T.Scalar("int32"),
        scale_log2: T.Scalar("float32"),  # scale * log2(e), positive
    ):
        with T.Kernel(T.ceildiv(rows, bm), parts, threads=config.threads) as (tile, part):
            T.annotate_dependent_launch()
            given = {"most_pieces": most_pieces, "notes": tile == 0}
            work = T.deal(cache_seqlens, pieces, part, parts, block=bn, overhead=5, **given)
            first_request, first_block, behind, last_request, last_end = work
            q_tile, k_tile = T.alloc_shared((bm, d), x), T.alloc_shared((bn, d), x)
            s, p_half = T.alloc_fragment((bn, bm), f32), T.alloc_fragment((bn, bm), x)
            o, limit = T.alloc_fragment((dv, bm), f32), T.alloc_fragment((bm,), "int32")
            peak, top, factor, sums, total = (T.alloc_fragment(*vector) for _ in range(5))
            first = tile * bm
            for request in T.Persistent(first_request, behind):
                length = T.let("length", cache_seqlens[request])
                begin = T.let("begin", T.if_then_else(request == first_request, first_block, 0))
                pages_of = T.max(T.ceildiv(length, bn), 1)
                end = T.let("end", T.if_then_else(request == last_request, last_end, pages_of))
                fewest = T.let("fewest", T.min(length + steps.beyond(first, heads, sq, causal), end * bn))  # that a row sees
                T.copy(q[request, first, 0], q_tile)
                T.fill(peak, -1e30)  # finite, so that a row that has seen no key has P = exp2(-inf + 1e30) = 0
                T.fill(sums, 0.0)
                steps.limits(limit, first, length, end * bn, heads, sq, causal)
                for i in T.Pipelined(T.max(end - begin, 1), num_stages=config.stages):
                    key = (begin + i) * bn
                    if config.unit:  # what lies beyond the end is 0
                        token, stop = key + T.box_row(1), T.min(length, end * bn)
                        place = steps.in_page(0, block_table, request, token, stop, page, inverse)
                    else:
                        place = block_table[request, begin + i], 0
                    T.copy(kv_cache[(*place, 0)], k_tile, eviction_policy="evict_first")
                    T.gemm(k_tile, q_tile, s, transpose_B=True, clear_accum=True)
                    with T.If(key + bn > fewest):
                        for t, r in T.Parallel(bn, bm):
                            s[t, r] = T.if_then_else(key + t < limit[r], s[t, r], -T.infinity())
                    T.reduce_max(s, top, dim=0)
                    steps.raise_maximum(top, peak, factor, scale_log2)
                    for t, r in T.Parallel(bn, bm):
                        s[t, r] = T.exp2(s[t, r] * scale_log2 - peak[r])
                    steps.scale(sums, factor)
                    T.reduce_sum(s, sums, dim=0, clear=False, partial=True)
                    steps.assign(p_half, s)
                    with T.If(i > 0), T.If(T.any_of(factor, lambda v: v != 1.0)):  # before, o holds nothing
                        for c, r in T.Parallel(dv, bm):
                            o[c, r] = o[c, r] * factor[r]
                    if not config.unit:
                        steps.clear_tail(k_tile, slice(0, dv), length - key)
                    T.gemm(k_tile[:, 0:dv], p_half, o, transpose_A=True, clear_accum=i == 0)
                T.reduce_sum(sums, total)
                for r in T.Parallel(bm):
                    factor[r] = peak[r] + T.log2(total[r])
                    total[r] = T.if_then_else(total[r] > 0.0, T.reciprocal(total[r]), 0.0)
                whole = T.let("whole", (begin == 0) & (end * bn >= length))
                begins = T.let("begins", T.if_then_else(begin == 0, 1, 0))  # and a piece may be the first one of several
                with T.If(whole):
                    for c, r in T.Parallel(dv, bm):
                        out[request, first + r, c] = o[c, r] * total[r]
                    for r in T.Parallel(bm):
                        lse[request, (first + r) % heads, (first + r) // heads] = factor[r] * 0.6931471805599453  # ln 2
                with T.If(~whole):
                    for c, r in T.Parallel(dv, bm):
                        partial[begins, part, first + r, c] = o[c, r] * total[r]
                    for r in T.Parallel(bm):
                        partial_lse[begins, part, first + r] = factor[r]

    return mla_decode_few
