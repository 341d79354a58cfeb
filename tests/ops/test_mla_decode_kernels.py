"""The kernels of mla_decode that were compiled, against float64: splits, layouts, captured graphs. On a GPU.

compute-sanitizer --tool racecheck python -m pytest tests/ops/test_mla_decode_kernels.py -k small     for a sanitizer
"""

import json
from pathlib import Path

import pytest
import torch
from attention_reference import paged
from ops_reference import normal
from test_mla_decode import SCALE, check, requests

import tileops

MANIFEST = Path(tileops.__file__).parent.parent / "csrc" / "generated" / "manifest.json"
EVERY = json.loads(MANIFEST.read_text())["kernels"] if MANIFEST.exists() else {}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
KERNELS = {name: kernel for name, kernel in EVERY.items() if kernel["op"] in ("mla_decode", "mla_decode_few")}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not KERNELS, reason="no mla_decode kernel in this build"),
]


@pytest.fixture(autouse=True, params=KERNELS)
def dtype(request):
    """Each kernel by its name, and a context that stays usable."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90a runs on capability 9.0 only")
    with tileops.knobs.scope(force=request.param, require_native=True):
        yield DTYPES[KERNELS[request.param]["x"]]
    torch.cuda.synchronize()


def queries(batch, rows, heads, dtype):
    return normal(batch, rows, heads, 576, dtype=dtype, device="cuda")


@pytest.mark.parametrize("heads, rows", [(1, 1), (16, 1), (16, 8), (33, 3), (64, 2), (128, 1), (128, 4)])
def test_heads_and_queries(dtype, heads, rows):
    tokens, cache = requests([130, 0, 1, 64, 65, 700], 64, dtype, "cuda")
    for causal in (True, False):
        check(queries(6, rows, heads, dtype), tokens, cache, causal=causal)


LENGTHS = [20000], [1, 5000, 0, 63, 640], [64] * 140, [4096, 4160, 4224], [1000] * 66 + [9000]


@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
@pytest.mark.parametrize("splits", [0, 1, 2, 1000])
def test_splits(dtype, lengths, splits):
    """Requests in one piece and in many, more of them than parts and fewer, however many pieces are allowed."""
    tokens, cache = requests(lengths, 64, dtype, "cuda")
    check(queries(len(lengths), 1, 20, dtype), tokens, cache, num_splits=splits)


def test_small(dtype):
    tokens, cache = requests([130, 0, 1000], 64, dtype, "cuda")
    check(queries(3, 2, 40, dtype), tokens, cache)


def test_repeats_are_equal(dtype):
    tokens, cache = requests([3000, 100, 0, 5000], 64, dtype, "cuda")
    q = queries(4, 2, 64, dtype)
    first = check(q, tokens, cache)
    for _ in range(20):
        assert all(map(torch.equal, tileops.mla_decode(q, *cache, SCALE), first))


def test_results_in_place(dtype):
    """With strides that the kernel writes, and with strides that it does not."""
    tokens, cache = requests([300, 70], 64, dtype, "cuda")
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


def test_one_graph_serves_changing_lengths(dtype):
    """Captured with short lengths, replayed with long and with none: nothing of the plan is frozen."""  # B55
    batch, q = 5, queries(5, 1, 128, dtype)
    tokens, (cache, table, _) = requests([9000] * batch, 64, dtype, "cuda")
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
            of_dtype = sorted(k["tile"][0] for k in KERNELS.values() if DTYPES[k["x"]] == dtype)
            assert wanted == [min([tile for tile in of_dtype if tile >= bm], default=of_dtype[-1])], (heads, rows)


def test_what_no_kernel_serves_says_why(dtype):
    tokens, cache = requests([70], 64, dtype, "cuda")
    q = queries(1, 1, 16, dtype)
    with tileops.knobs.scope(force="", require_native=False):
        assert "serves" in tileops.explain("mla_decode", q, *cache, SCALE).reason
        pages = paged(tokens, 16, "cuda")
        assert "page 16" in tileops.explain("mla_decode", q, *pages, SCALE).reason
        shifted = torch.nn.functional.pad(cache[0], (0, 7))[..., :576]
        assert "aligned" in tileops.explain("mla_decode", q, shifted, *cache[1:], SCALE).reason
        assert "scale" in tileops.explain("mla_decode", q, *cache, -1.0).reason
