"""Strides, alignment and emptiness: the layout of the inputs must not change a value."""
import pytest
import torch
from ops_reference import DTYPES, check, normal

import tileops

OPS = ("softmax", "rms_norm", "rms_norm_silu")

VIEWS = {  # B20
    "transposed": lambda d, t: normal(512, 6, dtype=t, device=d).t(),
    "slice of columns": lambda d, t: normal(2, 5, 384, dtype=t, device=d)[:, :, :128],
    "slice at 128": lambda d, t: normal(2, 5, 384, dtype=t, device=d)[:, :, 128:256],
    "one row, repeated": lambda d, t: normal(4096, dtype=t, device=d).expand(8, 4096),
    "one column, repeated": lambda d, t: normal(9, 1, dtype=t, device=d).expand(9, 257),
    "every second row": lambda d, t: normal(11, 300, dtype=t, device=d)[::2],
    "every second column": lambda d, t: normal(5, 300, dtype=t, device=d)[:, ::2],
    "outer dims swapped": lambda d, t: normal(4, 3, 64, dtype=t, device=d).permute(1, 0, 2),
    "all dims reversed": lambda d, t: normal(4, 3, 64, dtype=t, device=d).permute(2, 1, 0),
    "channels last": lambda d, t: normal(2, 96, 5, 7, dtype=t, device=d).to(memory_format=torch.channels_last),
    "video": lambda d, t: normal(2, 16, 3, 4, 5, dtype=t, device=d),
    "pitch + 1": lambda d, t: normal(7, 257, dtype=t, device=d)[:, :256],
    "pitch + 3": lambda d, t: normal(7, 259, dtype=t, device=d)[:, :256],
    "base + 1": lambda d, t: normal(1 + 7 * 256, dtype=t, device=d)[1:].view(7, 256),  # B24
    "base + 1, odd": lambda d, t: normal(1 + 7 * 255, dtype=t, device=d)[1:].view(7, 255),
    "size 1 with odd strides": lambda d, t: normal(64, dtype=t, device=d).as_strided((1, 64, 1), (999, 1, 777)),
    "dims that do not merge": lambda d, t: normal(4, 6, 8, 10, dtype=t, device=d)[::2, ::3, :5, :7].permute(2, 0, 3, 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("op", OPS)
def test_views(route, op, view, dtype):
    x = VIEWS[view](route.device, dtype)
    before = x.clone()
    for dim in range(x.dim()):
        y = check(op, x, dim=dim)
        packed = getattr(tileops, op)(x.contiguous(), dim=dim)
        torch.testing.assert_close(y.contiguous(), packed)  # one value to within the order of a sum
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert torch.equal(x, before)


WEIGHTS = {
    "packed": lambda n, d, t: normal(n, device=d, dtype=t, seed=1),
    "every second": lambda n, d, t: normal(2 * n, device=d, dtype=t, seed=1)[::2],
    "one, repeated": lambda n, d, t: normal(1, device=d, dtype=t, seed=1).expand(n),
    "base + 5": lambda n, d, t: normal(n + 5, device=d, dtype=t, seed=1)[5:],
    "a column": lambda n, d, t: normal(n, 3, device=d, dtype=t, seed=1)[:, 1],
}


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("layout", WEIGHTS)
@pytest.mark.parametrize("op", OPS[1:])
def test_weight_layouts(route, op, layout, weight_dtype):
    for shape, dim in (((5, 256), -1), ((5, 255), 1), ((2, 96, 33), 1), ((64, 5), 0)):
        x = normal(*shape, dtype=torch.bfloat16, device=route.device)
        weight = WEIGHTS[layout](shape[dim], route.device, weight_dtype)
        check(op, x, weight, dim=dim)


@pytest.mark.parametrize("shape", [(0, 4096), (4096, 0), (0,), (2, 0, 5), (0, 0)])
@pytest.mark.parametrize("op", OPS)
def test_empty(device, op, shape):  # B11
    for dtype in DTYPES:
        for dim in range(len(shape)):
            x = torch.empty(shape, dtype=dtype, device=device)
            options = {"dim": dim}
            if op != "softmax":
                options["weight"] = normal(shape[dim], device=device).requires_grad_()
            y = getattr(tileops, op)(x.requires_grad_(), **options)
            assert (y.shape, y.dtype, y.device, y.stride()) == (x.shape, dtype, x.device, torch.empty_like(x).stride())
            y.sum().backward()
            assert x.grad.shape == x.shape
            if "weight" in options:
                assert torch.equal(options["weight"].grad, torch.zeros(shape[dim], device=device))
            out = torch.empty_like(x)
            assert getattr(tileops, op)(x.detach(), dim=dim, out=out) is out
    if device == "cuda":
        torch.cuda.synchronize()
    check(op, normal(3, 5, device=device))


@pytest.mark.parametrize("op", OPS)
def test_meta(op):  # B61
    for x in (torch.empty(3, 5, device="meta"), torch.empty(5, 3, device="meta").t()):
        y = getattr(tileops, op)(x)
        assert y.device.type == "meta" and y.shape == x.shape and y.stride() == x.stride()
        out = torch.empty(3, 5, device="meta")
        assert getattr(tileops, op)(x, out=out) is out
