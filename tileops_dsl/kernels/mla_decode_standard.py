"""mla_decode_standard: attention of a few query tokens over a paged latent cache, as the tutorials write it.

q [n, rows, 576] (rows: sq tokens x heads, heads fastest), kv_cache [pages, 64, 576], whose first 512 columns are the values as
well, out [n, rows, 512], lse [n, rows] (natural log). Causal: token i sees the keys j <= i + length - sq. A row that sees no
key gives out 0 and lse -inf. A CTA has 64 rows of a request and goes through its pages; CTAs of a cluster share those.

Two groups divide the columns: of a page's 64 scores each has 32, of the 512 columns of o 256. The maximum of a row and P, which
the product with the values needs whole, go from group to group through shared memory; the compiler sees to that.
"""

import math

import tileops_dsl.language as T
from tileops_dsl.kernels import attention as steps
from tileops_dsl.kernels.mla_decode_config import StandardMlaConfig


def mla_decode_standard(config: StandardMlaConfig):
    bm, bn, d, dv = config.tile
    x, by_columns, vector = config.x, T.GemmWarpPolicy.FullCol, ((bm,), "float32")
    n, rows, pages, table = T.dynamic("n, rows, pages, table", "int32")

    @T.prim_func
    def mla_decode_standard(
        q: T.Tensor((n, rows, d), x, vector=8),
        kv_cache: T.Tensor((pages, bn, d), x, vector=8),
        out: T.Tensor((n, rows, dv), x, vector=8),
        lse: T.Tensor((n, rows), "float32"),
        block_table: T.Tensor((n, table), "int32"),
        cache_seqlens: T.Tensor((n,), "int32"),
        heads: T.Scalar("int32"),
        sq: T.Scalar("int32"),
        causal: T.Scalar("int32"),
        scale_log2: T.Scalar("float32"),  # scale * log2(e), positive
    ):
        with T.Kernel(threads=config.threads, cluster=(config.cluster, 1)):
            q_tile = T.alloc_shared((bm, d), x)
            k_tile = T.alloc_shared((bn, d), x)
            s = T.alloc_fragment((bm, bn), "float32")
            p_half = T.alloc_fragment((bm, bn), x)
            o = T.alloc_fragment((bm, dv), "float32")
            o_half = T.alloc_fragment((bm, dv), x)
            limit = T.alloc_fragment((bm,), "int32")
            peak, top, factor, sums, total = (T.alloc_fragment(*vector) for _ in range(5))
            for block, request in T.Persistent((T.ceildiv(rows, bm), n), group_size=8 // config.cluster):
                length = T.let("length", cache_seqlens[request])
                fewest = T.let("fewest", length + steps.beyond(block * bm, heads, sq, causal))  # keys that a row sees
                T.copy(q[request, block * bm, 0], q_tile)
                T.fill(peak, -1e30)  # finite, so that a row that has seen no key has P = exp2(-inf + 1e30) = 0
                T.fill(sums, 0.0)
                steps.limits(limit, block * bm, length, length, heads, sq, causal)
                for i in T.Pipelined(T.max(T.ceildiv(length, bn), 1), num_stages=config.stages):
                    T.copy(kv_cache[block_table[request, i], 0, 0], k_tile, multicast=config.cluster > 1)
                    T.gemm(q_tile, k_tile, s, transpose_B=True, policy=by_columns, clear_accum=True)
                    steps.maximum(s, top, i * bn, limit, fewest)
                    steps.raise_maximum(top, peak, factor, scale_log2)
                    steps.take(s, p_half, sums, peak, factor, scale_log2)
                    with T.If(i > 0):  # before, o holds nothing
                        steps.rescale(o, factor)
                    steps.clear_tail(k_tile, slice(0, dv), length - i * bn)
                    T.gemm(p_half, k_tile[:, 0:dv], o, policy=by_columns, clear_accum=i == 0)
                T.reduce_sum(sums, total)
                for r in T.Parallel(bm):
                    factor[r] = T.if_then_else(total[r] > 0.0, T.reciprocal(total[r]), 0.0)
                    peak[r] = (peak[r] + T.log2(total[r])) * math.log(2)
                T.copy(peak, lse[request, block * bm])
                for r, c in T.Parallel(bm, dv):
                    o_half[r, c] = o[r, c] * factor[r]
                T.copy(o_half, out[request, block * bm, 0])

    return mla_decode_standard
