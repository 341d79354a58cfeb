"""Gradients of the attention operators against float64 autograd of the reference, from both results."""
import functools
import itertools
import math

import pytest
import torch
from attention_reference import OPTIONS, cut, eager, exact, offsets, options, qkv
from ops_reference import DTYPES, normal

import tileops

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compilers

INF = math.inf
SHAPES = [(2, 7, 7, 4, 4, 16, 16), (2, 5, 9, 4, 2, 8, 24), (1, 9, 5, 6, 1, 8, 8)]


def dense(run):
    """exact or eager, one sequence, for a batch."""

    def batched(q, k, v, **chosen):
        results = [run(*tensors, **chosen) for tensors in zip(q, k, v)]
        return (torch.stack(results), None) if run is eager else tuple(map(torch.stack, zip(*results)))

    return batched


def packed(run, rows, keys):
    def ragged(q, k, v, **chosen):
        results = [run(*tensors, **chosen) for tensors in zip(cut(q, rows), cut(k, keys), cut(v, keys))]
        if run is eager:
            return torch.cat(results), None
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results], 1)

    return ragged


def gradients(run, tensors, dout, dlse, dtype=None, **chosen):
    leaves = [t.detach().clone().to(dtype or t.dtype).requires_grad_() for t in tensors]
    named = dict(zip(("q", "k", "v", "sinks"), leaves))
    out, lse = run(**named, **chosen)
    loss = (out * dout.to(out.dtype)).sum()
    if dlse is not None and lse is not None:
        loss = loss + (lse.masked_fill(lse == -INF, 0) * dlse.to(lse.dtype)).sum()
    return torch.autograd.grad(loss, leaves)


def assert_gradients(run, reference, tensors, dout, dlse, slack=0.0, **chosen):
    """Per tensor: at most twice the error of eager autograd in the same dtype (of out alone), plus a few roundings of the
    largest gradient, and that times `slack`. Returns them."""
    ours = gradients(run, tensors, dout, dlse, **chosen)
    wanted = gradients(reference(exact), tensors, dout, dlse, torch.float64, **chosen)
    plain = gradients(reference(exact), tensors, dout, None, torch.float64, **chosen)
    theirs = gradients(reference(eager), tensors, dout, None, **chosen)
    for name, tensor, found, right, alone, eagers in zip("q k v sinks".split(), tensors, ours, wanted, plain, theirs):
        assert found.dtype == tensor.dtype and found.shape == tensor.shape and found.isfinite().all()
        if not found.numel():
            continue
        floor = (2 * torch.finfo(tensor.dtype).eps + 2.0**-16 + slack) * right.abs().amax() + 2.0**-18
        error, bound = (found.double() - right).abs().amax(), 2 * (eagers.double() - alone).abs().amax() + floor
        assert error <= bound, f"{name}: {error} > {bound}"
    return ours


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense(device, shape, name, dtype):
    chosen = options(name, shape[3], device, dtype)
    tensors = [*qkv(*shape, dtype=dtype, device=device), *([chosen.pop("sinks")] if "sinks" in chosen else [])]
    dout = normal(*shape[:2], shape[3], shape[6], dtype=dtype, device=device, seed=8)
    for dlse in (None, normal(shape[0], shape[3], shape[1], device=device, seed=9)):
        assert_gradients(tileops.flash_attention, dense, tensors, dout, dlse, **chosen)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["full", "causal", "all"])
def test_varlen(device, name, dtype):
    rows, keys = [0, 0, 12, 9, 0, 4], [0, 30, 14, 3, 3, 0]
    index = offsets(rows, device), offsets(keys, device)
    chosen = options(name, 4, device, dtype)
    shapes = (sum(rows), 4, 16), (sum(keys), 2, 16), (sum(keys), 2, 24)
    tensors = [normal(*shape, dtype=dtype, device=device, seed=i) for i, shape in enumerate(shapes)]
    tensors += [chosen.pop("sinks")] if "sinks" in chosen else []

    def run(q, k, v, sinks=None, **more):
        return tileops.flash_attention_varlen(q, k, v, *index, 12, 30, sinks=sinks, **more)

    dout, dlse = normal(25, 4, 24, dtype=dtype, device=device, seed=8), normal(4, 25, device=device, seed=9)
    assert_gradients(run, lambda of: packed(of, rows, keys), tensors, dout, dlse, **chosen)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_of_sequences_without_queries(device, dim):  # B13
    rows, keys = [0, 0, 40, 20, 0], [0, 30, 30, 30, 30]
    index = offsets(rows, device), offsets(keys, device)
    shapes = (60, 4, dim), (120, 1, dim), (120, 1, dim)
    q, k, v = (normal(*s, dtype=torch.bfloat16, device=device, seed=i).requires_grad_() for i, s in enumerate(shapes))
    out, _ = tileops.flash_attention_varlen(q, k, v, *index, 40, 30)
    _, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for grad in (dk, dv):
        assert not grad[:30].any() and not grad[90:].any() and grad[30:90].abs().sum(-1).all()
    alone = tileops.flash_attention(*(t[None, s] for t, s in ((q, slice(40)), (k, slice(30, 60)), (v, slice(30, 60)))))[0]
    torch.testing.assert_close(torch.autograd.grad(alone.sum(), k)[0][30:60], dk[30:60], atol=4e-3, rtol=2.0**-6)


def test_seqused_keys_get_nothing(device):  # B03
    q, k, v = (normal(10, 2, 8, device=device, seed=i) for i in range(3))
    k[6:] = v[6:] = math.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    index, used = offsets([10], device), torch.tensor([6], device=device)
    out, lse = tileops.flash_attention_varlen(*leaves, index, index, 10, 10, seqused_k=used, causal=True)
    for grad, rows in zip(torch.autograd.grad(out.sum() + lse[:, 4:].sum(), leaves), (slice(0, 4), slice(6, 10), slice(6, 10))):
        assert grad.isfinite().all() and not grad[rows].any() and grad.any()


def test_large_scores_with_a_cap(device):  # B38
    tensors = qkv(1, 12, 12, 2, 1, 16, device=device)
    q, k, v = tensors[0] * 10, tensors[1] * 10, tensors[2]
    dout = normal(1, 12, 2, 16, device=device, seed=8)
    assert_gradients(tileops.flash_attention, dense, (q, k, v), dout, None, softcap=30.0, causal=True)


def test_one_result_is_enough(device):
    leaves = [t.requires_grad_() for t in qkv(1, 4, 6, 2, 1, 8, device=device)]
    out, lse = tileops.flash_attention(*leaves)
    dq, dk, dv = torch.autograd.grad(lse.sum(), leaves, retain_graph=True)
    assert dq.any() and dk.any() and not dv.any()
    assert all(grad.any() for grad in torch.autograd.grad(out.square().sum(), leaves))


def differentiable_calls(device):
    """Function, leaves and the gradients of its results."""
    q, k, v = qkv(2, 6, 8, 4, 2, 8, device=device)
    sinks, dout = normal(4, device=device), normal(2, 6, 4, 8, device=device, seed=8)
    lse_a, lse_b, dlse = (normal(2, 4, 6, device=device, seed=seed) for seed in (3, 4, 9))
    index = offsets([5, 0, 7], device), offsets([8, 3, 5], device), 7, 8
    flat = dout.flatten(0, 1), dlse.transpose(0, 1).flatten(1)

    def dense(q, k, v, sinks):
        return tileops.flash_attention(q, k, v, sinks=sinks, causal=True)

    def varlen(q, k, v, sinks):
        return tileops.flash_attention_varlen(q, k, v, *index, sinks=sinks, causal=True)

    yield dense, (q, k, v, sinks), (dout, dlse)
    yield varlen, (*(t.flatten(0, 1) for t in (q, k, v)), sinks), flat
    yield tileops.merge_attention, (q, lse_a, q.flip(0), lse_b), (dout, dlse)


def test_nothing_is_overwritten(device):  # B44
    """By two backward passes through one graph, from one gradient for both, and of results that are used again."""
    for run, tensors, given in differentiable_calls(device):
        leaves = [t.clone().requires_grad_() for t in tensors]
        results = run(*leaves)
        kept = [t.detach().clone() for t in (*leaves, *given, *results)]
        first = torch.autograd.grad(results, leaves, given, retain_graph=True)
        second = torch.autograd.grad(results, leaves, given, retain_graph=True)
        third = torch.autograd.grad(run(*leaves), leaves, given)
        assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, third))
        assert all(map(torch.equal, (*leaves, *given, *results), kept))
        residual = torch.autograd.grad(results[0] + leaves[0], leaves, given[0], retain_graph=True)  # out has the shape of q
        plain = torch.autograd.grad(results[0], leaves, given[0])
        torch.testing.assert_close(residual, (plain[0] + given[0], *plain[1:]))


@pytest.mark.parametrize("name", ["causal", "all", "band"])
def test_second_derivatives(name):
    rows, keys = [3, 0, 4], [4, 2, 3]
    index = offsets(rows), offsets(keys)
    chosen = options(name, 4)
    tensors = [normal(sum(n), h, 6, seed=i) for i, (n, h) in enumerate(((rows, 4), (keys, 2), (keys, 2)))]
    batch = qkv(2, 5, 4, 4, 2, 6)
    sinks = [chosen.pop("sinks")] if "sinks" in chosen else []

    def varlen(q, k, v, sinks=None, **more):
        return tileops.flash_attention_varlen(q, k, v, *index, 4, 4, sinks=sinks, **more)

    def second(run, dtype, inputs):
        leaves = [t.to(dtype).clone().requires_grad_() for t in inputs]
        out, lse = run(**dict(zip(("q", "k", "v", "sinks"), leaves)), **chosen)
        loss = out.pow(3).sum() + lse.masked_fill(lse == -INF, 0).pow(2).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)

    ragged = packed(exact, rows, keys)
    for run, reference, inputs in ((tileops.flash_attention, dense(exact), batch), (varlen, ragged, tensors)):
        found, wanted = second(run, torch.float32, [*inputs, *sinks]), second(reference, torch.float64, [*inputs, *sinks])
        for ours, right in zip(found, wanted):
            torch.testing.assert_close(ours.double(), right, atol=1e-4 * right.abs().amax().item(), rtol=1e-3)


def test_only_what_is_wanted(device):  # B42
    """Of each subset of the tensors, what all of them get."""
    for run, tensors, given in differentiable_calls(device):
        leaves = [t.clone().requires_grad_() for t in tensors]
        everything = torch.autograd.grad(run(*leaves), leaves, given)
        for wanted in itertools.product((True, False), repeat=4):
            leaves = [t.clone().requires_grad_(want) for t, want in zip(tensors, wanted)]
            results = run(*leaves)
            assert all(t.requires_grad == any(wanted) for t in results)
            if any(wanted):
                torch.autograd.backward(results, given)
            for leaf, want, right in zip(leaves, wanted, everything):
                assert torch.equal(leaf.grad, right) and right.any() if want else leaf.grad is None


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functional_transforms(device):
    q, k, v = qkv(3, 4, 6, 2, 1, 8, device=device)
    loss = lambda q, k, v: tileops.flash_attention(q[None], k[None], v[None], causal=True)[0].pow(2).sum()  # noqa: E731
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    tileops.flash_attention(*leaves, causal=True)[0].pow(2).sum().backward()
    for found, leaf in zip(torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v), leaves):
        torch.testing.assert_close(found, leaf.grad)
    out, lse = torch.vmap(lambda q, k, v: tileops.flash_attention(q[None], k[None], v[None]))(q, k, v)
    expected = tileops.flash_attention(q, k, v)
    torch.testing.assert_close(out[:, 0], expected[0])
    torch.testing.assert_close(lse[:, 0], expected[1])


def inference_calls(device):
    q = normal(1, 1, 2, 8, device=device)
    cache, table = normal(3, 4, 1, 8, device=device), torch.zeros(1, 2, dtype=torch.int32, device=device)
    used = torch.tensor([3], device=device)
    yield "flash_attention_paged", {"q": q, "k_cache": cache, "v_cache": cache, "sinks": q[0, 0, :, 0]}, {}, (table, used)
    more = {"scale": 1.0, "head_dim_v": 4}
    yield "mla_decode", {"q": q[..., :6], "kv_cache": cache[:, :, 0], "q_rope": q[..., 6:]}, more, (table, used)


def test_operators_for_inference_say_so(device):  # B42
    for op, tensors, more, (table, used) in inference_calls(device):
        run = getattr(tileops, op)
        for name in tensors:
            given = {n: t.clone().requires_grad_(n == name) for n, t in tensors.items()}
            everything = {"block_table": table, "cache_seqlens": used, **more}
            text = f"{op}: {name} wants a gradient, which this operator does not have; expected a call under torch.no_grad()"
            with pytest.raises(NotImplementedError) as caught:
                run(**given, **everything)
            assert str(caught.value) == text
            with torch.no_grad():
                out, _ = run(**given, **everything)
            assert not out.requires_grad
            rest = {n: t for n, t in tensors.items() if n != name}
            partly = functools.partial(run, **rest, **everything)
            with pytest.raises(NotImplementedError, match="wants a gradient"):
                torch.func.jvp(lambda t, run=partly, name=name: run(**{name: t})[0], (tensors[name],), (tensors[name],))


def test_forward_mode_is_refused(device):
    q, k, v = qkv(1, 4, 6, 2, 1, 8, device=device)
    lse = normal(1, 2, 4, device=device)
    for run in (lambda t: tileops.flash_attention(t, k, v)[0], lambda t: tileops.merge_attention(t, lse, q, lse)[0]):
        with pytest.raises(NotImplementedError, match="jvp"):
            torch.func.jvp(run, (q,), (q,))
