"""rms_norm: y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset); rms_norm_silu: v * sigmoid(v) of that (no offset).

Along the last dimension, in float32; rounded once at the end and, with round_before_weight, before the weight product.
"""

import math

import tileops_dsl.language as T
from tileops_dsl.kernels.row_config import RowConfig

LOG2E = math.log2(math.e)


def rms_norm(config: RowConfig):
    return (looped if config.looped else resident)(config, silu=False)


def rms_norm_silu(config: RowConfig):
    return (looped if config.looped else resident)(config, silu=True)


def resident(config: RowConfig, silu: bool):
    """Rows that fit in the CTA's registers: x is read once."""
    rows, columns = config.tile

    def body(x, weight, y, cols, block, batch, eps, weight_offset, round_before_weight):
        x_tile = T.alloc_fragment((rows, columns), config.x)
        y_tile = T.alloc_fragment((rows, columns), config.y)
        squares = T.alloc_fragment((rows, columns), "float32")
        normed = T.alloc_fragment((rows, columns), "float32")
        scale = T.alloc_fragment((rows,), "float32")
        w_tile = T.alloc_fragment((columns,), "float32")
        T.annotate_layout({x_tile: config.layout})
        T.annotate_min_blocks_per_sm(config.min_blocks)

        T.copy(x[batch, block * rows, 0], x_tile, fill=0.0)
        for i, j in T.Parallel(rows, columns):
            squares[i, j] = x_tile[i, j] * x_tile[i, j]
        T.reduce_sum(squares, scale)
        for i in T.Parallel(rows):
            scale[i] = T.rsqrt(scale[i] / cols + eps)
        with T.If(round_before_weight != 0):
            scale_in_place(x_tile, scale)
            T.fill(scale, 1.0)
        load_weight(weight, 0, w_tile, weight_offset)
        for i, j in T.Parallel(rows, columns):
            normed[i, j] = x_tile[i, j] * scale[i] * w_tile[j]
            y_tile[i, j] = normed[i, j] * sigmoid(normed[i, j]) if silu else normed[i, j]
        T.copy(y_tile, y[batch, block * rows, 0])

    return program(config, silu, body)


def looped(config: RowConfig, silu: bool):
    """Rows of any length: each column of the tile keeps its own sum of squares, and x is read twice."""
    rows, columns = config.tile

    def body(x, weight, y, cols, block, batch, eps, weight_offset, round_before_weight):
        x_tile = T.alloc_fragment((rows, columns), config.x)
        y_tile = T.alloc_fragment((rows, columns), config.y)
        squares = T.alloc_fragment((rows, columns), "float32")
        normed = T.alloc_fragment((rows, columns), "float32")
        scale = T.alloc_fragment((rows,), "float32")
        late_scale = T.alloc_fragment((rows,), "float32")
        w_tile = T.alloc_fragment((columns,), "float32")
        T.annotate_layout({x_tile: config.layout})
        T.annotate_min_blocks_per_sm(config.min_blocks)

        T.fill(squares, 0.0)
        for k in T.serial(T.ceildiv(cols, columns)):
            T.copy(x[batch, block * rows, k * columns], x_tile, fill=0.0)
            for i, j in T.Parallel(rows, columns):
                squares[i, j] = squares[i, j] + x_tile[i, j] * x_tile[i, j]
        T.reduce_sum(squares, scale)
        for i in T.Parallel(rows):
            scale[i] = T.rsqrt(scale[i] / cols + eps)
            late_scale[i] = T.if_then_else(round_before_weight != 0, 1.0, scale[i])
        for k in T.serial(T.ceildiv(cols, columns)):
            T.copy(x[batch, block * rows, k * columns], x_tile, fill=0.0, eviction_policy="evict_first")
            with T.If(round_before_weight != 0):
                scale_in_place(x_tile, scale)
            load_weight(weight, k * columns, w_tile, weight_offset)
            for i, j in T.Parallel(rows, columns):
                normed[i, j] = x_tile[i, j] * late_scale[i] * w_tile[j]
                y_tile[i, j] = normed[i, j] * sigmoid(normed[i, j]) if silu else normed[i, j]
            T.copy(y_tile, y[batch, block * rows, k * columns], eviction_policy="evict_first")

    return program(config, silu, body)


def program(config: RowConfig, silu: bool, body):
    """The parameters and the grid around `body`."""
    outer, inner = T.dynamic("outer, inner")
    cols = T.dynamic("cols", "int32")
    tile = T.Tensor((outer, inner, cols), config.x, vector=config.vector)

    def rms_norm(
        x: tile,
        weight: T.Tensor((cols,), "any", vector=config.column_vector),
        y: tile,
        eps: T.Scalar("float32"),
        weight_offset: T.Scalar("float32"),
        round_before_weight: T.Scalar("int32"),
    ):
        with T.Kernel(T.ceildiv(inner, config.tile[0]), outer, threads=config.threads) as (block, batch):
            body(x, weight, y, cols, block, batch, eps, weight_offset, round_before_weight)

    def rms_norm_silu(
        x: tile,
        weight: T.Tensor((cols,), "any", vector=config.column_vector),
        y: tile,
        eps: T.Scalar("float32"),
        round_before_weight: T.Scalar("int32"),
    ):
        with T.Kernel(T.ceildiv(inner, config.tile[0]), outer, threads=config.threads) as (block, batch):
            body(x, weight, y, cols, block, batch, eps, None, round_before_weight)

    return T.prim_func(rms_norm_silu if silu else rms_norm)


def load_weight(weight, column, w_tile, weight_offset):
    """w = weight + offset, or 1 where there is no weight."""
    T.copy(weight[column], w_tile, fill=0.0, absent=1.0)
    if weight_offset is not None:
        with T.If(weight.given):
            for j in T.Parallel(*w_tile.shape):
                w_tile[j] = w_tile[j] + weight_offset


def scale_in_place(x_tile, scale):
    """x * scale in x's own dtype, which rounds it. What follows then scales by 1: a select for each element would cost two
    instructions for each of them even where the flag is off (NOTES.md)."""
    for i, j in T.Parallel(*x_tile.shape):
        x_tile[i, j] = x_tile[i, j] * scale[i]


def sigmoid(v):
    return T.reciprocal(1.0 + T.exp2(v * -LOG2E))
