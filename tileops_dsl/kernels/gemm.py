"""gemm: c = activation(a b + bias) + residual, rounded once; a [M, K], b [K, N], c [M, N], each for every item of a batch.

A transposed operand is stored the other way round: a [K, M]; b [N, K], as torch keeps a weight.
"""

import tileops_dsl.language as T
from tileops_dsl.kernels.gemm_config import GemmConfig

ACTIVATIONS = {1: T.relu, 2: T.gelu, 3: T.gelu_tanh, 4: T.silu}


def gemm(config: GemmConfig):
    (bm, bn, bk), sub = config.tile, config.store_columns
    transposes = {"transpose_A": config.transpose_a, "transpose_B": config.transpose_b}
    batch, m, n, k = T.dynamic("batch, m, n, k", "int32")
    order = {"group_size": config.group_size, "alternate": config.alternate}

    def of_a(rows, depth):
        """Extents or coordinates, as a is stored."""
        return (depth, rows) if config.transpose_a else (rows, depth)

    def of_b(depth, columns):
        return (columns, depth) if config.transpose_b else (depth, columns)

    @T.prim_func
    def gemm(
        a: T.Tensor((batch, *of_a(m, k)), config.x, vector=config.vector),
        b: T.Tensor((batch, *of_b(k, n)), config.x, vector=config.vector),
        c: T.Tensor((batch, m, n), config.y, vector=config.vector),
        bias: T.Tensor((n,), "any"),
        residual: T.Tensor((batch, m, n), config.y, vector=config.vector, optional=True),
        activation: T.Scalar("int32", below=1 + len(ACTIVATIONS)),
    ):
        with T.Kernel(threads=config.threads, cluster=(config.cluster, 1)):
            a_tile = T.alloc_shared(of_a(bm, bk), config.x)
            b_tile = T.alloc_shared(of_b(bk, bn), config.x)
            c_tile = T.alloc_shared((bm, sub), config.y)
            bias_row = T.alloc_shared((bn,), "float32")
            acc = T.alloc_fragment((bm, bn), "float32")
            bias_part = T.alloc_fragment((bn,), "float32")
            out = T.alloc_fragment((bm, sub), config.y)
            for item, row, column in T.Persistent((batch, T.ceildiv(m, bm), T.ceildiv(n, bn)), **order):
                T.copy(bias[column * bn], bias_part, fill=0.0, absent=0.0)
                for i in T.Pipelined(T.ceildiv(k, bk), num_stages=config.stages, pending=1):
                    T.copy(a[(item, *of_a(row * bm, i * bk))], a_tile)
                    T.copy(b[(item, *of_b(i * bk, column * bn))], b_tile, multicast=config.cluster > 1)
                    T.gemm(a_tile, b_tile, acc, **transposes, policy=T.GemmWarpPolicy.FullRow, clear_accum=i == 0)
                with T.If(bias.given):
                    T.copy(bias_part, bias_row)
                    for r, j in T.Parallel(bm, bn):
                        acc[r, j] = acc[r, j] + bias_row[j]
                with T.If(activation != 0):
                    for code, function in ACTIVATIONS.items():
                        with T.If(activation == code):
                            for r, j in T.Parallel(bm, bn):
                                acc[r, j] = function(acc[r, j])
                for e in T.Pipelined(bn // sub, num_stages=2):
                    piece = acc[:, e * sub : e * sub + sub]
                    with T.If(residual.given):
                        T.copy(residual[item, row * bm, column * bn + e * sub], c_tile)
                        for r, j in T.Parallel(bm, sub):
                            piece[r, j] = piece[r, j] + c_tile[r, j]
                    for r, j in T.Parallel(bm, sub):
                        out[r, j] = piece[r, j]
                    T.copy(out, c_tile)
                    T.copy(c_tile, c[item, row * bm, column * bn + e * sub])

    return gemm
