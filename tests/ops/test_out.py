"""out=: any strides, the same values, and no other memory touched."""
import random

import pytest
import torch
from ops_reference import DTYPES, normal, operands

import tileops
from tileops.ops._checks import may_overlap

OPS = ("softmax", "rms_norm", "rms_norm_silu")

OUTS = {
    "packed": lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    "transposed": lambda x: torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device).movedim((0, 1, 2), (2, 1, 0)),
    "base + 1": lambda x: torch.empty(1 + x.numel(), dtype=x.dtype, device=x.device)[1:].view(x.shape),
    "pitch + 1": lambda x: torch.empty(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype, device=x.device)[..., :-1],
    "every second": lambda x: torch.empty(*x.shape, 2, dtype=x.dtype, device=x.device)[..., 0],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", OUTS)
@pytest.mark.parametrize("op", OPS)
def test_layouts(route, op, layout, dtype):
    run = getattr(tileops, op)
    d = route.device
    for x in (normal(4, 6, 128, dtype=dtype, device=d), normal(128, 3, 5, dtype=dtype, device=d).transpose(0, 2)):
        for dim in range(3):
            out = OUTS[layout](x)
            strides, elements = out.stride(), out.untyped_storage().nbytes() // out.element_size()
            around = torch.full((elements,), 7.0, dtype=dtype)
            whole = out.as_strided((elements,), (1,), 0).copy_(around)
            assert run(x, dim=dim, out=out) is out
            assert out.stride() == strides
            torch.testing.assert_close(out, run(x, dim=dim))
            out.fill_(7)
            assert torch.equal(whole.cpu(), around), "an element outside of out was written"


@pytest.mark.parametrize("op", OPS)
def test_neighbours_in_one_buffer(route, op):
    """Interleaved memory is not overlapping memory."""
    for buffer in (normal(16, 64, device=route.device), normal(8, 256, device=route.device).t()):
        expected = getattr(tileops, op)(buffer[:, : buffer.shape[1] // 2].clone())
        x, out = buffer.chunk(2, dim=1)
        getattr(tileops, op)(x, out=out)
        torch.testing.assert_close(out, expected)
        x, out = buffer[::2], buffer[1::2]
        expected = getattr(tileops, op)(x.clone())
        torch.testing.assert_close(getattr(tileops, op)(x, out=out), expected)


def test_softmax_into_another_dtype(route):
    x = normal(5, 33, dtype=torch.bfloat16, device=route.device)
    for dtype in DTYPES:
        out = torch.empty(5, 33, dtype=dtype, device=route.device)
        assert torch.equal(tileops.softmax(x, dtype=dtype, out=out), tileops.softmax(x, dtype=dtype))


@pytest.mark.parametrize("op", (*OPS, "gemm"))
def test_out_and_gradients(device, op):
    (x, *others), out = operands(op, normal(3, 4, device=device)), torch.empty(3, 4, device=device)
    text = f"{op}: out was given while a gradient is wanted; expected no out, or a call under torch.no_grad()"
    with pytest.raises(ValueError) as caught:
        getattr(tileops, op)(x.clone().requires_grad_(), *others, out=out)
    assert str(caught.value) == text
    with pytest.raises(ValueError):
        getattr(tileops, op)(x, *others, out=out.clone().requires_grad_())
    with torch.no_grad():
        getattr(tileops, op)(x.requires_grad_(), *others, out=out)
    assert not out.requires_grad and torch.equal(out, getattr(tileops, op)(x, *others).detach())


@pytest.mark.parametrize("op", (*OPS, "gemm"))
def test_inference_mode(device, op):
    with torch.inference_mode():
        args = operands(op, normal(3, 4, device=device))
        assert torch.equal(getattr(tileops, op)(*args, out=torch.empty_like(args[0])), getattr(tileops, op)(*args))


def test_overlap_against_every_byte():
    """Never a false "apart"; and of the pairs that are apart, most are seen to be."""
    chance = random.Random(0)
    buffer = torch.empty(4096, dtype=torch.uint8)
    apart = seen_apart = 0
    for _ in range(3000):
        views, touched = [], []
        for dtype in chance.choices((torch.float32, torch.float16), k=2):
            sizes = chance.choices((1, 2, 3, 5), k=chance.randint(0, 3))
            strides = chance.choices((0, 1, 2, 4, 8, 12, 16, 24), k=len(sizes))
            view = buffer.view(dtype).as_strided(sizes, strides, chance.randint(0, 64))
            views.append(view)
            numbers = torch.arange(4096 // view.element_size()).as_strided(sizes, strides, view.storage_offset())
            item = view.element_size()
            touched.append({item * n + byte for n in numbers.flatten().tolist() for byte in range(item)})
        if touched[0] & touched[1]:
            assert may_overlap(*views) and may_overlap(*views[::-1]), (views[0].stride(), views[1].stride())
        else:
            apart += 1
            seen_apart += not may_overlap(*views)
    assert apart > 500 and seen_apart > 0.6 * apart
