"""Bad input: the type of the error and its exact words, the same in C++ and in Python, raised before any launch."""
import functools

import pytest
import torch
from ops_reference import normal

import tileops

D, H, F, B = torch.float64, torch.float16, torch.float32, torch.bfloat16
THREE = "torch.float32, torch.float16 or torch.bfloat16"
FROM_4_5 = "expected a value from -2 to 1 for x of shape [4, 5]"


def ones(*shape, dtype=F):
    return torch.ones(*shape, dtype=dtype)


BAD = [  # op, arguments, keywords, error, text
    ("softmax", (ones(4, 5, dtype=D),), {}, ValueError, f"softmax: x has dtype torch.float64; expected {THREE}"),
    ("softmax", (ones(4, 5, dtype=torch.int32),), {}, ValueError, f"softmax: x has dtype torch.int32; expected {THREE}"),
    ("softmax", (ones(4, 5), 3), {}, IndexError, f"softmax: dim is 3; {FROM_4_5}"),
    ("softmax", (ones(4, 5), -3), {}, IndexError, f"softmax: dim is -3; {FROM_4_5}"),
    ("softmax", (ones(()), 1), {}, IndexError, "softmax: dim is 1; expected a value from -1 to 0 for x of shape []"),
    ("softmax", (ones(4, 5),), {"dtype": D}, ValueError, f"softmax: dtype is torch.float64; expected {THREE}"),
    ("softmax", (ones(0, 5, dtype=D),), {}, ValueError, f"softmax: x has dtype torch.float64; expected {THREE}"),
    ("rms_norm", (ones(4, 5, dtype=D),), {}, ValueError, f"rms_norm: x has dtype torch.float64; expected {THREE}"),
    ("rms_norm", (ones(4, 5),), {"dim": 2}, IndexError, f"rms_norm: dim is 2; {FROM_4_5}"),
    ("rms_norm", (ones(4, 5), ones(5, dtype=D)), {}, ValueError, f"rms_norm: weight has dtype torch.float64; expected {THREE}"),
    ("rms_norm", (ones(3, 4096), ones(7)), {}, ValueError,
     "rms_norm: weight has shape [7]; expected [4096], the size of x along dim -1"),
    ("rms_norm", (ones(3, 4096), ones(1)), {}, ValueError,
     "rms_norm: weight has shape [1]; expected [4096], the size of x along dim -1"),
    ("rms_norm", (ones(3, 4), ones(1, 4)), {}, ValueError,
     "rms_norm: weight has shape [1, 4]; expected [4], the size of x along dim -1"),
    ("rms_norm", (ones(3, 4), ones(())), {}, ValueError,
     "rms_norm: weight has shape []; expected [4], the size of x along dim -1"),
    ("rms_norm", (ones(3, 4), ones(4)), {"dim": 0}, ValueError,
     "rms_norm: weight has shape [4]; expected [3], the size of x along dim 0"),
    ("rms_norm_silu", (ones(3, 4), ones(5)), {}, ValueError,
     "rms_norm_silu: weight has shape [5]; expected [4], the size of x along dim -1"),
    ("rms_norm_silu", (ones(3, 4, dtype=D),), {}, ValueError, f"rms_norm_silu: x has dtype torch.float64; expected {THREE}"),
    ("gemm", (ones(4, 5, dtype=D), ones(5, 6)), {}, ValueError, f"gemm: a has dtype torch.float64; expected {THREE}"),
    ("gemm", (ones(4, 5), ones(5, 6, dtype=B)), {}, ValueError,
     "gemm: b has dtype torch.bfloat16; expected torch.float32, that of a"),
    ("gemm", (ones(5), ones(5, 6)), {}, ValueError, "gemm: a has shape [5]; expected two dimensions or more, [..., M, K]"),
    ("gemm", (ones(4, 5), ones(5)), {}, ValueError, "gemm: b has shape [5]; expected two dimensions or more, [..., K, N]"),
    ("gemm", (ones(()), ones(5)), {}, ValueError, "gemm: a has shape []; expected two dimensions or more, [..., M, K]"),
    ("gemm", (ones(2, 4, 5), ones(6, 5)), {}, ValueError,
     "gemm: b has shape [6, 5]; expected [..., 5, N] for a of shape [2, 4, 5]"),
    ("gemm", (ones(4, 0), ones(1, 6)), {}, ValueError, "gemm: b has shape [1, 6]; expected [..., 0, N] for a of shape [4, 0]"),
    ("gemm", (ones(2, 1, 4, 5), ones(3, 2, 5, 6)), {}, ValueError,
     "gemm: b has shape [3, 2, 5, 6]; expected batch dimensions that broadcast with those of a of shape [2, 1, 4, 5]"),
    ("gemm", (ones(0, 4, 5), ones(2, 5, 6)), {}, ValueError,
     "gemm: b has shape [2, 5, 6]; expected batch dimensions that broadcast with those of a of shape [0, 4, 5]"),
    ("gemm", (ones(4, 5), ones(5, 6), ones(5)), {}, ValueError,
     "gemm: bias has shape [5]; expected [6], the number of columns of b"),
    ("gemm", (ones(4, 5), ones(5, 6), ones(1, 6)), {}, ValueError,
     "gemm: bias has shape [1, 6]; expected [6], the number of columns of b"),
    ("gemm", (ones(4, 5), ones(5, 6), ones(6, dtype=D)), {}, ValueError,
     f"gemm: bias has dtype torch.float64; expected {THREE}"),
    ("gemm", (ones(4, 5), ones(5, 6)), {"activation": "swish"}, ValueError,
     "gemm: activation is 'swish'; expected one of none, relu, gelu, gelu_tanh, silu"),
    ("gemm", (ones(4, 5), ones(5, 6)), {"activation": ""}, ValueError,
     "gemm: activation is ''; expected one of none, relu, gelu, gelu_tanh, silu"),
    ("gemm", (ones(4, 5), ones(5, 6)), {"residual": ones(3, 6)}, ValueError,
     "gemm: residual has shape [3, 6]; expected one that broadcasts to the result, [4, 6]"),
    ("gemm", (ones(4, 5), ones(5, 6)), {"residual": ones(1, 4, 6)}, ValueError,
     "gemm: residual has shape [1, 4, 6]; expected one that broadcasts to the result, [4, 6]"),
    ("gemm", (ones(4, 5), ones(5, 6)), {"residual": ones(4, 6, dtype=D)}, ValueError,
     f"gemm: residual has dtype torch.float64; expected {THREE}"),
    ("gemm", (ones(4, 5), ones(5, 6)), {"out_dtype": D}, ValueError, f"gemm: out_dtype is torch.float64; expected {THREE}"),
    # the order of the checks: x, then dim, then the other arguments
    ("softmax", (ones(4, 5, dtype=D), 7), {"dtype": D}, ValueError, f"softmax: x has dtype torch.float64; expected {THREE}"),
    ("softmax", (ones(4, 5), 7), {"dtype": D}, IndexError, f"softmax: dim is 7; {FROM_4_5}"),
    ("rms_norm", (ones(4, 5), ones(3, dtype=D)), {}, ValueError, f"rms_norm: weight has dtype torch.float64; expected {THREE}"),
]

BAD_OUT = [  # op, x or all operands, out on a device, text
    ("rms_norm", ones(4, 5), lambda d: ones(4, 6).to(d), "rms_norm: out has shape [4, 6]; expected [4, 5]"),
    ("rms_norm", ones(4, 5), lambda d: ones(20).to(d), "rms_norm: out has shape [20]; expected [4, 5]"),
    ("rms_norm", ones(4, 5, dtype=B), lambda d: ones(4, 5, dtype=H).to(d),
     "rms_norm: out has dtype torch.float16; expected torch.bfloat16"),
    ("rms_norm", ones(4, 5, dtype=B), lambda d: ones(4, 6, dtype=H).to(d),
     "rms_norm: out has dtype torch.float16; expected torch.bfloat16"),
    ("gemm", (ones(4, 5), ones(5, 6)), lambda d: ones(4, 5).to(d), "gemm: out has shape [4, 5]; expected [4, 6]"),
    ("gemm", (ones(4, 5), ones(5, 6)), lambda d: ones(4, 6, dtype=B).to(d),
     "gemm: out has dtype torch.bfloat16; expected torch.float32"),
    ("gemm", (ones(4, 5), ones(5, 6)), lambda d: ones(6).to(d).expand(4, 6),
     "gemm: out overlaps itself (a stride is 0); give it storage of its own"),
    ("softmax", ones(4, 5), lambda d: ones(4, 5, dtype=D).to(d),
     "softmax: out has dtype torch.float64; expected torch.float32"),
    ("softmax", ones(4, 5), lambda d: ones(4, 1).to(d).expand(4, 5),
     "softmax: out overlaps itself (a stride is 0); give it storage of its own"),
    ("rms_norm_silu", ones(4, 5), lambda d: ones(5).to(d).expand(4, 5),
     "rms_norm_silu: out overlaps itself (a stride is 0); give it storage of its own"),
]


def place(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def callers(op):
    yield lambda *a, **k: getattr(tileops, op)(*a, **k)
    overloads = getattr(torch.ops.tileops, op)
    yield lambda *a, **k: overloads.out(*a, **k) if "out" in k else overloads.default(*a, **k)


@pytest.mark.parametrize(("op", "args", "kwargs", "error", "text"), BAD)
def test_bad_input(device, op, args, kwargs, error, text):
    args = [place(a, device) for a in args]
    for call in (*callers(op), functools.partial(tileops.explain, op)):
        with pytest.raises(error) as caught:
            call(*args, **kwargs)
        assert str(caught.value) == text and type(caught.value) is error


@pytest.mark.parametrize(("op", "args", "kwargs", "error", "text"), BAD)
def test_bad_input_where_gradients_are_wanted(device, op, args, kwargs, error, text):
    if not args[0].is_floating_point():
        pytest.skip("integers have no gradient")
    with pytest.raises(error) as caught:
        getattr(tileops, op)(*(place(a, device).requires_grad_() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
    assert str(caught.value) == text
    for tensor in args:
        if isinstance(tensor, torch.Tensor):
            tensor.requires_grad_(False)


@pytest.mark.parametrize(("op", "x", "out", "text"), BAD_OUT)
def test_bad_out(device, op, x, out, text):
    operands = [place(t, device) for t in (x if isinstance(x, tuple) else (x,))]
    for call in callers(op):
        with pytest.raises(ValueError) as caught:
            call(*operands, out=out(device))
        assert str(caught.value) == text


def test_out_that_overlaps(device):
    give = "give it storage of its own"
    buffer, weight = normal(8, 12, device=device), torch.ones(6, device=device)
    x = buffer[:4, :6]
    for out in (x, buffer[3:7, :6], buffer[:4, 5:11], buffer[:6, :4].t()):
        for call in callers("rms_norm"):
            with pytest.raises(ValueError) as caught:
                call(x, weight, out=out)
            assert str(caught.value) == f"rms_norm: out overlaps x in memory; {give}"
    square = torch.ones(6, 6, device=device)
    with pytest.raises(ValueError) as caught:
        tileops.rms_norm(normal(6, 6, device=device), square[2], out=square)
    assert str(caught.value) == f"rms_norm: out overlaps weight in memory; {give}"
    assert torch.equal(square, torch.ones(6, 6, device=device)), "nothing was written"


def test_out_that_overlaps_an_input_of_gemm(device):
    square = torch.ones(6, 6, device=device)
    one, other = normal(6, 6, device=device), normal(6, 6, device=device, seed=1)
    for name, args, residual in (
        ("a", (square.t(), one), None),
        ("b", (one, square), None),
        ("bias", (one, other, square[:, 2]), None),
        ("residual", (one, other), square[3]),
    ):
        for call in callers("gemm"):
            with pytest.raises(ValueError) as caught:
                call(*args, residual=residual, out=square)
            assert str(caught.value) == f"gemm: out overlaps {name} in memory; give it storage of its own"
    assert torch.equal(square, torch.ones(6, 6, device=device)), "nothing was written"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_mixed_devices():
    x, cuda_x = ones(3, 4), ones(3, 4).cuda()
    for args, kwargs, text in (
        ((cuda_x, ones(4)), {}, "rms_norm: weight is on cpu; expected cuda:0, where x is"),
        ((x, ones(4).cuda()), {}, "rms_norm: weight is on cuda:0; expected cpu, where x is"),
        ((cuda_x,), {"out": ones(3, 4)}, "rms_norm: out is on cpu; expected cuda:0, where x is"),
        ((x,), {"out": ones(3, 4).cuda()}, "rms_norm: out is on cuda:0; expected cpu, where x is"),
    ):
        with pytest.raises(ValueError) as caught:
            tileops.rms_norm(*args, **kwargs)
        assert str(caught.value) == text
    square, far = ones(4, 4), ones(4, 4).cuda()
    for args, kwargs, text in (
        ((far, square), {}, "gemm: b is on cpu; expected cuda:0, where a is"),
        ((square, square, far[0]), {}, "gemm: bias is on cuda:0; expected cpu, where a is"),
        ((far, far), {"residual": square}, "gemm: residual is on cpu; expected cuda:0, where a is"),
        ((far, far), {"out": ones(4, 4)}, "gemm: out is on cpu; expected cuda:0, where a is"),
    ):
        with pytest.raises(ValueError) as caught:
            tileops.gemm(*args, **kwargs)
        assert str(caught.value) == text
    torch.cuda.synchronize()
    assert torch.isfinite(tileops.rms_norm(cuda_x)).all()


def test_meta_beside_cpu_is_refused():
    with pytest.raises(ValueError, match=r"^rms_norm: weight is on meta; expected cpu, where x is$"):
        tileops.rms_norm(ones(3, 4), torch.ones(4, device="meta"))
