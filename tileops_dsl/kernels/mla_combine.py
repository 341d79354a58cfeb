"""mla_combine: merges the pieces of the requests that mla_decode has split; float32, one rounding.

    lse = log2(sum exp2(lse_s)),    out = sum out_s * exp2(lse_s - lse)    over the pieces s of a request

LSEs of pieces have base 2; that of a piece without a key is -inf. A request in one piece has none here: its CTAs leave.
"""

import math

import tileops_dsl.language as T
from tileops_dsl.kernels.row_config import RowConfig


def mla_combine(config: RowConfig):
    rows, columns = config.tile
    splits, entries, batch, outer, inner = T.dynamic("splits, entries, batch, outer, inner")
    cols = T.dynamic("cols", "int32")

    @T.prim_func
    def mla_combine(
        partial: T.Tensor((splits, outer, inner, cols), config.x, vector=config.vector),
        partial_lse: T.Tensor((splits, outer, inner), "float32"),
        first_split: T.Tensor((entries,), "int32"),
        out: T.Tensor((batch, outer, inner, cols), config.y, vector=config.vector),
        lse: T.Tensor((batch, outer, inner), "float32"),
    ):
        with T.Kernel(T.ceildiv(inner, rows), outer, batch, threads=config.threads) as (block, line, entry):
            x_tile = T.alloc_fragment((rows, columns), config.x)
            total = T.alloc_fragment((rows, columns), "float32")
            out_tile = T.alloc_fragment((rows, columns), config.y)
            top, sums = T.alloc_fragment((rows,), "float32"), T.alloc_fragment((rows,), "float32")
            weight, factor = T.alloc_fragment((rows,), "float32"), T.alloc_fragment((rows,), "float32")
            T.annotate_layout({x_tile: config.layout})
            T.annotate_min_blocks_per_sm(config.min_blocks)

            pieces = first_split[entry + 1] - first_split[entry]
            T.fill(total, 0.0)
            T.fill(sums, 0.0)
            T.fill(top, -T.infinity())
            for s in T.serial(pieces):
                T.copy(partial_lse[first_split[entry] + s, line, block * rows], weight, fill=0.0)
                T.copy(partial[first_split[entry] + s, line, block * rows, 0], x_tile, fill=0.0)
                for i in T.Parallel(rows):
                    factor[i] = top[i]
                    top[i] = T.max(top[i], weight[i])
                    factor[i] = T.exp2(factor[i] - finite(top[i]))
                    weight[i] = T.exp2(weight[i] - finite(top[i]))
                    sums[i] = sums[i] * factor[i] + weight[i]
                for i, j in T.Parallel(rows, columns):
                    total[i, j] = total[i, j] * factor[i] + x_tile[i, j] * weight[i]
            with T.If(pieces > 0):
                for i in T.Parallel(rows):
                    factor[i] = T.if_then_else(sums[i] == 0.0, 0.0, 1.0 / sums[i])
                    top[i] = (top[i] + T.log2(sums[i])) * math.log(2)
                for i, j in T.Parallel(rows, columns):
                    out_tile[i, j] = total[i, j] * factor[i]
                T.copy(out_tile, out[entry, line, block * rows, 0])
                T.copy(top, lse[entry, line, block * rows])

    return mla_combine


def finite(peak):
    """The maximum to subtract: 0 where no piece had a key, so that exp2 gives 0 there and not NaN."""
    return T.if_then_else(peak == -T.infinity(), 0.0, peak)


def configs(target: str) -> list[RowConfig]:
    """A row of 512 columns for each warp: there are few rows, and a piece of each is 2 KiB."""
    common = {"op": "mla_combine", "target": target, "x": "float32", "vector": 4, "threads": 128}
    return [RowConfig(**common, y=dtype, threads_per_row=32, chunks=4) for dtype in ("bfloat16", "float16")]
