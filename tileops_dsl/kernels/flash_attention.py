"""flash_attention: out = softmax(scale q k^T + mask) v and the log-sum-exp of each row of scores.

q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv], out [B, H, Sq, Dv], of any strides; lse [B, H, Sq] (natural log).
H / Hk query heads share a key head. Causal: query i sees the keys j <= i + Sk - Sq. A row that sees no key gives out 0 and
lse -inf. Options: a window of keys from i + Sk - Sq - window_left to i + Sk - Sq + window_right; for each head a sink, one more
score without a value, which counts in lse; softcap c, by which a scaled score s becomes c tanh(s / c).
With lengths, B is 1, and queries and keys of several requests lie one behind the other: `tiles` says which are whose. Paged:
keys and values [pages, Hk, page, D] lie in the pages of a cache.
"""

import math

import tileops_dsl.language as T
from tileops_dsl.kernels import attention as steps
from tileops_dsl.kernels.flash_attention_config import AttentionConfig

LOWEST = -1e30  # finite, so that a row that has seen no key has weights exp2(-inf + 1e30) = 0
SLACK = 8.0  # in powers of 2, between a row's maximum so far and what its scores are shifted by


def flash_attention(config: AttentionConfig):
    (bm, bn, d), dv = config.tile, config.head_dim_v  # at least those of the tensors: copies fill a tile up with zeros
    sub = math.gcd(dv, 64)  # columns of the output stored at a time
    hides_rows = config.causal or config.window  # a block may have no key for some rows
    by_rows, row_vector = T.GemmWarpPolicy.FullRow, ((bm,), "float32")
    batches, heads, kv_heads, sq, sk, dim, dim_v = T.dynamic("batches, heads, kv_heads, sq, sk, head_dim, head_dim_v", "int32")
    pages, page, requests, table, most_tiles = T.dynamic("pages, page, requests, table, most_tiles", "int32")
    of_keys = (pages, kv_heads, page) if config.paged else (batches, kv_heads, sk)

    @T.prim_func
    def flash_attention(
        q: T.Tensor((batches, heads, sq, dim), config.x, vector=8),
        k: T.Tensor((*of_keys, dim), config.x, vector=8),
        v: T.Tensor((*of_keys, dim_v), config.x, vector=8),
        out: T.Tensor((batches, heads, sq, dim_v), config.x, vector=8),
        lse: T.Tensor((batches, heads, sq), "float32"),
        sinks: T.Tensor((heads, sq), "any"),  # the same for all rows: of stride 0
        # Of each tile: its first row of q, and of its request, whose queries, first key (paged: number) and keys; row in lse.
        tiles: T.Tensor((most_tiles, 8), "int32") if config.lengths else None,
        tile_count: T.Tensor((1,), "int32") if config.lengths else None,
        block_table: T.Tensor((requests, table), "int32") if config.paged else None,
        unit: T.Scalar("int32") if config.paged else None,  # rows of a page that are loaded together: a power of 2 up to bn
        inverse: T.Scalar("int64") if config.paged else None,  # 2^32 / page, rounded up
        scale_log2: T.Scalar("float32"),  # scale * log2(e), positive; with a softcap c, c * log2(e)
        cap_scale: T.Scalar("float32"),  # scale / c
        unscale: T.Scalar("float32"),  # 1 / scale_log2
        window_left: T.Scalar("int32"),  # at most sk
        window_right: T.Scalar("int32"),  # at most sq
        section: T.Scalar("int32") if not config.lengths else None,  # heads whose keys and values the L2 cache holds
    ):
        right = window_right if config.window else 0
        with T.Kernel(threads=config.threads):
            q_tile = T.alloc_shared((bm, d), config.x)
            k_tile = T.alloc_shared((bn, d), config.x)
            v_tile = T.alloc_shared((bn, dv), config.x)
            if not config.lengths:
                o_tile = T.alloc_shared((bm, sub), config.x, alias=q_tile if config.o_over_q else None)
            if config.q_registers:
                q_half = T.alloc_fragment((bm, d), config.x)
            s = T.alloc_fragment((bm, bn), "float32")
            p_half = T.alloc_fragment((bm, bn), config.x)
            o = T.alloc_fragment((bm, dv), "float32")
            o_half = T.alloc_fragment((bm, sub), config.x)
            top, shift, factor, sums, total, row_lse = (T.alloc_fragment(*row_vector) for _ in range(6))
            if config.sinks:
                sink = T.alloc_fragment(*row_vector)
            blocks_of_all = tile_count[0] if config.lengths else T.ceildiv(sq, bm)
            order = {"longest_first": section} if config.longest_first else {"zigzag": hides_rows}
            for batch, head, block in T.Persistent((batches, heads, blocks_of_all), **order):
                if config.lengths:
                    names = ("token", "row", "q_len", "first_key", "k_len")
                    token, row, q_len, first_key, k_len = (T.let(name, tiles[block, n]) for n, name in enumerate(names))
                else:
                    token, row, q_len, first_key, k_len = block * bm, block * bm, sq, None, sk
                kv_head = head // (heads // kv_heads)
                if config.window:
                    blocks, masked, of_step = within_window(row, bm, bn, q_len, k_len, window_left, right)
                else:
                    seen = T.min(row + bm + k_len - q_len, k_len) if config.causal else k_len  # keys that the last row sees
                    blocks = T.max(T.ceildiv(seen, bn), 1)  # a tile that sees no key has one block, all masked
                    whole = (
                        T.max(T.min(row + 1 + k_len - q_len, k_len), 0) // bn if config.causal else k_len // bn
                    )  # blocks without a mask
                    masked = blocks - whole if config.causal else T.min(blocks - whole, 1)
                T.copy(q[batch, head, token, 0], q_tile, eviction_policy="evict_first")
                T.fill(shift, LOWEST)
                T.fill(sums, 0.0)
                queries = q_half if config.q_registers else q_tile
                if config.q_registers:
                    T.copy(q_tile, queries)
                for i in T.Pipelined(blocks, num_stages=config.stages, turns=config.turns):
                    key = (of_step(i) if config.window else blocks - 1 - i) * bn
                    if config.paged:
                        of_page, place = steps.in_page(0, block_table, first_key, key + T.box_row(unit), k_len, page, inverse)
                    else:
                        of_page, place = batch, first_key + key if config.lengths else key
                    T.copy(k[of_page, kv_head, place, 0], k_tile, eviction_policy="evict_last")
                    T.copy(v[of_page, kv_head, place, 0], v_tile, eviction_policy="evict_last")
                    T.gemm(queries, k_tile, s, transpose_B=True, policy=by_rows, clear_accum=True)
                    if config.softcap:
                        for r, c in T.Parallel(bm, bn):
                            s[r, c] = T.tanh(s[r, c] * cap_scale)
                    with T.If(i < masked):
                        for r, c in T.Parallel(bm, bn):
                            limit = T.min(row + r + 1 + k_len - q_len + right, k_len) if hides_rows else k_len
                            s[r, c] = T.if_then_else(key + c < limit, s[r, c], -T.infinity())
                        if config.window:
                            for r, c in T.Parallel(bm, bn):
                                s[r, c] = T.if_then_else(
                                    key + c < row + r + k_len - q_len - window_left, -T.infinity(), s[r, c]
                                )
                    # A maximum that is exceeded by little stays: weights are at most 2^SLACK then. A negative one does not, as
                    # what is above it takes longer to find.
                    for r in T.Parallel(bm):
                        top[r] = (shift[r] + T.if_then_else(shift[r] < 0.0, 0.0, SLACK)) * unscale  # above which it moves
                    with T.If((i == 0) | T.any_above(s, top), "grows") as grows:
                        T.reduce_max(s, top)
                        for r in T.Parallel(bm):
                            factor[r] = shift[r]
                            shift[r] = T.max(shift[r], top[r] * scale_log2)
                            factor[r] = T.exp2(factor[r] - shift[r])
                            sums[r] = sums[r] * factor[r]
                    # The last product of the values runs beside the first columns: what it reads and writes is touched behind
                    # them, so that rescaling and rounding go on beside the exponentials of the others.
                    if config.early:
                        exponentials(s[:, 0 : config.early], shift, scale_log2, sums)
                    with T.If(i > 0), T.If(grows):  # before, o holds nothing
                        steps.times(o, factor)
                    if config.early:
                        rounded(s[:, 0 : config.early], p_half[:, 0 : config.early])
                    exponentials(s[:, config.early : bn], shift, scale_log2, sums)
                    rounded(s[:, config.early : bn], p_half[:, config.early : bn])
                    if config.lengths:  # behind the last key, in the first block (or a window's first ones), 0 * NaN is NaN
                        with T.If(i < masked if config.window else i == 0):
                            T.fill(v_tile[T.max(k_len - key, 0) :, 0:dv], 0.0)
                    T.gemm(p_half, v_tile, o, policy=by_rows, clear_accum=i == 0, stage=1)
                if config.sinks:
                    T.copy(sinks[head, row], sink, fill=0.0, absent=-T.infinity())
                T.reduce_sum(sums, total)
                for r in T.Parallel(bm):
                    if config.sinks:  # the sums are taken to the larger of the row's maximum and its sink
                        sink[r] = sink[r] * math.log2(math.e)
                        factor[r] = shift[r]
                        shift[r] = T.max(shift[r], sink[r])
                        factor[r] = T.exp2(factor[r] - shift[r])
                        row_lse[r] = T.if_then_else(total[r] == 0.0, -T.infinity(), 0.0)  # no key: its sink does not count
                        total[r] = total[r] * factor[r] + T.exp2(sink[r] - shift[r])
                        row_lse[r] = row_lse[r] + (shift[r] + T.log2(total[r])) * math.log(2)
                        factor[r] = factor[r] * T.if_then_else(total[r] == 0.0, 0.0, T.reciprocal(total[r]))
                    else:
                        factor[r] = T.if_then_else(total[r] == 0.0, 0.0, T.reciprocal(total[r]))
                        row_lse[r] = (shift[r] + T.log2(total[r])) * math.log(2)
                if config.lengths:
                    end, at = token + q_len - row, tiles[block, 5]
                    T.copy(row_lse, lse[batch, head, at : at + q_len - row])
                else:
                    T.copy(row_lse, lse[batch, head, row])
                for e in T.Pipelined(dv // sub, num_stages=2):
                    piece = o[:, e * sub : e * sub + sub]
                    for r, c in T.Parallel(bm, sub):
                        o_half[r, c] = piece[r, c] * factor[r]
                    if config.lengths:  # no other request's rows
                        T.copy(o_half, out[batch, head, token:end, e * sub])
                    else:
                        T.copy(o_half, o_tile)
                        T.copy(o_tile, out[batch, head, row, e * sub])

    return flash_attention


def exponentials(scores, shift, scale_log2, sums):
    """In place; each thread adds those of its columns to its sums."""
    for r, c in T.Parallel(*scores.shape):
        scores[r, c] = T.exp2(scores[r, c] * scale_log2 - shift[r])
    T.reduce_sum(scores, sums, clear=False, partial=True)


def rounded(scores, weights):
    for r, c in T.Parallel(*scores.shape):
        weights[r, c] = scores[r, c]


def within_window(row, bm, bn, sq, sk, left, right):
    """Of a tile of queries: how many blocks of keys it sees, how many of them have a mask, and the block of step i.

    Those with a mask come first: the ones at the window's left end, then from its right end on towards the left.
    """
    begin = T.let("begin", T.max(row + sk - sq - left, 0) // bn)  # the block in which the first row's window begins
    blocks = T.let("blocks", T.max(T.ceildiv(T.min(row + bm + sk - sq + right, sk), bn) - begin, 1))  # no key: one, all masked
    all_begun = T.max(row + bm - 1 + sk - sq - left, 0)  # the first key of the last row's window
    cut = T.let("cut", T.min((all_begun + bn - 1) // bn - begin, blocks))  # blocks in which a window begins
    whole = T.let("whole", T.max(T.min(row + 1 + sk - sq + right, sk) // bn, begin))  # the block in which the first row's ends
    return blocks, cut + begin + blocks - whole, lambda i: begin + cut - 1 - i + T.if_then_else(i < cut, 0, blocks)
