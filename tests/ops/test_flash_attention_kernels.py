"""Every kernel of flash_attention that was compiled, against float64, and what calls of them need besides. On a GPU.

compute-sanitizer --tool racecheck python -m pytest tests/ops/test_flash_attention_kernels.py -k small     for a sanitizer
"""

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from attention_reference import assert_attention, assert_close, check_dense, qkv
from ops_reference import normal

import tileops

MANIFEST = Path(tileops.__file__).parent.parent / "csrc" / "generated" / "manifest.json"
EVERY = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.exists() else {}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
TARGETS = ("sm_90a", "portable") if HOPPER else ("portable",)  # of the kernels that run here
OURS = {name: k for name, k in EVERY.items() if k["op"] == "flash_attention" and k["target"] in TARGETS}
KERNELS = {name: k for name, k in OURS.items() if not k["lengths"]}  # test_attention_lengths_kernels.py has the others
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not KERNELS, reason="no flash_attention kernel in this build"),
]
cuda = functools.partial(qkv, device="cuda")


@pytest.fixture(autouse=True)
def context_stays_usable():
    yield
    torch.cuda.synchronize()


@pytest.fixture(params=TARGETS)
def target(request):
    """Forces the target's kernels."""
    with tileops.knobs.scope(force=request.param, require_native=True):
        yield request.param


@pytest.fixture(params=[False, True], ids=["full", "causal"])
def causal(request, target):
    return request.param


def plain_kernels():
    """Those without options that TILEOPS_FORCE allows."""
    of_target = [k for k in KERNELS.values() if k["target"] == tileops.knobs.current().force]
    return [k for k in of_target if not (k["window"] or k["sinks"] or k["softcap"])]


def need(causal, head_dim=128, x="bfloat16"):
    """Skips if the build (a smoke build, say) lacks the kind of kernel, which has no options."""
    plain = plain_kernels()
    if (x, causal, head_dim) not in {(k["x"], k["causal"], k["tile"][2]) for k in plain if k["head_dim_v"] == k["tile"][2]}:
        pytest.skip(f"no kernel for {x}, head dim {head_dim}, causal={causal} in this build")


def into_gaps(q, k, v, **options):
    """tileops.flash_attention into results with gaps, which must stay as they are."""
    b, s, h, d = (*q.shape[:3], v.shape[3])
    out = torch.full((b, s, h, d + 8), torch.nan, dtype=q.dtype, device="cuda")[..., :d]
    lse = torch.full((b, s, h, 2), torch.nan, device="cuda")[..., 1].transpose(1, 2)
    given = tileops.flash_attention(q, k, v, **options, out=out, lse=lse)
    assert given[0] is out and given[1] is lse
    for result in given:
        whole = torch.as_strided(result, [result.untyped_storage().nbytes() // result.element_size()], [1], 0)
        assert int(whole.isnan().sum()) == whole.numel() - result.numel(), "written outside of a result, or not everywhere"
    return given


def calls(kernel, heads):
    """What the kernel serves: of one with a window, masks of every kind, each with all that it has."""
    if not kernel["window"]:
        masks = [{"causal": kernel["causal"]}]
    else:
        bn = kernel["tile"][1]
        masks = [
            {"causal": True, "window_left": 40},
            {"causal": True, "window_left": 3 * bn + 5},
            {"window_left": bn - 1, "window_right": 70},
            {"window_right": 2 * bn},
            {"causal": True, "window_left": 0},
            {"causal": True},
            {},
        ]
    more = {"softcap": 5.0} if kernel["softcap"] else {}
    more |= {"sinks": normal(2 * heads, device="cuda", seed=77).bfloat16()[::2]} if kernel["sinks"] else {}
    return [mask | more for mask in masks]


def run_kernel(name, batch, sq, sk, heads, kv_heads, call=0, **options):
    kernel = KERNELS[name]
    dims, given = (kernel["tile"][2], kernel["head_dim_v"]), calls(kernel, heads)
    tensors = cuda(batch, sq, sk, heads, kv_heads, *dims, dtype=DTYPES[kernel["x"]])
    with tileops.knobs.scope(force=name, require_native=True):
        check_dense(*tensors, run=into_gaps, **given[call % len(given)], **options)


def edges(bm, bn):
    """Sq and Sk at the edges of tiles and of the pipeline, and rows that see no key."""
    return [
        (1, 1), (bm, bn), (bm + 1, bn - 1), (bm - 1, bn + 1), (1, 5 * bn + 3), (2 * bm + 3, 1), (3 * bm + 17, bn // 2),
        (64, 2 * bn), (65, 3 * bn - 1), (2 * bm, 4 * bn + 1), (7, 9 * bn),
    ]  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_edges(name):
    bm, bn, _ = KERNELS[name]["tile"]
    for number, (sq, sk) in enumerate(edges(bm, bn)):
        heads, kv_heads = ((1, 1), (4, 2), (3, 1), (2, 2))[number % 4]
        for call in range(number, len(calls(KERNELS[name], heads)) + number, 3):
            run_kernel(name, 1 + number % 3, sq, sk, heads, kv_heads, call)
    run_kernel(name, 1, bm + 5, bn + 9, 2, 1, scale=0.5)
    run_kernel(name, 1, bm + 5, bn + 9, 2, 1, scale=1e-3)


@pytest.mark.parametrize("name", KERNELS)
def test_many_tiles(name):
    """More than fit on the GPU at a time, so that CTAs go from tile to tile."""
    for call in range(3):
        run_kernel(name, 3, 700, 900, 24, 8, call)
    run_kernel(name, 40, 1, 33, 16, 1)


@pytest.mark.parametrize("name", KERNELS)
def test_small(name):
    """For a sanitizer, which slows kernels down a hundredfold."""
    bm, bn, _ = KERNELS[name]["tile"]
    run_kernel(name, 1, bm + 3, 3 * bn + 5, 2, 1)


OPTIONAL = {name: k for name, k in KERNELS.items() if k["window"] or k["sinks"] or k["softcap"]}


@pytest.mark.parametrize("name", OPTIONAL)
def test_sinks_and_softcaps(name):  # B38
    """Sinks far below, among and far above the scores, of each dtype, or none; caps that bend much and little."""
    kernel, window = OPTIONAL[name], {"causal": True, "window_left": 200}
    tensors = cuda(2, 333, 444, 4, 2, kernel["tile"][2], kernel["head_dim_v"], dtype=DTYPES[kernel["x"]])
    with tileops.knobs.scope(force=name, require_native=True):
        for softcap in (0.5, 2.0, 30.0) if kernel["softcap"] else (0.0,):
            check_dense(*tensors, **window, softcap=softcap)
        for dtype in (torch.float32, torch.bfloat16, torch.float16) if kernel["sinks"] else ():
            sinks = torch.tensor([-200.0, 1.5, 9.0, 300.0], dtype=dtype, device="cuda")
            check_dense(*tensors, **window, sinks=sinks)
            check_dense(*cuda(1, 300, 70, 4, 2, kernel["tile"][2], dtype=DTYPES[kernel["x"]]), causal=True, sinks=sinks)
        if kernel["softcap"]:
            check_dense(*tensors, causal=True, softcap=3.0, scale=-0.1)


@pytest.mark.parametrize("name", OPTIONAL)
def test_keys_out_of_the_window_are_not_read(name):
    """No query sees the first keys, which are NaN; a block of keys that some query sees reads others."""
    kernel = OPTIONAL[name]
    q, *keys = cuda(1, 100, 700, 4, 2, kernel["tile"][2], kernel["head_dim_v"], dtype=DTYPES[kernel["x"]])
    options = {"causal": True, "window_left": 100} | ({"softcap": 5.0} if kernel["softcap"] else {})
    with tileops.knobs.scope(force=name, require_native=True):
        found = tileops.flash_attention(q, *keys, **options)
        for tensor in keys:
            tensor[:, : (700 - 200) // 128 * 128] = torch.nan
        assert all(map(torch.equal, found, tileops.flash_attention(q, *keys, **options)))


# ---- what a call needs besides


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("sq, sk", [(200, 72), (130, 1), (2048, 1024)])
def test_rows_that_see_no_key(sq, sk):  # B01
    need(True)
    tensors = cuda(1, sq, sk, 2, 2, 128, dtype=torch.bfloat16)
    out, lse = check_dense(*tensors, causal=True)
    assert not out[:, : sq - sk].any() and (lse[..., : sq - sk] == -math.inf).all()


def test_keys_beyond_the_last_are_not_read(causal):  # B03
    """What lies behind the sequences in memory is NaN."""
    need(causal)
    q, *keys = cuda(2, 100, 150, 4, 2, 128, dtype=torch.bfloat16)
    padded = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 100), value=torch.nan)[:, :150] for t in keys]
    check_dense(q, *padded, causal=causal)


@pytest.mark.parametrize("keys", [1, 17, 64, 160, 257])
def test_equal_weights(causal, keys):  # B31, B33
    need(causal)
    q, k, v = cuda(1, 1, keys, 4, 2, 128, dtype=torch.bfloat16)
    out, lse = tileops.flash_attention(torch.zeros_like(q), k, v, causal=causal)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(keys)), atol=1e-6, rtol=1e-6)
    mean = v.double().mean(1, keepdim=True).repeat_interleave(2, 2)
    assert_close(out, mean, 2 * torch.finfo(out.dtype).eps * v.double().abs().amax())


def test_one_hot(causal):
    """A score that leaves nothing for the other keys: exactly one row of v."""
    need(causal)
    k = torch.zeros(1, 128, 1, 128, dtype=torch.bfloat16, device="cuda")
    k[0, :, 0] = torch.eye(128, device="cuda") * 64
    v = normal(1, 128, 1, 128, device="cuda").bfloat16()
    out, lse = tileops.flash_attention(k, k, v, causal=causal)
    assert torch.equal(out, v)
    torch.testing.assert_close(lse, torch.full_like(lse, 4096 * 128**-0.5), atol=0, rtol=1e-6)


LAYOUTS = {
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "batch second": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "half of a pair": lambda t: torch.cat((t, t), -1)[..., t.shape[-1] :],
    "every second token": lambda t: torch.stack((t, t), 2).flatten(1, 2)[:, ::2],
    "batch, repeated": lambda t: t[:1].expand(t.shape),
    "a token, repeated": lambda t: t[:, :1].expand(t.shape),
    "a head, repeated": lambda t: t[:, :, :1].expand(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(causal, layout):  # B20, B22
    need(causal)
    tensors = [LAYOUTS[layout](t) for t in cuda(2, 150, 170, 4, 2, 128, dtype=torch.bfloat16)]
    check_dense(*tensors, causal=causal)
    assert tileops.explain("flash_attention", *tensors, causal=causal).path == "kernel"


def test_slices_of_one_projection(causal):
    need(causal)
    rows = normal(2, 200, 8, 128, device="cuda").bfloat16()
    check_dense(rows[:, :, :4], rows[:, :, 4:6], rows[:, :, 6:], causal=causal)


def test_out_of_other_strides(causal):
    """Through a result of our own where the kernel cannot write."""
    need(causal)
    tensors = cuda(2, 40, 56, 4, 2, 128, dtype=torch.bfloat16)
    expected = tileops.flash_attention(*tensors, causal=causal)
    new = functools.partial(torch.empty, dtype=torch.bfloat16, device="cuda")
    for out in (new(2, 40, 4, 128, 2)[..., 0], new(2, 40, 4, 129)[..., :-1], new(2, 4, 40, 128).transpose(1, 2)):
        lse = torch.empty(40, 2, 4, device="cuda").permute(1, 2, 0)
        tileops.flash_attention(*tensors, causal=causal, out=out, lse=lse)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("options", [{}, {"dlse": True}, {"scale": 0.3}])
def test_gradients(causal, options):
    """The backward of eager PyTorch from the kernel's out and lse, against that of the eager forward."""
    need(causal)
    tensors = cuda(2, 150, 170, 4, 2, 128, dtype=torch.bfloat16)
    dout = normal(2, 150, 4, 128, device="cuda", seed=8).bfloat16()
    dlse = normal(2, 4, 150, device="cuda", seed=9) if options.get("dlse") else None
    found = []
    for force in (tileops.knobs.current().force, "eager"):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        with tileops.knobs.scope(force=force):
            out, lse = tileops.flash_attention(*leaves, causal=causal, scale=options.get("scale"))
            loss = (out * dout).sum() + (0 if dlse is None else (lse * dlse).sum())
            found.append(torch.autograd.grad(loss, leaves))
    for ours, eager in zip(*found):
        assert (ours - eager).abs().amax() <= 2**-6 * eager.abs().amax()


def test_same_result_each_time(causal):  # B57
    """Beside a busy stream, in memory that held something else."""
    need(causal)
    tensors = cuda(3, 600, 1000, 8, 2, 128, dtype=torch.bfloat16)
    run = functools.partial(tileops.flash_attention, *tensors, causal=causal)
    first, noise, stream = run(), normal(2048, 2048, device="cuda"), torch.cuda.Stream()
    for _ in range(30):
        with torch.cuda.stream(stream):
            noise @ noise
        poison = [torch.full_like(t, torch.nan) for t in first]
        del poison
        assert all(map(torch.equal, run(), first))


@pytest.mark.parametrize("name", KERNELS)
def test_batch_invariance(name):
    """From one kernel a sequence has the same result whatever else is in the batch; which kernel, the size decides."""
    kernel = KERNELS[name]
    q, k, v = cuda(5, 300, 500, 4, 2, kernel["tile"][2], kernel["head_dim_v"], dtype=DTYPES[kernel["x"]])
    options = calls(kernel, 4)[0]
    with tileops.knobs.scope(force=name, require_native=True):
        whole = tileops.flash_attention(q, k, v, **options)
        for b in range(5):
            alone = tileops.flash_attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], **options)
            assert all(torch.equal(one[0], all_[b]) for one, all_ in zip(alone, whole))


def test_side_stream(causal):
    need(causal)
    q, k, v = cuda(1, 256, 512, 4, 4, 128, dtype=torch.bfloat16)
    expected = tileops.flash_attention(q, k, v, causal=causal)
    stream, late = torch.cuda.Stream(), torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        found = tileops.flash_attention(late, k, v, causal=causal)
    stream.synchronize()
    assert all(map(torch.equal, found, expected))


def captured_first(causal, dim, run_python):
    """A process whose first calls, new and into given results, are inside a capture; replayed on other values."""
    program = f"""
import torch, tileops
q, k, v = (torch.randn(2, 300, heads, {dim}, device="cuda").bfloat16() for heads in (4, 2, 2))
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
    found = tileops.flash_attention(q, k, v, causal={causal})
    given = torch.empty_like(found[0]), torch.empty_like(found[1])
    tileops.flash_attention(q, k, v, causal={causal}, out=given[0], lse=given[1])
for seed in range(3):
    torch.manual_seed(seed)
    for tensor in (q, k, v):
        tensor.copy_(torch.randn(tensor.shape))
    graph.replay()
    torch.cuda.synchronize()
    expected = tileops.flash_attention(q, k, v, causal={causal})
    assert all(map(torch.equal, found, expected)) and all(map(torch.equal, given, expected))
"""
    run_python(program, TILEOPS_REQUIRE_NATIVE="1", TILEOPS_FORCE=tileops.knobs.current().force)


def test_first_call_of_the_process_is_captured(causal, run_python):  # B55
    need(causal)
    captured_first(causal, 128, run_python)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compilers
def test_compile_and_opcheck(causal):  # B47
    need(causal)
    q, k, v = cuda(2, 72, 136, 4, 2, 128, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.tileops.flash_attention.default, (q, k, v), {"causal": causal})

    def program(q, k, v):
        out, lse = tileops.flash_attention(q * 1, k, v, causal=causal)
        return out + 1, lse

    torch._dynamo.reset()
    found = torch.compile(program, backend="aot_eager", fullgraph=True)(q, k, v)
    assert all(map(torch.equal, found, program(q, k, v)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device(causal):  # B53
    need(causal)
    tensors = cuda(2, 150, 170, 4, 2, 128, dtype=torch.bfloat16)
    far = tileops.flash_attention(*(t.to("cuda:1") for t in tensors), causal=causal)
    assert torch.cuda.current_device() == 0 and far[0].device.index == far[1].device.index == 1
    for found, near in zip(far, tileops.flash_attention(*tensors, causal=causal)):
        assert torch.equal(found.cpu(), near.cpu())


def test_what_cannot_be_forced(target):
    need(False)
    q, k, v = cuda(1, 40, 56, 4, 2, 128, dtype=torch.bfloat16)
    wide = [torch.cat((t, t, t[..., :8]), -1) for t in (q, k, v)]
    cases = {
        "and q is float32": ((q.float(), k.float(), v.float()), {}),
        "head dim 264": (wide, {}),
        "head dims 128 and 264": ((q, k, wide[2]), {}),
        "head dim 264 with a window": (wide, {"window_left": 3}),
        "a softcap, and a scale": ((q, k, v), {"softcap": 1e-40}),
        "a scale above 0": ((q, k, v), {"scale": -1.0}),
    }
    if target == "sm_90a":
        both = {"softcap": 5.0, "sinks": torch.zeros(4, device="cuda")}
        cases["head dim 128 with sinks and a softcap"] = ((q, k, v), both)
    for reason, (tensors, options) in cases.items():
        with pytest.raises(RuntimeError, match=f"^flash_attention: TILEOPS_FORCE={target} cannot apply: .*{reason}"):
            tileops.flash_attention(*tensors, **options)
    with tileops.knobs.scope(force="", require_native=False):
        for tensors, options in cases.values():
            assert tileops.explain("flash_attention", *tensors, **options).path == "eager"
            check_dense(*tensors, **options)


def test_choice_is_what_was_measured():
    """At each measured point: a kernel where one won, else eager PyTorch."""
    kernels, gains = pytest.importorskip("tileops_dsl.kernels"), {}
    for row in kernels.configs_of("flash_attention"):
        for at in row.measured:
            if at.gpu == torch.cuda.get_device_name():
                dims = at.head_dim or row.tile[2], at.head_dim_v or row.head_dim_v
                point = row.x, row.causal or row.window, *dims, row.sinks, row.softcap
                point = *point, at.batch_heads, at.sq, at.sk, at.window
                gains[point] = max(gains.get(point, 0.0), at.baseline_us / at.us)
    for point, gain in gains.items():
        x, causal, head_dim, head_dim_v, sinks, softcap, heads, sq, sk, window = point
        q = torch.empty(1, sq, heads, head_dim, dtype=DTYPES[x], device="cuda")
        k, v = (torch.empty(1, sk, 1, dim, dtype=DTYPES[x], device="cuda") for dim in (head_dim, head_dim_v))
        options = {"causal": causal, "window_left": window - 1, "softcap": 50.0 * softcap}
        options |= {"sinks": q.new_zeros(heads)} if sinks else {}
        with tileops.knobs.scope(force=""):
            found = tileops.explain("flash_attention", q, k, v, **options)
        assert found.path == ("kernel" if gain >= 0.985 else "eager"), (found, point, gain)


@pytest.mark.big
def test_more_elements_than_31_bits_count(causal):  # B16
    """2^31 and more of each tensor: the last heads come out like the first, whose values they have."""
    need(causal)
    heads, rows = 2**17 + 8, 128
    q, _, v = cuda(1, rows, rows, 1, 1, 128, dtype=torch.bfloat16)
    many = q.expand(1, rows, heads, 128).contiguous()
    assert many.numel() > 2**31
    out, lse = tileops.flash_attention(many, many, v.expand(many.shape).contiguous(), causal=causal)
    assert_attention(out[0, :, -1:], lse[0, -1:], q[0], q[0], v[0], causal=causal)
    assert torch.equal(out[:, :, 0], out[:, :, -1]) and torch.equal(lse[:, 0], lse[:, -1])
