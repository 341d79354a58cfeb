"""Registers of a wgmma in flight: what may be done with them, and when."""

import numpy as np
import pytest

from tileops_dsl.emulate import I32, EmulatorError, Out, TensorMap

# o [64, 64] = p v + p v: P = 1 from registers, V = 1 from shared memory, in two groups on one accumulator.
TEXT = """
struct Result { void* o; };
TILEOPS_KERNEL(twice, Result, 128, 1) {
  const int thread = thread_index();
  Fragment<bf16, 8> p_tile, ones;
  Fragment<float, 32> o;
  fill<8>(ones, 0, from_float<bf16>(1.0f));
  for (int i = 0; i < 8; i += 2) store_pair(shared<bf16>(0), thread * 8 + i, site(1));
  fence_async_shared(site(2));
  sync_threads(site(3));
  for (int i = 0; i < 8; ++i) p_tile[i] = ones[i];
  const auto v = matrix_at<Swizzle::kNone, Major::kK, 128, 1024>(shared<bf16>(0));
  wgmma_fence(site(4));
  wgmma<64>(o, 0, p_tile, 0, v, 0, site(5));
  wgmma_commit(site(6));
  wgmma<64>(o, 0, p_tile, 0, v, 1, site(7));
  wgmma_commit(site(8));
  // here
  wgmma_wait<0>(site(9));
  // there
  fence_operand(o);
  for (int i = 0; i < 32; i += 2) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (thread % 4);
    store_global<2>(global<float>(p.o), row * 64 + column, o, i, site(10));
  }
}
"""
STORE = """
TILEOPS_WORD void store_pair(shared_ptr<bf16> at, int offset, site s) {
  for (int i = 0; i < 2; ++i) store_shared(at, offset + i, from_float<bf16>(1.0f), s);
}
"""
SEEDS = range(4)


def run(run_words, old="", new=""):
    assert old in TEXT
    for seed in SEEDS:
        o = np.zeros((64, 64), np.float32)
        run_words(STORE + TEXT.replace(old, new, 1), "twice", [Out(o)], shared=4096, seed=seed)
        yield o


def test_two_products_on_one_accumulator(run_words):
    assert all((o == 32).all() for o in run(run_words))


def test_operand_registers_may_be_read_and_copied_in_flight(run_words):
    assert all((o == 32).all() for o in run(run_words, "// here", "auto copy = p_tile; copy[0] = p_tile[1];"))


FAULTS = {  # old text, new text: kind, message
    "operand overwritten": ("// here", "p_tile[3] = ones[0];", "operand_in_flight", "reads as operand A; wait for it"),
    "operand rounded into": ("// here", "round_pair(p_tile, 0, 1.0f, 2.0f);", "operand_in_flight", "reads as operand A"),
    "accumulator read": ("// here", "const float x = o[5]; (void)x;", "accumulator_in_flight", "reads a register that a wgmma"),
    "accumulator scaled": ("// here", "o[0] *= 2.0f;", "accumulator_in_flight", "that a wgmma in flight will write"),
    "accumulator cleared": ("// here", "o[0] = 0.0f;", "accumulator_in_flight", "writes a register that a wgmma"),
    "one group left": ("wgmma_wait<0>(site(9))", "wgmma_wait<1>(site(9))", "accumulator_in_flight|in_flight_at_exit", "wait"),
    "read before fence_operand": ("// there", "o[0] *= 2.0f;", "missing_operand_fence", "call fence_operand after the wait"),
    "not committed": ("wgmma_commit(site(8));", "", "accumulator_in_flight", "wait for it"),
    "no fence": (
        "wgmma_fence(site(4));",
        "",
        "missing_wgmma_fence",
        "written after the last wgmma_fence|without a wgmma_fence",
    ),
    "written after the fence": (
        "wgmma_fence(site(4));",
        "wgmma_fence(site(4)); p_tile[0] = ones[0];",
        "missing_wgmma_fence",
        "written after the last wgmma_fence",
    ),
    "accumulates into nothing": ("v, 0, site(5)", "v, 1, site(5)", "unwritten_register", "before anything was written to it"),
    "operand of nothing": ("p_tile[i] = ones[i];", "{}", "unwritten_register", "before anything was written to it"),
    "part of an accumulator": (
        "wgmma<64>(o, 0, p_tile, 0, v, 1",
        "wgmma<32>(o, 8, p_tile, 0, v, 1",
        "accumulator_in_flight",
        "uses a part",
    ),
    "fragment ends in flight": (
        "// here",
        "{ Fragment<float, 32> s; wgmma<64>(s, 0, p_tile, 0, v, 0, site(11)); wgmma_commit(site(12)); }",
        "accumulator_in_flight",
        "leaves the scope of a fragment",
    ),
    "one warp skips": (
        "wgmma<64>(o, 0, p_tile, 0, v, 1, site(7));",
        "if (warp_index() < 3) wgmma<64>(o, 0, p_tile, 0, v, 1, site(7));",
        "deadlock",
        r"wait for a wgmma at k.py:9 \(96 of 128 threads have issued that of k.py:7\)",
    ),
    "registers beyond the fragment": (
        "wgmma<64>(o, 0, p_tile, 0, v, 1",
        "wgmma<64>(o, 8, p_tile, 0, v, 1",
        "register_index",
        "39 of a fragment of 32",
    ),
    "shared memory not fenced": ("fence_async_shared(site(2));", "", "missing_fence", "without fence_async_shared after it"),
    "fenced after the barrier": (
        "fence_async_shared(site(2));\n  sync_threads(site(3));",
        "sync_threads(site(3));\n  fence_async_shared(site(2));",
        "missing_fence",
        "let each writing thread fence, then a barrier",
    ),
    "shared memory overwritten": ("// here", "store_pair(shared<bf16>(0), 0, site(13));", "race", "shared bytes 0..1"),
    "misaligned operand": ("(shared<bf16>(0));\n  wgmma", "(shared<bf16>(4));\n  wgmma", "misaligned", "multiples of 16"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(run_words, fault):
    old, new, kind, message = FAULTS[fault]
    with pytest.raises(EmulatorError, match=message) as caught:
        list(run(run_words, old, new))
    assert caught.value.kind in kind.split("|")


BOX_STORE = """
struct Store { tensor_map y; int32_t column, row; };
TILEOPS_KERNEL(store_box, Store, 32, 1) {
  if (thread_index() == 0) {
    for (int i = 0; i < 128; ++i) store_shared(shared<float>(0), i, 1.0f, site(1));
    fence_async_shared(site(2));
    tma_store(p.y, at(p.column, p.row), shared<float>(0), site(3));
    store_commit(site(4));
    store_wait<0>(site(5));
  }
}
"""


@pytest.mark.parametrize("column, row, message", [
    (0, -3, "begins at -3 along dimension 1; begin inside"),
    (-8, 0, "begins at -8 along dimension 0; begin inside"),
    (2, 0, "begins a box 8 bytes into a row; begin at a multiple of 16"),
])
def test_a_store_that_the_hardware_refuses(run_words, column, row, message):
    """An illegal instruction on an H200 (tests/words)."""
    y = np.zeros((10, 40), np.float32)
    with pytest.raises(EmulatorError, match=message):
        values = [TensorMap(y, (16, 8), 0, writable=True), I32(column), I32(row)]
        run_words(BOX_STORE, "store_box", values, threads=32, shared=512)


def test_a_store_that_overhangs(run_words):
    y = np.zeros((10, 40), np.float32)
    run_words(BOX_STORE, "store_box", [TensorMap(y, (16, 8), 0, writable=True), I32(32), I32(6)], threads=32, shared=512)
    assert y.sum() == y[6:, 32:].sum() == 4 * 8


def test_a_store_beyond_a_row_that_ends_within_16_bytes(run_words):
    """An H200 writes what lies between."""
    y = np.zeros((10, 44), np.float32)[:, :42]
    with pytest.raises(EmulatorError, match="beyond the end of rows of 168 bytes: whole 16 bytes are written"):
        run_words(BOX_STORE, "store_box", [TensorMap(y, (16, 8), 0, writable=True), I32(32), I32(0)], threads=32, shared=512)
