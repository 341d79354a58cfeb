"""The kernels of mla_decode that were compiled, against float64: page sizes, splits, layouts, captured graphs. On a GPU.

compute-sanitizer --tool racecheck python -m pytest tests/ops/test_mla_decode_kernels.py -k small     for a sanitizer
"""

import json
import math
from pathlib import Path

import pytest
import torch
from ops_reference import normal
from test_mla_decode import SCALE, check, requests

import tileops

MANIFEST = Path(tileops.__file__).parent.parent / "csrc" / "generated" / "manifest.json"
EVERY = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.exists() else {}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
TARGETS = ("sm_90a", "portable") if HOPPER else ("portable",)  # of the kernels that run here, those that are taken first
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
OURS = {name: kernel for name, kernel in EVERY.items() if kernel["op"] in ("mla_decode", "mla_decode_few")}
KERNELS = {name: kernel for name, kernel in OURS.items() if kernel["target"] in TARGETS}
PAGES = {0: (64,), 64: (128, 192), 1: (16, 32, 1, 2, 4, 8, 48)}  # by the unit of a kernel; of float16 the first one only
CASES = {
    f"{name}-page{page}": (name, page)
    for name, kernel in KERNELS.items()
    for page in (*PAGES[kernel["unit"]], *[64] * (kernel["target"] == "portable"))[: 1 if kernel["x"] == "float16" else None]
}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not KERNELS, reason="no mla_decode kernel in this build"),
]


@pytest.fixture(autouse=True, params=CASES)
def case(request):
    """Each kernel by its name, with pages of some size, and a context that stays usable."""
    with tileops.knobs.scope(force=CASES[request.param][0], require_native=True):
        yield CASES[request.param]
    torch.cuda.synchronize()


@pytest.fixture
def dtype(case):
    return DTYPES[KERNELS[case[0]]["x"]]


@pytest.fixture
def page(case):
    return case[1]


@pytest.fixture
def first(case):
    """The kernel is one that the dispatcher takes by itself on this GPU."""
    if KERNELS[case[0]]["target"] != TARGETS[0]:
        pytest.skip("kernels of warp groups come first")


def queries(batch, rows, heads, dtype):
    return normal(batch, rows, heads, 576, dtype=dtype, device="cuda")


@pytest.mark.parametrize("heads, rows", [(1, 1), (16, 1), (16, 8), (33, 3), (64, 2), (128, 1), (128, 4)])
def test_heads_and_queries(dtype, page, heads, rows):
    tokens, cache = requests([130, 0, 1, 64, 65, 700], page, dtype, "cuda")
    for causal in (True, False):
        check(queries(6, rows, heads, dtype), tokens, cache, causal=causal)


LENGTHS = [20000], [1, 5000, 0, 63, 640], [64] * 140, [4096, 4160, 4224], [1000] * 66 + [9000]


@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
@pytest.mark.parametrize("splits", [0, 1, 2, 1000])
def test_splits(dtype, page, lengths, splits):
    """Requests in one piece and in many, more of them than parts and fewer, however many pieces are allowed."""
    tokens, cache = requests(lengths, page, dtype, "cuda")
    check(queries(len(lengths), 1, 20, dtype), tokens, cache, num_splits=splits)


def test_small(dtype, page):
    tokens, cache = requests([130, 0, 1000], page, dtype, "cuda")
    check(queries(3, 2, 40, dtype), tokens, cache)


def test_repeats_are_equal(dtype, page):  # B57
    tokens, cache = requests([3000, 100, 0, 5000], page, dtype, "cuda")
    q = queries(4, 2, 64, dtype)
    first = check(q, tokens, cache)
    for _ in range(20):
        assert all(map(torch.equal, tileops.mla_decode(q, *cache, SCALE), first))


def test_results_in_place(first, dtype, page):
    """With strides that the kernel writes, and with strides that it does not."""
    tokens, cache = requests([300, 70], page, dtype, "cuda")
    heads = KERNELS[tileops.knobs.current().force]["tile"][0] // 2  # so many that this kernel is taken without being asked for
    q = queries(2, 2, heads, dtype)
    expected = check(q, tokens, cache)
    for width, order in ((520, (0, 1, 2)), (512, (0, 2, 1))):
        sizes, back = [(2, 2, heads)[i] for i in order], map(order.index, range(3))
        out = torch.full((*sizes, width), torch.nan, dtype=dtype, device="cuda")[..., :512].permute(*back, 3)
        lse = torch.full((2, heads, 2, 2), torch.nan, device="cuda")[..., 0]
        with tileops.knobs.scope(force="", require_native=False):
            found = tileops.mla_decode(q, *cache, SCALE, out=out, lse=lse)
        assert found[0] is out and all(map(torch.equal, found, expected))


def test_one_graph_serves_changing_lengths(dtype, page):  # B55
    """Captured with short lengths, replayed with long and with none: nothing of the plan is frozen."""
    batch, q = 5, queries(5, 1, 128, dtype)
    tokens, (cache, table, _) = requests([9000] * batch, page, dtype, "cuda")
    lengths = torch.full((batch,), 64, dtype=torch.int32, device="cuda")
    tileops.mla_decode(q, cache, table, lengths, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tileops.mla_decode(q, cache, table, lengths, SCALE)
    for now in ([64] * 5, [1, 4096, 0, 65, 9000], [9000] * 5, [0] * 5):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        expected = tileops.mla_decode(q, cache, table, lengths, SCALE)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        if now[1] == 4096:
            check(q, [t[:n] for t, n in zip(tokens, now, strict=True)], (cache, table, lengths))


def test_the_kernel_reads_the_cache_once_and_wastes_few_rows(dtype):
    _, cache = requests([70], 64, dtype, "cuda")
    with tileops.knobs.scope(force="", require_native=False):
        for heads, rows, bm in ((1, 1, 16), (16, 1, 16), (8, 2, 16), (17, 1, 32), (16, 2, 32), (33, 1, 64), (128, 1, 64)):
            variant = tileops.explain("mla_decode", queries(1, rows, heads, dtype), *cache, SCALE).variant
            wanted = [kernel["tile"][0] for name, kernel in KERNELS.items() if name == variant]
            mine = [k for k in KERNELS.values() if k["target"] == TARGETS[0] and DTYPES[k["x"]] == dtype]
            of_dtype = sorted(k["tile"][0] for k in mine)
            assert wanted == [min([tile for tile in of_dtype if tile >= bm], default=of_dtype[-1])], (heads, rows)


def test_what_no_kernel_serves_says_why(dtype, page):
    q, (_, cache) = queries(1, 1, 16, dtype), requests([70], page, dtype, "cuda")
    with tileops.knobs.scope(force="", require_native=False):
        assert "serves" in tileops.explain("mla_decode", q, *cache, SCALE).reason
        shifted = torch.nn.functional.pad(cache[0], (0, 7))[..., :576]
        assert "aligned" in tileops.explain("mla_decode", q, shifted, *cache[1:], SCALE).reason
        for scale in (-1.0, 0.0):
            assert "scale" in tileops.explain("mla_decode", q, *cache, scale).reason


def test_the_page_size_chooses(first, case, dtype, page):
    q, (_, cache) = queries(1, 1, 16, dtype), requests([70], page, dtype, "cuda")
    with tileops.knobs.scope(force="", require_native=False):
        assert tileops.explain("mla_decode", q, *cache, SCALE).variant == case[0]


def test_the_page_size_changes_nothing(case, dtype, page):
    """The same tokens in pages of 64: the same sums in the same order."""
    q, lengths = queries(5, 2, 24, dtype), [130, 0, 5000, 64, 1]
    found = tileops.mla_decode(q, *requests(lengths, page, dtype, "cuda")[1], SCALE)
    with tileops.knobs.scope(force=case[0] if KERNELS[case[0]]["target"] == "portable" else ""):
        other = tileops.mla_decode(q, *requests(lengths, 64, dtype, "cuda")[1], SCALE)
    assert all(map(torch.equal, found, other))


@pytest.mark.parametrize("unused", [-1, 2**30])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nothing_but_the_tokens_in_use_counts(dtype, page, poison, unused):  # B03, B29, B35
    """Rows padded for a captured graph have no tokens; in front of the replay, none have."""
    lengths, q = [130, 0, 0, 64, 77], queries(5, 2, 16, dtype)
    clean = tileops.mla_decode(q, *requests(lengths, page, dtype, "cuda", poison=0.0, unused=0)[1], SCALE)
    tokens, cache = requests(lengths, page, dtype, "cuda", poison=poison, unused=unused, width=200)
    assert all(map(torch.equal, check(q, tokens, cache), clean))
    now, graph = torch.zeros_like(cache[2]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = tileops.mla_decode(q, *cache[:2], now, SCALE)
    graph.replay()
    assert not out.any() and (lse == -math.inf).all()
    now.copy_(cache[2])
    graph.replay()
    assert torch.equal(out, clean[0]) and torch.equal(lse, clean[1])


def test_nan_of_one_request_stays_there(dtype, page):  # B03
    tokens, cache = requests([100, 64, 65], page, dtype, "cuda")
    q = queries(3, 1, 4, dtype)
    clean = check(q, tokens, cache)
    cache[0][cache[1][1, 0].long(), min(7, page - 1)] = math.nan
    out, lse = tileops.mla_decode(q, *cache, SCALE)
    assert torch.isnan(out[1]).all() and torch.isnan(lse[1]).all()
    assert torch.equal(out[::2], clean[0][::2]) and torch.equal(lse[::2], clean[1][::2])


@pytest.mark.parametrize("length", [1, 16, 17, 63, 64, 65, 100, 255, 257])
def test_equal_weights(dtype, page, length):  # B31, B33
    tokens, cache = requests([length], page, dtype, "cuda")
    for causal, scale in ((True, SCALE), (False, 0.3)):
        _, lse = check(torch.zeros_like(queries(1, 1, 4, dtype)), tokens, cache, scale=scale, causal=causal)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(length)), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0])
def test_scale_is_taken_as_it_is(dtype, page, scale):  # B40
    tokens, cache = requests([9, 133], page, dtype, "cuda")
    check(queries(2, 2, 3, dtype), tokens, cache, scale=scale)


def test_rows_that_see_no_key_beside_split_ones(dtype, page):  # B35
    tokens, cache = requests([3, 0, 9000], page, dtype, "cuda")
    out, lse = check(queries(3, 8, 2, dtype), tokens, cache)
    assert not out[0, :5].any() and (lse[0, :, :5] == -math.inf).all() and (lse[1] == -math.inf).all()


@pytest.mark.big
@pytest.mark.parametrize("layers", [1, 8])
def test_pages_past_31_bits(dtype, page, layers):  # B18
    """More elements than 2^31; the same as a layer of eight."""
    pages = 58300 * 64 // page // layers
    cache = torch.zeros(pages, layers, page, 576, dtype=dtype, device="cuda")[:, layers // 2]
    cache[0] = cache[-1] = queries(1, page, 1, dtype)[0, :, 0]
    q, used = queries(1, 1, 16, dtype), torch.tensor([page], dtype=torch.int32, device="cuda")
    first, last = (torch.tensor([[n]], dtype=torch.int32, device="cuda") for n in (0, pages - 1))
    near, far = (tileops.mla_decode(q, cache, table, used, SCALE) for table in (first, last))
    assert all(map(torch.equal, near, far)) and near[0].any()
