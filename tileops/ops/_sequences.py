"""The layouts of attention (a batch, packed sequences, pages) as batches of padded sequences, and back."""
from collections.abc import Callable

import torch
from torch import Tensor

from ._attention import Gradients, Options, Sequences, attend, attend_backward, batches

# The sequences of a slice of the batch.
Load = Callable[[slice], Sequences]


class Packed:
    """Sequences one behind the other, [total, ...]: sequence b is rows offsets[b] to offsets[b] + lengths[b] - 1."""

    def __init__(self, offsets: Tensor, longest: int, used: Tensor | None = None):
        offsets = offsets.long()
        self.starts, lengths = offsets[:-1], offsets.diff()
        if used is not None:
            lengths = torch.minimum(lengths, used.long())
        self.lengths = lengths.clamp(0, longest)
        self.longest = longest

    def rows(self, part: slice) -> tuple[Tensor, Tensor]:
        """Row numbers [B, longest] of the sequences in `part`, and which of them are meant."""
        position = torch.arange(self.longest, device=self.starts.device)
        return self.starts[part, None] + position, position < self.lengths[part, None]

    def pad(self, packed: Tensor, part: slice) -> Tensor:
        """[total, H, D] -> [B, longest, H, D], with zeros past the ends."""
        rows, meant = self.rows(part)
        if not packed.shape[0]:
            return packed.new_zeros(*rows.shape, *packed.shape[1:])
        return _take(packed, torch.where(meant, rows, 0), meant)

    def put(self, padded: Tensor, packed: Tensor, part: slice) -> None:
        """Writes [B, longest, ...] into [total + 1, ...], the last row of which takes what is past the ends."""
        rows, meant = self.rows(part)
        index = torch.where(meant, rows, packed.shape[0] - 1)
        packed.index_copy_(0, index.flatten(), padded.flatten(0, 1).to(packed.dtype))


class Pages:
    """Keys in pages: token j of sequence b is slot j % page of page table[b, j // page], for j < lengths[b]. Entries and slots
    past the length are not looked at, whatever they hold."""

    def __init__(self, table: Tensor, lengths: Tensor, page: int):
        self.table, self.page = table, page
        capacity = table.shape[1] * page
        self.lengths = lengths.long().clamp(0, capacity)
        self.longest = _longest(self.lengths, capacity)

    def pad(self, cache: Tensor, part: slice) -> Tensor:
        """[pages, page, ...] -> [B, longest, ...], with zeros past the ends."""
        lengths = self.lengths[part, None]
        position = torch.arange(self.longest, device=cache.device)
        meant = position < lengths
        if not cache.shape[0] or not self.page:
            return cache.new_zeros(*meant.shape, *cache.shape[2:])
        columns = -(-self.longest // self.page)
        first = torch.arange(columns, device=cache.device) * self.page
        pages = torch.where(first < lengths, self.table[part, :columns].long(), 0)
        return _take(cache, pages, None).flatten(1, 2)[:, : self.longest].masked_fill_(_like(meant, cache.dim()), 0)


def _take(source: Tensor, index: Tensor, meant: Tensor | None) -> Tensor:
    """source[index], with zeros where it is not meant."""
    taken = source.index_select(0, index.flatten()).unflatten(0, index.shape)
    return taken if meant is None else taken.masked_fill_(_like(meant, taken.dim()), 0)


def _like(meant: Tensor, rank: int) -> Tensor:
    """The complement of [B, S], to be masked in a tensor of `rank` dimensions."""
    return ~meant.reshape(*meant.shape, *(1 for _ in range(rank - 2)))


def _longest(lengths: Tensor, capacity: int) -> int:
    """Tables are often far wider than what is in use, so the lengths are read; under stream capture they cannot be."""
    if not lengths.numel() or (lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
        return capacity
    return min(capacity, int(lengths.max()))


def cost(rows: int, keys: int, heads: int, kv_heads: int, dims: int) -> int:
    """Elements of one padded sequence, or of its scores for one row: what `batches` limits. dims: of q and of v together."""
    return max(keys * max(heads, kv_heads * dims), rows * heads * dims)


def attend_all(load: Load, count: int, elements: int, o: Options) -> tuple[Tensor, Tensor]:
    """out [B, Sq, H, Dv] and lse [B, H, Sq] of `count` sequences, each of so many elements."""
    parts = [attend(load(part), o) for part in batches(count, elements)]
    return parts[0] if len(parts) == 1 else tuple(map(torch.cat, zip(*parts)))


def attend_packed(load: Load, queries: Packed, q: Tensor, dim_v: int, elements: int, o: Options) -> tuple[Tensor, Tensor]:
    """out [total, H, Dv] and lse [H, total] of packed queries; a row that no sequence has sees no key."""
    total, heads, _ = q.shape
    out = q.new_zeros(total + 1, heads, dim_v)
    lse = q.new_full((total + 1, heads), -torch.inf, dtype=torch.float32)
    for part in batches(queries.starts.shape[0], elements):
        out_part, lse_part = attend(load(part), o)
        queries.put(out_part, out, part)
        queries.put(lse_part.mT, lse, part)
    return out[:-1], lse[:-1].mT


def backward_packed(
    load: Load, queries: Packed, keys: Packed, tensors: tuple[Tensor, ...], grads: tuple[Tensor, Tensor | None],
    elements: int, o: Options,
) -> Gradients:  # fmt: skip
    """Gradients of packed q, k and v; `tensors` are q, k, v, out and lse [H, total], `grads` those of out and lse."""
    q, k, v, out, lse = tensors
    dout, dlse = grads
    results = [torch.zeros(t.shape[0] + 1, *t.shape[1:], dtype=torch.float32, device=t.device) for t in (q, k, v)]
    dsinks = None if o.sinks is None else torch.zeros(o.sinks.shape, dtype=torch.float32, device=q.device)
    for part in batches(queries.starts.shape[0], elements):
        by_row = lambda t, part=part: queries.pad(t.mT, part).mT  # noqa: E731  [H, total] -> [B, H, Sq]
        lse_part = by_row(lse)
        grad = attend_backward(
            load(part), o, queries.pad(out, part), lse_part, queries.pad(dout, part), None if dlse is None else by_row(dlse)
        )
        for side, value, result in zip((queries, keys, keys), grad[:3], results):
            side.put(value, result, part)
        if dsinks is not None:
            dsinks = dsinks + grad.sinks
    return Gradients(*(result[:-1] for result in results), dsinks)
