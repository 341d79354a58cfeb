"""What the emulator counts: wavefronts against written-out cases, instructions of warps, bytes by who moves them."""

import numpy as np
import pytest
import wavefronts

from tileops_dsl import emulate
from tileops_dsl.emulate import In, Out
from tileops_dsl.emulate_problems import PROBLEMS
from tileops_dsl.kernels import PROGRAMS, configs_of


@pytest.fixture(scope="module")
def patterns():
    return wavefronts.pattern_reports()


@pytest.mark.parametrize("name", wavefronts.PATTERNS)
def test_wavefronts_of_a_pattern(patterns, name):
    """Of its access (and of a load of the same rows by matrices)."""
    *_, expected = wavefronts.PATTERNS[name]
    found = [a for a in patterns[name] if a["site"] in (3, 5)]
    assert [(a["instructions"], a["wavefronts"]) for a in found] == [(1, expected)] * (2 if name.startswith("matrix") else 1)


@pytest.mark.parametrize("name, conflicts", [
    ("load_4_same_word", 0), ("load_4_every_second", 1), ("load_8_neighbours", 0), ("store_8_accumulator", 2),
    ("load_16_same", 0), ("store_16_rows", 28), ("matrix_4_swizzled", 0), ("matrix_4_rows_of_128_bytes", 28),
])  # fmt: skip
def test_conflicts_are_what_other_banks_would_save(patterns, name, conflicts):
    assert next(a for a in patterns[name] if a["site"] == 3)["conflicts"] == conflicts


WARPS = """
struct P { const void* x; void* y; };
TILEOPS_KERNEL(warps, P, 96, 1) {
  const int t = thread_index();
  Fragment<float, 4> f;
  load_global<4>(f, 0, global<float>(p.x), t * 4, site(1));
  if (t % 2 == 0) store_shared(shared<float>(0), t, f[0], site(2));  // half of each warp
  sync_threads(site(3));
  float sum = 0.0f;
  for (int i = 0; i < t / 32 + 1; ++i)  // a warp more often than the one before
    for (int again = 0; again < 3; ++again) sum += load_shared(shared<float>(0), t / 32 * 32 + i * 2, site(4));
  if (t < 32) sync_warp(site(5));
  sum += load_shared(shared<float>(0), t / 32 * 32, site(4));
  f[1] = sum;
  store_global<1>(global<float>(p.y), t, f, 1, site(6));
}
"""


def test_instructions_are_counted_by_warps(run_words):
    """A value that a lane has loaded it keeps, up to the next word that orders memory."""
    x, y = np.arange(96 * 4, dtype=np.float32), np.zeros(96, np.float32)
    report = run_words(WARPS, "warps", [In(x), Out(y)], threads=96)
    words = {"load_global": 3, "store_shared": 3, "sync_threads": 3, "load_shared": 1 + 2 + 3 + 1, "sync_warp": 1}
    assert report["words"] == words | {"store_global": 3}
    load, store = report["shared_accesses"]
    assert load == {"word": "load_shared", "site": 4, "line": "k.py:4", "instructions": 7, "wavefronts": 7, "conflicts": 0}
    assert (store["instructions"], store["wavefronts"], store["conflicts"]) == (3, 3, 0)
    assert report["peak_shared_bytes"] == 95 * 4
    read = 32 * (4 + 7 + 10) * 4
    assert report["bytes"]["shared"]["threads"] == {"read": read, "written": 48 * 4}
    assert report["bytes"]["global"]["threads"] == {"read": x.nbytes, "written": y.nbytes}


def launched(name, **more):
    row = next(row for row in configs_of(name.split("_")[0]) if row.name == name)
    tensors, scalars, _ = PROBLEMS[row.op](row, np.random.default_rng(0))
    return emulate(PROGRAMS[row.op], *tensors, config=row, **scalars, **more)[1], tensors


def test_bytes_of_a_gemm():
    """Eight tiles of 128 x 160 (two of them beyond the rows) of 304 x 264, in steps of 64 of K = 200; a pair shares b."""
    report, (a, b, _, residual) = launched("gemm_sm_90a_bf16_bf16_128x160x64_nt_alt")
    tiles, steps, step_bytes = 8, 4, (128 + 160) * 64 * 2
    moved, residual_bytes = report["bytes"], tiles * 128 * 160 * 2
    instructions = tiles * steps * 4 * 2  # of 16 of K, of 64 rows
    assert moved["shared"]["wgmma"] == {"read": instructions * (64 + 160) * 16 * 2, "written": 0}
    assert moved["shared"]["tma"] == {"read": residual.nbytes, "written": tiles * steps * step_bytes + residual_bytes}
    assert moved["global"]["tma"] == {"read": 2 * a.nbytes + 2 * b.nbytes + residual.nbytes, "written": residual.nbytes}
    assert moved["global"]["copy_async"] == moved["shared"]["copy_async"] == {"read": 0, "written": 0}
    words = report["words"]
    assert words["wgmma"] == instructions * 4  # warps of a group
    assert words["tma_load"] + words["tma_load_multicast"] == tiles * (steps * 2 + 5)
    assert not any(access["conflicts"] for access in report["shared_accesses"])


def test_bytes_of_cp_async():
    report, (a, b, _, _) = launched("gemm_portable_bf16_bf16_128x256x32_nt")
    assert report["bytes"]["global"]["copy_async"]["read"] > a.nbytes + b.nbytes
    assert report["bytes"]["shared"]["copy_async"]["written"] == report["words"]["copy_async"] * 32 * 16
    assert report["bytes"]["shared"]["tma"] == report["bytes"]["shared"]["wgmma"] == {"read": 0, "written": 0}


def test_counts_do_not_depend_on_the_order_of_events():
    first, *others = (launched("gemm_sm_90a_bf16_f32_128x128x64_nt_alt", seed=seed)[0] for seed in range(2))
    same = ("words", "shared_accesses", "bytes", "peak_shared_bytes")
    assert all(other[key] == first[key] for other in others for key in same)
