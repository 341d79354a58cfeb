"""mla_decode: attention of a few query tokens over a paged latent cache whose first 512 columns are the values as well.

q [n, rows, 576] (rows: sq tokens x heads, heads fastest), kv_cache [pages, page, 576], out [n, rows, 512], lse [n, heads, sq].
A part is a piece of all requests, in blocks of 64 tokens; what belongs to a split one goes to `partial`. Group 0 has the scores
of the first of two blocks and the left half of o, group 1 the others; group 2 loads. Each half has its group's P in registers.
"""

import tileops_dsl.language as T
from tileops_dsl.kernels import attention as steps
from tileops_dsl.kernels.mla_decode_config import MlaConfig


def mla_decode(config: MlaConfig):
    (bm, bn, d, dv), x, f32 = config.tile, config.x, "float32"
    left, right, rope, row = slice(0, dv // 2), slice(dv // 2, dv), slice(dv, d), ((bm,), "float32")
    halves = slice(dv // 2, 3 * dv // 4), slice(3 * dv // 4, dv)  # of the right columns
    n, rows, pages, page, table = T.dynamic("n, rows, pages, page, table", "int32")
    parts, heads, sq = T.dynamic("parts, heads, sq", "int32")

    @T.prim_func
    def mla_decode(
        q: T.Tensor((n, rows, d), x, vector=8),
        kv_cache: T.Tensor((pages, page, d), x, vector=8),
        out: T.Tensor((n, rows, dv), x, vector=8),
        lse: T.Tensor((n, heads, sq), "float32"),
        partial: T.Tensor((2, parts, rows, dv), "float32", vector=2),
        partial_lse: T.Tensor((2, parts, rows), "float32"),
        block_table: T.Tensor((n, table), "int32"),
        cache_seqlens: T.Tensor((n,), "int32"),
        pieces: T.Tensor((parts, 4), "int32"),  # of T.deal, for mla_combine
        most_pieces: T.Scalar("int32"),  # of a request; 0: any number
        unit: T.Scalar("int32"),  # rows of a page that are loaded together: a power of 2 up to bn
        inverse: T.Scalar("int64"),  # 2^32 / page, rounded up
        causal: T.Scalar("int32"),
        scale_log2: T.Scalar("float32"),  # scale * log2(e), positive
    ):
        with T.Kernel(T.ceildiv(rows, bm), parts, threads=384) as (tile, part):
            T.annotate_dependent_launch()
            given = {"most_pieces": most_pieces, "notes": tile == 0}
            work = T.deal(cache_seqlens, pieces, part, parts, block=bn, overhead=5, **given)
            first_request, first_block, behind, last_request, last_end = work
            q_tile, first = T.alloc_shared((bm, d), x, box=64), tile * bm
            k0, k1 = T.alloc_shared((bn, d), x, box=64), T.alloc_shared((bn, d), x, box=64)
            p0, p1 = T.alloc_shared((bm, bn), x), T.alloc_shared((bm, bn), x, alias=q_tile[:, rope])
            o_tile = T.alloc_shared((bm, dv), x, alias=q_tile[:, 0:dv])
            peak0, factor0, sums0, peak1, factor1, sums1 = (T.alloc_shared(*row) for _ in range(6))
            with T.ws(0, 1):
                o, o_half = T.alloc_fragment((bm, dv // 2), f32), T.alloc_fragment((bm, dv // 2), x)
                s, p_half = T.alloc_fragment((bm, bn), f32), T.alloc_fragment((bm, bn), x)
                peak, top, sums, factor, other = (T.alloc_fragment(*row) for _ in range(5))
                q_rope, limit = T.alloc_fragment((bm, d - dv), x), T.alloc_fragment((bm,), "int32")
            for request in T.Pipelined(first_request, behind, num_stages=1):
                length = T.let("length", cache_seqlens[request])
                begin = T.let("begin", T.if_then_else(request == first_request, first_block, 0))
                blocks = T.max(T.ceildiv(length, bn), 1)
                end = T.let("end", T.if_then_else(request == last_request, last_end, blocks))
                fewest = T.let("fewest", T.min(length + steps.beyond(first, heads, sq, causal), end * bn))  # that a row sees
                numbers = first, length, end * bn, heads, sq, causal  # that say which keys a row sees
                with T.ws(0):
                    steps.load(q, (request, first), q_tile, left, rope)
                with T.ws(1):
                    steps.load(q, (request, first), q_tile, right)
                with T.ws(0, 1):
                    T.copy(q_tile[:, rope], q_rope)
                    T.fill(peak, -1e30)  # finite, so that a row that has seen no key has P = exp2(-inf + 1e30) = 0
                    T.fill(sums, 0.0)
                for i in T.Pipelined(begin, end, 2, num_stages=1):
                    place0, place1 = steps.blocks(config, block_table, request, i, end, length, page, unit, inverse)
                    with T.ws(2):  # in the order in which what was there before has been read
                        steps.load(kv_cache, place0, k0, rope)
                        steps.load(kv_cache, place1, k1, rope)
                        steps.load(kv_cache, place0, k0, left, right)
                        steps.load(kv_cache, place1, k1, *halves, left)
                    with T.ws(0):
                        steps.scores(q_tile, q_rope, k0, s, rope, left, right)
                        steps.maximum(s, top, i * bn, limit, fewest, numbers)
                        steps.raise_maximum(top, peak, factor, scale_log2)
                        steps.copy_each((peak, peak0), (factor, factor0))
                        steps.exponentials(s, peak, scale_log2)
                        steps.assign(p_half, s)
                        T.copy(p_half, p0)
                        steps.scale(sums, factor)
                        with T.If(i > begin):  # before, o holds nothing
                            steps.rescale(o, factor)
                        steps.clear_tail(k0, left, length - i * bn)
                        own0 = T.wgmma_gemm(p_half, k0[:, left], o, clear_accum=i == begin)
                        T.reduce_sum(s, sums, clear=False, partial=True)
                    with T.ws(1):
                        steps.scores(q_tile, q_rope, k1, s, rope, right, left)
                        steps.maximum(s, top, i * bn + bn, limit, fewest, numbers)
                        T.copy(factor0, other)
                        steps.scale(sums, other)
                        with T.If(i > begin):
                            steps.rescale(o, other)
                        steps.clear_tail(k0, right, length - i * bn)
                        cross1 = T.wgmma_gemm(p0, k0[:, right], o, clear_accum=i == begin)
                        T.copy(peak0, peak)
                        steps.raise_maximum(top, peak, factor, scale_log2)
                        steps.copy_each((peak, peak1), (factor, factor1))
                        steps.exponentials(s, peak, scale_log2)
                        steps.assign(p_half, s)
                        T.wait(cross1)
                        T.copy(p_half, p1)
                        steps.scale(sums, factor)
                        steps.rescale(o, factor)
                        steps.clear_tail(k1, right, length - i * bn - bn)
                        for half in halves:  # each can be loaded anew when its product is done
                            T.wgmma_gemm(p_half, k1[:, half], o[:, half.start - right.start : half.stop - right.start])
                        T.reduce_sum(s, sums, clear=False, partial=True)
                    with T.ws(0):
                        steps.copy_each((factor1, other), (peak1, peak))
                        steps.scale(sums, other)
                        T.wait(own0)
                        steps.rescale(o, other)
                        steps.clear_tail(k1, left, length - i * bn - bn)
                        T.wgmma_gemm(p1, k1[:, left], o)
                for group, mine in ((0, sums0), (1, sums1)):
                    with T.ws(group):
                        T.reduce_sum(sums, top)
                        T.copy(top, mine)
                whole = T.let("whole", (begin == 0) & (end * bn >= length))
                begins = T.let("begins", T.if_then_else(begin == 0, 1, 0))  # and a piece may be the first one of several
                for group, half, others in ((0, left, sums1), (1, right, sums0)):
                    with T.ws(group):
                        T.copy(others, other)
                        steps.normalise(o, top, other, peak, factor)
                        with T.If(whole):
                            steps.assign(o_half, o)
                            T.copy(o_half, o_tile[:, half])
                            T.copy(o_tile[:, half], out[request, first, half.start])
                        with T.If(~whole):
                            T.copy(o, partial[begins, part, first, half.start])
                with T.ws(0):
                    with T.If(~whole):
                        T.copy(factor, partial_lse[begins, part, first])
                    with T.If(whole):
                        for r in T.Parallel(bm):
                            lse[request, (first + r) % heads, (first + r) // heads] = factor[r] * 0.6931471805599453  # ln 2

    return mla_decode
