"""The matrix products of a warp group: tiles laid out by the tables come out as the product, exactly."""

import launch
import pytest
import torch
from fragments import WgmmaA
from words_reference import bits, from_registers, stamps, to_registers, to_shared

from tileops_dsl.instruction_layouts import WgmmaAccumulator

pytestmark = pytest.mark.gpu


def small_integers(*shape, dtype):
    """Exact in every dtype, as is their product over 128."""
    return torch.randint(-3, 4, shape).to(dtype)


def laid_out(operand, tile):
    """A tile [M or N, K] as it lies in shared memory, with ones where a whole box reaches beyond it."""
    rows_of_k = tile.float().t() if operand.mn_major else tile.float()
    whole = torch.ones(operand.tile.rows, operand.tile.columns)
    whole[: rows_of_k.shape[0], : rows_of_k.shape[1]] = rows_of_k
    return to_shared(operand.tile, whole.to(tile.dtype))


@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("stamp", stamps(), ids=lambda stamp: stamp.name)
def test_products(launched, device, stamp, accumulate):
    k = 128 // stamp.a_dtype.itemsize
    a = small_integers(64, k, dtype=stamp.a_dtype)
    b = small_integers(stamp.columns, k, dtype=stamp.b_dtype)
    c = small_integers(64, stamp.columns, dtype=torch.float32)
    accumulator, fragment = WgmmaAccumulator(stamp.columns), WgmmaA(stamp.a_dtype.itemsize)
    if stamp.a is None:
        steps = [bits(to_registers(fragment, part)) for part in map(torch.Tensor.contiguous, chunks(a, fragment.shape[1]))]
        a_data, a_steps = torch.stack(steps, 1).contiguous(), [0, 0, 0, 0]
    else:
        a_data, a_steps = bits(laid_out(stamp.a, a)), [stamp.a.advance(step) for step in range(4)]
    b_data, b_steps = bits(laid_out(stamp.b, b)), [stamp.b.advance(step) for step in range(4)]
    d = torch.full((128, accumulator.registers), float("nan"), device=device)
    tensors = a_data.to(device), b_data.to(device), to_registers(accumulator, c).to(device), d
    words = [t.numel() * t.element_size() // 4 for t in (a_data, b_data)]
    numbers = map(launch.I32, (*words, accumulate, *a_steps, *b_steps))
    launched("words_wgmma.cu", stamp.name, *tensors, *numbers, shared=8192 + b_data.numel() * b_data.element_size())
    expected = a.double() @ b.double().t() + accumulate * c.double()
    assert torch.equal(from_registers(accumulator, d).double(), expected)


def chunks(a, columns):
    """Of 32 bytes of K. By way of float32, which can be cut in any dtype."""
    return [part.to(a.dtype) for part in a.float().split(columns, dim=1)]
