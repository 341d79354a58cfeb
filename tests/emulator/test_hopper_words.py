"""A pipeline in the words of sm_90a, and what the emulator reports when one of its words is wrong."""

import numpy as np
import pytest

from tileops_dsl.emulate import I32, EmulatorError, TensorMap, from_bf16, to_bf16

# c [tiles * 64, 64] = a [tiles * 64, K] b [64, K]^T: a producer warp, a consumer warp group, two stages, an epilogue by TMA.
PIPELINE = """
struct Pipeline { tensor_map a, b, c; int32_t steps, tiles; };
TILEOPS_KERNEL(pipeline, Pipeline, 256, 1) {
  constexpr int kA = 0, kB = 16384, kC = 32768;
  const auto full = shared<mbarrier>(40960), empty = shared<mbarrier>(40976);
  if (thread_index() == 0) {
    for (int s = 0; s < 2; ++s) {
      init_barrier(full + s, 1, site(1));
      init_barrier(empty + s, 4, site(2));
    }
    fence_barrier_init(site(3));
  }
  sync_threads(site(4));
  if (warp_group_index() == 0) {
    register_budget_decrease<40>(site(5));
    if (warp_index() == 0 && elect_one(site(6))) {
      int stage = 0, parity = 1;
      for (int i = 0; i < p.tiles * p.steps; ++i) {
        wait(empty + stage, parity, site(7));
        arrive_expect_bytes(full + stage, 16384, site(8));
        tma_load(shared<bf16>(kA + stage * 8192), p.a, at(i % p.steps * 64, i / p.steps * 64), full + stage, site(9));
        tma_load(shared<bf16>(kB + stage * 8192), p.b, at(i % p.steps * 64, 0), full + stage, site(10));
        stage ^= 1;
        parity ^= stage == 0;
      }
    }
  } else {
    const int lane = lane_index(), warp = warp_index() % 4;
    Fragment<float, 32> acc;
    Fragment<bf16, 8> out;
    int stage = 0, parity = 0;
    for (int tile = 0; tile < p.tiles; ++tile) {
      for (int k = 0; k < p.steps; ++k) {
        wait(full + stage, parity, site(12));
        const auto a = matrix_at<Swizzle::k128, Major::kK, 1024>(shared<bf16>(kA + stage * 8192));
        const auto b = matrix_at<Swizzle::k128, Major::kK, 1024>(shared<bf16>(kB + stage * 8192));
        wgmma_fence(site(13));
        for (int q = 0; q < 4; ++q) wgmma<64>(acc, 0, a + q * 32, b + q * 32, k + q > 0, site(14));
        wgmma_commit(site(15));
        wgmma_wait<0>(site(16));
        if (lane == 0) arrive(empty + stage, site(17));
        stage ^= 1;
        parity ^= stage == 0;
      }
      fence_operand(acc);
      if (warp == 0 && lane == 0) store_wait_read<0>(site(18));
      named_barrier_sync(1, 128, site(19));
      for (int j = 0; j < 4; ++j) {
        for (int i = 0; i < 8; i += 2) round_pair(out, i, acc[j * 8 + i], acc[j * 8 + i + 1]);
        const auto row = shared<bf16>(kC) + (warp * 16 + lane % 16) * 64;
        store_matrix<4>(row + ((j * 2 + lane / 16) ^ lane % 8) * 8, out, 0, site(20));
      }
      fence_async_shared(site(21));
      named_barrier_sync(1, 128, site(22));
      if (warp == 0 && lane == 0) {
        tma_store(p.c, at(0, tile * 64), shared<bf16>(kC), site(23));
        store_commit(site(24));
      }
    }
    if (warp == 0 && lane == 0) store_wait_read<0>(site(25));
  }
}
"""
SEEDS = range(4)


def pipeline(run_words, text=PIPELINE, steps=3, tiles=2, rows=None, **more):
    rng = np.random.default_rng(5)
    rows = rows or tiles * 64
    a, b = (to_bf16(rng.standard_normal((n, steps * 64 - 8))) for n in (rows, 64))
    c = to_bf16(np.full((rows, 64), np.nan))
    box = (64, 64)
    values = [TensorMap(a, box, 128), TensorMap(b, box, 128), TensorMap(c, box, 128, writable=True), I32(steps), I32(tiles)]
    report = run_words(text, "pipeline", values, threads=256, shared=40992, names=["a", "b", "c", "steps", "tiles"], **more)
    exact = from_bf16(a).astype(float) @ from_bf16(b).astype(float).T
    return np.abs(from_bf16(c) - exact).max() / np.abs(exact).max(), report


TESTS = "while (!test_wait(full + stage, parity, site(12))) {}"


@pytest.mark.parametrize(
    "text", [PIPELINE, PIPELINE.replace("wait(full + stage, parity, site(12));", TESTS)], ids=["wait", "test_wait"]
)
@pytest.mark.parametrize("steps, tiles, rows", [(1, 1, None), (3, 2, None), (5, 1, 50), (2, 3, 130)])
def test_pipeline(run_words, text, steps, tiles, rows):
    for seed in SEEDS:
        error, report = pipeline(run_words, text, steps, tiles, rows, seed=seed)
        assert error < 2**-8
        assert report["buffers"]["c"]["unwritten"] == report["buffers"]["c"]["rewritten"] == 0
        assert report["asynchronous"] == tiles * (steps * (2 + 4) + 1)


def test_runs_can_be_repeated(run_words):
    assert pipeline(run_words, seed=9) == pipeline(run_words, seed=9)


WRONG_VALUE = "wrong value"
MUTANTS = {  # what is changed: what is reported
    "wait@12 flip": ("race", "unwritten_shared", "deadlock", WRONG_VALUE),
    "wait@7 flip": ("deadlock",),
    "wait@7 suppress": ("race", "barrier"),
    "wait@12 suppress": ("race",),
    "arrive@17 suppress": ("deadlock",),
    "arrive_expect_bytes@8 -8192": ("barrier", "race"),
    "arrive_expect_bytes@8 128": ("deadlock",),
    "init_barrier@2 1": ("deadlock",),
    "init_barrier@2 -1": ("race", "barrier", "deadlock"),
    "init_barrier@1 1": ("deadlock",),
    "fence_barrier_init@3 suppress": ("missing_fence",),
    "sync_threads@4 suppress": ("race", "barrier"),
    "fence_async_shared@21 suppress": ("missing_fence",),
    "named_barrier_sync@19 suppress": ("race",),
    "named_barrier_sync@22 suppress": ("race",),
    "store_wait_read@18 suppress": ("race",),
    "store_wait_read@25 suppress": ("in_flight_at_exit",),
    "wgmma_fence@13 suppress": ("missing_wgmma_fence",),
    "wgmma_commit@15 suppress": ("accumulator_in_flight", "in_flight_at_exit", "race", "barrier"),
    "wgmma_wait@16 suppress": ("accumulator_in_flight", "race", "barrier"),
    "wgmma_wait@16 1": ("accumulator_in_flight", "race", "barrier"),
    "tma_load@9 flip": (WRONG_VALUE,),
    "wgmma@14 flip": ("misaligned", WRONG_VALUE),
    "tma_store@23 flip": (WRONG_VALUE,),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_word_is_reported(run_words, mutant):
    place, change = mutant.split()
    change = int(change) if change.lstrip("-").isdigit() else change
    for seed in SEEDS:
        try:
            error, _ = pipeline(run_words, steps=4, seed=seed, mutate={place: change})
            found = WRONG_VALUE if not error < 2**-8 else "nothing"
        except EmulatorError as e:
            found = e.kind
        assert found in MUTANTS[mutant], f"seed {seed}"


WAIT = "wait(full + stage, parity, site(12));"
RELEASE = "        if (lane == 0) arrive(empty + stage, site(17));\n"
COPY = "which a copy onto the mbarrier at byte 409(60|68) wrote"
REWRITTEN = {  # old text, new text, kind, message
    "early release": (
        "        wgmma_wait<0>(site(16));\n" + RELEASE,
        RELEASE + "        wgmma_wait<0>(site(16));\n",
        "race|barrier",
        "which a wgmma of warp group 1 reads at k.py:14 with no wgmma_wait|reads shared bytes|is over too",
    ),
    "stages that overlap": ("kB = 16384", "kB = 8192", "race", COPY + " at k.py:(9|10)"),
    "a tile over the barriers": ("kC = 32768", "kC = 33792", "barrier_as_data", "where an mbarrier lies"),
    "a tile outside": ("kC = 32768", "kC = 36864", "barrier_as_data|out_of_bounds", "shared bytes"),
    "a tile that is not aligned": ("kB = 16384", "kB = 16512", "misaligned", "no multiple of 1024"),
    "no fence_operand": ("      fence_operand(acc);\n", "", "missing_operand_fence", "call fence_operand after the wait"),
    "one warp waits": (WAIT, "if (warp == 0) " + WAIT, "race", "reads shared bytes .* " + COPY),
    "no store_commit": ("store_commit(site(24));", "", "race|in_flight_at_exit", "store_wait_read"),
    "read too early": (WAIT, "load_shared(shared<bf16>(kA), 0, site(11));" + WAIT, "race|unwritten_shared", "shared bytes"),
    "two products": ("b + q * 32, k + q > 0", "b + q * 32, k + q > warp / 3", "diverged", "issues a wgmma other"),
    "two dtypes": ("tma_load(shared<bf16>(kA", "tma_load(shared<float>(kA", "tensor_map", "elements of 4 bytes"),
    "three coordinates": ("at(i % p.steps * 64, 0)", "at(i % p.steps * 64, 0, 0)", "tensor_map", "gives 3 coordinates"),
    "no such barrier": ("arrive(empty + stage", "arrive(empty + 2 + stage", "out_of_bounds|barrier", "shared bytes"),
    "a test without end": (
        WAIT,
        "while (!test_wait(full + stage, parity ^ 1, site(12))) {}",
        "deadlock|race|unwritten_shared",
        "without end|shared bytes",
    ),
}


@pytest.mark.parametrize("change", REWRITTEN)
def test_a_wrong_text_is_reported(run_words, change):
    old, new, kind, message = REWRITTEN[change]
    assert old in PIPELINE
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=message) as caught:
            pipeline(run_words, PIPELINE.replace(old, new), seed=seed)
        assert caught.value.kind in kind.split("|")


def test_a_deadlock_says_what_each_warp_waits_for(run_words):
    with pytest.raises(EmulatorError) as caught:
        pipeline(run_words, mutate={"arrive_expect_bytes@8": 8192})
    text = str(caught.value)
    assert caught.value.kind == "deadlock"
    assert "127 have returned" in text
    assert "wait for parity 0 of the mbarrier at byte 40976 at k.py:7 (phase 0 has 0 of 4 arrivals)" in text
    assert "threads 128-255 wait for parity 0 of the mbarrier at byte 40960 at k.py:12" in text
    assert "(phase 0 has 1 of 1 arrivals and lacks 8192 bytes)" in text


def test_a_tensor_map_that_the_device_refuses():
    x = np.zeros((64, 100), np.uint16)
    for array, box, swizzle, message in [
        (x, (64, 64), 128, "strides of"),
        (x[:, 1:97].copy(), (32, 64), 128, "rows of 64 bytes in a swizzle of 128"),
        (np.zeros((64, 512), np.uint16), (512, 64), 0, "not all of 1 to 256"),
        (np.zeros((64, 64), np.uint16)[:, ::2], (16, 64), 0, "last stride"),
        (np.zeros(64, np.uint16), (64,), 128, "1 extents for 1 dimensions"),
    ]:
        with pytest.raises(ValueError, match=message):
            TensorMap(array, box, swizzle).pack()
