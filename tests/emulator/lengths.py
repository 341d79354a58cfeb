"""flash_attention over requests of different lengths against float64: arrays, grid and exact results, as Problem has them."""

import math
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "ops"))

import deals
from attention_reference import exact as exact_attention
from mla import LOG2E, bounded, softmax_times

from tileops_dsl.emulate_rows import decode, encode

OVERHEAD = 2  # of a piece, as attention_decode says
LENGTHS = [  # queries and keys of each request
    ([130, 0, 1, 60], [130, 40, 300, 61]),  # no queries; one query of many keys; as many queries as keys, and one fewer
    ([70, 140, 3], [0, 20, 3]),  # no keys; more queries than keys
    ([300], [520]),
]


def tiles_of(q_lens, k_lens, rows: int, is_paged: bool) -> np.ndarray:
    """As csrc/kernels/attention_tiles.cu lists them: first row of q, and of its request, ..."""
    starts = [np.cumsum([0, *lengths]) for lengths in (q_lens, k_lens)]
    found = [
        (starts[0][n] + row, row, sq, n if is_paged else starts[1][n], sk, starts[0][n] + row, 0, 0)
        for n, (sq, sk) in enumerate(zip(q_lens, k_lens, strict=True))
        for row in reversed(range(0, sq, rows))
    ]
    return np.array(found or [(0,) * 8], np.int32).reshape(-1, 8)


def paged(caches, k_lens, page: int, rng) -> tuple[list, np.ndarray]:
    """Keys and values [keys, heads, D] in pages of a cache, in any order, and the table; slots that nobody owns hold NaN."""
    of_pages = [-(-length // page) for length in k_lens]
    count, table = sum(of_pages) + 1, np.full((len(k_lens), max(*of_pages, 1)), 2**30, np.int32)
    places, at = rng.permutation(count), np.cumsum([0, *k_lens])
    table[:, 1::2] = -1
    out = [np.full((count * page, *cache.shape[1:]), np.nan) for cache in caches]
    for request, length in enumerate(k_lens):
        table[request, : of_pages[request]], places = np.split(places, [of_pages[request]])
        slots = table[request, np.arange(length) // page] * page + np.arange(length) % page
        for into, cache in zip(out, caches, strict=True):
            into[slots] = cache[at[request] : at[request] + length]
    return [cache.reshape(count, page, *cache.shape[1:]) for cache in out], table


def of_pages(row, page: int) -> dict:
    """Numbers of a paged kernel."""
    unit = math.gcd(page, row.tile[1])
    return {"page": page, "unit": unit & -unit, "inverse": -(-(2**32) // page)}


def lengths_problem(row, q_lens, k_lens, h=2, hk=1, ctas=2, dims=None, page=0, **options):
    """options: as exact() of attention_reference.py has them. Behind the last key of all NaN."""
    (bm, _, d), dv = row.tile, row.head_dim_v
    d, dv = dims or (d, dv)
    rng, total_q, total_k = np.random.default_rng(sum(q_lens) + sum(k_lens)), sum(q_lens), sum(k_lens) + 1
    shapes = {"q": (total_q, h, d), "k": (total_k, hk, d), "v": (total_k, hk, dv), "out": (total_q, h, dv)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays["k"][-1] = arrays["v"][-1] = np.nan
    wide = {name: decode(encode(array, row.x), row.x) for name, array in arrays.items()}
    arrays = {name: encode(array, row.x)[None].swapaxes(1, 2) for name, array in arrays.items()}
    q, k, v = (torch.from_numpy(wide[name]) for name in "qkv")
    given, at = {"causal": row.causal} | options, (0, 0)
    out, lse = np.empty((total_q, h, dv)), np.empty((h, total_q))
    sinks = given.get("sinks")
    for sq, sk in zip(q_lens, k_lens, strict=True):
        queries, keys = slice(at[0], at[0] + sq), slice(at[1], at[1] + sk)
        of_sinks = {"sinks": None if sinks is None else torch.from_numpy(sinks)}
        found = exact_attention(q[queries], k[keys], v[keys], **given | of_sinks)
        out[queries], lse[:, queries] = (part.numpy() for part in found)
        at = at[0] + sq, at[1] + sk
    tiles = tiles_of(q_lens, k_lens, bm, page > 0)
    table = None
    if page:
        caches, table = paged([wide["k"], wide["v"]], k_lens, page, rng)
        arrays |= {name: encode(cache, row.x).swapaxes(1, 2) for name, cache in zip("kv", caches, strict=True)}
        arrays |= of_pages(row, page) | {"pages": len(caches[0]), "table": table.shape[1]}
    arrays |= {"block_table": table, "requests": len(q_lens)}
    count = sum(-(-sq // bm) for sq in q_lens)
    cap, left, right = given.get("softcap", 0.0), given.get("window_left", -1), given.get("window_right", -1)
    arrays |= {"lse": np.empty((1, h, total_q), np.float32), "sinks": sinks, "sinks_dtype": 0 if sinks is None else 3}
    arrays |= {"tiles": tiles, "tile_count": np.array([count], np.int32), "most_tiles": len(tiles)}
    arrays |= {"batches": 1, "heads": h, "kv_heads": hk, "sq": total_q, "sk": total_k}
    arrays |= {"head_dim": d, "head_dim_v": dv}
    arrays |= {"scale_log2": (cap or d**-0.5) * math.log2(math.e), "cap_scale": d**-0.5 / cap if cap else 0.0}
    arrays["unscale"] = 1 / arrays["scale_log2"]
    arrays["window_left"] = max(k_lens) if left < 0 else min(left, max(k_lens))
    arrays["window_right"] = 0 if given["causal"] else max(q_lens) if right < 0 else min(right, max(q_lens))
    out, lse = out[None].swapaxes(1, 2), lse[None]
    exact = {"out": (out, out, 2 * 2**-8 * np.abs(out).max()), "lse": (lse, lse, 1e-3)}
    return arrays, (ctas, 1), exact


DECODES = [  # lengths, queries, heads of a group, page, parts, options
    ([300, 0, 64, 1], 1, 4, 16, 3, {}),
    ([700], 2, 8, 64, 5, {"causal": True}),
    ([130, 257, 3], 1, 3, 1, 2, {"window_left": 40, "sinks": True}),
    ([200, 5], 3, 2, 48, 4, {"causal": True, "sinks": True}),  # a row with two keys fewer; a request of few
    ([2], 4, 1, 8, 1, {"causal": True, "window_left": 0, "sinks": True}),  # rows that see no key
]


def decode_problem(row, lengths, queries, heads, page, parts, options, kv_heads=2, dims=None):
    """Whole items go to out and lse, pieces of others to partial and partial_lse. Slots that no request owns hold NaN."""
    (bm, bn, d), dv = row.tile, row.head_dim_v
    d, dv = dims or (d, dv)
    rng, n, rows, at = np.random.default_rng(sum(lengths) + page), len(lengths), queries * heads, np.cumsum([0, *lengths])
    q = encode(rng.standard_normal((n, kv_heads, rows, d)), row.x)
    k, v = (decode(encode(rng.standard_normal((at[-1], kv_heads, m)), row.x), row.x) for m in (d, dv))
    caches, table = paged([k, v], lengths, page, rng)
    sinks = np.linspace(-2, 3, kv_heads * heads).astype(np.float32) if options.get("sinks") else None
    cap, left, scale = options.get("softcap", 0.0), options.get("window_left", -1), d**-0.5
    behind = left if left >= 0 else max(lengths)
    starts = [max(length - queries - behind, 0) // bn for length in lengths]
    blocks = [max(1, -(-length // bn) - start) for length, start in zip(lengths, starts, strict=True)]
    out, lse = np.full((n, kv_heads, rows, dv), np.nan), np.full((n, kv_heads, rows), np.nan)
    partial, partial_lse = np.full((2, parts, rows, dv), np.nan), np.full((2, parts, rows), np.nan)
    for part, item, first, end in deals.spans([count for count in blocks for _ in range(kv_heads)], parts, OVERHEAD):
        request, head = divmod(item, kv_heads)
        count, length = blocks[request], lengths[request]
        own = slice((starts[request] + first) * bn, (starts[request] + end) * bn)
        keys, values = (cache[at[request] : at[request] + length, head] for cache in (k, v))
        token = length - queries + np.arange(rows) // heads
        scores = decode(q, row.x)[request, head] @ keys.T * scale
        scores = np.tanh(scores / cap) * cap if cap else scores
        key = np.arange(length)
        seen = (key <= token[:, None]) if options.get("causal") else np.ones((rows, length), bool)
        seen &= key >= token[:, None] - left if left >= 0 else True
        of_sinks = np.full(rows, -np.inf)
        if sinks is not None and first == 0:
            of_sinks = np.where(seen.any(-1), np.tile(sinks.reshape(kv_heads, heads)[head], queries), -np.inf)
        scores = np.concatenate([np.where(seen, scores, -np.inf)[:, own], of_sinks[:, None]], -1)
        found = softmax_times(scores, np.concatenate([values[own], np.zeros((1, dv))]))
        if (first, end) == (0, count):
            out[request, head], lse[request, head] = found
        else:
            place = int(first == 0), part
            partial[place], partial_lse[place] = found[0], found[1] * LOG2E
    exact = dict(zip(("out", "lse", "partial", "partial_lse"), bounded(row, out, lse) + bounded(row, partial, partial_lse)))
    arrays = {name: encode(values[0], row.x if name == "out" else "float32") for name, values in exact.items()}
    of_rows = None if sinks is None else np.stack([np.tile(s, queries) for s in sinks.reshape(kv_heads, heads)])
    maps = {name: encode(cache, row.x).swapaxes(1, 2) for name, cache in zip("kv", caches, strict=True)}
    arrays |= {"q": q, "sinks": of_rows, "sinks_dtype": 0 if sinks is None else 3, "block_table": table} | maps
    arrays |= {"cache_seqlens": np.array(lengths, np.int32), "pieces": np.full((parts, 4), -9, np.int32), "most_pieces": 0}
    arrays |= {"n": n, "kv_heads": kv_heads, "rows": rows, "pages": len(caches[0]), "table": table.shape[1], "parts": parts}
    arrays |= of_pages(row, page) | {"head_dim": d, "dim_v": dv, "shared_by": heads}
    arrays |= {"scale_log2": (cap or scale) * LOG2E, "cap_scale": scale / cap if cap else 0.0, "window_left": behind}
    arrays |= {"window_right": 0 if options.get("causal") else queries}
    return arrays, (-(-rows // bm), parts), exact
