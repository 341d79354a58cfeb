"""What the attention operators promise apart from values: errors, results in given memory, devices, knobs, explanations."""
import functools
import inspect

import pytest
import torch
from attention_errors import BAD, bad_results, good, results
from attention_ways import needs_gpu

import tileops
from tileops import dispatch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compilers

OPS = ("flash_attention", "flash_attention_varlen", "flash_attention_paged", "mla_decode", "merge_attention")
DIFFERENTIABLE = ("flash_attention", "flash_attention_varlen", "merge_attention")
DESCALES = ("q_descale", "k_descale", "v_descale")


def on(device, values):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def random_call(op, device="cpu", dtype=torch.float32):
    """The good call, with random numbers."""
    torch.manual_seed(0)
    call = good(op)
    for name, value in call.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            call[name] = torch.randn(value.shape).to(torch.float32 if name.startswith("lse") else dtype)
    return on(device, call)


def calls(op, device="cpu"):
    """The good call, and one with every option."""
    call = random_call(op, device)
    yield call
    if op.startswith("flash"):
        more = {"causal": True, "scale": 0.3, "window_left": 2, "window_right": 1, "softcap": 2.0}
        yield {**call, **more, "sinks": torch.randn(4, device=device)}
    if op == "flash_attention_varlen":
        yield {**call, "seqused_k": torch.tensor([1, 3], device=device)}
    if op == "flash_attention_paged":
        packed = {"q": call["q"][:, 0], "cu_seqlens_q": torch.tensor([0, 0, 2], device=device), "max_seqlen_q": 2}
        yield {**call, **packed, "num_splits": 3}
    if op == "mla_decode":
        yield {**call, "q": call["q"][..., :4], "q_rope": call["q"][..., 4:], "causal": False, "num_splits": 2}


def raw(op, variant="default"):
    return getattr(getattr(torch.ops.tileops, op), variant)


def callers(op):
    return getattr(tileops, op), raw(op), functools.partial(tileops.explain, op)


@pytest.mark.parametrize(("op", "change", "text"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input(device, op, change, text):  # B65
    call = on(device, {**good(op), **change})
    for run in callers(op):
        with pytest.raises(ValueError) as caught:
            run(**call)
        assert str(caught.value) == f"{op}: {text}" and type(caught.value) is ValueError
    if op in DIFFERENTIABLE:
        first = next(iter(call))
        with pytest.raises(ValueError) as caught:
            getattr(tileops, op)(**{**call, first: call[first].clone().requires_grad_()})
        assert str(caught.value) == f"{op}: {text}"


@pytest.mark.parametrize("op", OPS[:3])
@pytest.mark.parametrize("name", DESCALES)
def test_descales_are_reserved(device, op, name):
    call, text = on(device, good(op)), f"^{op}: {name} was given; scaled operands do not work yet, expected None$"
    for run in callers(op):
        with pytest.raises(RuntimeError, match=text):  # NotImplementedError is one; C++ cannot raise it
            run(**call, **{name: torch.ones((), device=device)})
    with pytest.raises(NotImplementedError, match=text):
        getattr(tileops, op)(**call, **{name: torch.ones((), device=device)})


def test_what_there_is_not():  # B38
    """Python and torch refuse a keyword that an operator lacks, whatever its value: each names it and the operator."""
    for name in ("dropout_p", "alibi_slopes"):
        for op in OPS[:3]:
            with pytest.raises(TypeError, match=rf"^{op}\(\) got an unexpected keyword argument '{name}'"):
                getattr(tileops, op)(**good(op), **{name: 0.0})
            with pytest.raises(RuntimeError, match=rf"Unknown keyword argument '{name}' for operator 'tileops::{op}'"):
                raw(op)(**good(op), **{name: 0.0})


def test_scale_of_mla_must_be_given():  # B40
    call = good("mla_decode")
    del call["scale"]
    with pytest.raises(TypeError, match="scale"):
        tileops.mla_decode(**call)


two_gpus = (*needs_gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("home", "away"), [
    ("cpu", "meta"), *(pytest.param(*pair, marks=needs_gpu) for pair in (("cpu", "cuda:0"), ("cuda:0", "cpu"))),
    *(pytest.param(*pair, marks=two_gpus) for pair in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"))),
])  # fmt: skip
def test_mixed_devices(op, home, away):  # B53
    """Each tensor, offsets and tables included, in a place of its own: an error before any launch."""
    for call in calls(op, home):
        tensors = [name for name, value in call.items() if isinstance(value, torch.Tensor)]
        for name in tensors[1:]:
            with pytest.raises(ValueError) as caught:
                getattr(tileops, op)(**{**call, name: call[name].to(away)})
            assert str(caught.value) == f"{op}: {name} is on {away}; expected {home}, where {tensors[0]} is"
        assert getattr(tileops, op)(**call)[1].isfinite().all()


@pytest.mark.parametrize("op", OPS)
def test_bad_results(device, op):
    for change, text in bad_results(op):
        call = {**good(op), **results(op), **change}
        if device != "cpu" and "overlaps" in text:
            continue  # moving the tensors parts them; tests/binding has the same on the native path
        for run in (getattr(tileops, op), raw(op, "out")):
            with pytest.raises(ValueError) as caught:
                run(**on(device, call))
            assert str(caught.value) == f"{op}: {text}"


@pytest.mark.parametrize("op", OPS)
def test_results_in_given_memory(device, op):  # B49
    for call in calls(op, device):
        expected = getattr(tileops, op)(**call)
        assert all(map(torch.equal, raw(op)(**call), expected))
        out = torch.full((*expected[0].shape, 2), 7.0, device=device)[..., 0]
        lse = torch.full(expected[1].shape[::-1], 7.0, device=device).movedim(0, -1) if expected[1].dim() == 2 else None
        lse = torch.full((*expected[1].shape, 3), 7.0, device=device)[..., 1] if lse is None else lse
        around = out.as_strided((out.numel(),), (2,), 1)
        for given in ({"out": out}, {"lse": lse}, {"out": out, "lse": lse}):
            found = getattr(tileops, op)(**call, **given)
            assert all(result is given.get(name, result) for name, result in zip(("out", "lse"), found))
            assert all(map(torch.equal, found, expected)) and (around == 7).all()
        out.fill_(0), lse.fill_(0)
        found = raw(op, "out")(**call, out=out, lse=lse)
        assert all(map(torch.equal, (out, lse), expected)) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("op", OPS)
def test_results_and_gradients(device, op):
    call = random_call(op, device)
    first = next(iter(call))
    memory = on(device, results(op))
    if op in DIFFERENTIABLE:
        for name in ("out", "lse"):
            text = f"{op}: {name} was given while a gradient is wanted; expected no {name}, or a call under torch.no_grad()"
            with pytest.raises(ValueError) as caught:
                getattr(tileops, op)(**{**call, first: call[first].clone().requires_grad_()}, **{name: memory[name]})
            assert str(caught.value) == text
    call[first].requires_grad_()
    with torch.no_grad():
        found = getattr(tileops, op)(**call, **memory)
    assert not any(t.requires_grad for t in found)
    with torch.inference_mode():
        call = random_call(op, device)
        assert all(map(torch.equal, getattr(tileops, op)(**call, **on(device, results(op))), getattr(tileops, op)(**call)))


@pytest.mark.parametrize("op", OPS)
def test_raw_operator_has_no_gradient_and_says_so(device, op):  # B42
    call = random_call(op, device)
    first = next(iter(call))
    call[first].requires_grad_()
    out, _ = raw(op)(**call)
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        out.sum().backward()
    assert call[first].grad is None


@pytest.mark.parametrize("op", OPS)
def test_meta(op):  # B61
    for call in calls(op):
        expected = getattr(tileops, op)(**call)
        for found, real in zip(getattr(tileops, op)(**on("meta", call)), expected):
            assert found.device.type == "meta" and found.dtype == real.dtype
            assert found.shape == real.shape and found.stride() == real.stride()


@pytest.mark.parametrize("op", OPS)
def test_results_are_new_memory(device, op):  # B49
    """Also where a result is one of the inputs, number for number."""
    for call in calls(op, device):
        if op == "merge_attention":
            call |= {"lse_b": torch.full_like(call["lse_b"], -torch.inf)}
        found = getattr(tileops, op)(**call)
        places = [t.untyped_storage().data_ptr() for t in (*found, *call.values()) if isinstance(t, torch.Tensor)]
        assert places[0] != places[1] and not {*places[:2]} & {*places[2:]}
        kept = {name: value.clone() for name, value in call.items() if isinstance(value, torch.Tensor)}
        for result in getattr(tileops, op)(**call):
            result.fill_(7)
        assert all(torch.equal(call[name], value) for name, value in kept.items())


@pytest.mark.parametrize("op", OPS)
def test_explain(device, op):
    if device != "cpu" and op == "merge_attention":
        pytest.skip("has kernels: test_merge_attention.py")
    call = random_call(op, device, torch.bfloat16)
    decision, first = tileops.explain(op, **call), next(iter(call))
    by_copies = device != "cpu" and tileops.status().loaded and torch.cuda.get_device_capability() == (9, 0)  # such head dims
    served = by_copies and op in ("flash_attention_varlen", "flash_attention_paged")
    assert decision.path == ("kernel" if served else "eager") and bool(decision.variant) == served
    assert decision == tileops.explain(getattr(tileops, op), **call)
    if device == "cpu":
        assert decision.reason == f"{first} is on cpu"
    elif tileops.status().loaded:
        none = f"this build has no {op} kernel for bfloat16", f"no {op} kernel for bfloat16 head dims 8 and 3"
        unmeasured = by_copies and op == "flash_attention"
        assert decision.reason.startswith("no kernel was measured on" if unmeasured else "it serves " if served else none)
    for name in ("out", "lse"):
        with pytest.raises(ValueError, match=rf"^explain: {name} was given; expected the other arguments only"):
            tileops.explain(op, **call, **{name: call[first]})


@pytest.mark.parametrize("op", OPS)
def test_knobs(device, op, capfd, monkeypatch):
    if device != "cpu" and op == "merge_attention":
        pytest.skip("has kernels: test_merge_attention.py")
    call = random_call(op, device)
    with tileops.knobs.scope(require_native=True):
        for run in (getattr(tileops, op), functools.partial(getattr(tileops, op), **on(device, results(op)))):
            with pytest.raises(RuntimeError, match=f"^{op}: TILEOPS_REQUIRE_NATIVE is set and no kernel serves this call: "):
                run(**call)
        with tileops.knobs.scope(force="eager"):
            getattr(tileops, op)(**call)
    for force in ("portable", "nonsense"):
        with tileops.knobs.scope(force=force):
            for run in callers(op):
                with pytest.raises(RuntimeError, match=f"^{op}: TILEOPS_FORCE={force} cannot apply: "):
                    run(**call)
    capfd.readouterr()
    monkeypatch.setattr(dispatch, "_announced", set())  # a decision is told once in a process
    with tileops.knobs.scope(log="dispatch"):
        getattr(tileops, op)(**call)
    shapes = " ".join(str(list(v.shape)) for v in call.values() if isinstance(v, torch.Tensor))
    text = capfd.readouterr().err
    assert text.startswith(f"tileops: {op} float32 {shapes} -> eager (") or device != "cpu"


@pytest.mark.parametrize("op", OPS)
def test_autocast_does_not_round_inside(device, op):
    for call in calls(op, device):
        expected = getattr(tileops, op)(**call)
        with torch.autocast(device, dtype=torch.bfloat16):
            found = getattr(tileops, op)(**call)
        for ours, right in zip(found, expected):
            assert ours.dtype == right.dtype
            torch.testing.assert_close(ours, right, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_parameters_are_documented(op):
    run = getattr(tileops, op)
    for name in inspect.signature(run).parameters:
        assert f" {name}: " in run.__doc__, name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op", OPS)
def test_second_device(op):  # B53
    for call in calls(op, "cuda:0"):
        far = on("cuda:1", call)
        assert torch.cuda.current_device() == 0
        for found, expected in zip(getattr(tileops, op)(**far), getattr(tileops, op)(**call)):
            assert found.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
            torch.testing.assert_close(found.cpu(), expected.cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("op", OPS)
def test_fallback_is_capturable(op):  # B55
    """The fallback reads nothing back, so that one graph serves other lengths and other pages."""
    for call in calls(op, "cuda"):
        with tileops.knobs.scope(force="eager"):
            getattr(tileops, op)(**call)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = getattr(tileops, op)(**call)
            for lengths in ([1, 8], [0, 0], [8, 5]):
                for name, value in call.items():
                    if name == "cache_seqlens":
                        value.copy_(torch.tensor(lengths))
                    elif isinstance(value, torch.Tensor) and value.is_floating_point():
                        value.normal_()
                graph.replay()
                for ours, right in zip(found, getattr(tileops, op)(**call)):
                    torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)
