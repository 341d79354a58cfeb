"""MLA decode against float64: arrays, grid and exact results of a problem, as Problem of library.py has them."""

import math
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "golden"))  # behind this folder, which has a test_kernels.py as well

import deals

from tileops_dsl.emulate_rows import decode, encode, error_bound

ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-22}
LOG2E = math.log2(math.e)
OVERHEAD = 5  # of a piece, as the programs say
DECODES = [  # lengths, heads, sq, causal, parts
    ([130, 0], 40, 2, 1, 1),  # heads that fill no tile, two tiles; a row sees one key fewer
    ([700], 64, 1, 1, 3),  # one request in several parts
    ([0, 1, 63, 64, 65, 130], 16, 1, 1, 2),  # several requests in a part
    ([1], 16, 2, 1, 2),  # a row without a key, a part without work
    ([300, 64, 5, 900], 24, 3, 0, 5),
    ([130, 200, 129], 5, 1, 1, 1),
]
PAGES = {0: [64], 1: [16, 32, 1, 8, 48, 2, 64, 4], 64: [128, 64, 192]}  # by the unit of a kernel


def few(rows: int) -> list:
    """The same, and others, of at most so many heads and queries."""
    calls = [(lengths, min(heads, rows // sq), sq, *more) for lengths, heads, sq, *more in DECODES]
    return [*calls, ([65, 0, 200], 1, 1, 1, 2), ([190, 64], 3, 1, 0, 1), ([130, 70], rows // 4, 3, 1, 2)]


COMBINES = [  # pieces of each request, queries, heads
    ([0, 3, 0, 2, 4], 2, 7),
    ([9, 0, 17, 8], 1, 3),  # more than are loaded together
    ([2], 3, 1),
    ([0, 0], 1, 2),
]


def softmax_times(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of rows that may see no key: out 0, lse -inf."""
    peak = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e30)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights @ v / np.where(total, total, 1.0), (peak + np.log(total))[..., 0]


def paged(row, lengths, heads, sq, causal, spread, page) -> tuple[dict, list]:
    """The arrays that describe a call, and each request's scores and keys.

    Pages in any order; behind each request's length NaN, and no page of its table is valid behind its last one. `spread` of the
    scores: from 6 or so on maxima rise by so much that the output is rescaled.
    """
    rng, (_, block, d, _) = np.random.default_rng(sum(lengths) + heads), row.tile
    n, rows, used = len(lengths), sq * heads, [-(-length // page) for length in lengths]
    pages, places = sum(used) + 1, rng.permutation(sum(used) + 1)
    cache, q = (rng.standard_normal(shape) for shape in ((pages, page, d), (n, rows, d)))
    table = np.full((n, max(*used, 1)), 2**30, np.int32)
    table[:, 1::2] = -1
    for request, length in enumerate(lengths):
        table[request, : used[request]], places = np.split(places, [used[request]])
        cache[table[request, length // page : used[request]], length % page :] = np.nan
    cache[places] = np.nan
    arrays = {"q": encode(q * spread, row.x), "kv_cache": encode(cache, row.x)}
    q, cache, requests = decode(arrays["q"], row.x), decode(arrays["kv_cache"], row.x), []
    for request, length in enumerate(lengths):
        kv = cache[table[request, : used[request]]].reshape(-1, d)[:length]
        seen = np.arange(length) <= (np.arange(rows) // heads)[:, None] + (length - sq if causal else length)
        requests.append((np.where(seen, q[request] @ kv.T * d**-0.5, -np.inf), kv))
    arrays |= {"block_table": table, "cache_seqlens": np.array(lengths, np.int32)}
    arrays |= {"n": n, "rows": rows, "pages": pages, "page": page, "table": table.shape[1], "heads": heads, "sq": sq}
    arrays |= {"unit": min(page & -page, block), "inverse": -(-(2**32) // page)}
    return arrays | {"causal": causal, "scale_log2": d**-0.5 * LOG2E}, requests


def bounded(row, out, lse) -> tuple[tuple, tuple]:
    """As Problem has exact results: of P, rounded to the dtype of x. What is NaN is not written."""
    return (out, out, 2 * ROUNDING[row.x] * np.abs(np.nan_to_num(out)).max() + 1e-4), (lse, lse, 1e-3)


def standard_problem(row, lengths, heads, sq=1, causal=1, ctas=2, spread=1.0):
    """Of mla_decode_standard."""
    arrays, requests = paged(row, lengths, heads, sq, causal, spread, row.tile[1])
    bm, _, _, dv = row.tile
    out, lse = map(np.stack, zip(*(softmax_times(scores, kv[:, :dv]) for scores, kv in requests), strict=True))
    arrays |= {"out": encode(out, row.x), "lse": lse.astype(np.float32)}
    grid = max(min(ctas, len(lengths) * -(-sq * heads // bm)), row.cluster), 1
    return arrays, grid, dict(zip(("out", "lse"), bounded(row, out, lse), strict=True))


def decode_problem(row, lengths, heads, sq=1, causal=1, parts=1, spread=3.0, page=64):
    """Of mla_decode: whole requests go to out and lse, pieces of others to partial and partial_lse."""
    arrays, requests = paged(row, lengths, heads, sq, causal, spread, page)
    (bm, block, _, dv), n, rows = row.tile, len(lengths), sq * heads
    blocks = [max(1, -(-length // block)) for length in lengths]
    out, lse = np.full((n, rows, dv), np.nan), np.full((n, rows), np.nan)
    partial, partial_lse = np.full((2, parts, rows, dv), np.nan), np.full((2, parts, rows), np.nan)
    for part, request, first, end in deals.spans(blocks, parts, OVERHEAD):
        scores, kv = requests[request]
        own = slice(first * block, end * block)
        found = softmax_times(scores[:, own], kv[own, :dv])
        if (first, end) == (0, blocks[request]):
            out[request], lse[request] = found
        else:
            at = int(first == 0), part
            partial[at], partial_lse[at] = found[0], found[1] * LOG2E
    lse = lse.reshape(n, sq, heads).swapaxes(1, 2).copy()  # queries side by side, as the kernel wants them
    exact = dict(zip(("out", "lse", "partial", "partial_lse"), bounded(row, out, lse) + bounded(row, partial, partial_lse)))
    arrays |= {name: encode(values[0], row.x if name == "out" else "float32") for name, values in exact.items()}
    arrays |= {"parts": parts, "most_pieces": 0, "pieces": np.full((parts, 4), -9, np.int32)}
    return arrays, (-(-rows // bm), parts), exact


def combine_problem(row, counts, sq, heads):
    """Of mla_combine: requests in so many pieces, some of them without a key. That of 0 pieces has been written before."""
    rng, parts, cols = np.random.default_rng(sum(counts)), sum(counts) + 1, row.tile[1]
    begins = np.cumsum([0, *counts]).astype(np.int32)  # the parts in which requests begin
    partial = rng.standard_normal((2, parts, sq, heads, cols)).astype(np.float32)
    of_pieces = (4 * rng.standard_normal(partial.shape[:4])).astype(np.float32)
    of_pieces[:, 0, :, 1::2] = of_pieces[:, 3:5, 0, :3] = of_pieces[:, 5:9, 1:] = -np.inf
    partial[of_pieces == -np.inf] = 0.0
    out, lse = np.full((len(counts), sq, heads, cols), np.nan), np.full((len(counts), heads, sq), np.nan).swapaxes(1, 2)
    for request, (first, count) in enumerate(zip(begins, counts, strict=False)):
        if count:
            own = [1] + [0] * (count - 1), range(first, first + count)
            weights = of_pieces[own][..., None].astype(np.float64).transpose(1, 2, 3, 0) / LOG2E
            found = softmax_times(weights, partial[own].transpose(1, 2, 0, 3))
            out[request], lse[request] = found[0][:, :, 0], found[1][:, :, 0]
    pieces = np.array([(n, begins[n], counts[n], 0) for n in reversed(range(len(counts)))], np.int32)  # in any order
    arrays = {"partial": partial, "partial_lse": of_pieces, "pieces": pieces}
    arrays |= {"out": encode(out, row.y), "lse": lse.astype(np.float32)}
    arrays |= {"parts": parts, "requests": len(counts), "batch": len(counts), "outer": sq, "inner": heads, "cols": cols}
    exact = {"out": (out, out, error_bound(row, out) + 2e-6), "lse": (lse, lse, 2e-6)}
    return arrays, (-(-heads // row.rows_per_block), sq, len(counts)), exact
