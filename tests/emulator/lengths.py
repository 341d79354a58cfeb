"""flash_attention over requests of different lengths against float64: arrays, grid and exact results, as Problem has them."""

import math

import numpy as np
import torch
from attention_reference import exact as exact_attention

from tileops_dsl.emulate_rows import decode, encode

LENGTHS = [  # queries and keys of each request
    ([130, 0, 1, 60], [130, 40, 300, 61]),  # no queries; one query of many keys; as many queries as keys, and one fewer
    ([70, 140, 3], [0, 20, 3]),  # no keys; more queries than keys
    ([300], [520]),
]


def tiles_of(q_lens, k_lens, rows: int) -> np.ndarray:
    """As csrc/kernels/attention_tiles.cu lists them: first query of all, first row, queries, first key, keys; 0, 0, 0."""
    starts = [np.cumsum([0, *lengths]) for lengths in (q_lens, k_lens)]
    found = [
        (starts[0][n] + row, row, sq, starts[1][n], sk, 0, 0, 0)
        for n, (sq, sk) in enumerate(zip(q_lens, k_lens, strict=True))
        for row in reversed(range(0, sq, rows))
    ]
    return np.array(found or [(0,) * 8], np.int32).reshape(-1, 8)


def lengths_problem(row, q_lens, k_lens, h=2, hk=1, ctas=2, dims=None, **options):
    """options: as exact() of attention_reference.py has them. Behind the last key of a request NaN, if the next one has none."""
    (bm, _, d), dv = row.tile, row.head_dim_v
    d, dv = dims or (d, dv)
    rng, total_q, total_k = np.random.default_rng(sum(q_lens) + sum(k_lens)), sum(q_lens), sum(k_lens) + 1
    shapes = {"q": (total_q, h, d), "k": (total_k, hk, d), "v": (total_k, hk, dv), "out": (total_q, h, dv)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays["k"][-1] = arrays["v"][-1] = np.nan
    arrays = {name: encode(array, row.x)[None].swapaxes(1, 2) for name, array in arrays.items()}
    q, k, v = (torch.from_numpy(decode(arrays[name], row.x)[0]).transpose(0, 1) for name in "qkv")
    given, at = {"causal": row.causal} | options, (0, 0)
    out, lse = np.empty((total_q, h, dv)), np.empty((h, total_q))
    sinks = given.get("sinks")
    for sq, sk in zip(q_lens, k_lens, strict=True):
        queries, keys = slice(at[0], at[0] + sq), slice(at[1], at[1] + sk)
        of_sinks = {"sinks": None if sinks is None else torch.from_numpy(sinks)}
        found = exact_attention(q[queries], k[keys], v[keys], **given | of_sinks)
        out[queries], lse[:, queries] = (part.numpy() for part in found)
        at = at[0] + sq, at[1] + sk
    tiles = tiles_of(q_lens, k_lens, bm)
    count = sum(-(-sq // bm) for sq in q_lens)
    cap, left, right = given.get("softcap", 0.0), given.get("window_left", -1), given.get("window_right", -1)
    arrays |= {"lse": np.empty((1, h, total_q), np.float32), "sinks": sinks, "sinks_dtype": 0 if sinks is None else 3}
    arrays |= {"tiles": tiles, "tile_count": np.array([count], np.int32), "most_tiles": len(tiles)}
    arrays |= {"batches": 1, "heads": h, "kv_heads": hk, "sq": total_q, "sk": total_k, "dim_v": dv}
    arrays |= {"scale_log2": (cap or d**-0.5) * math.log2(math.e), "cap_scale": d**-0.5 / cap if cap else 0.0}
    arrays["window_left"] = max(k_lens) if left < 0 else min(left, max(k_lens))
    arrays["window_right"] = 0 if given["causal"] else max(q_lens) if right < 0 else min(right, max(q_lens))
    out, lse = out[None].swapaxes(1, 2), lse[None]
    exact = {"out": (out, out, 2 * 2**-8 * np.abs(out).max()), "lse": (lse, lse, 1e-3)}
    return arrays, (ctas, 1), exact
