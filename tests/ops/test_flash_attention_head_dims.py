"""flash_attention's kernels at head dims below those of their tiles, and on tensors that TMA cannot address. On a GPU."""

import functools

import pytest
import test_flash_attention_kernels as of_kernels
import torch
from attention_reference import check_dense
from test_flash_attention_kernels import DTYPES, KERNELS, calls, captured_first, cuda, into_gaps, plain_kernels

import tileops

pytestmark, target, causal = of_kernels.pytestmark, of_kernels.target, of_kernels.causal
context_stays_usable = of_kernels.context_stays_usable
WHOLE = [*range(8, 257, 8)]
RAGGED = (1, 2, 7, 31, 33, 45, 65, 90, 100, 127, 129, 171, 191, 193, 250, 255)
COPIES = "; by copies with rows of whole 16 bytes: "


def need(causal, dim, dim_v=0, x="bfloat16"):
    """Skips if the build (a smoke build, say) lacks a kernel without options whose tile holds the head dims."""
    plain = [k for k in plain_kernels() if k["x"] == x]
    if not any(k["causal"] == causal and k["tile"][2] >= dim and k["head_dim_v"] >= (dim_v or dim) for k in plain):
        pytest.skip(f"no kernel for {x}, head dim {dim}, causal={causal} in this build")


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_below_its_tile(name):
    """Rows of whole 16 bytes and others, as few columns as there are; what lies between the rows of results stays."""
    kernel = KERNELS[name]
    (bm, bn, d), dv = kernel["tile"], kernel["head_dim_v"]
    for number, (dim, dim_v) in enumerate([(d - 8, dv - 16), (d - 3, dv - 5), (8, 8), (1, 1), (d, 8), (3, dv), (d - 16, dv)]):
        given = calls(kernel, 4)
        tensors = cuda(2, bm + 9 * number, 2 * bn + 7 - number, 4, 2, dim, dim_v, dtype=DTYPES[kernel["x"]])
        with tileops.knobs.scope(force=name, require_native=True):
            check_dense(*tensors, run=into_gaps, **given[number % len(given)])


@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("dim", [*WHOLE, *RAGGED])
def test_head_dims(causal, dim, x):  # B40
    need(causal, dim, x=x)
    tensors = cuda(1, 150, 170, 4, 1 + dim % 2, dim, dtype=DTYPES[x])
    check_dense(*tensors, causal=causal)
    reason = tileops.explain("flash_attention", *tensors, causal=causal).reason
    assert reason.endswith(f"{COPIES}q, k, v, out") if dim % 8 else COPIES not in reason


@pytest.mark.parametrize("dim, dim_v", [(192, 128), (128, 192), (64, 256), (40, 80), (250, 30), (96, 33)])
def test_value_head_dims(causal, dim, dim_v):
    need(causal, dim, dim_v)
    check_dense(*cuda(2, 130, 200, 4, 2, dim, dim_v, dtype=torch.bfloat16), causal=causal)
    check_dense(*cuda(1, 200, 130, 4, 2, dim, dim_v, dtype=torch.bfloat16), causal=causal)


@pytest.mark.parametrize("dim", [40, 37, 72, 104, 100])
def test_columns_beyond_the_head_dim_are_not_read(causal, dim):
    """They are NaN, in the same 16 bytes and in those behind them."""
    need(causal, dim)
    tensors = cuda(2, 150, 170, 4, 2, dim, dtype=torch.bfloat16)
    padded = [torch.nn.functional.pad(t, (0, -dim % 8 + 8), value=torch.nan)[..., :dim] for t in tensors]
    check_dense(*padded, causal=causal)
    reason = tileops.explain("flash_attention", *padded, causal=causal).reason
    assert reason.endswith(f"{COPIES}out") if dim % 8 else COPIES not in reason


NOT_BY_TMA = {
    "no unit stride": lambda t: t.mT.contiguous().mT,
    "any address": lambda t: torch.cat((t.flatten()[:3], t.flatten()))[3:].view(t.shape),
    "any strides": lambda t: torch.nn.functional.pad(t, (0, 3))[..., :-3],
    "one token, repeated": lambda t: torch.nn.functional.pad(t, (0, 3))[:, :1, :, :-3].expand(t.shape),
}


@pytest.mark.parametrize("layout", NOT_BY_TMA)
@pytest.mark.parametrize("dim", [64, 100])
def test_what_tma_cannot_address_is_copied(causal, dim, layout):  # B24
    need(causal, dim)
    q, k, v = cuda(2, 150, 170, 4, 2, dim, dtype=torch.bfloat16)
    change = NOT_BY_TMA[layout]
    for tensors in ((change(q), k, v), (q, change(k), v), (q, k, change(v)), tuple(map(change, (q, k, v)))):
        check_dense(*tensors, causal=causal)
        assert tileops.explain("flash_attention", *tensors, causal=causal).path == "kernel"


def test_options(causal):
    mine = [k for k in KERNELS.values() if k["target"] == tileops.knobs.current().force]
    if not any(k["window"] and k["sinks"] and k["tile"][2] >= 80 for k in mine):
        pytest.skip("no kernel with a window in this build")
    for dim in (80, 77):
        tensors = cuda(2, 150, 270, 4, 2, dim, dtype=torch.bfloat16)
        for options in ({"window_left": 60}, {"sinks": torch.linspace(-1, 3, 4, device="cuda")}, {"softcap": 4.0}):
            check_dense(*tensors, causal=causal, **options)


def test_gradients(causal):
    """The backward of eager PyTorch from the kernel's out and lse, against that of the eager forward."""
    need(causal, 100)
    tensors, found = cuda(2, 150, 170, 4, 2, 100, dtype=torch.bfloat16), []
    for force in (tileops.knobs.current().force, "eager"):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        with tileops.knobs.scope(force=force):
            out, lse = tileops.flash_attention(*leaves, causal=causal)
            found.append(torch.autograd.grad((out * out.detach()).sum() + lse.sum(), leaves))
    for ours, eager in zip(*found):
        assert (ours - eager).abs().amax() <= 2**-6 * eager.abs().amax()


def test_copies_beside_a_busy_stream(causal):  # B57
    """They are made and used on the stream of the call, in memory that others take when it returns."""
    need(causal, 100)
    tensors = cuda(3, 600, 1000, 8, 2, 100, dtype=torch.bfloat16)
    run = functools.partial(tileops.flash_attention, *tensors, causal=causal)
    first, stream = run(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            found = run()
            poison = [torch.full_like(t, torch.nan) for t in (*tensors, *first)]
        stream.synchronize()
        assert all(map(torch.equal, found, first))
        del poison


def test_first_call_of_the_process_is_captured(causal, run_python):  # B55
    need(causal, 100)
    captured_first(causal, 100, run_python)


@pytest.mark.parametrize("sizes", [(0, 100, 100), (2, 0, 100), (2, 100, 0)])
@pytest.mark.parametrize("dim", [80, 77])
def test_empty(causal, dim, sizes):  # B11, B35
    """No batch, no query: nothing is launched. No key: eager PyTorch writes 0 and -inf."""
    batch, sq, sk = sizes
    with tileops.knobs.scope(force="", require_native=False):
        out, lse = check_dense(*cuda(batch, sq, sk, 4, 2, dim, dtype=torch.bfloat16), causal=causal)
    assert not out.any() and torch.isneginf(lse).all()
