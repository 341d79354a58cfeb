"""Programs whose groups divide columns (FullCol), and problems for them against float64: see test_columns.py."""

import math
from dataclasses import replace

import library
import mla
import numpy as np
from mla import LOG2E, softmax_times

import tileops_dsl.language as T
from tileops_dsl import output
from tileops_dsl.emulate_rows import decode, encode
from tileops_dsl.kernels import configs_of
from tileops_dsl.kernels.mla_decode_config import StandardMlaConfig

ATTENTION = StandardMlaConfig("attention_by_columns", "sm_90a", "float16", "float16", (64, 64, 64, 128))
MLA = configs_of("mla_decode_standard")[0]
SMALL_MLA = replace(MLA, tile=(64, 64, 192, 128))
SHARED_MLA = replace(SMALL_MLA, cluster=2)
FEW_ROWS = [replace(row, tile=(64, 128, 64), stages=3, store_columns=128) for row in configs_of("gemm_few_rows")]


def attention_by_columns(config: StandardMlaConfig, stage: int = 0, groups: int = 2):
    """softmax(q k^T) v, causal: each row's maximum and sum taken to it in every iteration; out through shared memory.

    `stage` 1: the product with the values runs beside the next block's softmax.
    """
    bm, bn, d, dv = config.tile
    x, by_columns, vector = config.x, T.GemmWarpPolicy.FullCol, ((bm,), "float32")
    batches, sq, sk = T.dynamic("batches, sq, sk", "int32")

    @T.prim_func
    def attention_by_columns(
        q: T.Tensor((batches, sq, d), x, vector=8),
        k: T.Tensor((batches, sk, d), x, vector=8),
        v: T.Tensor((batches, sk, dv), x, vector=8),
        out: T.Tensor((batches, sq, dv), x, vector=8),
        lse: T.Tensor((batches, sq), "float32"),
        scale_log2: T.Scalar("float32"),
    ):
        with T.Kernel(threads=128 * groups):
            q_tile = T.alloc_shared((bm, d), x)
            k_tile = T.alloc_shared((bn, d), x)
            v_tile = T.alloc_shared((bn, dv), x)
            o_tile = T.alloc_shared((bm, dv), x)
            s = T.alloc_fragment((bm, bn), "float32")
            p_half = T.alloc_fragment((bm, bn), x)
            o = T.alloc_fragment((bm, dv), "float32")
            o_half = T.alloc_fragment((bm, dv), x)
            peak, factor, sums = (T.alloc_fragment(*vector) for _ in range(3))
            for batch, block in T.Persistent((batches, T.ceildiv(sq, bm))):
                T.copy(q[batch, block * bm, 0], q_tile)
                T.fill(peak, -1e30)
                T.fill(sums, 0.0)
                for i in T.Pipelined(T.max(T.ceildiv(sk, bn), 1), num_stages=config.stages):
                    T.copy(k[batch, i * bn, 0], k_tile)
                    T.copy(v[batch, i * bn, 0], v_tile)
                    T.gemm(q_tile, k_tile, s, transpose_B=True, policy=by_columns, clear_accum=True)
                    for r, c in T.Parallel(bm, bn):
                        limit = T.min(block * bm + r + 1 + sk - sq, sk)
                        s[r, c] = T.if_then_else(i * bn + c < limit, s[r, c] * scale_log2, -T.infinity())
                    for r in T.Parallel(bm):
                        factor[r] = peak[r]
                    T.reduce_max(s, peak, clear=False)
                    for r in T.Parallel(bm):
                        factor[r] = T.exp2(factor[r] - peak[r])
                        sums[r] = sums[r] * factor[r]
                    for r, c in T.Parallel(bm, bn):
                        s[r, c] = T.exp2(s[r, c] - peak[r])
                    T.reduce_sum(s, sums, clear=False)
                    with T.If(i > 0):
                        for r, c in T.Parallel(bm, dv):
                            o[r, c] = o[r, c] * factor[r]
                    for r, c in T.Parallel(bm, bn):
                        p_half[r, c] = s[r, c]
                    T.gemm(p_half, v_tile, o, policy=by_columns, clear_accum=i == 0, stage=stage)
                for r in T.Parallel(bm):
                    factor[r] = T.if_then_else(sums[r] > 0.0, T.reciprocal(sums[r]), 0.0)
                    peak[r] = (peak[r] + T.log2(sums[r])) * math.log(2)
                T.copy(peak, lse[batch, block * bm])
                for r, c in T.Parallel(bm, dv):
                    o_half[r, c] = o[r, c] * factor[r]
                T.copy(o_half, o_tile)
                T.copy(o_tile, out[batch, block * bm, 0])

    return attention_by_columns


def attention_kernel(row=ATTENTION, stage: int = 0, groups: int = 2) -> library.Kernel:
    return library.Kernel(row, output.compile_config(row, program=lambda config: attention_by_columns(config, stage, groups)))


m, n, k, some = T.dynamic("m, n, k, some", "int32")


@T.prim_func
def ends_early(
    a: T.Tensor((m, k), "float16", vector=8),
    b: T.Tensor((k, n), "float16", vector=8),
    c: T.Tensor((m, n), "float32", vector=2),
    lengths: T.Tensor((some,), "int32"),
):
    """a b of the first columns of a, as many as `lengths` says of each block of rows: the groups have other rows of it."""
    with T.Kernel(threads=256):
        a_tile = T.alloc_shared((128, 64), "float16")
        b_tile = T.alloc_shared((64, 128), "float16")
        acc = T.alloc_fragment((128, 128), "float32")
        for row, column in T.Persistent((T.ceildiv(m, 128), T.ceildiv(n, 128))):
            for i in T.Pipelined(T.ceildiv(k, 64), num_stages=3):
                T.copy(a[row * 128, i * 64], a_tile)
                T.copy(b[i * 64, column * 128], b_tile)
                with T.If(lengths[row] - i * 64 < 64):
                    T.fill(b_tile[T.max(lengths[row] - i * 64, 0) :, 0:128], 0.0)
                T.gemm(a_tile, b_tile, acc, clear_accum=i == 0)
            T.copy(acc, c[row * 128, column * 128])


def attention_problem(row, batches, sq, sk, ctas=2) -> library.Problem:
    rng, (bm, _, d, dv) = np.random.default_rng(sq + sk), row.tile
    shapes = {"q": (batches, sq, d), "k": (batches, sk, d), "v": (batches, sk, dv), "out": (batches, sq, dv)}
    arrays = {name: encode(rng.standard_normal(shape), row.x) for name, shape in shapes.items()}
    arrays |= {"lse": np.empty((batches, sq), np.float32), "batches": batches, "sq": sq, "sk": sk, "scale_log2": LOG2E / d**0.5}
    q, k, v = (decode(arrays[name], row.x) for name in "qkv")
    scores = q @ k.swapaxes(1, 2) / d**0.5
    scores = np.where(np.arange(sk) <= np.arange(sq)[:, None] + sk - sq, scores, -np.inf)
    out, lse = softmax_times(scores, v)
    exact = {"out": (out, out, 2 * library.ROUNDING[row.x] * np.abs(out).max() + 1e-4), "lse": (lse, lse, 1e-3)}
    return library.Problem(arrays, (min(ctas, batches * -(-sq // bm)), 1), exact)


def mla_problem(row, *call, **more) -> library.Problem:
    """Of mla_decode_standard: lengths, heads, queries, causal."""
    return library.Problem(*mla.standard_problem(row, *call, **more))
