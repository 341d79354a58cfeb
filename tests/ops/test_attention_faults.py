"""What public users of attention kernels met, on every operator of attention and every route: ids of the faults behind `#`."""

import itertools
import math

import pytest
import torch
from attention_reference import assert_close, exact, lse_bound, visible
from attention_ways import KINDS, LATENT, equal, ways
from ops_reference import normal
from test_attention_gradients import assert_gradients, packed

import tileops

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compilers

BF16, INF, NAN = torch.bfloat16, math.inf, math.nan
PAGED = ("paged", "decode", "mla", "flash_mla")
PLAIN = ("dense", "varlen", "paged", "decode")  # the kinds with windows and caps
TRAINED = ("dense", "varlen")
MORE_QUERIES = [(8, 4), (200, 72), (2048, 1024), (130, 1)]


def splits(way, *counts):
    """Those that make a difference."""
    return (0, *counts) if way.kind in ("decode", "mla") and way.has_kernels else (0,)


def assert_nothing(out, lse):
    assert not out.any() and (lse == -INF).all()


# ---- rows without keys, memory that nobody owns


def rows_and_keys(way):
    if way.kind == "dense":
        yield from (([rows], [keys]) for rows, keys in MORE_QUERIES)
    elif way.kind in ("varlen", "paged"):
        yield tuple(map(list, zip(*MORE_QUERIES)))
    else:
        yield [8] * 4, [4, 0, 130, 1]


@pytest.mark.parametrize("way", ways(*KINDS), indirect=True)
def test_more_queries_than_keys(way):  # B01
    for rows, keys in rows_and_keys(way):
        found = way.check(*way.sequences(rows, keys, heads=2, kv_heads=2), causal=True)
        for (out, lse), sq, sk in zip(found, rows, keys):
            assert_nothing(out[: max(sq - sk, 0)], lse[:, : max(sq - sk, 0)])
            assert lse[:, max(sq - sk, 0) :].isfinite().all()


def gradients(way, tensors, rows, keys, **chosen):
    """Those of both results, held against float64; chosen: as in assert_gradients."""
    heads, dim_v = tensors[0].shape[1], tensors[2].shape[2]
    dout = normal(sum(rows), heads, dim_v, dtype=BF16, device=way.device, seed=8)
    dlse = normal(heads, sum(rows), device=way.device, seed=9)

    def run(q, k, v, **given):
        found = way.run(q.split(rows), k.split(keys), v.split(keys), **given)
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)

    return assert_gradients(run, lambda of: packed(of, rows, keys), tensors, dout, dlse, **chosen)


@pytest.mark.parametrize("way", ways(*TRAINED), indirect=True)
def test_gradients_with_more_queries_than_keys(way):  # B01
    for rows, keys in rows_and_keys(way):
        if way.kind == "varlen":  # which pads to the longest in eager PyTorch: dense has that one
            rows, keys = ([n for n in lengths if n not in MORE_QUERIES[2]] for lengths in (rows, keys))
        tensors = [torch.cat(t) for t in way.sequences(rows, keys, heads=2, kv_heads=2)]
        grads = gradients(way, tensors, rows, keys, causal=True)
        assert all(grad.isfinite().all() for grad in grads)
        for dq, sq, sk in zip(grads[0].split(rows), rows, keys):
            assert not dq[: sq - sk].any() and dq[sq - sk :].any()


@pytest.mark.parametrize("way", ways(*PAGED), indirect=True)
def test_only_the_keys_in_use_count(way):  # B03, B29
    rows, keys = [70 if way.kind == "paged" else 2] * 4, [1, 100, 64, 65]
    tensors = way.sequences(rows, keys)
    for causal in (False, True):
        clean = way.check(*tensors, poison=0.0, unused=0, causal=causal)
        for poison, unused in ((NAN, -1), (INF, 2**30), (-INF, -1)):
            assert equal(way.run(*tensors, poison=poison, unused=unused, width=9, causal=causal), clean)


@pytest.mark.parametrize("way", ways("varlen", *PAGED), indirect=True)
@pytest.mark.parametrize("spoiled", ["keys", "values", "both"])
def test_nan_of_one_request_stays_there(way, spoiled):  # B03
    rows, keys = [70 if way.kind in ("paged", "varlen") else 2] * 4, [1, 100, 64, 65]
    q, k, v = way.sequences(rows, keys)
    clean = way.check(q, k, v)
    for tensors, wanted in ((k, spoiled != "values"), (v, spoiled != "keys")):
        if wanted:
            tensors[2] = torch.full_like(tensors[2], NAN)
    if way.kind in LATENT:
        k[2] = v[2] = torch.full_like(k[2], NAN)  # one memory
    found = way.run(q, k, v)
    assert found[2][0].isnan().all()
    assert equal(found[:2] + found[3:], clean[:2] + clean[3:])
    if way.kind not in LATENT and spoiled == "values":
        assert torch.equal(found[2][1], clean[2][1])
    else:
        assert found[2][1].isnan().all()


@pytest.mark.parametrize("way", ways(*PAGED), indirect=True)
def test_padded_requests(way):  # B29, B35
    """Those that a captured graph is padded with have no keys and no valid page."""
    rows = [70 if way.kind == "paged" else 1] * 4
    alone = way.check(*way.sequences(rows, [130, 0, 0, 64]), unused=0)
    for unused in (-1, 2**30):
        found = way.check(*way.sequences(rows, [130, 0, 0, 64]), unused=unused, width=11)
        assert equal(found, alone)
        for empty in (*found[1:3], *way.check(*way.sequences(rows, [0] * 4), unused=unused, width=11)):
            assert_nothing(*empty)


@pytest.mark.parametrize("way", ways(*PAGED, "varlen"), indirect=True)
def test_rows_without_keys_beside_split_ones(way):  # B35
    """In the same tile, the same launch and the same merge of parts."""
    rows, keys = [8] * 4, [3, 0, 9000 if way.device != "cpu" else 900, 300]
    for num_splits in splits(way, 1, 7):
        found = way.check(*way.sequences(rows, keys, heads=2, kv_heads=1), causal=True, num_splits=num_splits)
        assert_nothing(found[0][0][:5], found[0][1][:, :5])
        assert_nothing(*found[1])
    if way.kind == "decode":  # of two queries, parts that one sees and the other does not
        tensors = way.sequences([8] * 2, [9000, 260], heads=2, kv_heads=1)
        for window_left in (0, 3, 4000):
            way.check(*tensors, causal=True, window_left=window_left, num_splits=1000)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_queries_without_any_key(device, causal):  # B13, B35
    leaves = [normal(n, h, 64, dtype=BF16, device=device).requires_grad_() for n, h in ((30, 4), (0, 2), (0, 2))]
    index = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in ([0, 10, 30], [0, 0, 0]))
    out, lse = tileops.flash_attention_varlen(*leaves, *index, 20, 0, causal=causal)
    assert_nothing(out, lse)
    dq, dk, dv = torch.autograd.grad(out.sum() + lse.masked_fill(lse == -INF, 0).sum(), leaves)
    assert torch.equal(dq, torch.zeros_like(leaves[0])) and dk.shape == dv.shape == (0, 2, 64)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("way", ways("varlen"), indirect=True)
def test_sequences_without_queries_or_keys(way, dim):  # B13
    """cu_seqlens of the report, and the same with queries and keys exchanged."""
    for rows, keys in (([0, 40, 20, 0], [30] * 4), ([30] * 4, [0, 40, 20, 0])):
        tensors = [torch.cat(t) for t in way.sequences(rows, keys, heads=4, kv_heads=1, dim=dim)]
        dq, dk, dv = gradients(way, tensors, rows, keys)
        for grad, own, other in ((dq, rows, keys), (dk, keys, rows), (dv, keys, rows)):
            for part, count in zip(grad.split(own), other):
                assert part.any() if count and len(part) else not part.any()


# ---- exact values: equal weights, one key, masks


def scaled_and_capped(way):
    yield from ({}, {"scale": 0.3})
    if way.kind not in LATENT:
        yield from ({"softcap": 5.0}, {"softcap": 5.0, "scale": 0.3})


@pytest.mark.parametrize("way", ways(*KINDS), indirect=True)
@pytest.mark.parametrize("causal", [False, True])
def test_equal_weights(way, causal):  # B31, B33
    """Base e, of the capped scores, without the padding of tiles; of one part and of many."""
    counts = [1, 16, 17, 63, 64, 65, 100, 255, 257] + [5000] * (way.device != "cpu")
    for keys, chosen in itertools.product([[n] for n in counts] if way.kind == "dense" else [counts], scaled_and_capped(way)):
        q, k, v = way.sequences([1] * len(keys), keys)
        q = [torch.zeros_like(t) for t in q]
        for num_splits in splits(way, 5):
            for n, (out, lse) in enumerate(way.run(q, k, v, causal=causal, num_splits=num_splits, **chosen)):
                atol = 1e-4 if way.device == "cpu" else 1e-5  # torch's exponential in half precision
                torch.testing.assert_close(lse, torch.full_like(lse, math.log(keys[n])), atol=atol, rtol=1e-6)
                mean = v[n].double().mean(0).repeat_interleave(q[n].shape[1] // v[n].shape[1], 0)[None]
                assert_close(out, mean, 2 * torch.finfo(BF16).eps * v[n].double().abs().amax())


@pytest.mark.parametrize("way", ways(*KINDS), indirect=True)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_halves_of_the_keys_make_the_whole(way, share):  # B33, B35
    """By the weights that the two LSE say; one half may be empty."""
    if way.kind in ("dense", "varlen") and not share and way.has_kernels:
        pytest.skip("without keys there is no kernel")
    q, k, v = way.sequences([3] * 3, [16, 200, 65] if way.kind != "dense" else [100] * 3)
    for chosen in scaled_and_capped(way):
        cuts = [[t.split([int(len(t) * share), len(t) - int(len(t) * share)]) for t in of] for of in (k, v)]
        sides = [way.run(q, *([pair[side] for pair in of] for of in cuts), **chosen) for side in (0, 1)]
        for n, ((out_a, lse_a), (out_b, lse_b)) in enumerate(zip(*sides)):
            out, lse = tileops.merge_attention(out_a, lse_a.contiguous(), out_b, lse_b)
            wanted, wanted_lse = exact(q[n], k[n], v[n], **way.options(chosen))
            assert_close(out, wanted, 3 * torch.finfo(BF16).eps * v[n].double().abs().amax())
            of_scores = chosen.get("softcap", 0.0) * 2.0**-11  # of a GPU's tanh
            bound = 2 * lse_bound(q[n], k[n], way.options(chosen)) * (wanted_lse.abs() + 8) + of_scores
            assert_close(lse, wanted_lse, bound)


def in_dims(way, rows, keys, dim):
    """Of one head of q and k."""
    return way.sequences(rows, keys, heads=1, kv_heads=1, dim=dim)


@pytest.mark.parametrize("way", ways(*PLAIN), indirect=True)
def test_window_counts_both_ends(way):  # B36
    q, k, _ = in_dims(way, [8], [8], 8)
    eye = [torch.eye(8, dtype=BF16, device=way.device)[:, None]]
    ((out, lse),) = way.run([torch.zeros_like(q[0])], k, eye, causal=True, window_left=2)
    seen = visible(8, 8, way.device, causal=True, window_left=2)
    counts = seen.sum(-1)
    assert counts.tolist() == [1, 2, 3, 3, 3, 3, 3, 3] and torch.equal(out[:, 0] > 0, seen)
    assert_close(out[:, 0], seen / counts[:, None].double(), torch.finfo(BF16).eps)
    torch.testing.assert_close(lse[0], counts.log(), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("way", ways(*PLAIN), indirect=True)
def test_spellings_of_causal(way):  # B36
    tensors = way.sequences([16 if way.kind == "decode" else 512], [512], heads=2, kv_heads=1)
    way.check(*tensors, causal=True)
    for left in (-1, 511, 512, 4096, 2**62):
        way.check(*tensors, window_left=left, window_right=0)
    for left, right in ((512, 7), (510, -1)):
        way.check(*tensors, causal=True, window_left=left, window_right=right)


@pytest.mark.parametrize("way", ways(*PLAIN), indirect=True)
def test_cap_comes_before_the_mask(way):  # B38
    q, k, v = in_dims(way, [64], [64], 64)
    v[0][:] = 1000
    v[0][0] = 1
    ((out, _),) = way.run(q, k, v, causal=True, softcap=1.0)
    assert torch.equal(out[0], torch.ones_like(out[0])) and (out[1:] > 100).all()


@pytest.mark.parametrize("way", ways(*PLAIN), indirect=True)
def test_large_scores_with_a_cap(way):  # B38
    """Of the whole range of the cap, beside masks, windows, groups of heads and parts."""
    keys = [700] if way.kind == "dense" else [700, 65, 9]
    q, k, v = way.sequences([8] * len(keys), keys)
    q, k = ([t * 10 for t in of] for of in (q, k))
    for chosen in ({}, {"causal": True}, {"causal": True, "window_left": 70}, {"window_left": 3, "window_right": 5}):
        for num_splits in splits(way, 7):
            way.check(q, k, v, softcap=30.0, num_splits=num_splits, **chosen)


@pytest.mark.parametrize("way", ways(*TRAINED), indirect=True)
@pytest.mark.parametrize("chosen", [{"causal": True}, {"causal": True, "window_left": 9}], ids=str)
def test_gradients_of_large_scores_with_a_cap(way, chosen):  # B38
    rows, keys = ([60], [60]) if way.kind == "dense" else ([12, 40], [30, 40])
    q, k, v = (torch.cat(t) for t in way.sequences(rows, keys))
    slack = 8 * 30 * 2.0**-11 if way.has_kernels else 0.0  # the GPU's tanh is in their LSE
    gradients(way, [q * 10, k * 10, v], rows, keys, softcap=30.0, slack=slack, **chosen)


@pytest.mark.parametrize("way", ways(*PLAIN), indirect=True)
def test_no_cap(way):  # B38
    tensors = way.sequences([5] * 2, [70] * 2)
    plain = way.check(*tensors, causal=True)
    for off in (0.0, -0.0, None):
        assert equal(way.run(*tensors, causal=True, softcap=off), plain)
    call = way.call(*tensors, causal=True, softcap=None)
    decision = tileops.explain(call.function, *call.args, **call.options)
    assert decision == tileops.explain(call.function, *call.args, **{**call.options, "softcap": 0.0})


@pytest.mark.parametrize("way", ways(*KINDS), indirect=True)
def test_scales(way):  # B40
    """None is that of the head dim, not of the tile; 0 is a scale; LSE are of the scaled scores."""
    keys = [33] * 2 if way.kind == "dense" else [33, 9]
    for dim, scale in itertools.product((40, 72) if way.kind not in LATENT else (576,), (None, 0.0, -1.0, 1e-3, 10.0)):
        q, k, v = way.sequences([3] * 2, keys, dim=dim)
        if scale is None and way.kind in LATENT:
            continue  # mla_decode has no default
        for causal in (False, True):
            found = way.check(q, k, v, scale=scale, causal=causal)
        if scale == 0.0:
            for (out, lse), values in zip(found, v):  # of the last query, which sees all keys
                torch.testing.assert_close(lse[:, -1], torch.full_like(lse[:, -1], math.log(len(values))), atol=1e-4, rtol=0)
                mean = values.double().mean(0).repeat_interleave(out.shape[1] // values.shape[1], 0)
                assert_close(out[-1], mean, 2 * torch.finfo(BF16).eps * values.double().abs().amax())
