"""attention_decode: flash_attention_paged for a few queries of each request, whose many keys are split over the CTAs.

q [n, key heads, rows, D] (rows: queries x heads of the key head's group, heads fastest), k [pages, key heads, page, D] and v
[.., Dv] in the pages of a cache, out [n, key heads, rows, Dv], lse [n, key heads, rows]; options as of flash_attention. An item
is a key head of a request; a part is a run of all blocks of keys; pieces of split items go to `partial`, for mla_combine.
"""

import math

import tileops_dsl.language as T
from tileops_dsl.kernels import attention as steps
from tileops_dsl.kernels.attention_decode_config import DecodeConfig


def attention_decode(config: DecodeConfig):
    (bm, bn, d), dv = config.tile, config.head_dim_v  # at least those of the tensors: copies fill a tile up with zeros
    by_rows, vector, numbers = T.GemmWarpPolicy.FullRow, ((bm,), "float32"), ((bm,), "int32")
    n, kv_heads, rows, pages, page, table, parts = T.dynamic("n, kv_heads, rows, pages, page, table, parts", "int32")
    head_dim, dim_v = T.dynamic("head_dim, dim_v", "int32")

    @T.prim_func
    def attention_decode(
        q: T.Tensor((n, kv_heads, rows, head_dim), config.x, vector=8),
        k: T.Tensor((pages, kv_heads, page, head_dim), config.x, vector=8),
        v: T.Tensor((pages, kv_heads, page, dim_v), config.x, vector=8),
        out: T.Tensor((n, kv_heads, rows, dim_v), config.x, vector=8),
        lse: T.Tensor((n, kv_heads, rows), "float32"),
        sinks: T.Tensor((kv_heads, rows), "any"),
        partial: T.Tensor((2, parts, rows, dim_v), "float32", vector=2),
        partial_lse: T.Tensor((2, parts, rows), "float32"),
        block_table: T.Tensor((n, table), "int32"),
        cache_seqlens: T.Tensor((n,), "int32"),
        pieces: T.Tensor((parts, 4), "int32"),  # of T.deal, for mla_combine
        unit: T.Scalar("int32"),  # rows of a page that are loaded together: a power of 2 up to bn
        inverse: T.Scalar("int64"),  # 2^32 / page, rounded up
        shared_by: T.Scalar("int32"),  # heads that share a key head
        scale_log2: T.Scalar("float32"),  # scale * log2(e), positive; with a softcap c, c * log2(e)
        cap_scale: T.Scalar("float32"),  # scale / c
        most_pieces: T.Scalar("int32"),  # of an item; 0: any number
        window_left: T.Scalar("int32"),  # of keys; at most the longest request
        window_right: T.Scalar("int32"),  # at most the number of queries
    ):
        with T.Kernel(T.ceildiv(rows, bm), parts, threads=config.threads) as (tile, part):
            T.annotate_dependent_launch()
            given = {"seen": rows // shared_by + window_left, "most_pieces": most_pieces, "notes": tile == 0}
            work = T.deal(cache_seqlens, pieces, part, parts, block=bn, overhead=2, heads=kv_heads, **given)
            first_item, first_block, behind, last_item, last_end = work
            q_tile = T.alloc_shared((bm, d), config.x)
            k_tile = T.alloc_shared((bn, d), config.x)
            v_tile = T.alloc_shared((bn, dv), config.x)
            s = T.alloc_fragment((bm, bn), "float32")
            p_half = T.alloc_fragment((bm, bn), config.x)
            o = T.alloc_fragment((bm, dv), "float32")
            o_half = T.alloc_fragment((bm, dv), config.x)
            limit, start = (T.alloc_fragment(*numbers) for _ in range(2))
            peak, top, factor, sums, total, sink = (T.alloc_fragment(*vector) for _ in range(6))
            first, queries = tile * bm, rows // shared_by
            for item in T.Persistent(first_item, behind):
                request, head = item // kv_heads, item % kv_heads
                length = T.let("length", cache_seqlens[request])
                unseen = T.let("unseen", T.max(length - queries - window_left, 0) // bn)  # blocks before all windows
                begin = T.let("begin", unseen + T.if_then_else(item == first_item, first_block, 0))
                last = T.max(T.ceildiv(length, bn), unseen + 1)
                end = T.let("end", T.if_then_else(item == last_item, unseen + last_end, last))
                T.copy(q[request, head, first, 0], q_tile)
                T.fill(peak, -1e30)  # finite, so that a row that has seen no key has P = exp2(-inf + 1e30) = 0
                T.fill(sums, 0.0)
                for r in T.Parallel(bm):
                    start[r] = length - queries + (first + r) // shared_by - window_left
                    limit[r] = T.min(length - queries + (first + r) // shared_by + 1 + window_right, length)
                fewest = length - queries + 1 + T.min(first // shared_by + window_right, queries - 1)  # keys that all rows see
                latest = length - 1 - window_left  # from here on no window begins
                for i in T.Pipelined(T.max(end - begin, 1), num_stages=config.stages):
                    key = (begin + i) * bn
                    token, stop = key + T.box_row(unit), T.min(length, end * bn)
                    of_page, place = steps.in_page(0, block_table, request, token, stop, page, inverse)
                    T.copy(k[of_page, head, place, 0], k_tile, eviction_policy="evict_first")
                    T.copy(v[of_page, head, place, 0], v_tile, eviction_policy="evict_first")
                    T.gemm(q_tile, k_tile, s, transpose_B=True, policy=by_rows, clear_accum=True)
                    if config.softcap:
                        for r, c in T.Parallel(bm, bn):
                            s[r, c] = T.tanh(s[r, c] * cap_scale)
                    with T.If(key < latest):
                        for r, c in T.Parallel(bm, bn):
                            s[r, c] = T.if_then_else(key + c < start[r], -T.infinity(), s[r, c])
                    steps.maximum(s, top, key, limit, fewest)
                    steps.raise_maximum(top, peak, factor, scale_log2)
                    steps.take(s, p_half, sums, peak, factor, scale_log2)
                    with T.If(i > 0):  # before, o holds nothing
                        steps.rescale(o, factor)
                    steps.clear_tail(v_tile, slice(0, dv), length - key)
                    T.gemm(p_half, v_tile, o, policy=by_rows, clear_accum=i == 0)
                T.copy(sinks[head, first], sink, fill=0.0, absent=-T.infinity())
                T.reduce_sum(sums, total)
                for r in T.Parallel(bm):  # of a row that sees a key, in the first of its pieces
                    counts = (begin == unseen) & (T.max(start[r], 0) < limit[r])
                    sink[r] = T.if_then_else(counts, sink[r] * math.log2(math.e), -T.infinity())
                    factor[r] = peak[r]
                    peak[r] = T.max(peak[r], sink[r])
                    factor[r] = T.exp2(factor[r] - peak[r])
                    sink[r] = T.exp2(sink[r] - peak[r])
                    total[r] = total[r] * factor[r] + sink[r]
                    top[r] = T.if_then_else(total[r] > 0.0, T.reciprocal(total[r]), 0.0) * factor[r]
                    peak[r] = peak[r] + T.log2(total[r])
                steps.times(o, top)
                whole = T.let("whole", (begin == unseen) & (end * bn >= length))
                begins = T.let("begins", T.if_then_else(begin == unseen, 1, 0))  # and a piece may be the first one of several
                with T.If(whole):
                    steps.assign(o_half, o)
                    T.copy(o_half, out[request, head, first, 0])
                with T.If(~whole):
                    T.copy(o, partial[begins, part, first, 0])
                    T.copy(peak, partial_lse[begins, part, first])
                with T.If(whole):
                    for r in T.Parallel(bm):
                        peak[r] = peak[r] * math.log(2)
                    T.copy(peak, lse[request, head, first])

    return attention_decode
