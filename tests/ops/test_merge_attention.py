"""merge_attention against float64: empty sides, layouts, gradients, and attention over halves of the keys."""
import itertools

import pytest
import torch
from attention_reference import check_dense, qkv
from merge_reference import INF, check, exact, sides
from ops_reference import DTYPES, normal

import tileops

SHAPES = [(2, 5, 3, 8), (7, 3, 16), (1, 1, 1, 1), (3, 130, 2, 64), (2, 3, 33, 128), (1, 9, 5, 200), (4, 7, 2, 1024), (5, 3, 77)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(route, shape, dtype):
    args = sides(shape, dtype, route.device)
    found = tileops.merge_attention(*args)
    assert all(t.is_contiguous() for t in found)
    check(args, found)


def test_an_empty_side_changes_nothing(route):  # B35
    for dtype in DTYPES:
        out_a, lse_a, *_ = sides((2, 9, 3, 8), dtype, route.device, empty=False)
        nothing = torch.full_like(lse_a, -INF), torch.full_like(out_a, float("nan"))
        for args in ((out_a, lse_a, nothing[1], nothing[0]), (nothing[1], nothing[0], out_a, lse_a)):
            out, lse = tileops.merge_attention(*args)
            assert torch.equal(out, out_a) and torch.equal(lse, lse_a)
        out, lse = tileops.merge_attention(nothing[1], nothing[0], nothing[1], nothing[0])
        assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, nothing[0])


def test_far_apart_and_large(route):
    out_a, lse_a, out_b, lse_b = sides((1, 4, 2, 8), torch.float32, route.device, empty=False)
    for shift_a, shift_b in ((1e4, 1e4), (-1e4, -1e4), (1e4, -1e4), (3e38, 0), (0, -3e38)):
        args = out_a, lse_a + shift_a, out_b, lse_b + shift_b
        out, lse = tileops.merge_attention(*args)
        wanted, wanted_lse = exact(*args)
        torch.testing.assert_close(out.double(), wanted, atol=2e-3 if shift_a == shift_b else 1e-6, rtol=1e-6)
        torch.testing.assert_close(lse.double(), wanted_lse, atol=0, rtol=1e-6)


@pytest.mark.parametrize("split", [0, 1, 16, 37, 40])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0, "scale": 0.3}], ids=str)
def test_halves_of_the_keys_make_the_whole(device, options, split):  # B33
    q, k, v = qkv(2, 40, 40, 4, 2, 16, device=device)
    whole = check_dense(q, k, v, **options)
    first = options
    if options.get("causal"):  # a causal mask over the first keys only is a right window
        first = {"window_right": 40 - split} if split < 40 else options
    a = tileops.flash_attention(q, k[:, :split], v[:, :split], **first)
    b = tileops.flash_attention(q, k[:, split:], v[:, split:], **options)
    out, lse = tileops.merge_attention(*a, *b)
    torch.testing.assert_close(out, whole[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, whole[1], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_out(route, dtype):  # B20
    args = sides((2, 5, 3, 8), dtype, route.device)
    expected = tileops.merge_attention(*args)
    strided = [t.movedim(1, -1).contiguous().movedim(-1, 1) for t in args]
    for found in (tileops.merge_attention(*strided), tileops.merge_attention(*(torch.stack((t, t), -1)[..., 0] for t in args))):
        assert all(map(torch.equal, found, expected))
    out = torch.empty(2, 3, 5, 8, dtype=dtype, device=route.device).transpose(1, 2)
    lse = torch.empty(2, 5, 3, device=route.device).mT
    for given in ({"out": out}, {"lse": lse}, {"out": out, "lse": lse}):
        out.fill_(7), lse.fill_(7)
        results = tileops.merge_attention(*args, **given)
        assert results[0] is given.get("out", results[0]) and results[1] is given.get("lse", results[1])
        assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("shape", [(0, 5, 3, 8), (2, 0, 3, 8), (0, 3, 8), (4, 0, 8)], ids=str)
def test_empty(route, shape):  # B11
    args = [t.requires_grad_() for t in sides(shape, torch.bfloat16, route.device, empty=False)]
    out, lse = tileops.merge_attention(*args)
    assert out.shape == args[0].shape and lse.shape == args[1].shape
    (out.sum() + lse.sum()).backward()
    assert all(t.grad.shape == t.shape for t in args)


def test_not_a_number(route):
    for side, value in itertools.product((1, 3), (INF, float("nan"))):
        args = sides((2, 5, 3, 8), torch.bfloat16, route.device, empty=False)
        args[side][0, 1, 2] = value
        out, lse = tileops.merge_attention(*args)
        assert out.isnan().any(-1).nonzero().tolist() == [[0, 2, 1]] and lse.isnan().nonzero().tolist() == [[0, 1, 2]]


def test_explain(route):
    decision = tileops.explain("merge_attention", *sides((2, 5, 3, 64), torch.bfloat16, route.device))
    assert (decision.path, decision.variant.startswith(f"merge_attention_{route.target}_bf16")) == (
        ("kernel", True) if route.target else ("eager", False)
    )


def test_capture(route):
    if route.device == "cpu":
        pytest.skip("CUDA graphs")
    args, graph = sides((2, 33, 4, 128), torch.bfloat16, "cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = tileops.merge_attention(*args)
    args[0].normal_(), args[1].normal_()
    graph.replay()
    check(args, found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_first_call_of_the_process_is_captured(run_python):  # B55
    run_python("""
import torch, tileops
out, lse = torch.randn(2, 9, 4, 64, device="cuda").bfloat16(), torch.randn(2, 4, 9, device="cuda")
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    found = tileops.merge_attention(out, lse, out.flip(0), lse.flip(0))
graph.replay()
expected = tileops.merge_attention(out, lse, out.flip(0), lse.flip(0))
assert all(map(torch.equal, found, expected)) and not found[0].isnan().any()
""", TILEOPS_REQUIRE_NATIVE="1")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device(route):  # B53
    if route.device == "cpu":
        pytest.skip("devices")
    assert torch.cuda.current_device() == 0
    args = sides((2, 33, 4, 128), torch.bfloat16, "cuda:1")
    found = tileops.merge_attention(*args)
    assert torch.cuda.current_device() == 0 and all(t.device == args[0].device for t in found)
    check(args, found)


def test_stable_beside_a_busy_stream(route):  # B57
    if route.device == "cpu":
        pytest.skip("streams")
    args, noise = sides((3, 700, 4, 128), torch.bfloat16, "cuda"), normal(2048, 2048, device="cuda")
    first, stream = tileops.merge_attention(*args), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(stream):
            noise @ noise
        assert all(map(torch.equal, tileops.merge_attention(*args), first))


ADDRESSES = {
    "base + 1": lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
    "pitch + 3": lambda t: torch.nn.functional.pad(t, (0, 3), value=float("nan"))[..., :-3],
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_any_address_and_pitch(route, address):  # B24
    for cols in (46, 64):
        args = sides((2, 5, 3, cols), torch.bfloat16, route.device)
        for changed in ((0, 1, 2, 3), (0,), (1,), (2,), (3,)):
            given = [ADDRESSES[address](t) if n in changed else t for n, t in enumerate(args)]
            check(args, tileops.merge_attention(*given))
        out, lse = (ADDRESSES[address](torch.zeros_like(t)) for t in args[:2])
        check(args, tileops.merge_attention(*args, out=out, lse=lse))
        check(args, (out, lse))


def gradients(run, tensors, dout, dlse, **graph):
    out, lse = run(*tensors)
    finite = lse.masked_fill(lse == -INF, 0.0)
    return torch.autograd.grad((out * dout).sum() + (finite * dlse).sum(), tensors, **graph)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_gradients(device, shape, dtype):
    args = sides(shape, dtype, device, empty=False)
    args[1][..., 0] = args[3][..., 1] = args[1][..., 2] = args[3][..., 2] = -INF
    dout, dlse = normal(*shape, dtype=dtype, device=device, seed=8), normal(*args[1].shape, device=device, seed=9)
    leaves = [t.clone().requires_grad_() for t in args]
    wide = [t.double().requires_grad_() for t in args]
    found = gradients(tileops.merge_attention, leaves, dout, dlse)
    for leaf, ours, wanted in zip(leaves, found, gradients(exact, wide, dout.double(), dlse.double())):
        assert ours.dtype == leaf.dtype
        wanted = torch.nan_to_num(wanted)  # autograd of logaddexp is NaN where both sides are -inf
        torch.testing.assert_close(ours.double(), wanted, atol=2e-5, rtol=torch.finfo(leaf.dtype).eps)


def test_second_derivatives():
    args = sides((2, 4, 3, 5), torch.float32, "cpu", empty=False)
    dout, dlse = normal(2, 4, 3, 5, seed=8), normal(2, 3, 4, seed=9)

    def second(run, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in args]
        first = gradients(run, leaves, dout.to(dtype), dlse.to(dtype), create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)

    for found, wanted in zip(second(tileops.merge_attention, torch.float32), second(exact, torch.float64)):
        torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)
