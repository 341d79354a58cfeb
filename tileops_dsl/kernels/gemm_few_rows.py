"""gemm of few rows: the parameters and results of gemm.py; each group has all 64 rows of a tile and some of its columns."""

import tileops_dsl.language as T
from tileops_dsl.kernels.gemm import ACTIVATIONS
from tileops_dsl.kernels.gemm_config import FewRowsConfig


def gemm_few_rows(config: FewRowsConfig):
    bm, bn, bk = config.tile
    batch, m, n, k = T.dynamic("batch, m, n, k", "int32")

    def of_b(depth, columns):
        """Extents or coordinates, as b is stored."""
        return (columns, depth) if config.transpose_b else (depth, columns)

    @T.prim_func
    def gemm_few_rows(
        a: T.Tensor((batch, m, k), config.x, vector=8),
        b: T.Tensor((batch, *of_b(k, n)), config.x, vector=8),
        c: T.Tensor((batch, m, n), config.y, vector=8),
        bias: T.Tensor((n,), "any"),
        residual: T.Tensor((batch, m, n), config.y, vector=8, optional=True),
        activation: T.Scalar("int32", below=1 + len(ACTIVATIONS)),
    ):
        with T.Kernel(threads=config.threads):
            a_tile = T.alloc_shared((bm, bk), config.x)
            b_tile = T.alloc_shared(of_b(bk, bn), config.x)
            c_tile = T.alloc_shared((bm, bn), config.y)
            bias_row = T.alloc_shared((bn,), "float32")
            acc = T.alloc_fragment((bm, bn), "float32")
            bias_part = T.alloc_fragment((bn,), "float32")
            out = T.alloc_fragment((bm, bn), config.y)
            for item, row, column in T.Persistent((batch, T.ceildiv(m, bm), T.ceildiv(n, bn)), group_size=config.group_size):
                T.copy(bias[column * bn], bias_part, fill=0.0, absent=0.0)
                for i in T.Pipelined(T.ceildiv(k, bk), num_stages=config.stages, pending=1):
                    T.copy(a[item, row * bm, i * bk], a_tile)
                    T.copy(b[(item, *of_b(i * bk, column * bn))], b_tile)
                    by_columns = {"transpose_B": config.transpose_b, "policy": T.GemmWarpPolicy.FullCol}
                    T.gemm(a_tile, b_tile, acc, **by_columns, clear_accum=i == 0)
                with T.If(bias.given):
                    T.copy(bias_part, bias_row)
                    for r, j in T.Parallel(bm, bn):
                        acc[r, j] = acc[r, j] + bias_row[j]
                with T.If(activation != 0):
                    for code, function in ACTIVATIONS.items():
                        with T.If(activation == code):
                            for r, j in T.Parallel(bm, bn):
                                acc[r, j] = function(acc[r, j])
                for _part in T.Pipelined(1, num_stages=1):
                    with T.If(residual.given):
                        T.copy(residual[item, row * bm, column * bn], c_tile)
                        for r, j in T.Parallel(bm, bn):
                            acc[r, j] = acc[r, j] + c_tile[r, j]
                    for r, j in T.Parallel(bm, bn):
                        out[r, j] = acc[r, j]
                    T.copy(out, c_tile)
                    T.copy(c_tile, c[item, row * bm, column * bn])

    return gemm_few_rows
