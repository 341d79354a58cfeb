"""Attention from aten operators, in tiles of query rows: float32 scores of one tile at a time, forward and backward.

A row sees an interval of keys: causal masks, windows and lengths all bound it from the left or the right. So a mask is two
numbers for each row, computed on the device where lengths are there; nothing here waits for the device.
"""
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._matmul import product, tensor_core_dtype, without_autocast

SCORES = 2**25  # of a tile, at most: 128 MiB in float32, and a few temporaries of that size
FAR = 2**40  # more keys than there are, yet sums of a few do not overflow 64 bits


@dataclass(frozen=True)
class Options:
    """Of one call. window_left and window_right are FAR where unlimited; causal is window_right = 0."""

    scale: float
    window_left: int
    window_right: int
    softcap: float  # 0: none
    sinks: Tensor | None  # [H]


def options_of(
    q: Tensor, causal: bool, scale: float | None, window_left: int, window_right: int, softcap: float, sinks: Tensor | None
) -> Options:
    left, right = (FAR if window < 0 else min(window, FAR) for window in (window_left, window_right))
    return Options(q.shape[-1] ** -0.5 if scale is None else scale, left, 0 if causal else right, softcap, sinks)


class Sequences(NamedTuple):
    """Sequences of one batch, padded to [B, Sq, H, D], [B, Sk, Hk, D] and [B, Sk, Hk, Dv]; their lengths are [B, 1], or None
    where all are whole."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_lengths: Tensor | None = None
    k_lengths: Tensor | None = None


class _Tile(NamedTuple):
    """Rows first to last of all heads, against the keys that any of them may see."""

    rows: slice
    keys: slice
    visible: Tensor  # [B or 1, 1, 1, rows, keys]
    empty: Tensor  # [B or 1, 1, 1, rows]: rows that see no key


def fake_gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Shapes and dtypes of the gradients of q, k, v and, if there are any, sinks (else an empty tensor)."""
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def batches(count: int, scores: int) -> Iterator[slice]:
    """Slices of `count` sequences, each few enough for a tile where one sequence has `scores` scores for one row of queries."""
    step = max(1, SCORES // max(scores, 1))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def attend(s: Sequences, o: Options) -> tuple[Tensor, Tensor]:
    """out [B, Sq, H, Dv] in q's dtype and lse [B, H, Sq] in float32."""
    batch, rows, heads, _ = s.q.shape
    out = s.q.new_zeros(batch, rows, heads, s.v.shape[-1])
    lse = s.q.new_full((batch, heads, rows), -math.inf, dtype=torch.float32)
    with without_autocast(s.q):
        k, v = _by_head(s.k), _by_head(s.v)
        for tile in _tiles(s, o):
            scores = _scores(_rows_by_head(s.q, s, tile.rows), k[:, :, tile.keys], o, s)
            scores.masked_fill_(~tile.visible, -math.inf)
            top = scores.amax(-1, keepdim=True)
            sinks = _sinks_by_head(o, s)
            top = top if sinks is None else torch.maximum(top, sinks)
            top = torch.where(top == -math.inf, 0.0, top)
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            total = total if sinks is None else total + torch.exp(sinks - top)
            mixed = product(_narrow(weights, v).flatten(2, 3), v[:, :, tile.keys]).unflatten(2, weights.shape[2:4])
            mixed = mixed / torch.where(total == 0, 1.0, total)
            out[:, tile.rows] = _by_row(mixed.masked_fill(tile.empty.unsqueeze(-1), 0.0))
            lse_tile = (top + torch.log(total)).squeeze(-1).masked_fill(tile.empty, -math.inf)
            lse[:, :, tile.rows] = lse_tile.flatten(1, 2)
    return out, lse


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None  # float32


def attend_backward(s: Sequences, o: Options, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Gradients:
    """The gradients, those of q, k and v in float32 and padded like them; differentiable where gradients are on.

    With P = exp(S - lse): dV = P^T dO and dS = P * (dO V^T - rowsum(dO * out) + dlse); a sink is a score whose value is 0.
    """
    with without_autocast(s.q):
        along = (dout.float() * out.float()).sum(-1).mT  # [B, H, Sq]
        along = along if dlse is None else along - dlse
        finite_lse = lse.masked_fill(lse == -math.inf, 0.0)
        k, v = _by_head(s.k), _by_head(s.v)
        dq = torch.zeros_like(s.q, dtype=torch.float32)
        dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        for tile in _tiles(s, o):
            q_rows, dout_rows = _rows_by_head(s.q, s, tile.rows), _rows_by_head(dout, s, tile.rows)
            keys, values = k[:, :, tile.keys], v[:, :, tile.keys]
            scores = _scores(q_rows, keys, o, s)
            at_rows = lambda t, rows=tile.rows: t[:, :, rows].unflatten(1, _groups(s)).unsqueeze(-1)  # noqa: E731
            weights = torch.exp(scores.masked_fill(~tile.visible, -math.inf) - at_rows(finite_lse))
            d_weights = product(dout_rows, values.mT).unflatten(2, weights.shape[2:4])
            d_scores = weights * (d_weights - at_rows(along)) * o.scale
            if o.softcap:
                d_scores = d_scores * (1 - (scores / o.softcap).square())
            weights, d_scores = (_narrow(t, k).flatten(2, 3) for t in (weights, d_scores))
            dq[:, tile.rows] = _by_row(product(d_scores, keys).unflatten(2, (-1, scores.shape[3])))
            dk[:, :, tile.keys] += product(d_scores.mT, q_rows)
            dv[:, :, tile.keys] += product(weights.mT, dout_rows)
        dsinks = None
        if o.sinks is not None:
            sink_weights = torch.exp(o.sinks.float()[:, None] - finite_lse).masked_fill(lse == -math.inf, 0.0)
            dsinks = -(sink_weights * along).sum((0, 2))
        return Gradients(dq, dk.transpose(1, 2), dv.transpose(1, 2), dsinks)


def _tiles(s: Sequences, o: Options) -> Iterator[_Tile]:
    """Keys that no row of a tile sees are left out where the lengths are known here."""
    batch, rows, heads, _ = s.q.shape
    keys = s.k.shape[1]
    known = s.q_lengths is None and s.k_lengths is None
    step = max(1, SCORES // max(batch * heads * keys, 1))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        first, last = 0, keys
        if known:
            first = max(0, start + keys - rows - o.window_left)
            last = min(keys, stop + keys - rows + o.window_right)
        if first < last and batch and heads:
            yield _tile(s, o, slice(start, stop), slice(first, last))


def _tile(s: Sequences, o: Options, rows: slice, keys: slice) -> _Tile:
    row = torch.arange(rows.start, rows.stop, device=s.q.device)
    key = torch.arange(keys.start, keys.stop, device=s.q.device)
    q_lengths = s.q.shape[1] if s.q_lengths is None else s.q_lengths
    k_lengths = torch.full((1, 1), s.k.shape[1], device=s.q.device) if s.k_lengths is None else s.k_lengths
    last = row + (k_lengths - q_lengths)  # [B or 1, rows]: the key that the row stands on
    low = (last - o.window_left).clamp(min=0)
    high = torch.minimum(last + (o.window_right + 1), k_lengths)
    if s.q_lengths is not None:
        high = torch.where(row < s.q_lengths, high, 0)
    visible = (key >= low.unsqueeze(-1)) & (key < high.unsqueeze(-1))
    return _Tile(rows, keys, visible[:, None, None], (high <= low)[:, None, None])


def _scores(q_rows: Tensor, keys: Tensor, o: Options, s: Sequences) -> Tensor:
    """[B, Hk, H / Hk, rows, keys], scaled and capped, not masked."""
    scores = product(q_rows, keys.mT).mul_(o.scale).unflatten(2, (_groups(s)[1], -1))
    return o.softcap * torch.tanh(scores / o.softcap) if o.softcap else scores


def _groups(s: Sequences) -> tuple[int, int]:
    """The heads of k, and how many heads of q share one of them."""
    return s.k.shape[2], s.q.shape[2] // s.k.shape[2]


def _by_head(t: Tensor) -> Tensor:
    """[B, S, H, D] -> [B, H, S, D] in the dtype that products take."""
    return t.transpose(1, 2).to(tensor_core_dtype(t)).contiguous()


def _rows_by_head(t: Tensor, s: Sequences, rows: slice) -> Tensor:
    """[B, Sq, H, D] -> [B, Hk, H / Hk * rows, D]: a head of k meets the rows of all its heads of q in one product."""
    return t[:, rows].unflatten(2, _groups(s)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_row(t: Tensor) -> Tensor:
    """[B, Hk, H / Hk, rows, D] -> [B, rows, H, D]."""
    return t.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _sinks_by_head(o: Options, s: Sequences) -> Tensor | None:
    return None if o.sinks is None else o.sinks.float().reshape(1, *_groups(s), 1, 1)


def _narrow(t: Tensor, other: Tensor) -> Tensor:
    """float32 weights in the dtype of what they are multiplied with."""
    return t.to(other.dtype)
