"""Every gemm kernel that was compiled, against float64, and what calls of them need besides. On a GPU.

compute-sanitizer --tool racecheck python -m pytest tests/ops/test_gemm_kernels.py -k small     the subset for a sanitizer
"""

import functools
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from ops_reference import ACTIVATIONS, check_gemm, normal

import tileops

MANIFEST = Path(tileops.__file__).parent.parent / "csrc" / "generated" / "manifest.json"
EVERY = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.exists() else {}
KERNELS = {name: kernel for name, kernel in EVERY.items() if kernel["op"] == "gemm"}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LAYOUTS = ("nt", "nn", "tn", "tt")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def context_stays_usable():
    yield
    torch.cuda.synchronize()


@pytest.fixture(params=["sm_90a", "portable"])
def target(request):
    """Forces the target's kernels."""
    if request.param == "sm_90a" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90a runs on capability 9.0 only")
    with tileops.knobs.scope(force=request.param, require_native=True):
        yield request.param


def need(target, layout="nt", x="bfloat16", y="bfloat16", vector=8):
    """Skips if the build (a smoke build, say) lacks the kind of kernel."""
    kind = (target, x, y, layout[0] == "t", layout[1] == "t", vector)
    keys = ("target", "x", "y", "transpose_a", "transpose_b", "vector")
    if kind not in {tuple(kernel[key] for key in keys) for kernel in KERNELS.values()}:
        pytest.skip(f"no {kind} in this build")


def matrices(*shape, dtype=torch.bfloat16, transposed=False, anywhere=False, seed=0):
    """A stack of matrices stored by rows (transposed: by columns) with NaN between them. Rows begin at multiples of 16 bytes
    or anywhere."""
    *batch, rows, columns = shape
    if transposed:
        return matrices(*batch, columns, rows, dtype=dtype, anywhere=anywhere, seed=seed).mT
    step = 1 if anywhere else 16 // dtype.itemsize
    pitch = (columns + step) // step * step
    storage = torch.full((math.prod(batch) * rows * pitch + 1,), torch.nan, dtype=dtype, device="cuda")
    view = storage[1:] if anywhere else storage[:-1]
    view = view.view(*batch, rows, pitch)[..., :columns]
    return view.copy_(normal(*shape, seed=seed))


def into_gaps(anywhere=False):
    """tileops.gemm into a result with gaps, which must stay as they are."""

    def run(a, b, *args, **options):
        shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        out = matrices(*shape, dtype=options.get("out_dtype", a.dtype), anywhere=anywhere).fill_(torch.nan)
        assert tileops.gemm(a, b, *args, **options, out=out) is out
        whole = torch.as_strided(out, [out.untyped_storage().nbytes() // out.element_size()], [1], 0)
        assert int(whole.isnan().sum()) == whole.numel() - out.numel(), "written outside of out, or not everywhere"
        return out

    return run


def epilogue(number, m, n, dtype, anywhere=False):
    """Bias, activation and residual: one combination after the other."""
    biases, residuals = (None, *DTYPES.values()), (False, True)
    every = [*itertools.product(residuals, ACTIVATIONS, biases)]
    with_residual, activation, bias = every[number * 7 % len(every)]
    return {
        "bias": None if bias is None else normal(n, dtype=bias, device="cuda", seed=number),
        "activation": activation,
        "residual": matrices(m, n, dtype=dtype, anywhere=anywhere, seed=number + 1) if with_residual else None,
    }


def served(kernel, m, n, k):
    """The nearest problem above that the kernel takes: rows that end at 16 bytes, of the result, or of all on portable."""
    if kernel["vector"] == 1:
        return m, n, k
    up = lambda extent: -(-extent // 8) * 8  # noqa: E731
    return (m, up(n), k) if kernel["target"] == "sm_90a" else (up(m) if kernel["transpose_a"] else m, up(n), up(k))


def run_kernel(name, m, n, k, number, batch=()):
    kernel = KERNELS[name]
    m, n, k = served(kernel, m, n, k)
    x, y, anywhere = DTYPES[kernel["x"]], DTYPES[kernel["y"]], kernel["vector"] == 1
    a = matrices(*batch, m, k, dtype=x, transposed=kernel["transpose_a"], anywhere=anywhere, seed=1)
    b = matrices(*batch, k, n, dtype=x, transposed=kernel["transpose_b"], anywhere=anywhere, seed=2)
    options = {**epilogue(number, m, n, y, anywhere), "out_dtype": y}
    with tileops.knobs.scope(force=name, require_native=True):
        check_gemm(a, b, by_kernel=True, run=into_gaps(anywhere), **options)


def runs_here(name):
    return KERNELS[name]["target"] == "portable" or torch.cuda.get_device_capability() == (9, 0)


def edges(kernel):
    """Problems at the edges of tiles, of clusters, of steps of K and of the pipeline."""
    bm, bn, bk = kernel["tile"]
    above = bm * kernel["cluster"]
    return [
        (bm, bn, bk), (1, 1, 1), (above + 1, bn - 1, bk + 3), (above - 1, 2 * bn + 5, bk - 1), (7, 5, 9 * bk + 1),
        (3 * above + 17, 3 * bn + 1, 2 * bk), (2, bn + 8, 5 * bk + 8), (64, 1, 1000), (1, 2 * bn, 257),
    ]  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_edges(name):
    if not runs_here(name):
        pytest.skip(f"{name} is for another GPU")
    for number, (m, n, k) in enumerate(edges(KERNELS[name])):
        run_kernel(name, m, n, k, number)
    run_kernel(name, 70, 50, 90, 11, batch=(3,))


@pytest.mark.parametrize("name", KERNELS)
def test_many_tiles(name):
    """More than fit on the GPU at a time, so that CTAs go from tile to tile."""
    if not runs_here(name):
        pytest.skip(f"{name} is for another GPU")
    bm, bn, _ = KERNELS[name]["tile"]
    run_kernel(name, 23 * bm + 3, 29 * bn + 2, 200, 5)


def small():
    """One of each target and layout for a sanitizer, which slows them down a hundredfold."""
    kinds = {}
    for name, kernel in KERNELS.items():
        kinds.setdefault(tuple(kernel[key] for key in ("target", "transpose_a", "transpose_b", "vector")), name)
    return list(kinds.values())


@pytest.mark.parametrize("name", small())
def test_small(name):
    if not runs_here(name):
        pytest.skip(f"{name} is for another GPU")
    bm, bn, bk = KERNELS[name]["tile"]
    run_kernel(name, bm * KERNELS[name]["cluster"] + 3, bn + 5, 2 * bk + 1, 27)


# ---- what a call needs besides


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("x", ["bfloat16", "float16"])
def test_layouts_without_a_copy(target, layout, x):
    need(target, layout, x, x)
    a = matrices(72, 136, dtype=DTYPES[x], transposed=layout[0] == "t")
    b = matrices(136, 264, dtype=DTYPES[x], transposed=layout[1] == "t", seed=1)
    check_gemm(a, b)
    decision = tileops.explain("gemm", a, b)
    assert f"_{target}_" in decision.variant and f"_{layout}" in decision.variant and "copied" not in decision.reason


def test_exact(target):
    need(target)
    a = normal(320, 320, dtype=torch.bfloat16, device="cuda")
    eye = torch.eye(320, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(tileops.gemm(a, eye.t()), a) and torch.equal(tileops.gemm(eye, a.t()), a.t())
    ones = torch.ones(320, 320, dtype=torch.bfloat16, device="cuda")
    assert (tileops.gemm(ones, ones.t()) == 320).all()


BATCHES = {  # batch dimensions of a, b and the residual
    "each": ((3,), (3,), (3, 40, 24)),
    "two": ((2, 3), (2, 3), (2, 3, 40, 24)),
    "b for all": ((3,), (), (24,)),
    "a for all": ((), (3,), (1, 40, 24)),
    "a repeated": ((1,), (3,), (3, 1, 24)),
    "b repeated": ((3,), (1,), (40, 24)),
}


@pytest.mark.parametrize("batches", BATCHES)
def test_batches(target, batches):
    need(target)
    of_a, of_b, residual = BATCHES[batches]
    a = normal(*of_a, 40, 56, dtype=torch.bfloat16, device="cuda")
    b = normal(*of_b, 24, 56, dtype=torch.bfloat16, device="cuda", seed=1).mT
    check_gemm(a, b, normal(24, device="cuda"), activation="silu", residual=normal(*residual, device="cuda").bfloat16())
    repeated = b[:1].expand(3, 56, 24) if of_b == (3,) else b
    check_gemm(a.expand(3, 40, 56) if of_a in ((), (1,)) else a, repeated)


def test_copies(target):
    need(target, "nn")
    for a, b in (
        (normal(40, 112, device="cuda").bfloat16()[:, ::2], normal(56, 24, device="cuda").bfloat16()),
        (normal(5, 1, 112, device="cuda").bfloat16()[..., ::2], normal(56, 48, device="cuda").bfloat16()[:, ::2]),
    ):
        check_gemm(a, b, normal(48, device="cuda")[::2])
        assert "; a is copied first, because it has no unit stride" in tileops.explain("gemm", a, b).reason


def test_float32_result(target):
    need(target, y="float32")
    a, b = matrices(130, 200), matrices(200, 264, transposed=True, seed=1)
    residual = normal(130, 264, device="cuda", seed=2)
    check_gemm(a, b, normal(264, device="cuda"), residual=residual, out_dtype=torch.float32)


def test_out_of_other_strides(target):
    """Through a result of our own where the kernel cannot write."""
    need(target)
    a, b = matrices(40, 56), matrices(56, 24, transposed=True, seed=1)
    new = functools.partial(torch.empty, dtype=torch.bfloat16, device="cuda")
    for out in (new(24, 40).t(), new(40, 24, 2)[..., 0], new(40, 25)[:, :-1]):
        check_gemm(a, b, by_kernel=True, run=lambda *args, out=out, **options: tileops.gemm(*args, **options, out=out))


def test_same_result_each_time(target):
    """Beside a busy stream, in memory that held something else."""
    need(target)
    a, b = matrices(600, 520), matrices(520, 776, transposed=True, seed=1)
    first, noise, stream = tileops.gemm(a, b, activation="gelu"), normal(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(30):
        with torch.cuda.stream(stream):
            noise @ noise
        poison = torch.full((600, 776), torch.nan, dtype=torch.bfloat16, device="cuda")
        del poison
        assert torch.equal(tileops.gemm(a, b, activation="gelu"), first)


def test_side_stream(target):
    need(target)
    a, b = matrices(256, 512), matrices(512, 256, transposed=True, seed=1)
    expected = tileops.gemm(a, b)
    stream, late = torch.cuda.Stream(), torch.zeros(256, 512, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(a)
        y = tileops.gemm(late, b)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_first_call_of_the_process_is_captured(target, run_python):
    need(target)
    run_python("""
import torch, tileops
a, w = (torch.randn(264, 264, device="cuda").bfloat16() for _ in range(2))
bias, residual = torch.randn(264, device="cuda"), torch.randn(264, 264, device="cuda").bfloat16()
options = {"activation": "gelu", "residual": residual}
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
    y = tileops.gemm(a, w.t(), bias, **options)
    out = torch.empty_like(y)
    tileops.gemm(a, w.t(), bias, **options, out=out)
for seed in range(3):
    torch.manual_seed(seed)
    for tensor in (a, w, bias, residual):
        tensor.copy_(torch.randn(tensor.shape))
    graph.replay()
    torch.cuda.synchronize()
    expected = tileops.gemm(a, w.t(), bias, **options)
    assert torch.equal(y, expected) and torch.equal(out, expected)
""", TILEOPS_REQUIRE_NATIVE="1", TILEOPS_FORCE=target)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compilers
def test_compile_and_opcheck(target):
    need(target)
    a, w = matrices(72, 136), matrices(264, 136, seed=1)
    bias, residual = normal(264, device="cuda"), normal(72, 264, device="cuda").bfloat16()
    torch.library.opcheck(torch.ops.tileops.gemm.default, (a, w.t(), bias), {"activation": "relu", "residual": residual})

    def program(a, w):
        return tileops.gemm(a * 1, w.t(), bias, activation="silu", residual=residual) + 1

    torch._dynamo.reset()
    assert torch.equal(torch.compile(program, backend="aot_eager", fullgraph=True)(a, w), program(a, w))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device(target):
    need(target)
    a, b = matrices(256, 512), matrices(512, 256, transposed=True, seed=1)
    far = tileops.gemm(a.to("cuda:1"), b.t().to("cuda:1").t())
    assert torch.cuda.current_device() == 0 and far.device.index == 1
    assert torch.equal(far.cpu(), tileops.gemm(a, b).cpu())


def test_what_cannot_be_forced(target):
    need(target)
    a, b = matrices(40, 56), matrices(56, 24, transposed=True, seed=1)
    cases = {
        "and a is float32": (a.float(), b.float(), {}),
        "and out_dtype is float16": (a, b, {"out_dtype": torch.float16}),
        "and it is float32": (a, b, {"residual": normal(24, device="cuda")}),
        "a has no columns": (a[:, :0], b[:0], {}),
        "rows of residual that are contiguous": (a, b, {"residual": a[:, :1]}),
        "one batch dimension": (a.view(2, 1, 20, 56), torch.stack((b, b, b)), {}),
    }
    for reason, (p, q, options) in cases.items():
        with pytest.raises(RuntimeError, match=f"^gemm: TILEOPS_FORCE={target} cannot apply: .*{reason}"):
            tileops.gemm(p, q, **options)
    with tileops.knobs.scope(force="", require_native=False):
        for p, q, options in cases.values():
            check_gemm(p, q, **options)
    assert tileops.gemm(a[:0], b).shape == (0, 24)


def test_choice_is_what_was_measured():
    """At each measured point: a kernel where one won, else eager PyTorch."""
    kernels, gains = pytest.importorskip("tileops_dsl.kernels"), {}
    for row in kernels.configs_of("gemm"):
        for at in row.measured:
            if at.gpu == torch.cuda.get_device_name():
                point = row.x, row.y, row.transpose_a, row.transpose_b, at.batch * at.m, at.n, at.k, at.fused
                gains[point] = max(gains.get(point, 0.0), at.baseline_us / at.us)
    for (x, y, transpose_a, transpose_b, m, n, k, fused), gain in gains.items():
        a = torch.empty((k, m) if transpose_a else (m, k), dtype=DTYPES[x], device="cuda")
        b = torch.empty((n, k) if transpose_b else (k, n), dtype=DTYPES[x], device="cuda")
        options = {"activation": "relu" if fused else "none", "out_dtype": DTYPES[y]}
        found = tileops.explain("gemm", a.t() if transpose_a else a, b.t() if transpose_b else b, **options)
        assert found.path == ("kernel" if gain >= 0.985 else "eager"), (found, x, y, transpose_a, transpose_b, m, n, k, gain)


@pytest.mark.big
def test_more_elements_than_31_bits_count(target):
    need(target)
    a = torch.ones(2**16 + 8, 64, dtype=torch.bfloat16, device="cuda")
    b = torch.ones(2**15, 64, dtype=torch.bfloat16, device="cuda").t()
    b[:, -1] = 2
    y = tileops.gemm(a, b)
    assert (y[:, :-1] == 64).all() and (y[:, -1] == 128).all()
    z = tileops.gemm(y[:, :64], b)
    assert (z[:, :-1] == 4096).all() and (z[:, -1] == 8192).all()
