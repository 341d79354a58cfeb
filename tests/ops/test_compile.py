"""torch.compile, the fake kernels and torch's own check of custom operators."""

import pytest
import torch
from ops_reference import normal, operands

import tileops

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compilers

LIKE_X = ("softmax", "rms_norm", "rms_norm_silu")  # whose result has the strides of x; the others' is contiguous
OPS = (*LIKE_X, "gemm")
VIEWS = {
    "packed": lambda d: normal(4, 6, 32, device=d),
    "swapped": lambda d: normal(6, 4, 32, device=d).transpose(0, 1),
    "transposed": lambda d: normal(32, 6, 4, device=d).permute(2, 1, 0),
    "slice": lambda d: normal(4, 6, 64, device=d)[..., 3:35],
    "size 1": lambda d: normal(1, 6, 1, device=d),
    "repeated": lambda d: normal(6, 1, device=d).expand(4, 6, 1),
}


def calls(op, x):
    yield operands(op, x), {}
    if op == "gemm":
        bias = normal(x.shape[-1], device=x.device, dtype=torch.float16)
        yield (*operands(op, x), bias), {"activation": "gelu", "residual": x[:1], "out_dtype": torch.bfloat16}
    elif op == "softmax":
        yield (x, 1), {"dtype": torch.bfloat16}
    elif op.startswith("rms_norm"):
        yield (x, normal(x.shape[1], device=x.device, dtype=torch.float16), 1e-3), {"dim": 1, "round_before_weight": True}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(device, op, view):  # B47
    for args, kwargs in calls(op, VIEWS[view](device)):
        torch.library.opcheck(getattr(torch.ops.tileops, op).default, args, kwargs)
        twin = getattr(torch.ops.tileops, f"_eager_{op}").default
        torch.library.opcheck(twin, args, {name: 2 if value == "gelu" else value for name, value in kwargs.items()})
        like = torch.empty_like(args[0], dtype=kwargs.get("dtype")) if op in LIKE_X else torch.empty(args[0].shape)
        assert getattr(tileops, op)(*args, **kwargs).stride() == like.stride()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("op", OPS)
def test_opcheck_out(device, op, view):
    """Without test_aot_dispatch_dynamic, which compiles a direct call: see the tag in tileops/ops/_table.py."""
    for args, kwargs in calls(op, VIEWS[view](device)):
        dtype = kwargs.get("out_dtype" if op == "gemm" else "dtype", args[0].dtype)
        out = torch.empty(args[0].shape, dtype=dtype, device=device)
        utils = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(getattr(torch.ops.tileops, op).out, args, {**kwargs, "out": out}, test_utils=utils)


def test_out_is_not_tagged():
    """Inductor would pass each keyword-only argument twice. When this can be tagged again, test_compile[inductor] shows it."""
    for op in OPS:
        assert not [tag for tag in getattr(torch.ops.tileops, op).out.tags if str(tag).split(".")[-1] in ("out", "out_variant")]


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def backend(request):
    torch._dynamo.reset()
    return request.param


def softmax_program(x, w):
    return tileops.softmax(x * 2, 1, dtype=torch.float32).transpose(0, 2) + 1


def rms_norm_program(x, w):
    return x + tileops.rms_norm(x, w, dim=1, weight_offset=1.0, round_before_weight=True)


def rms_norm_silu_program(x, w):
    return tileops.rms_norm_silu(x.transpose(0, 2), w, None, dim=1).transpose(0, 2) * x


def gemm_program(x, w):
    b = w[:, None] * w
    return tileops.gemm(x.transpose(1, 2) * 2, b, w, activation="gelu_tanh", residual=x[:1, 0, :1]) + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [softmax_program, rms_norm_program, rms_norm_silu_program, gemm_program])
def test_compile(device, backend, program, dynamic):
    if backend == "inductor" and dynamic and device == "cpu":
        pytest.skip("30 seconds of C++ compilation for what aot_eager shows as well")
    compiled = torch.compile(program, fullgraph=True, backend=backend, dynamic=dynamic)
    for shape in ((3, 16, 5), (4, 16, 7)):
        x, w, dy = normal(*shape, device=device), normal(16, device=device, seed=1), None
        torch.testing.assert_close(compiled(x, w), program(x, w))
        mine, theirs = ([t.clone().requires_grad_() for t in (x, w)] for _ in range(2))
        for leaves, run in ((mine, compiled), (theirs, program)):
            y = run(*leaves)
            dy = normal(*y.shape, device=device, seed=2)
            y.backward(dy)
        for a, b in zip(mine, theirs):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS)
def test_compiled_out_is_seen_as_written(device, backend, op):  # B49
    def program(x, out):
        before = out * 2
        y = getattr(tileops, op)(x, *others, out=out)
        return before + out, y * 1

    x, *others = operands(op, normal(4, 8, device=device))
    ours, theirs = torch.ones(4, 8, device=device), torch.ones(4, 8, device=device)
    compiled = torch.compile(program, fullgraph=True, backend=backend)(x, ours)
    torch.testing.assert_close(compiled, program(x, theirs))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore")
def test_errors_keep_their_words_under_compile():
    def program(x):
        return tileops.softmax(x, 5)

    torch._dynamo.reset()
    with pytest.raises(Exception, match="dim is 5; expected a value from -2 to 1"):
        torch.compile(program, fullgraph=True, backend="aot_eager")(normal(3, 4))


@pytest.mark.parametrize("op", OPS)
def test_export(op):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return getattr(tileops, op)(*args)

    args = operands(op, normal(4, 8))
    exported = torch.export.export(Module(), args)
    assert f"tileops.{op}.default" in exported.graph_module.code
    torch.testing.assert_close(exported.module()(*args), getattr(tileops, op)(*args))
