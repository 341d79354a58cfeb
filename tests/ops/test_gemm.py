"""gemm against float64: shapes, layouts, epilogues, gradients. What it has in common with the other operators is tested with
them."""
import itertools

import pytest
import torch
from ops_reference import ACTIVATIONS, DTYPES, check_gemm, eager_gemm, exact_gemm, gemm_floor, normal

import tileops

HALF = (torch.bfloat16, torch.float16)
SHAPES = [  # B27
    (1, 1, 1), (64, 64, 24), (16, 104, 32), (1, 8, 8), (17, 13, 7), (129, 257, 40), (5, 1, 4096), (1, 128, 4096),
    (3, 1000, 72), (128, 128, 64), (130, 120, 513), (2, 2, 2),
]  # fmt: skip
BATCHES = [  # batch dimensions of a and of b
    ((2,), (2,)), ((3,), ()), ((), (3,)), ((1,), (3,)), ((3,), (1,)), ((2, 1), (3,)), ((2, 3), (3,)), ((3,), (2, 1)),
    ((2, 3), (2, 3)), ((1, 1), ()), ((), (1, 1)), ((2, 1, 3), (1, 2, 1)),
]  # fmt: skip


def matrices(m, n, k, dtype, device, batch_a=(), batch_b=()):
    a = normal(*batch_a, m, k, dtype=dtype, device=device, seed=1)
    return a, normal(*batch_b, k, n, dtype=dtype, device=device, seed=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_shapes(device, shape, dtype):
    m, n, k = shape
    a, b = matrices(m, n, k, dtype, device)
    check_gemm(a, b)
    ones = torch.ones_like(a), torch.ones_like(b)
    assert torch.equal(tileops.gemm(*ones), torch.full((m, n), float(k), dtype=dtype, device=device))
    bias, residual = normal(n, device=device, seed=3), normal(m, n, dtype=dtype, device=device, seed=4)
    check_gemm(a, b, bias, activation="gelu", residual=residual)


def test_identity_is_exact(device):
    a = normal(33, 33, dtype=torch.bfloat16, device=device)
    eye = torch.eye(33, dtype=torch.bfloat16, device=device)
    assert torch.equal(tileops.gemm(a, eye), a) and torch.equal(tileops.gemm(eye, a), a)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_batches(device, batches, dtype):
    a, b = matrices(5, 6, 7, dtype, device, *batches)
    assert check_gemm(a, b).shape == torch.matmul(a, b).shape
    bias, residual = normal(6, device=device, seed=3), normal(5, 1, dtype=dtype, device=device, seed=4)
    check_gemm(a, b, bias, activation="silu", residual=residual)


LAYOUTS = {
    "row-major": lambda t: t,
    "column-major": lambda t: t.mT.contiguous().mT,
    "slice": lambda t: torch.nn.functional.pad(t, (3, 2, 1, 0))[..., 1:, 3:-2],
    "slice of columns": lambda t: torch.nn.functional.pad(t.mT, (0, 8)).mT[..., :-8, :],
    "no unit stride": lambda t: torch.stack((t, t), -1)[..., 0],
    "a row, repeated": lambda t: t[..., :1, :].expand(t.shape),
    "a column, repeated": lambda t: t[..., :1].expand(t.shape),
    "batch inside": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "batch, repeated": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("of_a", "of_b"), [*itertools.product(LAYOUTS, LAYOUTS)])
def test_layouts(device, of_a, of_b, dtype):
    a, b = matrices(16, 24, 32, dtype, device, (2,), (2,))
    a, b = LAYOUTS[of_a](a), LAYOUTS[of_b](b)
    before = a.clone(), b.clone()
    stacked = check_gemm(a, b)
    torch.testing.assert_close(stacked, tileops.gemm(a.contiguous(), b.contiguous()))
    torch.testing.assert_close(check_gemm(a[0], b[0]), stacked[0])
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue(device, dtype, activation):
    a, b = matrices(9, 10, 20, dtype, device)
    for bias_type, residual_type, out_type in itertools.product((None, *DTYPES), (None, *DTYPES), (None, *DTYPES)):
        bias = None if bias_type is None else normal(10, dtype=bias_type, device=device, seed=3)
        residual = None if residual_type is None else normal(9, 10, dtype=residual_type, device=device, seed=4)
        check_gemm(a, b, bias, activation=activation, residual=residual, out_dtype=out_type)


@pytest.mark.parametrize("dtype", HALF)
def test_product_is_not_rounded_before_the_epilogue(device, dtype):
    """The product is 1 + 2^-11, which neither dtype holds; a bias or residual of -1 leaves 2^-11 of it."""
    one, tiny = torch.ones(1, 1, dtype=dtype, device=device), torch.full((1, 1), 2.0**-11, dtype=dtype, device=device)
    a, b = torch.cat((one, tiny), 1), torch.cat((one, one))
    minus = -torch.ones(1, device=device)
    for minus_one in (minus, minus.to(dtype)):
        for activation in ("none", "relu"):
            assert tileops.gemm(a, b, minus_one, activation=activation).item() == 2.0**-11
            assert tileops.gemm(a, b, activation=activation, residual=minus_one).item() == 2.0**-11
    assert tileops.gemm(a, b, out_dtype=torch.float32).item() == 1 + 2.0**-11


@pytest.mark.parametrize("shape", [(), (1,), (24,), (16, 24), (1, 24), (16, 1), (3, 1, 1), (2, 1, 16, 24), (2, 3, 16, 24)])
def test_residual_broadcasts(device, shape):
    a, b = matrices(16, 24, 8, torch.bfloat16, device, (2, 3))
    check_gemm(a, b, residual=normal(*shape, dtype=torch.bfloat16, device=device))
    check_gemm(a, b, residual=normal(*shape, device=device).expand(2, 3, 16, 24), activation="relu")


def test_strided_bias(device):
    a, b = matrices(4, 6, 8, torch.bfloat16, device)
    for bias in (normal(12, device=device)[::2], normal(1, device=device).expand(6), normal(6, 3, device=device)[:, 1]):
        check_gemm(a, b, bias)
        check_gemm(a, b, bias.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_columns_only_the_epilogue_is_left(device, dtype):
    a, b = matrices(4, 6, 0, dtype, device, (2,))
    assert torch.equal(tileops.gemm(a, b), torch.zeros(2, 4, 6, dtype=dtype, device=device))
    bias, residual = normal(6, dtype=dtype, device=device), normal(4, 6, dtype=dtype, device=device)
    for activation, given in itertools.product(ACTIVATIONS, (residual, None)):
        check_gemm(a, b, bias, activation=activation, residual=given)
    leaves = [t.requires_grad_() for t in (a, b, bias)]
    tileops.gemm(*leaves, activation="gelu").sum().backward()
    assert a.grad.shape == a.shape and b.grad.shape == b.shape and bias.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("of_a", "of_b", "result"),
    [((0, 5), (5, 6), (0, 6)), ((4, 5), (5, 0), (4, 0)), ((0, 0), (0, 0), (0, 0)), ((0, 4, 5), (5, 6), (0, 4, 6)),
     ((1, 4, 5), (0, 5, 6), (0, 4, 6)), ((2, 0, 5), (2, 5, 6), (2, 0, 6))],
)  # fmt: skip
def test_empty(device, of_a, of_b, result):
    for dtype in DTYPES:
        a, b = torch.ones(of_a, dtype=dtype, device=device), torch.ones(of_b, dtype=dtype, device=device)
        bias = torch.ones(result[-1], device=device)
        y = tileops.gemm(a.requires_grad_(), b.requires_grad_(), bias.requires_grad_(), activation="silu")
        assert (y.shape, y.dtype, y.device) == (result, dtype, a.device) and y.is_contiguous()
        y.sum().backward()
        for leaf in (a, b, bias):
            assert torch.equal(leaf.grad, torch.zeros_like(leaf))
        out = torch.empty(result, dtype=dtype, device=device)
        assert tileops.gemm(a.detach(), b.detach(), out=out) is out
    if device == "cuda":
        torch.cuda.synchronize()


OUTS = {
    "packed": lambda t: torch.empty_like(t),
    "transposed": lambda t: torch.empty_like(t.mT.contiguous()).mT,
    "pitch + 1": lambda t: t.new_empty(*t.shape[:-1], t.shape[-1] + 1)[..., :-1],
    "every second": lambda t: t.new_empty(*t.shape, 2)[..., 0],
}


@pytest.mark.parametrize("layout", OUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_out(device, layout, dtype):
    for batch in ((), (2, 3)):
        a, b = matrices(5, 6, 7, torch.bfloat16, device, batch)
        bias = normal(6, device=device)
        out = OUTS[layout](tileops.gemm(a, b, out_dtype=dtype))
        size = out.untyped_storage().nbytes() // out.element_size()
        whole = out.as_strided((size,), (1,), 0).fill_(7)

        def run(*args, out=out, **options):
            assert tileops.gemm(*args, **options, out=out) is out
            return out

        check_gemm(a, b, bias, activation="gelu_tanh", out_dtype=dtype, run=run)
        out.fill_(7)
        assert torch.equal(whole, torch.full_like(whole, 7)), "an element outside of out was written"


def test_scales_are_reserved(device):
    a, scale = torch.ones(2, 2, device=device), torch.ones((), device=device)
    for name in ("scale_a", "scale_b"):
        text = f"^gemm: {name} was given; scales do not work yet, expected None$"
        for call in (tileops.gemm, torch.ops.tileops.gemm, lambda *args, **kwargs: tileops.explain("gemm", *args, **kwargs)):
            with pytest.raises(RuntimeError, match=text):  # NotImplementedError is one; C++ cannot raise it
                call(a, a, **{name: scale})
        with pytest.raises(NotImplementedError, match=text):
            tileops.gemm(a, a, **{name: scale})


def test_meta():
    a, b = torch.empty(2, 3, 4, device="meta"), torch.empty(5, 4, device="meta").t()
    y = tileops.gemm(a, b, activation="silu", out_dtype=torch.float16)
    assert y.device.type == "meta" and y.shape == (2, 3, 5) and y.dtype == torch.float16 and y.is_contiguous()
    with pytest.raises(ValueError, match=r"^gemm: b is on cpu; expected meta, where a is$"):
        tileops.gemm(a, torch.empty(4, 5))


def test_explain(device):
    a, b = matrices(4, 6, 8, torch.float32, device)
    decision = tileops.explain(tileops.gemm, a, b, activation="relu")
    assert decision.path == "eager" and decision.variant == ""
    if device == "cpu":
        assert decision.reason == "a is on cpu"
    elif tileops.status().loaded:
        assert decision.reason == "gemm kernels take bfloat16 and float16, and a is float32"
        reason = tileops.explain("gemm", a.bfloat16(), b.bfloat16()).reason
        problem = "bfloat16 4x6x8 nn by vectors"
        none = (f"no kernel was measured on {torch.cuda.get_device_name()} near ", "this build has no gemm kernel for ")
        assert reason in [text + problem for text in none] or reason.startswith(f"no gemm kernel for {problem} fits (")
        forced = r"^gemm: TILEOPS_FORCE=portable cannot apply: "
        with tileops.knobs.scope(force="portable"), pytest.raises(RuntimeError, match=forced):
            tileops.gemm(a, b)


def test_autocast_does_not_round_inside(device):
    a, b = matrices(8, 8, 64, torch.float32, device)
    bias = normal(8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        check_gemm(a, b, bias, activation="silu")
        check_gemm(a.bfloat16(), b.bfloat16(), bias, activation="silu", out_dtype=torch.float32)
        leaf = a.clone().requires_grad_()
        (found,) = torch.autograd.grad(tileops.gemm(leaf, b).sum(), leaf)
    torch.testing.assert_close(found, b.sum(1).expand_as(a))


def gradients(run, tensors, dy, **options):
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items() if t is not None}
    return torch.autograd.grad(run(**leaves, **options), list(leaves.values()), dy)


def assert_gradients(a, b, bias, residual, activation, out_dtype=None):
    """Per tensor: at most twice the error of eager autograd in the same dtype, plus a floor of a few roundings."""
    tensors = {"a": a, "b": b, "bias": bias, "residual": residual}
    options = {"activation": activation, "out_dtype": out_dtype}
    shape = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (a.shape[-2], b.shape[-1])
    dy = normal(*shape, dtype=out_dtype or a.dtype, device=a.device, seed=9)
    ours = gradients(tileops.gemm, tensors, dy, **options)
    theirs = gradients(eager_gemm, tensors, dy, **options)
    wide = {name: None if t is None else t.double() for name, t in tensors.items()}
    exact = gradients(exact_gemm, wide, dy.double(), **options)
    for tensor, found, wanted, eager in zip([t for t in tensors.values() if t is not None], ours, exact, theirs):
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        worst = (eager.double() - wanted).abs().amax()
        floor = (torch.finfo(tensor.dtype).eps / 2 + 2.0**-18) * wanted.abs().amax()
        assert (found.double() - wanted).abs().amax() <= 2 * worst + floor


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(device, dtype, activation):
    a, b = matrices(9, 10, 20, dtype, device)
    assert_gradients(a, b, None, None, activation)
    bias, residual = normal(10, device=device, seed=3), normal(1, 10, dtype=dtype, device=device, seed=4)
    assert_gradients(a, b, bias, residual, activation)
    assert_gradients(a.mT.contiguous().mT, b.mT.contiguous().mT, bias.to(dtype), None, activation, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_gradients_of_batches(device, batches, dtype):
    a, b = matrices(5, 6, 7, dtype, device, *batches)
    assert_gradients(a, b, normal(6, device=device, seed=3), normal(5, 1, dtype=dtype, device=device, seed=4), "gelu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives(activation):
    tensors = [*matrices(4, 5, 6, torch.float32, "cpu", (2,)), normal(5, seed=3), normal(4, 5, seed=4)]

    def second(run, dtype):
        a, b, bias, residual = inputs = [t.to(dtype).requires_grad_() for t in tensors]
        y = run(a, b, bias, activation=activation, residual=residual)
        first = torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)

    for found, wanted in zip(second(tileops.gemm, torch.float32), second(exact_gemm, torch.float64)):
        torch.testing.assert_close(found.double(), wanted, atol=1e-4 * wanted.abs().amax().item(), rtol=1e-4)


@pytest.mark.parametrize("wanted", [*itertools.product((True, False), repeat=4)])
def test_only_what_is_wanted(device, wanted):
    tensors = [*matrices(3, 4, 5, torch.bfloat16, device), normal(4, device=device), normal(3, 4, device=device)]
    a, b, bias, residual = (t.requires_grad_(is_wanted) for t, is_wanted in zip(tensors, wanted))
    y = tileops.gemm(a, b, bias, activation="silu", residual=residual)
    assert y.requires_grad == any(wanted)
    if any(wanted):
        y.sum().backward()
    assert [t.grad is not None for t in tensors] == list(wanted)


def test_gradients_do_not_need_a_kernel(device):
    """The knobs decide about the forward call only."""
    a, b = matrices(4, 5, 6, torch.bfloat16, device)
    with tileops.knobs.scope(force="eager"):
        y = tileops.gemm(a.requires_grad_(), b, activation="gelu")
    with tileops.knobs.scope(require_native=True):
        y.sum().backward()
    assert a.grad is not None


@pytest.mark.usefixtures("gpu_route_on_cpu")
@pytest.mark.parametrize("batches", [((), ()), *BATCHES], ids=str)
def test_gpu_route(batches):
    a, b = matrices(5, 6, 7, torch.bfloat16, "cpu", *batches)
    bias, residual = normal(6, seed=3).bfloat16(), normal(5, 1, seed=4).bfloat16()
    strided = a.mT.contiguous().mT, torch.stack((b, b), -1)[..., 0]
    for operands, addends in itertools.product(((a, b), strided), ((None, None), (bias, None), (None, residual))):
        check_gemm(*operands, addends[0], residual=addends[1])  # rounded by torch's own
    check_gemm(a, b, bias, residual=residual)
    check_gemm(a, b, bias.float())
    check_gemm(a, b, out_dtype=torch.float32)
    assert_gradients(a, b, bias, residual, "silu")


def test_the_rule_can_fail():
    """A product rounded to bfloat16 before the bias is told from one that is not."""
    a, b = matrices(33, 40, 200, torch.bfloat16, "cpu")
    bias = normal(40)
    with pytest.raises(AssertionError, match="elements are off"):
        check_gemm(a, b, bias, run=lambda *args: (exact_gemm(a, b).bfloat16().float() + bias).bfloat16())
    with pytest.raises(AssertionError, match="elements are off"):
        check_gemm(a, b, run=lambda *args: tileops.gemm(a[:, :-1], b[:-1]))
    assert gemm_floor(a, b).amax() < 0.01


@pytest.mark.big
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_more_elements_than_31_bits_count(activation):
    a = torch.ones(2**16 + 8, 64, dtype=torch.bfloat16, device="cuda")
    b = torch.ones(64, 2**15, dtype=torch.bfloat16, device="cuda")
    assert (tileops.gemm(a, b, activation=activation) == 64).all()
