"""flash_attention: out = softmax(scale q k^T + mask) v and the log-sum-exp of each row of scores.

q, out [B, H, Sq, D], k, v [B, Hk, Sk, D], of any strides; lse [B, H, Sq] (natural log). H / Hk query heads share a key head.
Causal: query i sees the keys j <= i + Sk - Sq. A row that sees no key gives out 0 and lse -inf.
"""

import math

import tileops_dsl.language as T
from tileops_dsl.configs import AttentionConfig


def flash_attention(config: AttentionConfig):
    (bm, bn, d), sub = config.tile, 64 if config.tile[2] % 64 == 0 else 32  # columns of the output stored at a time
    by_rows, row_vector = T.GemmWarpPolicy.FullRow, ((bm,), "float32")
    batches, heads, kv_heads, sq, sk = T.dynamic("batches, heads, kv_heads, sq, sk", "int32")

    @T.prim_func
    def flash_attention(
        q: T.Tensor((batches, heads, sq, d), config.x, vector=8),
        k: T.Tensor((batches, kv_heads, sk, d), config.x, vector=8),
        v: T.Tensor((batches, kv_heads, sk, d), config.x, vector=8),
        out: T.Tensor((batches, heads, sq, d), config.x, vector=8),
        lse: T.Tensor((batches, heads, sq), "float32"),
        scale_log2: T.Scalar("float32"),  # scale * log2(e), positive
    ):
        with T.Kernel(threads=config.threads):
            q_tile = T.alloc_shared((bm, d), config.x)
            k_tile = T.alloc_shared((bn, d), config.x)
            v_tile = T.alloc_shared((bn, d), config.x)
            o_tile = T.alloc_shared((bm, sub), config.x)
            s = T.alloc_fragment((bm, bn), "float32")
            p_half = T.alloc_fragment((bm, bn), config.x)
            o = T.alloc_fragment((bm, d), "float32")
            o_half = T.alloc_fragment((bm, sub), config.x)
            peak = T.alloc_fragment(*row_vector)
            shift = T.alloc_fragment(*row_vector)
            factor = T.alloc_fragment(*row_vector)
            sums = T.alloc_fragment(*row_vector)
            total = T.alloc_fragment(*row_vector)
            row_lse = T.alloc_fragment(*row_vector)
            for batch, head, block in T.Persistent((batches, heads, T.ceildiv(sq, bm)), zigzag=config.causal):
                row = block * bm
                kv_head = head // (heads // kv_heads)
                seen = T.min(row + bm + sk - sq, sk) if config.causal else sk  # keys that the last row sees
                blocks = T.max(T.ceildiv(seen, bn), 1)  # a tile that sees no key has one block, all masked
                whole = T.max(T.min(row + 1 + sk - sq, sk), 0) // bn if config.causal else sk // bn  # blocks without a mask
                masked = blocks - whole if config.causal else T.min(blocks - whole, 1)
                T.copy(q[batch, head, row, 0], q_tile, eviction_policy="evict_first")
                T.fill(peak, -T.infinity())
                T.fill(sums, 0.0)
                for i in T.Pipelined(blocks, num_stages=config.stages):
                    key = (blocks - 1 - i) * bn
                    T.copy(k[batch, kv_head, key, 0], k_tile, eviction_policy="evict_last")
                    T.copy(v[batch, kv_head, key, 0], v_tile, eviction_policy="evict_last")
                    T.gemm(q_tile, k_tile, s, transpose_B=True, policy=by_rows, clear_accum=True)
                    with T.If(i < masked):
                        for r, c in T.Parallel(bm, bn):
                            limit = T.min(row + r + 1 + sk - sq, sk) if config.causal else sk
                            s[r, c] = T.if_then_else(key + c < limit, s[r, c], -T.infinity())
                    for r in T.Parallel(bm):
                        factor[r] = peak[r]
                    T.reduce_max(s, peak, clear=False)
                    for r in T.Parallel(bm):
                        shift[r] = (finite(peak[r]) if config.causal else peak[r]) * scale_log2
                        factor[r] = T.exp2(factor[r] * scale_log2 - shift[r])
                        sums[r] = sums[r] * factor[r]
                    for r, c in T.Parallel(bm, bn):
                        s[r, c] = T.exp2(s[r, c] * scale_log2 - shift[r])
                    T.reduce_sum(s, sums, clear=False, partial=True)
                    with T.If(i > 0):
                        for r, c in T.Parallel(bm, d):
                            o[r, c] = o[r, c] * factor[r]
                    for r, c in T.Parallel(bm, bn):
                        p_half[r, c] = s[r, c]
                    T.gemm(p_half, v_tile, o, policy=by_rows, clear_accum=i == 0, stage=1)
                T.reduce_sum(sums, total)
                for r in T.Parallel(bm):
                    factor[r] = T.if_then_else(total[r] == 0.0, 0.0, T.reciprocal(total[r]))
                    row_lse[r] = (peak[r] * scale_log2 + T.log2(total[r])) * math.log(2)
                T.copy(row_lse, lse[batch, head, row])
                for e in T.Pipelined(d // sub, num_stages=2):
                    piece = o[:, e * sub : e * sub + sub]
                    for r, c in T.Parallel(bm, sub):
                        o_half[r, c] = piece[r, c] * factor[r]
                    T.copy(o_half, o_tile)
                    T.copy(o_tile, out[batch, head, row, e * sub])

    return flash_attention


def finite(peak):
    """The maximum to subtract: 0 where a mask has left a row no key, so that exp2 gives 0 there and not NaN."""
    return T.if_then_else(peak == -T.infinity(), 0.0, peak)
