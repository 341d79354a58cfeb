"""The kernels of attention over requests of different lengths and paged caches that were compiled, against float64. On a GPU.

compute-sanitizer --tool racecheck python -m pytest tests/ops/test_attention_lengths_kernels.py -k small     for a sanitizer
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from attention_reference import assert_attention, cut, offsets, paged
from ops_reference import normal

import tileops

MANIFEST = Path(tileops.__file__).parent.parent / "csrc" / "generated" / "manifest.json"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
TARGETS = ("sm_90a", "portable") if HOPPER else ("portable",)  # of the kernels that run here
BUILT = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.exists() else {}
EVERY = {name: k for name, k in BUILT.items() if k["target"] in TARGETS}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
VARLEN = {name: k for name, k in EVERY.items() if k["op"] == "flash_attention" and k["lengths"] and not k["paged"]}
PAGED = {name: k for name, k in EVERY.items() if k["op"] == "flash_attention" and k["paged"]}
DECODE = {name: k for name, k in EVERY.items() if k["op"] == "attention_decode"}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not (VARLEN and PAGED and DECODE), reason="no such kernels in this build"),
]


@pytest.fixture(autouse=True)
def usable():
    """A context that stays usable."""
    yield
    torch.cuda.synchronize()


def forced(name):
    return tileops.knobs.scope(force=name, require_native=True)


def masks(kernel, heads):
    """What the kernel serves; of one with a window, masks of every kind."""
    if not kernel.get("window", True):
        return [{"causal": kernel["causal"]}]
    more = {"softcap": 5.0} if kernel["softcap"] else {}
    sinks = {"sinks": normal(heads, dtype=torch.float32, device="cuda", seed=77)} if kernel.get("sinks", True) else {}
    bn = kernel["tile"][1]
    kinds = [{"causal": True, "window_left": 40}, {"window_left": bn - 1, "window_right": 70}, {"causal": True}, {}]
    return [kind | more | (sinks if n % 2 else {}) for n, kind in enumerate(kinds)]


def dims(kernel):
    """The tile's, and fewer columns."""
    d, dv = kernel["tile"][2], kernel["head_dim_v"]
    return [(d, dv), (d - 8, dv - 16)]


def ragged_dims(kernel):
    """Whose rows do not end at 16 bytes, so that they are copied: of all, of queries and keys, of values and results."""
    d, dv = kernel["tile"][2], kernel["head_dim_v"]
    return [(d - 3, dv - 5), (d - 1, dv), (d, dv - 8 + 1), (33, 1)]


def ragged(lengths, heads, dim, dtype, seed):
    return [normal(n, heads, dim, dtype=dtype, device="cuda", seed=seed + i) for i, n in enumerate(lengths)]


LENGTHS = [
    ([130, 0, 1, 600, 7], [130, 40, 300, 700, 0]),
    ([200, 513], [50, 513]),
]


@pytest.mark.parametrize("name", VARLEN)
def test_varlen(name):
    kernel, heads, kv_heads = VARLEN[name], 6, 2
    dtype = DTYPES[kernel["x"]]
    for (rows, keys), (d, dv) in zip(itertools.cycle(LENGTHS), [*dims(kernel), *ragged_dims(kernel)]):
        q, k, v = (
            ragged(n, h, m, dtype, s) for n, h, m, s in ((rows, heads, d, 1), (keys, kv_heads, d, 30), (keys, kv_heads, dv, 60))
        )
        for options in masks(kernel, heads):
            places = offsets(rows, "cuda"), offsets(keys, "cuda"), max(rows), max(keys)
            with forced(name):
                out, lse = tileops.flash_attention_varlen(*map(torch.cat, (q, k, v)), *places, **options)
            for n, (o, sums) in enumerate(zip(cut(out, rows), cut(lse, rows, 1), strict=True)):
                assert_attention(o, sums, q[n], k[n], v[n], **options)


def check_paged(name, kernel, rows, keys, page, heads, kv_heads, d, dv, options, packed):
    dtype = DTYPES[kernel["x"]]
    q = ragged(rows, heads, d, dtype, 1)
    k, v = ragged(keys, kv_heads, d, dtype, 30), ragged(keys, kv_heads, dv, dtype, 60)
    k_cache, table, used = paged(k, page, "cuda")
    cache = k_cache, paged(v, page, "cuda")[0], table, used
    with forced(name):
        if packed:
            more = {"cu_seqlens_q": offsets(rows, "cuda"), "max_seqlen_q": max(rows)}
            out, lse = tileops.flash_attention_paged(torch.cat(q), *cache, **more, **options)
            parts = zip(cut(out, rows), cut(lse, rows, 1), strict=True)
        else:
            parts = zip(*tileops.flash_attention_paged(torch.stack(q), *cache, **options), strict=True)
    for n, (o, sums) in enumerate(parts):
        assert_attention(o, sums, q[n], k[n], v[n], **options)


@pytest.mark.parametrize("page", [1, 2, 16, 48, 256])
@pytest.mark.parametrize("name", PAGED)
def test_paged(name, page):
    """Chunks of prefill: packed, and as many queries for each request."""
    kernel = PAGED[name]
    for (rows, keys), (d, dv) in zip(LENGTHS, dims(kernel), strict=True):
        for options in masks(kernel, 6)[:: 1 if page == 16 else 3]:
            check_paged(name, kernel, rows, keys, page, 6, 2, d, dv, options, True)
    check_paged(name, kernel, [150] * 3, [400, 150, 30], page, 6, 2, *dims(kernel)[0], masks(kernel, 6)[0], False)
    for n, (d, dv) in enumerate(ragged_dims(kernel)):
        check_paged(name, kernel, *LENGTHS[n % 2], page, 6, 2, d, dv, masks(kernel, 6)[-1], True)
        check_paged(name, kernel, [1] * 3, [400, 150, 30], page, 6, 2, d, dv, masks(kernel, 6)[-1], False)


@pytest.mark.parametrize("page", [1, 2, 16, 48, 64, 256])
@pytest.mark.parametrize("name", DECODE)
def test_decode(name, page):
    kernel = DECODE[name]
    keys = [3000, 0, 1, 64, 130]
    for queries, heads, kv_heads in ((1, 8, 2), (1, 40, 8), (5, 8, 2), (2, 3, 3), (16, 4, 1)):
        for options in masks(kernel | {"causal": True}, heads)[:: 1 if page == 16 else 2]:
            for d, dv in dims(kernel):
                check_paged(name, kernel, [queries] * 5, keys, page, heads, kv_heads, d, dv, options, False)
    check_paged(name, kernel, [1] * 5, keys, page, 8, 2, *dims(kernel)[0], masks(kernel, 8)[-1], True)


@pytest.mark.parametrize("splits", [0, 1, 2, 1000])
@pytest.mark.parametrize("lengths", [[20000], [1, 5000, 0, 63, 640], [64] * 140, [1000] * 66 + [9000]], ids=len)
@pytest.mark.parametrize("target", TARGETS)
def test_splits(lengths, splits, target):
    name = next(n for n, k in DECODE.items() if k["target"] == target and k["tile"][2] == 128 and not k["softcap"])
    options = {"causal": True, "num_splits": splits, "sinks": normal(8, dtype=torch.float32, device="cuda", seed=7)}
    check_options = {key: value for key, value in options.items() if key != "num_splits"}
    dtype = DTYPES[DECODE[name]["x"]]
    q, k, v = (ragged(n, h, 128, dtype, s) for n, h, s in (([1] * len(lengths), 8, 1), (lengths, 2, 30), (lengths, 2, 60)))
    k_cache, table, used = paged(k, 16, "cuda")
    with forced(name):
        out, lse = tileops.flash_attention_paged(torch.stack(q), k_cache, paged(v, 16, "cuda")[0], table, used, **options)
    for n in range(len(lengths)):
        assert_attention(out[n], lse[n], q[n], k[n], v[n], **check_options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("queries", [1, 200])
def test_small_graph_of_changing_lengths(queries, target):  # B55
    """One captured graph, as the first call of all, serves other lengths."""
    lengths = [[64, 64, 64], [900, 1, 0], [5, 700, 65]]
    k = ragged([1000] * 3, 2, 64, torch.bfloat16, 3)
    v = ragged([1000] * 3, 2, 64, torch.bfloat16, 9)
    k_cache, table, used = paged(k, 16, "cuda")
    v_cache, q = paged(v, 16, "cuda")[0], normal(3, queries, 4, 64, dtype=torch.bfloat16, device="cuda")
    with tileops.knobs.scope(force=target, require_native=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = tileops.flash_attention_paged(q, k_cache, v_cache, table, used, causal=True)
        for now in lengths:
            used.copy_(torch.tensor(now))
            graph.replay()
            again = tileops.flash_attention_paged(q, k_cache, v_cache, table, used, causal=True)
            assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
            for n, count in enumerate(now):
                assert_attention(out[n], lse[n], q[n], k[n][:count], v[n][:count], causal=True)
