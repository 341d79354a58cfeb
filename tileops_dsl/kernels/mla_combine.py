"""mla_combine: merges the pieces of the requests that mla_decode has split; float32, one rounding.

    lse = log2(sum exp2(lse_s)),    out = sum out_s * exp2(lse_s - lse)    over the pieces s of a request

LSEs of pieces have base 2; that of a piece without a key is -inf. There are no more CTAs than requests that may be split.
"""

import math

import tileops_dsl.language as T
from tileops_dsl.kernels.row_config import RowConfig

OUTSIDE = 1 << 30  # rows further, where nothing is loaded


def mla_combine(config: RowConfig):
    rows, columns = config.tile
    together = 16 if config.chunks == 1 else 8 // config.chunks  # pieces that are loaded before the first one is used
    parts, requests, batch, outer, inner = T.dynamic("parts, requests, batch, outer, inner")
    cols = T.dynamic("cols", "int32")

    @T.prim_func
    def mla_combine(
        partial: T.Tensor((2, parts, outer, inner, cols), config.x, vector=config.vector),
        partial_lse: T.Tensor((2, parts, outer, inner), "float32"),
        pieces: T.Tensor((batch, 4), "int32", vector=4),  # a request, the part in which it begins, in how many it is; 0: in one
        out: T.Tensor((requests, outer, inner, cols), config.y, vector=config.vector),
        lse: T.Tensor((requests, outer, inner), "float32"),
    ):
        with T.Kernel(T.ceildiv(inner, rows), outer, batch, threads=config.threads) as (block, line, number):
            wide, narrow, used = ((rows, columns), config.x), ((rows,), "float32"), [n < together for n in range(16)]
            x0, x1, x2, x3, x4, x5, x6, x7 = (T.alloc_fragment(*wide) if own else None for own in used[:8])
            x8, x9, x10, x11, x12, x13, x14, x15 = (T.alloc_fragment(*wide) if own else None for own in used[8:])
            # At first LSEs, then weights.
            w0, w1, w2, w3, w4, w5, w6, w7 = (T.alloc_fragment(*narrow) if own else None for own in used[:8])
            w8, w9, w10, w11, w12, w13, w14, w15 = (T.alloc_fragment(*narrow) if own else None for own in used[8:])
            total = T.alloc_fragment((rows, columns), "float32")
            out_tile = T.alloc_fragment((rows, columns), config.y)
            top, sums, factor = (T.alloc_fragment((rows,), "float32") for _ in range(3))
            tiles = (x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15)[:together]
            weights = (w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15)[:together]
            T.annotate_layout({x0: config.layout})
            T.annotate_dependent_launch()
            T.annotate_min_blocks_per_sm(config.min_blocks)

            request, first, count = (pieces[number, k] for k in range(3))
            T.fill(total, 0.0)
            T.fill(sums, 0.0)
            T.fill(top, -T.infinity())
            for s in T.serial((count + together - 1) // together):
                for k, (tile, weight) in enumerate(zip(tiles, weights, strict=True)):
                    piece = s * together + k
                    place = T.if_then_else(piece == 0, 1, 0), first + piece, line
                    row = block * rows + T.if_then_else(piece < count, 0, OUTSIDE)
                    T.copy(partial_lse[(*place, row)], weight, fill=-T.infinity())
                    T.copy(partial[(*place, row, 0)], tile, fill=0.0)
                for i in T.Parallel(rows):
                    factor[i] = top[i]
                    for weight in weights:
                        top[i] = T.max(top[i], weight[i])
                    factor[i] = T.exp2(factor[i] - finite(top[i]))
                    sums[i] = sums[i] * factor[i]
                    for weight in weights:
                        weight[i] = T.exp2(weight[i] - finite(top[i]))
                        sums[i] = sums[i] + weight[i]
                for i, j in T.Parallel(rows, columns):
                    total[i, j] = total[i, j] * factor[i]
                    for tile, weight in zip(tiles, weights, strict=True):
                        total[i, j] = total[i, j] + tile[i, j] * weight[i]
            with T.If(count > 0):
                for i in T.Parallel(rows):
                    factor[i] = T.if_then_else(sums[i] == 0.0, 0.0, 1.0 / sums[i])
                    top[i] = (top[i] + T.log2(sums[i])) * math.log(2)
                for i, j in T.Parallel(rows, columns):
                    out_tile[i, j] = total[i, j] * factor[i]
                T.copy(out_tile, out[request, line, block * rows, 0])
                T.copy(top, lse[request, line, block * rows])

    return mla_combine


def finite(peak):
    """The maximum to subtract: 0 where no piece had a key, so that exp2 gives 0 there and not NaN."""
    return T.if_then_else(peak == -T.infinity(), 0.0, peak)


def configs(target: str) -> list[RowConfig]:
    """A row of up to 512 columns for each warp: the fewer threads, the less often weights are computed.

    And one for four warps: of few rows, which are in many pieces, more CTAs read.
    """
    common = {"op": "mla_combine", "target": target, "x": "float32", "vector": 4, "threads": 128}
    shapes = ((32, 4), (128, 1), (32, 2), (32, 1))  # threads of a row, accesses of a thread
    rows = [{"y": dtype, "threads_per_row": t, "chunks": n} for dtype in ("bfloat16", "float16") for t, n in shapes]
    return [RowConfig(**common, **row) for row in rows]
