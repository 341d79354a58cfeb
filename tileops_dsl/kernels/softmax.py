"""softmax: y = exp(x - max x) / sum exp(x - max x), along the last dimension; float32 arithmetic, rounded once.

A row that is all -inf, or holds +inf or NaN, becomes NaN, as in PyTorch.
"""

import math

import tileops_dsl.language as T
from tileops_dsl.kernels.row_config import RowConfig

LOG2E = math.log2(math.e)


def softmax(config: RowConfig):
    return looped(config) if config.looped else resident(config)


def resident(config: RowConfig):
    """Rows that fit in the CTA's registers: x is read once."""
    rows, columns = config.tile
    outer, inner = T.dynamic("outer, inner")
    cols = T.dynamic("cols", "int32")

    @T.prim_func
    def softmax(
        x: T.Tensor((outer, inner, cols), config.x, vector=config.vector),
        y: T.Tensor((outer, inner, cols), config.y, vector=config.vector),
    ):
        with T.Kernel(T.ceildiv(inner, rows), outer, threads=config.threads) as (block, batch):
            x_tile = T.alloc_fragment((rows, columns), config.x)
            p_tile = T.alloc_fragment((rows, columns), "float32")
            y_tile = T.alloc_fragment((rows, columns), config.y)
            peak = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            T.annotate_layout({x_tile: config.layout})
            T.annotate_min_blocks_per_sm(config.min_blocks)

            T.copy(x[batch, block * rows, 0], x_tile, fill=-T.infinity())
            T.reduce_max(x_tile, peak)
            for i, j in T.Parallel(rows, columns):
                p_tile[i, j] = T.exp2((x_tile[i, j] - peak[i]) * LOG2E)
            T.reduce_sum(p_tile, total)
            for i in T.Parallel(rows):
                total[i] = 1.0 / total[i]
            for i, j in T.Parallel(rows, columns):
                y_tile[i, j] = p_tile[i, j] * total[i]
            T.copy(y_tile, y[batch, block * rows, 0])

    return softmax


def looped(config: RowConfig):
    """Rows of any length: each column of the tile keeps its own running maximum and sum, and x is read twice."""
    rows, columns = config.tile
    outer, inner = T.dynamic("outer, inner")
    cols = T.dynamic("cols", "int32")

    @T.prim_func
    def softmax(
        x: T.Tensor((outer, inner, cols), config.x, vector=config.vector),
        y: T.Tensor((outer, inner, cols), config.y, vector=config.vector),
    ):
        with T.Kernel(T.ceildiv(inner, rows), outer, threads=config.threads) as (block, batch):
            x_tile = T.alloc_fragment((rows, columns), config.x)
            y_tile = T.alloc_fragment((rows, columns), config.y)
            peaks = T.alloc_fragment((rows, columns), "float32")
            sums = T.alloc_fragment((rows, columns), "float32")
            base = T.alloc_fragment((rows, columns), "float32")
            peak = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            T.annotate_layout({x_tile: config.layout})
            T.annotate_min_blocks_per_sm(config.min_blocks)

            T.fill(peaks, -T.infinity())
            T.fill(sums, 0.0)
            for k in T.serial(T.ceildiv(cols, columns)):
                T.copy(x[batch, block * rows, k * columns], x_tile, fill=-T.infinity())
                for i, j in T.Parallel(rows, columns):
                    base[i, j] = finite(T.max(peaks[i, j], x_tile[i, j]))
                    sums[i, j] = sums[i, j] * T.exp2((peaks[i, j] - base[i, j]) * LOG2E) + T.exp2(
                        (x_tile[i, j] - base[i, j]) * LOG2E
                    )
                    peaks[i, j] = T.max(peaks[i, j], x_tile[i, j])
            T.reduce_max(peaks, peak)
            for i, j in T.Parallel(rows, columns):
                sums[i, j] = sums[i, j] * T.exp2((peaks[i, j] - finite(peak[i])) * LOG2E)
            T.reduce_sum(sums, total)
            for i in T.Parallel(rows):
                total[i] = 1.0 / total[i]
            for k in T.serial(T.ceildiv(cols, columns)):
                T.copy(x[batch, block * rows, k * columns], x_tile, fill=-T.infinity(), eviction_policy="evict_first")
                for i, j in T.Parallel(rows, columns):
                    y_tile[i, j] = T.exp2((x_tile[i, j] - peak[i]) * LOG2E) * total[i]
                T.copy(y_tile, y[batch, block * rows, k * columns], eviction_policy="evict_first")

    return softmax


def finite(peak):
    """The maximum to subtract: 0 where nothing but -inf was seen, so that exp2 gives 0 there and not NaN."""
    return T.if_then_else(peak == -T.infinity(), 0.0, peak)
