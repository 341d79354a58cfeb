"""Each device word does on the emulator what its header says, whatever the order of the threads."""

import numpy as np
import pytest

from tileops_dsl.emulate import EmulatorError, from_bf16, to_bf16

ENCODE = {"bf16": to_bf16, "f16": lambda v: v.astype(np.float16), "float": lambda v: v.astype(np.float32)}
NUMPY = {"bf16": np.uint16, "f16": np.float16, "float": np.float32}

SOFTMAX = """
TILEOPS_KERNEL(softmax, Params, 128, 1) {
  const int thread = thread_index();
  const int64_t row = block_index_y() * p.n + block_index_x();
  Fragment<bf16, 8> x;
  Fragment<float, 8> e;
  Fragment<float, 1> peak, total;
  const int col = thread * 8;
  if (col < 1000) load_global<8>(x, 0, global<bf16>(p.x), row * p.step[0] + col, site(10));
  else for (int i = 0; i < 8; ++i) x[i] = from_float<bf16>(-infinity());
  peak[0] = reduce_lanes<Max, 32>(reduce_registers<Max, 8>(x, 0), site(11));
  reduce_members<Max, 4>(peak, shared<float>(0), 1, 0, thread / 32, thread % 32 == 0, site(12));
  TILEOPS_UNROLL
  for (int i = 0; i < 8; ++i) e[i] = exp2((to_float(x[i]) - peak[0]) * 1.4426950408889634f);
  total[0] = reduce_lanes<Sum, 32>(reduce_registers<Sum, 8>(e, 0), site(13));
  reduce_members<Sum, 4>(total, shared<float>(16), 1, 0, thread / 32, thread % 32 == 0, site(14));
  TILEOPS_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = from_float<bf16>(e[i] * reciprocal(total[0]));
  if (col < 1000) store_global<8>(global<bf16>(p.y), row * p.step[1] + col, x, 0, site(15));
}
"""


def softmax(run_kernel, x, seed, **more):
    y = np.zeros((*x.shape[:2], 1000), np.uint16)
    report = run_kernel(
        SOFTMAX,
        "softmax",
        x,
        y,
        threads=128,
        grid=(x.shape[1], x.shape[0]),
        shared=32,
        seed=seed,
        n=x.shape[1],
        step=(x.shape[2], 1000),
        **more,
    )
    return y, report


def test_softmax_over_four_warps(run_kernel, rng):
    x = to_bf16(rng.standard_normal((2, 8, 1000)))
    y, report = softmax(run_kernel, x, seed=0)
    exact = np.exp(from_bf16(x).astype(np.float64))
    exact /= exact.sum(-1, keepdims=True)
    assert np.abs(from_bf16(y) / exact - 1).max() < 2**-8 + 1e-5
    nothing = {"read": 0, "written": 0}
    exchanged = {"read": 16 * 128 * 4 * 2 * 4, "written": 16 * 4 * 2 * 4}  # CTAs, threads, values, reductions, bytes
    assert report == {
        "barriers": 2 * 16,
        "shuffles": 16 * 4 * (5 + 5),
        "asynchronous": 0,
        "buffers": {
            "x": {"bytes_read": x.nbytes, "bytes_written": 0, "unwritten": 0, "rewritten": 0},
            "y": {"bytes_read": 0, "bytes_written": y.nbytes, "unwritten": 0, "rewritten": 0},
        },
        "bytes": {
            "global": {"threads": {"read": x.nbytes, "written": y.nbytes}, "copy_async": nothing, "tma": nothing},
            "shared": {"threads": exchanged, "copy_async": nothing, "tma": nothing, "wgmma": nothing},
        },
        "words": {
            "load_global": 16 * 4,
            "store_global": 16 * 4,
            "load_shared": 16 * 4 * 4 * 2,
            "store_shared": 16 * 4 * 2,
            "shuffle_xor": 16 * 4 * (5 + 5),
            "sync_threads": 16 * 4 * 2,
        },
        "shared_accesses": [
            {"word": word, "site": site, "line": f"k.py:{site}", "instructions": n, "wavefronts": n, "conflicts": 0}
            for word, n in (("load_shared", 16 * 4 * 4), ("store_shared", 16 * 4))
            for site in (12, 14)
        ],
        "peak_shared_bytes": 32,
    }


def test_result_does_not_depend_on_the_seed(run_kernel, rng):
    x = to_bf16(rng.standard_normal((2, 8, 1000)))
    first, _ = softmax(run_kernel, x, seed=0)
    for seed in range(1, 8):
        assert np.array_equal(first, softmax(run_kernel, x, seed)[0])


ORDER = """
TILEOPS_KERNEL(order, Params, 64, 1) {  // which block, and which thread of it, was the last to write
  Fragment<float, 1> v;
  v[0] = static_cast<float>(block_index_x() * 64 + thread_index());
  store_global<1>(global<float>(p.y), 0, v, 0, site(1));
}
"""


def test_the_seed_draws_the_order(run_kernel):
    def last(seed):
        y = np.zeros(1, np.float32)
        run_kernel(ORDER, "order", y=y, threads=64, grid=(4, 1), seed=seed)
        return y[0]

    orders = [last(seed) for seed in range(8)]
    assert orders == [last(seed) for seed in range(8)]
    assert len({v // 64 for v in orders}) > 1 and len({v % 64 for v in orders}) > 4


COPY = "\n".join(
    f"""TILEOPS_KERNEL(copy_{t}_{v}, Params, 32, 1) {{
  Fragment<{t}, {2 * v}> f;
  const int64_t at = (block_index_x() * 32 + thread_index()) * {v};
  load_global<{v}>(f, 0, global<{t}>(p.x), at, site(1));
  load_global_evict_first<{v}>(f, {v}, global<{t}>(p.x) + {v}, at - {v}, site(1));
  for (int i = 0; i < {v}; ++i) f[i] = from_float<{t}>(to_float(f[i]) + to_float(f[{v} + i]));
  store_global<{v}>(global<{t}>(p.y), at, f, 0, site(2));
}}"""
    for t in NUMPY
    for v in (1, 2, 4, 8, 16)
)


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("vector", [1, 2, 4, 8, 16])
def test_vectors_of_each_width_and_type(run_kernel, rng, dtype, vector):
    x = ENCODE[dtype](rng.standard_normal(64 * vector))
    y = np.zeros_like(x)
    report = run_kernel(COPY, f"copy_{dtype}_{vector}", x, y, grid=(2, 1))
    decode = from_bf16 if dtype == "bf16" else np.asarray
    assert np.array_equal(decode(y), 2 * decode(x))  # doubling is exact
    assert report["buffers"]["y"]["unwritten"] == report["buffers"]["y"]["rewritten"] == 0


EXCHANGE = """
TILEOPS_KERNEL(indices, Params, 96, 1) {
  Fragment<float, 1> v;
  const int64_t block = block_index_y() * 3 + block_index_x();
  v[0] = static_cast<float>(block_index_y() * 10000 + block_index_x() * 1000 + thread_index());
  store_global<1>(global<float>(p.y), block * 96 + thread_index(), v, 0, site(1));
}
TILEOPS_KERNEL(shuffle, Params, 64, 1) {
  Fragment<float, 1> v;
  load_global<1>(v, 0, global<float>(p.x), thread_index(), site(1));
  v[0] = shuffle_xor(v[0], static_cast<int>(p.n), site(2));
  store_global<1>(global<float>(p.y), thread_index(), v, 0, site(3));
}
TILEOPS_KERNEL(rotate, Params, 64, 1) {  // three times by one thread, through one buffer
  Fragment<bf16, 1> v;
  load_global<1>(v, 0, global<bf16>(p.x), thread_index(), site(1));
  const auto buffer = shared<bf16>(128);
  TILEOPS_NO_UNROLL
  for (int i = 0; i < 3; ++i) {
    sync_threads(site(2));
    store_shared(buffer, thread_index(), v[0], site(3));
    sync_threads(site(4));
    v[0] = load_shared(buffer + 1, (thread_index() + 1) % 64 - 1, site(5));
  }
  store_global<1>(global<bf16>(p.y), thread_index(), v, 0, site(6));
}
"""


def test_indices(run_kernel):
    y = np.zeros((2, 3, 96), np.float32)
    run_kernel(EXCHANGE, "indices", y=y, threads=96, grid=(3, 2))
    by, bx, t = np.indices(y.shape)
    assert np.array_equal(y, by * 10000 + bx * 1000 + t)


@pytest.mark.parametrize("mask", [0, 1, 2, 4, 8, 16, 31])
def test_shuffle_xor(run_kernel, mask):
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    run_kernel(EXCHANGE, "shuffle", x, y, threads=64, n=mask)
    assert np.array_equal(y, np.arange(64) ^ mask)


@pytest.mark.parametrize("seed", range(4))
def test_shared_memory_and_barriers(run_kernel, rng, seed):
    x, y = to_bf16(rng.standard_normal(64)), np.zeros(64, np.uint16)
    run_kernel(EXCHANGE, "rotate", x, y, threads=64, shared=256, seed=seed)
    assert np.array_equal(y, np.roll(x, -3))


MATH = """
TILEOPS_KERNEL(unary, Params, 32, 1) {
  Fragment<float, 1> v;
  Fragment<float, 5> f;
  load_global<1>(v, 0, global<float>(p.x), block_index_x() * 32 + thread_index(), site(1));
  f[0] = exp2(v[0]);
  f[1] = rsqrt(v[0]);
  f[2] = reciprocal(v[0]);
  f[3] = divide(p.scale, v[0]);
  f[4] = fma(v[0], v[0], -(v[0] * v[0]));  // the rounding error of the product: not 0
  for (int i = 0; i < 5; ++i)
    store_global<1>(global<float>(p.y), i * p.n + block_index_x() * 32 + thread_index(), f, i, site(2));
}
TILEOPS_KERNEL(expressions, Params, 32, 1) {  // the ways in which generated text uses a register
  Fragment<float, 4> f;
  Fragment<f16, 2> h;
  for (int i = 0; i < 2; ++i) h[i] = from_float<f16>(3.0f);
  f[0] = -to_float(h[0]);
  f[1] = f[0];
  f[1] += 1.0f;
  f[1] *= f[0];
  const auto before = f[1];
  const auto copy = f;
  f[1] -= f[0];
  f[2] = f[0] == -infinity() ? 0.0f : f[1];
  f[3] = Max::combine(copy[1], f[0] < f[1] ? f[0] : f[1]) / before;
  f[0] = (f[2] != f[1] ? 1.0f : min(f[2], 100.0f));
  if (thread_index() == 0) store_global<4>(global<float>(p.y), 0, f, 0, site(2));
}
"""


def test_math(run_kernel, rng):
    x = rng.standard_normal(1024).astype(np.float32) * 8
    y = np.zeros((5, 1024), np.float32)
    run_kernel(MATH, "unary", x, y, grid=(32, 1), n=1024, scale=3.0)
    v = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        exact = [np.exp2(v), 1 / np.sqrt(v), 1 / v, 3 / v, v * v - (x * x).astype(np.float64)]
    for got, want in zip(y, exact):
        assert np.array_equal(np.isnan(got), np.isnan(want))
        assert np.nanmax(np.abs(got - want) / np.abs(want + (want == 0))) < 2**-22
    assert (y[4] != 0).any()


def test_math_at_the_ends(run_kernel):
    inf, nan = np.inf, np.nan
    x = np.full(32, 1, np.float32)
    x[:8] = [0, inf, -inf, nan, -127, 2.0**127, 1e-40, 128]
    y = np.zeros((5, 32), np.float32)
    run_kernel(MATH, "unary", x, y, n=32)
    assert np.array_equal(y[0, :8], np.float32([1, inf, 0, nan, 0, inf, 1, inf]), equal_nan=True)  # exp2(-127): flushed
    assert np.array_equal(y[1, :5], np.float32([inf, 0, nan, nan, nan]), equal_nan=True)
    assert np.array_equal(y[2, :7], np.float32([inf, 0, 0, nan, np.float32(-1) / 127, 0, inf]), equal_nan=True)


def test_expressions_over_registers(run_kernel):
    y = np.zeros(4, np.float32)
    run_kernel(MATH, "expressions", y=y)
    assert y.tolist() == [9.0, 9.0, 9.0, 1.0]


WEIGHT = """
TILEOPS_KERNEL(weight, Params, 32, 1) {
  Fragment<float, 2> w;
  fill<2>(w, 0, 1.0f);
  if (p.n == kBf16) load_global_as_float<2>(w, 0, global<bf16>(p.x), thread_index() * 2, site(1));
  if (p.n == kF16) load_global_as_float<2>(w, 0, global<f16>(p.x), thread_index() * 2, site(1));
  if (p.n == kF32) load_global_as_float<2>(w, 0, global<float>(p.x), thread_index() * 2, site(1));
  store_global<2>(global<float>(p.y), thread_index() * 2, w, 0, site(2));
}
"""


@pytest.mark.parametrize("dtype, code", [("bf16", 1), ("f16", 2), ("float", 3), (None, 0)])
def test_tensor_of_run_time_dtype(run_kernel, rng, dtype, code):
    x = ENCODE[dtype](rng.standard_normal(64)) if dtype else None
    y = np.zeros(64, np.float32)
    run_kernel(WEIGHT, "weight", x, y, n=code)
    assert np.array_equal(y, from_bf16(x) if dtype == "bf16" else x if dtype else np.ones(64))


STRIDED = """
TILEOPS_KERNEL(strided, Params, 32, 1) {
  Fragment<float, 1> v;
  const int64_t i = thread_index();
  load_global<1>(v, 0, global<float>(p.x), i * p.step[0], site(1));
  if (i < p.n) store_global<1>(global<float>(p.y), i * p.step[1], v, 0, site(2));
}
"""


@pytest.mark.parametrize("x_step, y_step", [(1, 1), (3, 2), (-2, 1), (0, -3)])
def test_strided_arrays(run_kernel, rng, x_step, y_step):
    def strided(step):
        return rng.standard_normal(128).astype(np.float32)[::step][:32] if step else np.broadcast_to(np.float32(5), 32)

    x, y = strided(x_step), strided(y_step)
    report = run_kernel(STRIDED, "strided", x, y, n=32, step=(x_step, y_step))
    assert np.array_equal(x, y)
    assert report["buffers"]["y"]["unwritten"] == 0


def test_report_counts_what_is_not_written_and_what_is_written_twice(run_kernel):
    x, y = np.ones(32, np.float32), np.zeros(64, np.float32)[::2]
    report = run_kernel(STRIDED, "strided", x, y, n=20, step=(1, 2))
    assert report["buffers"]["y"]["unwritten"] == 12 * 4  # of the elements: the gaps do not count
    report = run_kernel(STRIDED, "strided", x, y, n=3, step=(1, 0))
    assert report["buffers"]["y"]["rewritten"] == 2 * 4


VECTORS = """
TILEOPS_KERNEL(vectors, Params, 32, 1) {
  const auto buffer = shared<bf16>(64);
  const int at = thread_index() * 16;
  Fragment<bf16, 16> v, w;
  load_global<16>(v, 0, global<bf16>(p.x), at, site(1));
  store_shared<16>(buffer, at, v, 0, site(2));
  sync_threads(site(3));
  load_shared<8>(w, 0, buffer, (at + 16) % 512 + static_cast<int>(p.n), site(4));
  load_shared<2>(w, 8, buffer, (at + 16) % 512 + 8, site(5));
  store_global<2>(global<bf16>(p.y), at, w, 8, site(6));
  store_global<2>(global<bf16>(p.y), at + 2, w, 6, site(6));
}
"""


def test_vectors_in_shared_memory(run_kernel, rng):
    x, y = to_bf16(rng.standard_normal((32, 16))), np.zeros((32, 16), np.uint16)
    run_kernel(VECTORS, "vectors", x, y, shared=64 + 1024)
    expected = np.roll(x, -1, axis=0)
    assert np.array_equal(y[:, :2], expected[:, 8:10]) and np.array_equal(y[:, 2:4], expected[:, 6:8])


def test_a_vector_in_shared_memory_is_aligned(run_kernel, rng):
    x, y = to_bf16(rng.standard_normal((32, 16))), np.zeros((32, 16), np.uint16)
    with pytest.raises(EmulatorError, match=r"k.py:4: reads shared bytes .*the offset is no multiple of 16"):
        run_kernel(VECTORS, "vectors", x, y, shared=64 + 1024, n=1)
