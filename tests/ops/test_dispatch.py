"""Which path is taken and what is said about it: explain, status, the knobs and the log."""
import functools
import sys
import types

import pytest
import torch
from ops_reference import normal, operands

import tileops
from tileops import _native, dispatch, knobs
from tileops.ops import _table

OPS = ("softmax", "rms_norm", "rms_norm_silu")  # those that have kernels
ALL = (*OPS, "gemm")


def test_explain_on_cpu():
    for op in ALL:
        decision = tileops.explain(op, *operands(op, normal(3, 4)))
        first = "a" if op == "gemm" else "x"
        assert (decision.path, decision.variant, decision.reason) == ("eager", "", f"{first} is on cpu")
        assert str(decision) == f"eager: {first} is on cpu"
        assert tileops.explain(getattr(tileops, op), *operands(op, normal(3, 4))) == decision
    meta = tileops.explain("rms_norm", torch.empty(3, 4, device="meta"), torch.empty(4, device="meta"))
    assert str(meta) == "eager: x is on meta"
    assert str(dispatch.Decision("kernel", "softmax_x", "why")) == "kernel softmax_x: why"


def test_explain_on_gpu(route):
    if route.device == "cpu":
        pytest.skip("what a kernel serves")
    for op in OPS:
        decision = tileops.explain(op, normal(3, 256, device=route.device, dtype=torch.bfloat16))
        assert decision.path == "kernel" and decision.variant.startswith(op) and route.target in decision.variant
        with knobs.scope(force=decision.variant):
            assert tileops.explain(op, normal(3, 256, device=route.device, dtype=torch.bfloat16)).variant == decision.variant
            other = OPS[OPS.index(op) - 1]
            with pytest.raises(RuntimeError, match=rf"^{other}: TILEOPS_FORCE={decision.variant} cannot apply: "):
                getattr(tileops, other)(normal(3, 256, device=route.device, dtype=torch.bfloat16))


def test_explain_refuses_what_it_cannot_answer():
    with pytest.raises(ValueError, match=r"^explain: op is 'conv'; expected one of "):
        tileops.explain("conv", normal(3, 4))
    with pytest.raises(ValueError, match=r"^explain: out was given; expected the other arguments only"):
        tileops.explain("softmax", normal(3, 4), out=normal(3, 4))


def test_status():
    status = tileops.status()
    assert status.loaded == (not status.reason)
    assert status.torch == torch.__version__
    lines = str(status).splitlines()
    assert lines[0].startswith(f"torch: {torch.__version__}, ") and lines[-1] == "knobs: none set"
    assert lines[1] == "native library: " + ("loaded" if status.loaded else f"not loaded: {status.reason}")
    with knobs.scope(force="eager", require_native=True):
        assert str(tileops.status()).splitlines()[-1] == "knobs: TILEOPS_FORCE=eager, TILEOPS_REQUIRE_NATIVE=1"


def test_status_is_readable():
    device = {"name": "NVIDIA H200", "capability": "9.0", "target": "sm_90a", "reason": ""}
    old = {"name": "Tesla V100", "capability": "7.0", "target": None, "reason": "this build has no kernels for capability 7.0"}
    status = dispatch.Status(
        True, "", ("sm_90a", "portable"), 24, 13000, "", {"0": device, "1": old}, "2.13.0", "13.0", knobs.Knobs(log="dispatch")
    )
    assert str(status).splitlines() == [
        "torch: 2.13.0, CUDA 13.0",
        "native library: loaded",
        "kernels: 24 variants for sm_90a, portable",
        "driver: CUDA 13.0",
        "device 0: NVIDIA H200, capability 9.0: sm_90a",
        "device 1: Tesla V100, capability 7.0: eager: this build has no kernels for capability 7.0",
        "knobs: TILEOPS_LOG=dispatch",
    ]


@pytest.mark.parametrize("op", ALL)
def test_what_cannot_be_forced_is_an_error(op):
    args, first = operands(op, normal(3, 4)), "a" if op == "gemm" else "x"
    for force in ("portable", "sm_90a", "softmax_sm_90a_bf16", "nonsense"):
        with knobs.scope(force=force):
            for call in (getattr(tileops, op), functools.partial(tileops.explain, op), getattr(torch.ops.tileops, op)):
                with pytest.raises(RuntimeError) as caught:
                    call(*args)
                assert str(caught.value) == (
                    f"{op}: TILEOPS_FORCE={force} cannot apply: {first} is on cpu; "
                    "unset it, or force a target or kernel that fits"
                )
    getattr(tileops, op)(*args)


@pytest.mark.parametrize("op", ALL)
def test_require_native(op):
    args, reason = operands(op, normal(3, 4)), f"{'a' if op == 'gemm' else 'x'} is on cpu"
    with knobs.scope(require_native=True):
        for out in (None, torch.empty_like(args[0])):
            with pytest.raises(RuntimeError) as caught:
                getattr(tileops, op)(*args, out=out)
            assert str(caught.value) == f"{op}: TILEOPS_REQUIRE_NATIVE is set and no kernel serves this call: {reason}"
        with pytest.raises(RuntimeError, match=reason):
            getattr(tileops, op)(args[0].clone().requires_grad_(), *args[1:])
        assert tileops.explain(op, *args).reason == reason
        with knobs.scope(force="eager"):  # what is forced by name is no fallback
            assert tileops.explain(op, *args).reason == "TILEOPS_FORCE=eager is set"
            getattr(tileops, op)(*args)


@pytest.mark.parametrize("op", OPS)
def test_forced_fallback_agrees_with_the_kernel(route, op):  # B65
    for dtype in (torch.bfloat16, torch.float32):
        x = normal(5, 6, 64, dtype=dtype, device=route.device).transpose(0, 1)
        for dim in range(3):
            kernel = getattr(tileops, op)(x, dim=dim)
            with knobs.scope(force="eager"):
                eager = getattr(tileops, op)(x, dim=dim)
            assert (kernel.dtype, kernel.stride()) == (eager.dtype, eager.stride())
            torch.testing.assert_close(kernel, eager)


def test_log(run_python):
    program = """
import torch, tileops
x = torch.ones(3, 4)
for _ in range(3):
    tileops.softmax(x); tileops.rms_norm(x.bfloat16(), out=torch.empty(3, 4, dtype=torch.bfloat16)); tileops.softmax(x, 0)
tileops.softmax(torch.ones(5))
tileops.gemm(x, x.t())
with tileops.knobs.scope(log=""):
    tileops.softmax(torch.ones(6))
"""
    done = run_python(program, TILEOPS_LOG="dispatch")
    assert done.stderr.splitlines() == [
        "tileops: softmax float32 [3, 4] -> eager (x is on cpu)",
        "tileops: rms_norm bfloat16 [3, 4] -> eager (x is on cpu)",
        "tileops: softmax float32 [5] -> eager (x is on cpu)",
        "tileops: gemm float32 [3, 4] [4, 3] -> eager (a is on cpu)",
    ]
    assert run_python(program).stderr == ""


def test_a_gpu_without_kernels_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(dispatch, "_announced", set())
    monkeypatch.setattr(dispatch._native, "load", lambda: _native.Native(None, "this is why"))
    x = types.SimpleNamespace(is_cuda=True, device="cuda:0", dtype=torch.float32, shape=(3, 4))
    for scope in ({"force": "eager"}, {"disable_native": True}):  # asked for
        with knobs.scope(**scope):
            dispatch.enter_eager("softmax", x=x)
    text = r"^tileops runs in eager PyTorch on this GPU: no kernels are loaded: this is why$"
    with pytest.warns(RuntimeWarning, match=text) as caught:
        for op in OPS:
            dispatch.enter_eager(op, x=x)
    assert len(caught) == 1
    with knobs.scope(require_native=True), pytest.raises(RuntimeError, match="this call: no kernels are loaded: this is why"):
        dispatch.enter_eager("softmax", x=x)


def test_knobs_from_the_environment():
    read = knobs.from_environment
    assert read({}) == knobs.Knobs()
    values = {"TILEOPS_FORCE": "eager", "TILEOPS_LOG": "dispatch", "TILEOPS_REQUIRE_NATIVE": "1", "TILEOPS_DISABLE_NATIVE": "0"}
    assert read(values) == knobs.Knobs("eager", "dispatch", True, False)
    assert read(values).texts() == {"force": "eager", "log": "dispatch", "require_native": "1", "disable_native": ""}
    with pytest.raises(ValueError, match=r"^TILEOPS_REQUIRE_NATIVE is 'yes'; expected 1, 0 or nothing$"):
        read({"TILEOPS_REQUIRE_NATIVE": "yes"})
    with pytest.raises(ValueError, match=r"^TILEOPS_LOG is 'all'; expected dispatch or nothing$"):
        read({"TILEOPS_LOG": "all"})


def test_scope_restores_and_tells_listeners():
    seen = []
    knobs.on_change(lambda now: seen.append(now.force))
    try:
        with pytest.raises(ZeroDivisionError), knobs.scope(force="eager"), knobs.scope(force="portable", require_native=True):
            assert knobs.current() == knobs.Knobs(force="portable", require_native=True)
            raise ZeroDivisionError
        assert knobs.current() == knobs.Knobs() and seen == ["", "eager", "portable", "eager", ""]
    finally:
        knobs._listeners.pop()
    with pytest.raises(TypeError, match="unexpected keyword"), knobs.scope(fource="eager"):
        pass
    with pytest.raises(TypeError, match=r"^knob require_native is 'yes'; expected a bool$"), knobs.scope(require_native="yes"):
        pass
    assert knobs.current() == knobs.Knobs()


def test_errors_of_the_native_path_are_given_back_as_they_were(monkeypatch):
    """torch's C++ ABI turns every exception into a RuntimeError; a stand-in for the native library does the same here."""
    module = sys.modules["tileops.ops.softmax"]
    def native(text):
        def call(x, *args, **kwargs):
            try:
                return torch.ops.tileops._eager_softmax(x, *args, **kwargs)
            except Exception as error:
                raise RuntimeError(text or str(error)) from None

        return call

    x = normal(3, 4)
    for text in ("", "softmax: no kernel serves this call (why), and its eager form failed; torch printed why on stderr"):
        monkeypatch.setattr(module, "_op", _table.Operator("softmax", native(text), None, None, None))
        with pytest.raises(IndexError) as caught:
            tileops.softmax(x, 5)
        assert str(caught.value) == "softmax: dim is 5; expected a value from -2 to 1 for x of shape [3, 4]"
        assert type(caught.value) is IndexError

    def fail(text):
        def call(*args, **kwargs):
            raise RuntimeError(text)

        return call

    with pytest.raises(IndexError):
        torch.ops.tileops._eager_softmax(x, 5)  # leaves an error behind that the next one must not be taken for
    for text, kind in (
        ("softmax: launching softmax_x failed: invalid argument", RuntimeError),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", torch.OutOfMemoryError),
        ("tileops: torch failed while allocating the result; it printed why on stderr", torch.OutOfMemoryError),
    ):
        monkeypatch.setattr(module, "_op", _table.Operator("softmax", fail(text), None, None, None))
        with pytest.raises(kind) as caught:
            tileops.softmax(x)
        assert str(caught.value) == text and type(caught.value) is kind
