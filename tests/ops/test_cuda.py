"""What only a GPU shows: capture, streams, devices, big indices and exceptions through the native library."""
import pytest
import torch
from ops_reference import normal, operands

import tileops

OPS = ("softmax", "rms_norm", "rms_norm_silu")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def context_stays_usable():
    yield
    torch.cuda.synchronize()


def test_library_is_loaded():
    assert tileops.status().loaded, tileops.status().reason


def test_status_knows_the_device():
    tileops.softmax(torch.ones(3, 4, device="cuda"))
    status = tileops.status()
    assert status.driver >= 13000
    assert status.devices["0"]["name"] == torch.cuda.get_device_name(0)


@pytest.mark.parametrize("op", OPS)
def test_first_call_of_the_process_is_captured(run_python, op):  # B55
    run_python(f"""
import torch, tileops
x = torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16)
stream = torch.cuda.Stream()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    y = tileops.{op}(x)
    out = torch.empty_like(x)
    tileops.{op}(x, out=out)
for seed in range(3):
    torch.manual_seed(seed)
    x.copy_(torch.randn(64, 1000))
    graph.replay()
    torch.cuda.synchronize()
    expected = tileops.{op}(x)
    assert torch.equal(y, expected) and torch.equal(out, expected)
""", TILEOPS_REQUIRE_NATIVE="1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", (*OPS, "gemm"))
def test_fallback_is_capturable(op, dtype):
    args, options = operands(op, normal(64, 100, device="cuda", dtype=dtype)), {"activation": "silu"} if op == "gemm" else {}
    with tileops.knobs.scope(force="eager"):
        getattr(tileops, op)(*args, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = getattr(tileops, op)(*args, **options)
        args[0].copy_(normal(64, 100, seed=5))
        graph.replay()
        torch.testing.assert_close(y, getattr(tileops, op)(*args, **options))


@pytest.mark.parametrize("op", OPS)
def test_side_stream(route, op):
    """The kernel goes to the current stream: behind the slow work queued there, not beside it."""
    if route.device == "cpu":
        pytest.skip("streams")
    x = normal(512, 2048, device="cuda")
    expected = getattr(tileops, op)(x)
    stream, late = torch.cuda.Stream(), torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        y = getattr(tileops, op)(late)
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op", OPS)
def test_second_device(route, op):  # B53
    if route.device == "cpu":
        pytest.skip("devices")
    x = normal(64, 1000, device="cuda:0", dtype=torch.float16)
    far = x.to("cuda:1")
    assert torch.cuda.current_device() == 0
    y = getattr(tileops, op)(far)
    assert torch.cuda.current_device() == 0 and y.device == far.device
    assert torch.equal(y.cpu(), getattr(tileops, op)(x).cpu())
    if op != "softmax":
        with pytest.raises(ValueError, match="weight is on cuda:0; expected cuda:1, where x is"):
            getattr(tileops, op)(far, torch.ones(1000, device="cuda:0"))


@pytest.mark.parametrize("op", OPS)
def test_fresh_memory_is_not_taken_for_zero(route, op):
    if route.device == "cpu":
        pytest.skip("the caching allocator")
    for cols in (5, 255, 1000, 4097):
        x = normal(33, cols, device="cuda", dtype=torch.bfloat16)
        clean = getattr(tileops, op)(x)
        for _ in range(3):
            poison = torch.full((33, cols), float("nan"), device="cuda", dtype=torch.bfloat16)
            del poison
            assert torch.equal(getattr(tileops, op)(x), clean)


@pytest.mark.parametrize("op", OPS)
def test_stable_beside_a_busy_stream(route, op):  # B57
    if route.device == "cpu":
        pytest.skip("streams")
    x, noise = normal(300, 5000, device="cuda", dtype=torch.float16), normal(2048, 2048, device="cuda")
    first, stream = getattr(tileops, op)(x), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(stream):
            noise @ noise
        assert torch.equal(getattr(tileops, op)(x), first)


@pytest.mark.parametrize("op", OPS)
def test_empty_launches_nothing(run_python, op):  # B11, in a process of its own: a bad launch would stick
    run_python(f"""
import torch, tileops
for shape in ((0, 4096), (4096, 0), (0,)):
    x = torch.empty(shape, device="cuda")
    assert tileops.{op}(x).shape == x.shape
torch.cuda.synchronize()
assert torch.isfinite(tileops.{op}(torch.ones(3, 4, device="cuda"))).all()
""", TILEOPS_REQUIRE_NATIVE="1")


@pytest.mark.parametrize("op", OPS)
def test_errors_of_the_twin_keep_type_and_text(monkeypatch, op):
    """The native library calls the twin through a C++ ABI that knows no Python exception."""
    import sys

    module, x = sys.modules[f"tileops.ops.{op}"], torch.ones(3, 4, device="cuda")
    for error in (KeyError("a text"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate it all")):
        def formula(*args, error=error, **kwargs):
            raise error

        target = module if op == "softmax" else sys.modules["tileops.ops._norm"].Norm
        with monkeypatch.context() as patch, tileops.knobs.scope(force="eager"):
            patch.setattr(torch, "softmax", formula) if op == "softmax" else patch.setattr(target, "forward", formula)
            with pytest.raises(type(error)) as caught:
                getattr(tileops, op)(x)
        assert str(caught.value) == str(error)
    assert torch.isfinite(getattr(tileops, op)(x)).all()


@pytest.mark.big
def test_out_of_memory_is_torchs(route):
    if route.device == "cpu":
        pytest.skip("memory of the GPU")
    free, _ = torch.cuda.mem_get_info()
    x = torch.empty(int(free * 0.6) // 4096 // 2, 4096, dtype=torch.float16, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        tileops.softmax(x, dtype=torch.float32)
    del x
    torch.cuda.empty_cache()
    assert torch.isfinite(tileops.softmax(torch.ones(3, 4, device="cuda"))).all()


@pytest.mark.big
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(4194305, 512), (2097160, 1024), (2097152, 1024)])
def test_more_elements_than_31_bits_count(route, op, shape):  # B16 a, c, and exactly 2^31
    if route.device == "cpu":
        pytest.skip("memory of the GPU")
    x = torch.zeros(shape, dtype=torch.float16, device="cuda")
    last = normal(shape[1], device="cuda", dtype=torch.float16)
    x[-1] = last
    y = getattr(tileops, op)(x)
    assert torch.equal(y[-1], getattr(tileops, op)(last[None])[0])
    assert torch.equal(y[0], getattr(tileops, op)(x[:1])[0])
    zero_row = getattr(tileops, op)(torch.zeros(1, shape[1], dtype=torch.float16, device="cuda"))[0]
    for start in range(0, shape[0] - 1, 262144):  # every other row, in slices
        rows = y[start : min(start + 262144, shape[0] - 1)]
        assert torch.equal(rows, zero_row.expand_as(rows))


@pytest.mark.big
@pytest.mark.parametrize("op", OPS)
def test_stride_of_2_to_31(route, op):  # B16 b
    if route.device == "cpu":
        pytest.skip("memory of the GPU")
    flat = torch.zeros(2**31 + 128, dtype=torch.bfloat16, device="cuda")
    x = flat.as_strided((2, 128), (2**31, 1))
    x.copy_(normal(2, 128))
    assert torch.equal(getattr(tileops, op)(x), getattr(tileops, op)(x.contiguous()))
    expected = getattr(tileops, op)(x.clone())
    out = torch.zeros_like(flat).as_strided((2, 128), (2**31, 1))
    getattr(tileops, op)(x, out=out)
    assert torch.equal(out, expected)


@pytest.mark.big
@pytest.mark.parametrize("op", OPS)
def test_columns_far_apart(route, op):
    if route.device == "cpu":
        pytest.skip("memory of the GPU")
    x = torch.zeros(3, 2**30, dtype=torch.bfloat16, device="cuda")[:, :: 2**22].t()  # 256 rows of 3, columns 2^30 apart
    x.copy_(normal(256, 3))
    assert torch.equal(getattr(tileops, op)(x).contiguous(), getattr(tileops, op)(x.clone().contiguous()))
