"""wgmma of each dtype, layout and swizzle, on tiles that TMA brings; mma of a warp. Against float64."""

import numpy as np
import pytest

from tileops_dsl.emulate import In, Out, TensorMap, from_bf16, to_bf16

K_BYTES = 128  # of a row of A and B


def e4m3(rng, shape):
    """Bits without NaN, and their values."""
    bits = rng.integers(0, 256, shape, np.uint8)
    bits[bits & 0x7F == 0x7F] = 0x38
    exponent, mantissa = (bits >> 3 & 15).astype(int), (bits & 7).astype(float)
    values = np.where(exponent, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    return bits, np.where(bits & 0x80, -values, values)


def e5m2(rng, shape):
    bits = rng.integers(0, 256, shape, np.uint8)
    bits[bits & 0x7C == 0x7C] = 0x3C
    return bits, (bits.astype(np.uint16) << 8).view(np.float16).astype(float)


def bf16(rng, shape):
    bits = to_bf16(rng.standard_normal(shape))
    return bits, from_bf16(bits).astype(float)


def f16(rng, shape):
    values = rng.standard_normal(shape).astype(np.float16)
    return values, values.astype(float)


MAKE = {"bf16": bf16, "f16": f16, "e4m3": e4m3, "e5m2": e5m2}
HEAD = """
struct Product { tensor_map a, b; void* d; };
struct Registers { const void* a; tensor_map b; void* d; };
template <int R> TILEOPS_WORD void store_result(void* d, const Fragment<float, R>& acc, int n, site s) {
  const int thread = thread_index();
  TILEOPS_UNROLL
  for (int i = 0; i < R; i += 2) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (thread % 4);
    store_global<2>(global<float>(d), row * n + column, acc, i, s);
  }
}
"""


class Operand:
    """One operand of `lines` rows (of M or N) and 128 bytes of K, its boxes from byte `base` of shared memory on."""

    def __init__(self, dtype, lines, major, swizzle, base):
        self.dtype, self.major, self.swizzle, self.base = dtype, major, swizzle, base
        size = 1 if dtype in ("e4m3", "e5m2") else 2
        depth, width = K_BYTES // size, swizzle or 16  # elements of K; bytes of a row of a box
        rows, row_bytes = (lines, K_BYTES) if major == "kK" else (depth, lines * size)
        self.box, self.boxes, self.box_bytes = (width // size, rows), row_bytes // width, rows * width
        self.bytes = self.boxes * self.box_bytes
        if swizzle:
            stride, leading = 8 * width, self.box_bytes
        else:  # 8 rows of 16 bytes lie together; which of the two strides runs along K depends on the major
            stride, leading = (128, self.box_bytes) if major == "kK" else (self.box_bytes, 128)
        name = f"k{swizzle or 'None'}"
        self.matrix = f"matrix_at<Swizzle::{name}, Major::{major}, {stride}, {leading}>(shared<{dtype}>({base}))"
        # Bytes from one product of 32 bytes of K to the next.
        per_box = max(width // 32, 1)
        self.step = (
            f"q / {per_box} * {self.box_bytes * (2 if width < 32 else 1)} + q % {per_box} * 32"
            if major == "kK"
            else f"q * {16 * width}"
        )

    def loads(self, name):
        tiles = [f"shared<{self.dtype}>({self.base + i * self.box_bytes})" for i in range(self.boxes)]
        return "\n".join(f"tma_load({t}, p.{name}, at({i * self.box[0]}, 0), full, site(5));" for i, t in enumerate(tiles))


def kernel(name, params, n, a, b, registers=False):
    loads = b.loads("b") + ("" if registers else a.loads("a"))
    expected = b.bytes + (0 if registers else a.bytes)
    prologue, product = "", f"a + ({a.step})"
    if registers:
        per_word = 2 if a.dtype in ("bf16", "f16") else 4
        depth, count = 64 * per_word // 2, 64 * per_word // 8
        product = f"f, q * {4 * per_word}"
        prologue = f"""
        Fragment<{a.dtype}, {count * 2}> f;
        TILEOPS_UNROLL
        for (int q = 0; q < 4; ++q)
          TILEOPS_UNROLL
          for (int r = 0; r < 4; ++r)
            load_global<{per_word}>(
                f, (q * 4 + r) * {per_word}, global<{a.dtype}>(p.a),
                (thread_index() / 32 * 16 + thread_index() % 32 / 4 + 8 * (r % 2)) * {depth} +
                    q * {8 * per_word} + {4 * per_word} * (r / 2) + {per_word} * (thread_index() % 4), site(12));"""
    return f"""
    TILEOPS_KERNEL({name}, {params}, 128, 1) {{
      const auto full = shared<mbarrier>(49152);
      if (thread_index() == 0) {{
        init_barrier(full, 1, site(1));
        fence_barrier_init(site(2));
      }}
      sync_threads(site(3));
      if (thread_index() == 0) {{
        arrive_expect_bytes(full, {expected}, site(4));
        {loads}
      }}{prologue}
      wait(full, 0, site(6));
      Fragment<float, {n // 2}> acc;
      {"" if registers else f"const auto a = {a.matrix};"}
      const auto b = {b.matrix};
      wgmma_fence(site(7));
      TILEOPS_UNROLL
      for (int q = 0; q < 4; ++q) wgmma<{n}>(acc, 0, {product}, b + ({b.step}), q > 0, site(8));
      wgmma_commit(site(9));
      wgmma_wait<0>(site(10));
      fence_operand(acc);
      store_result(p.d, acc, {n}, site(11));
    }}"""


SHAPES = [  # dtypes of A and B, N, majors, swizzles
    *((t, t, 64, "kK", "kK", s, s) for t in ("bf16", "f16") for s in (128, 64, 32, 0)),
    *(("bf16", "bf16", 128, a, b, 128, s) for a, b in (("kK", "kMN"), ("kMN", "kK"), ("kMN", "kMN")) for s in (128, 64, 32, 0)),
    ("bf16", "bf16", 128, "kMN", "kMN", 0, 128),
    ("bf16", "bf16", 8, "kK", "kK", 128, 128),
    ("bf16", "bf16", 160, "kK", "kK", 128, 128),
    *((a, b, 64, "kK", "kK", 128, 64) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
]
REGISTERS = [
    ("bf16", "bf16", 128, "kK", "kMN", 128, 128),
    ("f16", "f16", 64, "kK", "kK", 128, 128),
    ("e4m3", "e5m2", 64, "kK", "kK", 128, 128),
]


def operands(dtype_a, dtype_b, n, major_a, major_b, swizzle_a, swizzle_b):
    return Operand(dtype_a, 64, major_a, swizzle_a, 0), Operand(dtype_b, n, major_b, swizzle_b, 16384)


TEXT = HEAD + "\n".join(
    [kernel(f"product_{i}", "Product", s[2], *operands(*s)) for i, s in enumerate(SHAPES)]
    + [kernel(f"registers_{i}", "Registers", s[2], *operands(*s), registers=True) for i, s in enumerate(REGISTERS)]
)


def check(run, rng, name, shape, registers=False):
    a, b = operands(*shape)
    depth, n = (64 if shape[0] in ("bf16", "f16") else 128), shape[2]
    (a_bits, a_values), (b_bits, b_values) = MAKE[a.dtype](rng, (64, depth)), MAKE[b.dtype](rng, (n, depth))
    d = np.full((64, n), np.nan, np.float32)

    def tensor(bits, operand):
        stored = np.ascontiguousarray(bits.T if operand.major == "kMN" else bits)
        return TensorMap(stored, operand.box, operand.swizzle)

    run(TEXT, name, [In(a_bits) if registers else tensor(a_bits, a), tensor(b_bits, b), Out(d)], shared=49160)
    exact = a_values @ b_values.T
    # The tensor core keeps fewer bits of 8-bit products than float32 has.
    assert np.abs(d - exact).max() <= (1e-5 if depth == 64 else 2e-3) * (np.abs(a_values) @ np.abs(b_values).T).max()


def run_on_gpu(folder):
    """The same launch on a GPU: the emulator's layouts are the hardware's."""
    import launch
    import torch

    kinds = {"uint16": torch.bfloat16, "float16": torch.float16, "uint8": torch.uint8}

    def run(text, name, values, shared):
        source = folder / "products.cu"
        source.write_text(f"#include <tileops/sm_90a.h>\nnamespace tileops {{\n{text}\n}}\n")
        *inputs, out = values
        arrays = [v.array.view(np.int16) if v.array.dtype == np.uint16 else v.array for v in inputs]
        # Kept until the kernel has run: a tensor map does not keep its tensor.
        tensors = [torch.from_numpy(a).cuda().view(kinds[v.array.dtype.name]) for a, v in zip(arrays, inputs)]
        fields = [
            launch.tensor_map(tensor, value.box, value.swizzle) if isinstance(value, TensorMap) else tensor
            for tensor, value in zip(tensors, inputs)
        ]
        d = torch.from_numpy(out.array).cuda()
        launch.load(source, name)(launch.pack(*fields, d), 1, 128, shared)
        out.array[...] = d.cpu().numpy()

    return run


ids = {"ids": lambda i: "-".join(map(str, (SHAPES + REGISTERS)[i]))}
ALL = range(len(SHAPES) + len(REGISTERS))


def check_number(run, rng, i):
    registers = i >= len(SHAPES)
    name = f"registers_{i - len(SHAPES)}" if registers else f"product_{i}"
    check(run, rng, name, (SHAPES + REGISTERS)[i], registers)


@pytest.mark.parametrize("i", ALL, **ids)
def test_product(run_words, rng, i):
    check_number(run_words, rng, i)


@pytest.mark.gpu
@pytest.mark.parametrize("i", ALL, **ids)
def test_product_on_a_gpu(tmp_path, rng, i):
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of capability 9.0")
    check_number(run_on_gpu(tmp_path), rng, i)


MMA = """
struct Warp { const void* a; const void* b; void* d; };
TILEOPS_KERNEL(mma_TYPE, Warp, 32, 1) {  // d (16 x 8) = 2 a b, a (16 x 16) row by row, b (16 x 8) column by column
  Fragment<TYPE, 8> a;
  Fragment<TYPE, 4> b;
  Fragment<float, 4> d;
  const int lane = lane_index();
  for (int i = 0; i < 8; i += 2)
    load_global<2>(a, i, global<TYPE>(p.a), (lane / 4 + 8 * (i / 2 % 2)) * 16 + 2 * (lane % 4) + 8 * (i / 4), site(1));
  for (int i = 0; i < 4; i += 2) load_global<2>(b, i, global<TYPE>(p.b), lane / 4 * 16 + 2 * (lane % 4) + 8 * (i / 2), site(2));
  fill<4>(d, 0, 0.0f);
  mma(d, 0, a, 0, b, 0, site(3));
  mma(d, 0, a, 0, b, 0, site(4));
  for (int i = 0; i < 4; i += 2)
    store_global<2>(global<float>(p.d), (lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4), d, i, site(5));
}
"""


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_mma(run_words, rng, dtype):
    (a_bits, a), (b_bits, b) = MAKE[dtype](rng, (16, 16)), MAKE[dtype](rng, (8, 16))
    d = np.full((16, 8), np.nan, np.float32)
    run_words(MMA.replace("TYPE", dtype), f"mma_{dtype}", [In(a_bits), In(b_bits), Out(d)], threads=32, target="portable")
    assert np.abs(d - 2 * a @ b.T).max() < 1e-5
