"""flash_attention: out = softmax(scale q k^T + mask) v and the log-sum-exp of each row of scores.

q [B, Sq, H, D], k and v [B, Sk, Hk, D], out as q, lse [B, H, Sq] (natural log); H / Hk query heads share a key head. Causal:
query i sees the keys j <= i + Sk - Sq. A row that sees no key gives out 0 and lse -inf.
"""

import math

import tileops_dsl.language as T
from tileops_dsl.configs import AttentionConfig


def flash_attention(config: AttentionConfig):
    bm, bn, d = config.tile
    by_rows, rows = T.GemmWarpPolicy.FullRow, ((bm,), "float32")
    batches, heads, kv_heads, sq, sk = T.dynamic("batches, heads, kv_heads, sq, sk", "int32")

    @T.prim_func
    def flash_attention(
        q: T.Tensor((batches, sq, heads, d), config.x, vector=8),
        k: T.Tensor((batches, sk, kv_heads, d), config.x, vector=8),
        v: T.Tensor((batches, sk, kv_heads, d), config.x, vector=8),
        out: T.Tensor((batches, sq, heads, d), config.x, vector=8),
        lse: T.Tensor((batches, heads, sq), "float32"),
        scale_log2: T.Scalar("float32"),  # scale * log2(e), positive
    ):
        with T.Kernel(threads=config.threads):
            q_tile = T.alloc_shared((bm, d), config.x)
            k_tile = T.alloc_shared((bn, d), config.x)
            v_tile = T.alloc_shared((bn, d), config.x)
            o_tile = T.alloc_shared((bm, d), config.x)
            s, p = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), config.x)
            o, o_half = T.alloc_fragment((bm, d), "float32"), T.alloc_fragment((bm, d), config.x)
            peak, shift, factor, sums, total, row_lse = (T.alloc_fragment(*rows) for _ in range(6))
            for block, head, batch in T.Persistent((T.ceildiv(sq, bm), heads, batches), schedule=config.schedule):
                row = block * bm
                kv_head = head // (heads // kv_heads)
                seen = T.min(row + bm + sk - sq, sk) if config.causal else sk  # keys that the last row sees
                blocks = T.max(T.ceildiv(seen, bn), 1)  # a tile that sees no key has one block, all masked
                whole = T.max(T.min(row + 1 + sk - sq, sk), 0) // bn if config.causal else sk // bn  # blocks without a mask
                masked = blocks - whole if config.causal else T.min(blocks - whole, 1)
                T.copy(q[batch, row, head, 0], q_tile, eviction_policy="evict_first")
                T.fill(peak, -T.infinity())
                T.fill(sums, 0.0)
                for i in T.Pipelined(blocks, num_stages=config.stages, ping_pong=True):
                    key = (blocks - 1 - i) * bn
                    T.copy(k[batch, key, kv_head, 0], k_tile, eviction_policy="evict_last")
                    T.copy(v[batch, key, kv_head, 0], v_tile, eviction_policy="evict_last")
                    T.gemm(q_tile, k_tile, s, transpose_B=True, policy=by_rows, clear_accum=True)
                    with T.If(i < masked):
                        for r, c in T.Parallel(bm, bn):
                            limit = T.min(row + r + 1 + sk - sq, sk) if config.causal else sk
                            s[r, c] = T.if_then_else(key + c < limit, s[r, c], -T.infinity())
                    for r in T.Parallel(bm):
                        factor[r] = peak[r]
                    T.reduce_max(s, peak, clear=False)
                    for r in T.Parallel(bm):
                        shift[r] = (finite(peak[r], i < masked) if config.causal else peak[r]) * scale_log2
                        factor[r] = T.exp2(factor[r] * scale_log2 - shift[r])
                        sums[r] = sums[r] * factor[r]
                    for r, c in T.Parallel(bm, bn):
                        s[r, c] = T.exp2(s[r, c] * scale_log2 - shift[r])
                    T.reduce_sum(s, sums, clear=False, partial=True)
                    with T.If(i > 0):
                        for r, c in T.Parallel(bm, d):
                            o[r, c] = o[r, c] * factor[r]
                    for r, c in T.Parallel(bm, bn):
                        p[r, c] = s[r, c]
                    T.gemm(p, v_tile, o, policy=by_rows, clear_accum=i == 0, stage=1)
                T.reduce_sum(sums, total)
                for r in T.Parallel(bm):
                    factor[r] = T.if_then_else(total[r] == 0.0, 0.0, T.reciprocal(total[r]))
                    row_lse[r] = (peak[r] * scale_log2 + T.log2(total[r])) * math.log(2)
                T.copy(row_lse, lse[batch, head, row])
                for r, c in T.Parallel(bm, d):
                    o_half[r, c] = o[r, c] * factor[r]
                T.copy(o_half, o_tile)
                T.copy(o_tile, out[batch, row, head, 0])

    return flash_attention


def finite(peak, masked):
    """The maximum to subtract: 0 where a mask has left a row no key, so that exp2 gives 0 there and not NaN."""
    return T.if_then_else(masked & (peak == -T.infinity()), 0.0, peak)
