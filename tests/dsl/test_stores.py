"""What a group stores: how far it waits for its stores. The simulation shows that it is far enough."""

import pytest

import tileops_dsl.language as T
from tileops_dsl import ir
from tileops_dsl.passes import run_passes
from tileops_dsl.schedule import Retire, Sync, Unrolled
from tileops_dsl.targets import TARGETS

m, n, k = T.dynamic("m, n, k", "int32")
A = T.Tensor((m, k), "bfloat16", vector=8)
B = T.Tensor((n, k), "bfloat16", vector=8)
C = T.Tensor((m, n), "bfloat16", vector=8)
FLAG = T.Scalar("int32")
PARTS = 4


def program(epilogue, stages: int) -> ir.Kernel:
    """A product whose result is stored a part at a time, in two forms; the epilogue stores the first one."""

    @T.prim_func
    def kernel(a: A, b: B, c: C, other: C, flag: FLAG):
        with T.Kernel(threads=256):
            a_tile = T.alloc_shared((128, 64), "bfloat16")
            b_tile = T.alloc_shared((128, 64), "bfloat16")
            c_tile = T.alloc_shared((128, 32), "bfloat16")
            d_tile = T.alloc_shared((128, 32), "bfloat16")
            acc = T.alloc_fragment((128, 128), "float32")
            out = T.alloc_fragment((128, 32), "bfloat16")
            for row, column in T.Persistent((T.ceildiv(m, 128), T.ceildiv(n, 128))):
                for i in T.Pipelined(T.ceildiv(k, 64), num_stages=2):
                    T.copy(a[row * 128, i * 64], a_tile)
                    T.copy(b[column * 128, i * 64], b_tile)
                    T.gemm(a_tile, b_tile, acc, transpose_B=True, clear_accum=i == 0)
                for e in T.Pipelined(PARTS, num_stages=stages):
                    piece, place = acc[:, e * 32 : e * 32 + 32], (row * 128, column * 128 + e * 32)
                    epilogue(piece, out, c_tile, c[place], flag)
                    for r, j in T.Parallel(128, 32):
                        out[r, j] = piece[r, j] * 2.0
                    T.copy(out, d_tile)
                    T.copy(d_tile, other[place])

    return run_passes(kernel, TARGETS["sm_90a"])


def stored(piece, out, tile, to, flag):
    for r, j in T.Parallel(128, 32):
        out[r, j] = piece[r, j]
    T.copy(out, tile)
    T.copy(tile, to)


def added(piece, out, tile, to, flag):
    with T.If(flag != 0), T.If(flag != 1):
        T.copy(to, tile)
        for r, j in T.Parallel(128, 32):
            piece[r, j] = piece[r, j] + tile[r, j]
    stored(piece, out, tile, to, flag)


def added_always(piece, out, tile, to, flag):
    T.copy(to, tile)
    for r, j in T.Parallel(128, 32):
        out[r, j] = piece[r, j] + tile[r, j]
    T.copy(out, tile)
    T.copy(tile, to)


def pending(kernel: ir.Kernel) -> list[int]:
    """Stores that may still read where the group waits for others."""
    return [s.pending for s in ir.walk(kernel.roles[1].body) if isinstance(s, Retire) and s.kind == "read"]


@pytest.mark.parametrize("epilogue, stages, expected", [
    (stored, 1, [0, 0]), (stored, 2, [2, 2]), (stored, 3, [0, 0]),  # of the tile before, the last part is in the first stage
    (added, 2, [0, 2, 2, 0]), (added_always, 2, [0, 2, 0]),  # a load waits for the stores itself
])  # fmt: skip
def test_stores_that_may_be_unfinished(epilogue, stages, expected):
    assert pending(program(epilogue, stages)) == expected


def test_a_vector_of_each_iteration():
    """Its writer meets its readers, and they the next writer."""

    @T.prim_func
    def kernel(a: A, b: B, w: T.Tensor((n,), "any")):
        with T.Kernel(threads=256):
            a_tile = T.alloc_shared((128, 64), "bfloat16")
            b_tile = T.alloc_shared((128, 64), "bfloat16")
            row_part = T.alloc_shared((128,), "float32")
            part = T.alloc_fragment((128,), "float32")
            acc = T.alloc_fragment((128, 128), "float32")
            for row, column in T.Persistent((T.ceildiv(m, 128), T.ceildiv(n, 128))):
                for i in T.Pipelined(T.ceildiv(k, 64), num_stages=2):
                    T.copy(a[row * 128, i * 64], a_tile)
                    T.copy(b[column * 128, i * 64], b_tile)
                    T.gemm(a_tile, b_tile, acc, transpose_B=True, clear_accum=i == 0)
                T.copy(w[column * 128], part, fill=0.0, absent=0.0)
                for _e in T.Pipelined(PARTS, num_stages=1):
                    T.copy(part, row_part)
                    for r, j in T.Parallel(128, 128):
                        acc[r, j] = acc[r, j] + row_part[j]

    loop = next(s for s in ir.walk(run_passes(kernel, TARGETS["sm_90a"]).roles[1].body) if isinstance(s, Unrolled))
    assert [type(s) for s in loop.body] == [Sync, ir.Copy, Sync, ir.Parallel]
