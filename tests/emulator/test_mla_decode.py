"""What nvcc makes of mla_decode, and a second program with T.ws, of other steps. What mla_decode computes: test_library.py."""

import launch
import library
import numpy as np
import pytest

import tileops_dsl.language as T
from build_backend import checks, toolkit
from tileops_dsl import emulate, output
from tileops_dsl.codegen import emit_roles, param_fields, params_header
from tileops_dsl.kernels import configs_of
from tileops_dsl.passes import run_passes
from tileops_dsl.targets import TARGETS

ROWS = [*configs_of("mla_decode"), *configs_of("mla_decode_few")]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_nvcc_makes_no_spill_and_serialises_nothing(row):
    try:
        toolkit.find()
    except Exception:
        pytest.skip("needs nvcc")
    _, log = launch.compile_cubin(library.write([output.compile_config(row)]))
    report = checks.Report(row.name, log, {})
    assert checks.parse_ptxas(log), "ptxas named no kernel"
    assert checks.register_problems(report) + checks.warning_problems(report) == []


n, m, some, fewer = T.dynamic("n, m, some, fewer", "int32")


@T.prim_func
def powers(
    x: T.Tensor((n, m), "float16", vector=8),
    squares: T.Tensor((some, fewer), "float32", vector=2),
    total: T.Tensor((n,), "float32"),
):
    """x = x^4 of its tiles of 64 x 64: one group squares them, the other squares that; a part of all x^2; their row sums."""
    with T.Kernel(n // 64, threads=256) as block:
        tile, there, back = (T.alloc_shared((64, 64), "float16") for _ in range(3))
        with T.ws(0, 1):
            acc, half = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float16")
        with T.ws(0):
            sums, more = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            T.fill(sums, 0.0)
        for i in T.Pipelined(m // 64, num_stages=1):
            with T.ws(0):
                T.tma_copy(x[block * 64, i * 64], tile)
                T.wgmma_gemm(tile, tile, acc, clear_accum=True)
                T.reduce_sum(acc, more)
                for r in T.Parallel(64):
                    sums[r] = sums[r] + more[r]
                T.copy(acc, squares[block * 64, i * 64])
                for r, c in T.Parallel(64, 64):
                    half[r, c] = acc[r, c]
                T.copy(half, there)
            with T.ws(1):
                T.wgmma_gemm(there, there, acc, clear_accum=True)
                for r, c in T.Parallel(64, 64):
                    half[r, c] = acc[r, c]
                T.copy(half, back)
            with T.ws(0):
                T.copy(back, x[block * 64, i * 64])
        with T.ws(0):
            T.copy(sums, total[block * 64])


@pytest.mark.parametrize("columns", [64, 192])
def test_another_program(run_words, columns):
    """Its groups pass tiles to and fro; what lies outside of a tensor is not stored."""
    kernel = run_passes(powers, TARGETS["sm_90a"])
    header = params_header("powers_params", param_fields(kernel)).split("namespace tileops {")[1].split("}  //")[0]
    text = f"{header}\n{emit_roles(kernel, 'powers', 'powers_params')[0]}"
    x = (np.random.default_rng(3).standard_normal((128, columns)) / 8).astype(np.float16)
    exact = by_tiles(x) @ by_tiles(x)
    some, fewer = 100, columns - 10
    for seed in range(3):
        fourth, total = x.copy(), np.full(128, np.nan, np.float32)
        squares = np.full((128, columns), 7.0, np.float32)
        numbers = map(emulate.I32, (128, columns, some, fewer))
        out = emulate.Out(squares), emulate.Out(total)
        values = [emulate.TensorMap(fourth, (64, 64), 128, writable=True), *out, *numbers, *map(emulate.I64, (columns, 1))]
        run_words(text, "powers", values, threads=256, grid=2, shared=kernel.shared_bytes, seed=seed)
        np.testing.assert_allclose(by_tiles(fourth), exact @ exact, atol=2e-3, rtol=2e-3)
        np.testing.assert_allclose(total, exact.sum((1, 3)).ravel(), atol=1e-4, rtol=1e-4)
        wanted = exact.transpose(0, 2, 1, 3).reshape(128, columns)[:some, :fewer]
        np.testing.assert_allclose(squares[:some, :fewer], wanted, atol=1e-5, rtol=1e-5)
        assert (squares[some:] == 7).all() and (squares[:, fewer:] == 7).all()


def by_tiles(x: np.ndarray) -> np.ndarray:
    """[rows / 64, columns / 64, 64, 64]."""
    return x.astype(np.float64).reshape(len(x) // 64, 64, -1, 64).transpose(0, 2, 1, 3)
