"""merge_attention: attention over two sets of keys from `out` and LSE of the same queries over each; float32, one rounding.

    lse = log(exp(lse_a) + exp(lse_b)),    out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)

A side whose LSE is -inf saw no key and counts for nothing, whatever its `out` holds. Neither saw one: 0 and -inf.
"""

import math

import tileops_dsl.language as T
from tileops_dsl.kernels.row_config import RowConfig

LOG2E, LN2 = math.log2(math.e), math.log(2)


def merge_attention(config: RowConfig):
    rows, columns = config.tile
    batch, outer, inner = T.dynamic("batch, outer, inner")
    cols = T.dynamic("cols", "int32")
    tensor = T.Tensor((batch, outer, inner, cols), config.x, vector=config.vector)
    value_per_row = T.Tensor((batch, outer, inner), "float32")

    @T.prim_func
    def merge_attention(
        out_a: tensor,
        lse_a: value_per_row,
        out_b: tensor,
        lse_b: value_per_row,
        out: tensor,
        lse: value_per_row,
    ):
        with T.Kernel(T.ceildiv(inner, rows), outer, batch, threads=config.threads) as (block, line, entry):
            a_tile = T.alloc_fragment((rows, columns), config.x)
            b_tile = T.alloc_fragment((rows, columns), config.x)
            out_tile = T.alloc_fragment((rows, columns), config.y)
            weight_a = T.alloc_fragment((rows,), "float32")  # at first the LSE
            weight_b = T.alloc_fragment((rows,), "float32")
            top = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            T.annotate_layout({out_tile: config.layout})
            T.annotate_min_blocks_per_sm(config.min_blocks)

            T.copy(lse_a[entry, line, block * rows], weight_a, fill=0.0)
            T.copy(lse_b[entry, line, block * rows], weight_b, fill=0.0)
            for i in T.Parallel(rows):
                top[i] = finite(T.max(weight_a[i], weight_b[i]))
                weight_a[i] = T.exp2((weight_a[i] - top[i]) * LOG2E)
                weight_b[i] = T.exp2((weight_b[i] - top[i]) * LOG2E)
                total[i] = weight_a[i] + weight_b[i]
                top[i] = top[i] + T.log2(total[i]) * LN2
                total[i] = T.if_then_else(total[i] == 0.0, 1.0, total[i])
                weight_a[i] = weight_a[i] / total[i]
                weight_b[i] = weight_b[i] / total[i]

            for k in T.serial(T.ceildiv(cols, columns)) if config.looped else [0]:
                T.copy(out_a[entry, line, block * rows, k * columns], a_tile, fill=0.0)
                T.copy(out_b[entry, line, block * rows, k * columns], b_tile, fill=0.0)
                for i, j in T.Parallel(rows, columns):
                    out_tile[i, j] = share(a_tile[i, j], weight_a[i]) + share(b_tile[i, j], weight_b[i])
                T.copy(out_tile, out[entry, line, block * rows, k * columns])
            T.copy(top, lse[entry, line, block * rows])  # last: loads do not pass a store

    return merge_attention


def finite(peak):
    """The maximum to subtract: 0 where both sides are empty, so that exp2 gives 0 there and not NaN."""
    return T.if_then_else(peak == -T.infinity(), 0.0, peak)


def share(value, weight):
    """What a side adds: nothing, not even a NaN, where its weight is 0."""
    return T.if_then_else(weight == 0.0, 0.0, value * weight)


def configs(target: str) -> list[RowConfig]:
    """For any head dim: in vectors of 16 bytes the shortest tile that holds it, then element by element."""
    found = []
    for dtype, vector in (("bfloat16", 8), ("float16", 8), ("float32", 4)):
        common = {"op": "merge_attention", "target": target, "x": dtype, "y": dtype, "threads": 128, "chunks": 1}
        for columns in (64, 128, 256):
            found.append(RowConfig(**common, vector=vector, threads_per_row=columns // vector))
        found.append(RowConfig(**common, vector=vector, threads_per_row=512 // vector, looped=True))
        found.append(RowConfig(**common, vector=1, threads_per_row=32, looped=True))
    return found
