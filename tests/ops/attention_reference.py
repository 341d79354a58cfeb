"""What the attention operators are held against: one sequence in float64, the same in eager PyTorch of the input's dtype, and
sequences in the layouts of the operators."""
import functools
import math
from typing import Any

import torch
from ops_reference import DTYPES, normal

import tileops


def _scores(q, k, scale, softcap):
    """[H, Sq, Sk] of q [Sq, H, D] and k [Sk, Hk, D]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.matmul(q.transpose(0, 1), k.permute(1, 2, 0)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def visible(rows, keys, device, causal=False, window_left=-1, window_right=-1):
    """[Sq, Sk]: which keys a query sees, written out."""
    i = torch.arange(rows, device=device)[:, None] + keys - rows
    j = torch.arange(keys, device=device)[None]
    seen = torch.ones(rows, keys, dtype=torch.bool, device=device)
    seen &= (j <= i) if causal else True
    seen &= (j >= i - window_left) if window_left >= 0 else True
    return seen & (j <= i + window_right) if window_right >= 0 else seen


def exact(q, k, v, *, causal=False, scale=None, window_left=-1, window_right=-1, softcap=0.0, sinks=None):
    """out [Sq, H, Dv] and lse [H, Sq] in float64, differentiable."""
    q, k, v = (t.double() for t in (q, k, v))
    seen = visible(q.shape[0], k.shape[0], q.device, causal, window_left, window_right)
    scores = _scores(q, k, scale, softcap).masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, q.shape[0], 1)), -1)
    none = ~seen.any(-1)
    lse = torch.logsumexp(scores.masked_fill(none[:, None], 0.0), -1).masked_fill(none, -math.inf)
    weights = torch.exp(scores - lse.masked_fill(none, 0.0).unsqueeze(-1))[..., : k.shape[0]].masked_fill(none[:, None], 0.0)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.matmul(weights, v.transpose(0, 1)).transpose(0, 1), lse


def eager(q, k, v, *, causal=False, scale=None, window_left=-1, window_right=-1, softcap=0.0, sinks=None):
    """out as models have it in eager PyTorch: each product rounded to the dtype, the softmax in float32."""
    seen = visible(q.shape[0], k.shape[0], q.device, causal, window_left, window_right)
    scores = _scores(q, k, scale, softcap).masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q.dtype)[:, None, None].expand(-1, q.shape[0], 1)), -1)
    weights = torch.softmax(scores.float(), -1).to(q.dtype)[..., : k.shape[0]].masked_fill(~seen, 0.0)
    return torch.matmul(weights, v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(0, 1)).transpose(0, 1)


def assert_attention(out, lse, q, k, v, **options: Any) -> None:
    """One sequence: out within twice the error of eager PyTorch plus two roundings of the largest value, lse within float32
    arithmetic on scores of their size; rows without a key exactly 0 and -inf. A GPU's tanh errs by 2**-11 of it."""
    wanted, wanted_lse = exact(q, k, v, **options)
    assert out.shape == wanted.shape and out.dtype == q.dtype and lse.shape == wanted_lse.shape and lse.dtype == torch.float32
    if not out.numel():
        return
    none = torch.isneginf(wanted_lse)
    assert torch.equal(torch.isneginf(lse), none)
    assert not out.transpose(0, 1)[none].any()
    error = (eager(q, k, v, **options).double() - wanted).abs()
    scale = v.double().abs().amax() if v.numel() else 0.0
    of_scores = options.get("softcap", 0.0) * 2.0**-11 if q.device.type == "cuda" and q.dtype != torch.float32 else 0.0
    bound = 2 * error.amax() + torch.finfo(q.dtype).eps * wanted.abs() + (2.0**-18 + 2 * of_scores) * scale
    assert_close(out, wanted, bound)
    size = wanted_lse.masked_fill(none, 0.0).abs() + 8
    assert_close(lse.masked_fill(none, 0.0), wanted_lse.masked_fill(none, 0.0), lse_bound(q, k, options) * size + of_scores)


def lse_bound(q, k, options) -> float:
    """float32 sums, relative to the largest score; on a CPU in half precision, PyTorch's own exponential has 14 bits."""
    if q.device.type == "cpu" and q.dtype != torch.float32:
        return 2.0**-14
    scale = q.shape[-1] ** -0.5 if options.get("scale") is None else abs(options["scale"])
    largest = q.double().norm(dim=-1).amax() * k.double().norm(dim=-1).amax() * scale if k.numel() else 0.0
    return 2.0**-20 * (1 + float(largest))


def assert_close(found, wanted, bound) -> None:
    error = (found.double() - wanted).abs()
    good = error <= bound
    if not good.all():
        where = tuple(torch.nonzero(~good)[0].tolist())
        count = f"{int((~good).sum())} of {good.numel()} elements are off"
        raise AssertionError(f"{count}; the first, {list(where)}: {found[where].item()}, exactly {wanted[where].item()}")


def qkv(batch, rows, keys, heads, kv_heads, dim, dim_v=None, dtype=torch.float32, device="cpu", seed=0):
    q = normal(batch, rows, heads, dim, dtype=dtype, device=device, seed=seed)
    k = normal(batch, keys, kv_heads, dim, dtype=dtype, device=device, seed=seed + 1)
    return q, k, normal(batch, keys, kv_heads, dim_v or dim, dtype=dtype, device=device, seed=seed + 2)


def check_dense(q, k, v, run=None, **options: Any):
    out, lse = (run or tileops.flash_attention)(q, k, v, **options)
    assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert (out.is_contiguous() and lse.is_contiguous()) or run
    for b in range(q.shape[0]):
        assert_attention(out[b], lse[b], q[b], k[b], v[b], **options)
    return out, lse


def offsets(lengths, device="cpu", dtype=torch.int32):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def cut(packed, lengths, dim=0):
    return packed.split(list(lengths), dim)


def paged(tensors, page, device, width=None, poison=math.nan, unused=-1, pages=None, seed=0, index=torch.int32):
    """Sequences [S, ...] -> cache [pages, page, ...], block_table and cache_seqlens, pages in random order; what no sequence
    owns holds `poison`, entries past the end hold `unused`."""
    lengths = [t.shape[0] for t in tensors]
    counts = [-(-length // page) for length in lengths]
    total = (sum(counts) + 3) if pages is None else pages
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    cache = torch.full((total, page, *tensors[0].shape[1:]), poison, dtype=tensors[0].dtype, device=device)
    table = torch.full((len(lengths), max([*counts, 1]) + 1 if width is None else width), unused, dtype=index)
    for b, tensor in enumerate(tensors):
        for w in range(counts[b]):
            table[b, w] = order.pop()
            part = tensor[w * page : (w + 1) * page]
            cache[int(table[b, w]), : part.shape[0]] = part
    return cache, table.to(device), torch.tensor(lengths, dtype=index, device=device)


OPTIONS = {  # of one call; sinks: True stands for random ones
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_left": 3},
    "band": {"window_left": 2, "window_right": 1},
    "right": {"window_right": 2},
    "one key": {"window_left": 0, "window_right": 0},
    "softcap": {"softcap": 1.5, "causal": True},
    "sinks": {"sinks": True},
    "all": {"causal": True, "window_left": 5, "softcap": 5.0, "sinks": True, "scale": 0.3},
    "scale 0": {"scale": 0.0},
    "scale below 0": {"scale": -1.0, "causal": True},
}


def options(name, heads, device="cpu", dtype=torch.float32):
    chosen = dict(OPTIONS[name])
    if chosen.get("sinks"):
        chosen["sinks"] = normal(heads, dtype=dtype, device=device, seed=77)
    return chosen


@functools.cache
def halves():
    return DTYPES[1:]
