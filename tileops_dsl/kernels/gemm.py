"""gemm: c = activation(a b^T + bias) + residual, rounded once; a [M, K], b [N, K] (a weight as torch keeps it), c [M, N]."""

import tileops_dsl.language as T
from tileops_dsl.configs import GemmConfig

ACTIVATIONS = {1: T.relu, 2: T.gelu, 3: T.gelu_tanh, 4: T.silu}


def gemm(config: GemmConfig):
    (bm, bn, bk), sub = config.tile, config.store_columns
    m, n, k = T.dynamic("m, n, k", "int32")

    @T.prim_func
    def gemm(
        a: T.Tensor((m, k), config.x, vector=8),
        b: T.Tensor((n, k), config.x, vector=8),
        c: T.Tensor((m, n), config.y, vector=8),
        bias: T.Tensor((n,), "any"),
        residual: T.Tensor((m, n), config.y, vector=8, optional=True),
        activation: T.Scalar("int32", below=1 + len(ACTIVATIONS)),
    ):
        with T.Kernel(threads=config.threads, cluster=(2, 1)):
            a_tile = T.alloc_shared((bm, bk), config.x)
            b_tile = T.alloc_shared((bn, bk), config.x)
            c_tile = T.alloc_shared((bm, sub), config.y)
            bias_row = T.alloc_shared((bn,), "float32")
            acc = T.alloc_fragment((bm, bn), "float32")
            bias_part = T.alloc_fragment((bn,), "float32")
            out = T.alloc_fragment((bm, sub), config.y)
            for row, column in T.Persistent((T.ceildiv(m, bm), T.ceildiv(n, bn)), group_size=config.group_size):
                T.copy(bias[column * bn], bias_part, fill=0.0, absent=0.0)
                for i in T.Pipelined(T.ceildiv(k, bk), num_stages=config.stages, pending=1):
                    T.copy(a[row * bm, i * bk], a_tile)
                    T.copy(b[column * bn, i * bk], b_tile, multicast=True)
                    T.gemm(a_tile, b_tile, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=i == 0)
                with T.If(bias.given):
                    T.copy(bias_part, bias_row)
                    for r, j in T.Parallel(bm, bn):
                        acc[r, j] = acc[r, j] + bias_row[j]
                with T.If(activation != 0):
                    for e in T.serial(bn // sub):
                        part = acc[:, e * sub : e * sub + sub]
                        for code, function in ACTIVATIONS.items():
                            with T.If(activation == code):
                                for r, j in T.Parallel(bm, sub):
                                    part[r, j] = function(part[r, j])
                for e in T.Pipelined(bn // sub, num_stages=2):
                    piece = acc[:, e * sub : e * sub + sub]
                    with T.If(residual.given):
                        T.copy(residual[row * bm, column * bn + e * sub], c_tile)
                        for r, j in T.Parallel(bm, sub):
                            piece[r, j] = piece[r, j] + c_tile[r, j]
                    for r, j in T.Parallel(bm, sub):
                        out[r, j] = piece[r, j]
                    T.copy(out, c_tile)
                    T.copy(c_tile, c[row * bm, column * bn + e * sub])

    return gemm
