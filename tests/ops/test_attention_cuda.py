"""Attention in a process: captured graphs, streams, devices, empty problems and caches past 31 bits, on every operator.

What needs no GPU runs on the CPU as well.

compute-sanitizer --tool memcheck python -m pytest tests/ops/test_attention_cuda.py -k padded      for a sanitizer
"""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from attention_reference import assert_close, exact, lse_bound
from attention_ways import KINDS, equal, ways
from ops_reference import normal

import tileops

BF16, F16, INF, NAN = torch.bfloat16, torch.float16, math.inf, math.nan
PAGED = ("paged", "decode", "mla", "flash_mla")
HERE = Path(__file__).parent


def few_or_many(way):
    """Queries of each request: more than decoding takes where tiles of them are meant."""
    return 70 if way.kind in ("dense", "varlen", "paged") else 2


# ---- captured graphs


REPLAYS = [[64] * 4, [1, 4096, 0, 65], [4096] * 4, [0] * 4, [130, 0, 0, 64]]
FIRST_CALL = """
import sys
sys.path.insert(0, {here!r})
import torch
from attention_ways import Way
way = Way({kind!r}, {route!r})
q, k, v = way.sequences([{rows}] * 4, [4096] * 4)
call = way.call(q, k, v, causal=True, seqused=True)
call.lengths.fill_(64)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
    found = call.results()
for now in {replays}:
    call.lengths.copy_(torch.tensor(now))
    poison = [torch.full((2**20 * n,), float("nan"), device="cuda") for n in (1, 3, 16, 64)]
    del poison
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, call.results())), now
    used = [[t[:n] for t, n in zip(of, now)] for of in (k, v)]
    way.assert_right(call.split(*found), q, *used, causal=True)
torch.cuda.empty_cache()
graph.replay()
torch.cuda.synchronize()
assert all(map(torch.equal, found, call.results()))
"""


@pytest.mark.parametrize("way", ways("varlen", *PAGED, routes=("kernels",)), indirect=True)
def test_first_call_of_the_process_is_captured(way, run_python):  # B55
    """With lengths of 64; nothing of the plan is frozen. dense: test_flash_attention_kernels.py."""
    way.run(*way.sequences([few_or_many(way)] * 4, [64] * 4), seqused=True, causal=True)  # or skips
    run_python(FIRST_CALL.format(here=str(HERE), kind=way.kind, route=way.route, rows=few_or_many(way), replays=REPLAYS))


@pytest.mark.parametrize("way", ways(*PAGED, routes=("eager", "kernels")), indirect=True)
def test_padded_requests_in_a_graph(way):  # B29, B55
    tensors = way.sequences([few_or_many(way)] * 4, [130, 0, 0, 64])
    for unused in (-1, 2**30):
        call = way.call(*tensors, unused=unused, width=11)
        expected, lengths = call.results(), call.lengths.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call.results()
        for now in (lengths, torch.zeros_like(lengths), lengths):
            call.lengths.copy_(now)
            graph.replay()
            if now is lengths:
                way.assert_right(call.split(*found), *tensors)
                assert all(map(torch.equal, found, expected)) or way.route == "eager"  # it pads to the width of the table
            else:
                assert all(not out.any() and (lse == -INF).all() for out, lse in call.split(*found))


# ---- streams and devices


@pytest.mark.parametrize("way", ways(*KINDS, routes=("cpu", "kernels")), indirect=True)
def test_stable_beside_a_busy_stream(way):  # B57
    """The sizes of the report, and its values times 3: the same bits each time, in memory that held something else."""
    on_cpu = way.route == "cpu"
    batch, rows, times = (2, 64, 3) if on_cpu else (300, 2048 if way.kind in ("dense", "varlen", "paged") else 2, 50)
    heads = 16 if way.kind in PAGED[2:] else 1
    tensors = [[t * 3 for t in of] for of in way.sequences([rows] * batch, [128] * batch, heads, 1, 128, dtype=F16)]
    call, differentiable = way.call(*tensors), way.kind in ("dense", "varlen")
    leaves = [t.requires_grad_() for t in call.args[:3]] if differentiable else []
    first = call.results()
    way.assert_right([(o.detach(), n.detach()) for o, n in call.split(*first)[:2]], *(of[:2] for of in tensors))
    dout = torch.ones_like(first[0])
    grads = torch.autograd.grad(first[0], leaves, dout) if leaves else ()
    first = [t.detach() for t in first]
    noise, stream = normal(2048, 2048, device=way.device), None if on_cpu else torch.cuda.Stream()
    for number in range(times):
        if stream:
            with torch.cuda.stream(stream):
                noise @ noise
        poison = [torch.full_like(t, NAN) for t in first]
        del poison
        found = call.results()
        assert all(map(torch.equal, found, first))
        if leaves and number % 10 == 0:
            assert all(map(torch.equal, torch.autograd.grad(found[0], leaves, dout), grads))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", ways(*KINDS, routes=("eager", "kernels")), indirect=True)
def test_second_device(way):  # B53
    """Which is not the current one; forward and backward."""
    assert torch.cuda.current_device() == 0
    both = []
    for here in (way, dataclasses.replace(way, gpu="cuda:1")):
        call = here.call(*here.sequences([few_or_many(way)] * 2, [100] * 2), causal=True)
        leaves = [t.requires_grad_() for t in call.args[:3]] if way.kind in ("dense", "varlen") else []
        out, lse = call.results()
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), leaves) if leaves else ()
        assert all(t.device == leaf.device for t, leaf in zip((out, lse, *grads), [call.args[0]] * 5))
        both.append([t.detach().cpu() for t in (out, lse, *grads)])
        assert torch.cuda.current_device() == 0
    assert call.args[0].device == torch.device("cuda:1") and all(map(torch.equal, *both))


# ---- nothing to do


EMPTY = """
import torch, tileops
from tileops.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

def new(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype, device={device!r})

def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device={device!r})

def check(results, *shapes):
    assert [tuple(t.shape) for t in results] == list(shapes) and results[0].dtype == torch.bfloat16
    assert all(t.device.type == {device!r} and not t.numel() for t in results)

kv, cache, latent = new(2, 5, 2, 64), new(4, 16, 2, 64), new(4, 64, 576)
for b, s, h in ((0, 3, 4), (2, 0, 4)):
    q, of_b = new(b, s, h, 64).requires_grad_(), kv[:b].clone().requires_grad_()
    table, used = torch.zeros((b, 2), dtype=torch.int32, device={device!r}), ints(*[5] * b)
    out, lse = tileops.flash_attention(q, of_b, of_b, causal=True)
    check((out, lse), (b, s, h, 64), (b, h, s))
    (out.sum() + lse.sum()).backward()
    assert q.grad.shape == q.shape and torch.equal(of_b.grad, torch.zeros_like(of_b))
    q = q.detach()
    check(tileops.flash_attention_paged(q, cache, cache, table, used), (b, s, h, 64), (b, h, s))
    check(tileops.mla_decode(new(b, s, h, 576), latent, table, used, 0.1), (b, s, h, 512), (b, h, s))
    metadata = get_mla_metadata()
    check(flash_mla_with_kvcache(new(b, s, h, 576), latent[:, :, None], table, used, 512, *metadata), (b, s, h, 512), (b, h, s))
    check(tileops.merge_attention(q, lse.detach(), q, lse.detach()), (b, s, h, 64), (b, h, s))
for cu in (ints(0), ints(0, 0)):
    for keys in (0, 5):
        q, k = new(0, 4, 64).requires_grad_(), new(keys, 2, 64).requires_grad_()
        out, lse = tileops.flash_attention_varlen(q, k, k, cu, cu, 0, 0)
        check((out, lse), (0, 4, 64), (4, 0))
        (out.sum() + lse.sum()).backward()
        assert q.grad.shape == q.shape and torch.equal(k.grad, torch.zeros_like(k))
    table = torch.zeros((len(cu) - 1, 2), dtype=torch.int32, device={device!r})
    packed = dict(cu_seqlens_q=cu, max_seqlen_q=0)
    check(tileops.flash_attention_paged(q.detach(), cache, cache, table, table[:, 0], **packed), (0, 4, 64), (4, 0))
if {device!r} == "cuda":
    torch.cuda.synchronize()
    assert tileops.status().loaded, tileops.status().reason
with tileops.knobs.scope(require_native=False):
    v = torch.randn(1, 1, 2, 64, device={device!r}).bfloat16()
    out, lse = tileops.flash_attention(v, v, v)
    assert torch.equal(out, v) and lse.isfinite().all()
"""


def test_empty_launches_nothing(device, run_python):  # B11
    """In a process of its own: a bad launch would stick."""
    run_python(EMPTY.format(device=device), TILEOPS_REQUIRE_NATIVE="1" if device == "cuda" else "")


# ---- caches past 31 bits


LARGE = {"paged": (131200, 16, (8, 128)), "decode": (131200, 16, (8, 128)), "mla": (58300, 64, (576,))}  # pages, page, token


def memory(*shape, device):
    """On the CPU it is reserved, and not touched but where something is written."""
    size = 2 * math.prod(shape)
    if device == "cuda":
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < size + 2**30:
            pytest.skip(f"needs {(size >> 30) + 2} GiB of GPU memory")
    return torch.empty(shape, dtype=BF16, device=device)


@pytest.mark.parametrize("way", [
    pytest.param(*p.values, marks=(*p.marks, pytest.mark.big), id=p.id) if "cpu" not in p.id else p for p in ways(*LARGE)
], indirect=True)  # fmt: skip
@pytest.mark.parametrize("layers", [1, 20])
def test_pages_past_31_bits(way, layers):  # B18
    """The page at the end of the cache is as good as the first one; the same as one layer's view of a bigger allocation."""
    pages, page, token = LARGE[way.kind]
    pages //= layers
    k_cache = memory(pages, layers, page, *token, device=way.device)[:, layers - 1]
    v_cache = memory(pages, layers, page, *token, device=way.device)[:, layers - 1] if way.kind != "mla" else None
    assert (pages - 1) * k_cache.stride(0) + k_cache[0].numel() > 2**31
    values = [normal(page, *token, dtype=BF16, device=way.device, seed=seed) for seed in (1, 2)]
    for cache, value in zip((k_cache, v_cache), values):
        if cache is not None:
            cache[1], cache[-2] = NAN, NAN
            cache[0], cache[-1] = value, value
    used = torch.tensor([page], dtype=torch.int32, device=way.device)
    rows, found = 70 if way.kind == "paged" else 2, []
    for number in (0, pages - 1):
        table = torch.tensor([[number]], dtype=torch.int32, device=way.device)
        with way.scope():
            if way.kind == "mla":
                q = normal(1, rows, 16, 576, dtype=BF16, device=way.device)
                found.append(tileops.mla_decode(q, k_cache, table, used, 0.07, causal=False))
                continue
            q = normal(1, rows, 16, 128, dtype=BF16, device=way.device)
            found.append(tileops.flash_attention_paged(q, k_cache, v_cache, table, used))
    assert equal(*[[pair] for pair in found])
    (out, lse), scale = found[1], 0.07 if way.kind == "mla" else 128**-0.5
    k, v = (values[0][:, None], values[0][:, None, :512]) if way.kind == "mla" else values
    wanted, wanted_lse = exact(q[0], k, v, scale=scale)
    assert_close(out[0], wanted, 2 * torch.finfo(BF16).eps * v.double().abs().amax())
    assert_close(lse[0], wanted_lse, lse_bound(q[0], k, {"scale": scale}) * (wanted_lse.abs() + 8))
