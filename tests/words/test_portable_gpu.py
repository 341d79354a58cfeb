"""The words of the portable target on a GPU: asynchronous copies, matrices and products of a warp, functions."""

import launch
import pytest
import torch
from fragments import Matrices, MmaA, MmaAccumulator, MmaB
from words_reference import from_registers, to_registers

pytestmark = pytest.mark.gpu
FILE = "words_portable.cu"


@pytest.fixture
def run(launched, device):
    """Up to three inputs, the output and n."""

    def call(name, *inputs, out, n=0, **more):
        tensors = [t.contiguous().to(device) for t in inputs]
        out = torch.full(out[0], 77, dtype=out[1], device=device)
        launched(FILE, name, *(tensors + tensors[:1] * 3)[:3], out, launch.I32(n), **more)
        return out.cpu()

    return call


@pytest.mark.parametrize("bytes_", [4, 8, 16])
@pytest.mark.parametrize("inside", [0, 1, 33, 64])
def test_a_copy_fills_with_zeros(run, bytes_, inside):
    x = torch.randn(64, bytes_ // 2).bfloat16()
    out = run(f"copy_async_{bytes_}", x, out=(x.shape, x.dtype), n=inside, threads=64, shared=64 * bytes_)
    assert torch.equal(out[:inside], x[:inside]) and not out[inside:].any()


@pytest.mark.parametrize("count", [-3, 0, 5, 40, 100])
def test_a_part_of_a_copy(run, count):
    """From all of the 16 bytes to none of them: a thread has one element fewer than the one before it."""
    x = torch.randn(64, 8).bfloat16()
    out = run("copy_async_part_16", x, out=(x.shape, x.dtype), n=count, threads=64, shared=1024)
    wanted = torch.arange(8) < count - torch.arange(64)[:, None]
    assert torch.equal(out, torch.where(wanted, x, 0))


def test_a_ring_of_copies(run):
    x = torch.randn(50, 256)
    assert torch.equal(run("copy_async_ring", x, out=(x.shape, x.dtype), n=50, threads=32, shared=3072), x)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_load_matrix(run, count, transposed):
    x, layout = torch.randn(4, 8, 8).bfloat16(), Matrices(count, transposed)
    name = f"load_matrix_{count}{'_transposed' * transposed}"
    registers = run(name, x, out=((32, 2 * count), x.dtype), threads=32, shared=512)
    assert torch.equal(from_registers(layout, registers), x[:count])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mma(run, dtype):
    a, b = torch.randint(-8, 9, (16, 16)).to(dtype), torch.randint(-8, 9, (16, 8)).to(dtype)
    c = torch.randint(-8, 9, (16, 8)).float()
    inputs = to_registers(MmaA(), a), to_registers(MmaB(), b), to_registers(MmaAccumulator(), c)
    name = "mma_bf16" if dtype == torch.bfloat16 else "mma_f16"
    registers = run(name, *inputs, out=((32, 4), torch.float32), threads=32)
    assert torch.equal(from_registers(MmaAccumulator(), registers).double(), a.double() @ b.double() + c.double())


@pytest.mark.parametrize("rows_of_k", [0, 1])
def test_mma_of_loaded_matrices(run, rows_of_k):
    a, b = torch.randint(-8, 9, (16, 16)).half(), torch.randint(-8, 9, (16, 8)).half()
    stored = b if rows_of_k else b.t()
    registers = run("mma_loaded", a, stored, out=((32, 4), torch.float32), n=rows_of_k, threads=32, shared=768)
    assert torch.equal(from_registers(MmaAccumulator(), registers).double(), a.double() @ b.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_pairs(run, dtype):
    x = torch.cat([torch.randn(250), torch.tensor([1 + 2.0**-9, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1e30, -1e30, 3e-6])])
    name = "round_pairs_bf16" if dtype == torch.bfloat16 else "round_pairs_f16"
    assert torch.equal(run(name, x, out=(x.shape, dtype)), x.to(dtype))


def unary(run, name, x):
    return run(f"unary_{name}", x, out=(x.shape, x.dtype), n=x.numel(), grid=8, threads=256).double()


SPECIAL = torch.tensor([float("-inf"), float("nan"), 0.0, 1.0, -1.0, 127.0, -126.0, -127.0, -150.0, -1e30])


@pytest.mark.parametrize("name, bound", [("exp2", 2.0**-22), ("exp2_polynomial", 1.02e-4)])
def test_exp2(run, name, bound):
    x = torch.linspace(-126, 127.4, 1 << 20)
    exact = torch.exp2(x.double())
    assert ((unary(run, name, x) / exact - 1).abs() <= bound).all()
    expected = [0.0, float("nan"), 1.0, 2.0, 0.5, 2.0**127, 2.0**-126, 0.0, 0.0, 0.0]
    torch.testing.assert_close(
        unary(run, name, SPECIAL), torch.tensor(expected, dtype=torch.double), rtol=2**-22, atol=0, equal_nan=True
    )


def test_log2(run):
    near, far = torch.linspace(0.5, 2, 1 << 18)[1:-1], torch.exp2(torch.linspace(-126, 127.9, 1 << 18))
    assert ((unary(run, "log2", near) - torch.log2(near.double())).abs() <= 2.0**-22).all()
    far = far[(far <= 0.5) | (far >= 2)]
    assert ((unary(run, "log2", far) / torch.log2(far.double()) - 1).abs() <= 2.0**-22).all()
    found = unary(run, "log2", torch.tensor([0.0, 1.0, -1.0, float("inf"), 1e-40]))
    expected = torch.tensor([float("-inf"), 0.0, float("nan"), float("inf"), float("-inf")], dtype=torch.double)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)


def test_tanh(run):
    x = torch.cat([torch.linspace(-12, 12, 1 << 18), torch.logspace(-30, 0, 1 << 12), torch.tensor([-1e30, 1e30])])
    x = x[x != 0]
    assert ((unary(run, "tanh", x) / torch.tanh(x.double()) - 1).abs() <= 1.02 * 2.0**-11).all()
    assert unary(run, "tanh", torch.tensor([float("nan")])).isnan().all()
