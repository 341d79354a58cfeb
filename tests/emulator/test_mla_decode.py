"""mla_decode as the compiler writes it: each word of its text is needed. What it computes: test_golden_kernels.py.

And a second program with T.ws, of other steps.
"""

from collections import Counter
from pathlib import Path

import golden_launch
import launch
import mla_decode
import mutants
import numpy as np
import pytest
import torch

import tileops_dsl.language as T
from build_backend import checks, toolkit
from tileops_dsl import emulate
from tileops_dsl.codegen import emit_roles, param_fields, params_header
from tileops_dsl.kernels import MODULES, configs_of
from tileops_dsl.passes import run_passes
from tileops_dsl.targets import TARGETS

ROWS = configs_of("mla_decode")


@pytest.fixture
def gpu(monkeypatch):
    return golden_launch.Emulated(monkeypatch, multiprocessors=4)


def source(site: str) -> str:
    """The line of the program that a site is mapped to."""
    file, line = site.split(":")
    return Path(MODULES[file.removesuffix(".py")].__file__).read_text().splitlines()[int(line) - 1].strip()


# Words that may be left out, with the reason. Of the scores there are four: of each group in front of the loop, and in it.
ROPE, HALF = "T.wait(T.wgmma_gemm(q_rope, k[:, rope], s, transpose_B=True, clear_accum=True), pending=1)", "done = "
EQUIVALENT = Counter(
    {
        # No register of these products is written between the fence before this one and this one.
        ("wgmma_fence", HALF): 8,
        ("wgmma_fence", ROPE): 2,
        ("wgmma_fence", "T.wgmma_gemm(p0, k0[:, right], o)"): 1,
        # The next commit takes them along, and nothing is waited for before it.
        ("wgmma_commit", HALF): 4,
        ("wgmma_commit", ROPE): 2,
        # Where a page has a tail, the next one has, too, behind which the group fences what it wrote to both.
        ("fence_async_shared", "T.fill(k[T.max(valid, 0) :, columns], 0.0)"): 1,
    }
)


def test_a_wrong_word_is_noticed(gpu, tmp_path, monkeypatch):
    """Each wait, arrival, fence, barrier and commit of the text, and each with another number, parity or swizzle."""
    _, combine = mla_decode.load()
    kernel = mla_decode.Generated(folder=tmp_path)
    monkeypatch.setattr(mla_decode, "load", lambda: (kernel, combine))
    launches = list(mutants.mla_launches())
    right, missed = [torch.nan_to_num(run()) for run in launches], Counter()
    every = mutants.mutants(kernel.path.read_text())
    assert len(every) > 200
    for gpu.mutate in every:
        if not mutants.caught(gpu, launches, right):
            ((place, change),) = gpu.mutate.items()
            word, site = place.split("@")
            line = source(kernel.entry["sites"][site])
            missed[word if change == "suppress" else f"{word} {change}", HALF if line.startswith(HALF) else line] += 1
    assert missed == EQUIVALENT


@pytest.mark.parametrize("lengths", [[300], [64, 1, 129]])
def test_float16(gpu, tmp_path, lengths):
    """Whole requests: the kernel that merges pieces is of bfloat16."""
    kernels = mla_decode.Generated(next(row for row in ROWS if row.x == "float16"), tmp_path), None
    rng = torch.Generator().manual_seed(len(lengths))
    used = [-(-length // 64) for length in lengths]
    cache, q = (torch.randn(*shape, generator=rng).half() for shape in ((sum(used), 64, 576), (len(lengths), 2, 40, 576)))
    table, pages = torch.zeros(len(lengths), max(used), dtype=torch.int32), iter(range(sum(used)))
    for request, count in enumerate(used):
        table[request, :count] = torch.tensor([next(pages) for _ in range(count)])
    sizes, scale = torch.tensor(lengths, dtype=torch.int32), 576**-0.5
    for gpu.seed in range(3):
        out, lse = mla_decode.launch(kernels, q, cache, table, sizes, scale, num_parts=1)
        for request, length in enumerate(lengths):
            kv = cache[table[request, : used[request]].long()].flatten(0, 1)[:length].double()
            scores = torch.einsum("shd,nd->hsn", q[request].double(), kv) * scale
            scores = scores.masked_fill(torch.arange(length) > torch.arange(2)[:, None] + length - 2, -torch.inf)
            exact = torch.einsum("hsn,nd->shd", torch.nan_to_num(scores.softmax(-1)), kv[:, :512])
            torch.testing.assert_close(out[request].double(), exact, atol=2e-3, rtol=2e-3)
            torch.testing.assert_close(lse[request].double(), scores.logsumexp(-1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_nvcc_makes_no_spill_and_serialises_nothing(gpu, row, tmp_path):
    try:
        toolkit.find()
    except Exception:
        pytest.skip("needs nvcc")
    kernel = mla_decode.Generated(row, tmp_path)
    _, log = launch.compile_cubin(kernel.path)
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
