"""Steps of mla_decode, in the order of their first use: macros, which stand in the program where they are called."""

import tileops_dsl.language as T

SLACK = 8.0  # a maximum that is exceeded by no more stays, and P is at most 2^8: o is rarely rescaled


def beyond(row, heads, sq, causal):
    """How many keys fewer than all a row sees, as a number <= 0: those of the tokens behind its own."""
    return T.if_then_else(causal != 0, T.min(row // heads + 1 - sq, 0), 0)


def limits(limit, first, length, end, heads, sq, causal):
    """Keys that each row sees, in the piece of the request."""
    for r in T.Parallel(*limit.shape):
        limit[r] = T.min(length + beyond(first + r, heads, sq, causal), end)


def blocks(config, table, request, i, end, length, page, unit, inverse):
    """Where the cache has blocks i and i + 1 of a request: page and row each. Of page -1, beyond the end, TMA reads zeros."""
    if not config.unit:  # a block is a page
        page0, other = T.let("page0", table[request, i]), table[request, T.min(i + 1, end - 1)]
        return (page0, 0), (T.let("page1", T.if_then_else(i + 1 < end, other, -1)), 0)
    block, stop = config.tile[1], T.let("stop", T.min(length, end * config.tile[1]))
    token = i * block + (T.box_row(unit) if config.unit < block else 0)
    return tuple(in_page(n, table, request, token + n * block, stop, page, inverse) for n in (0, 1))


def in_page(n, table, request, token, stop, page, inverse):
    """The same of a token, without a division: names end in n."""
    index = T.cast(T.cast(T.max(T.min(token, stop - 1), 0), "int64") * inverse // 2**32, "int32")  # token // page
    number = T.if_then_else(token < stop, table[request, index], -1)
    return T.let(f"page{n}", number), T.let(f"row{n}", token - index * page)


def load(tensor, place, tile, *columns):
    """Columns of a tile of the tensor."""
    for piece in columns:
        T.tma_copy(tensor[(*place, piece.start)], tile[:, piece], eviction_policy="evict_first")


def scores(q_tile, q_rope, k, s, rope, *columns):
    """s = q k^T, columns in the order in which they land. Behind the first, all earlier products of the group are done."""
    first = T.wgmma_gemm(q_rope, k[:, rope], s, transpose_B=True, clear_accum=True)
    T.wait(first, pending=2)
    T.wait(first, pending=1)
    for piece in columns:
        done = T.wgmma_gemm(q_tile[:, piece], k[:, piece], s, transpose_B=True)
    T.wait(done)


def maximum(s, top, key, limit, fewest, numbers=()):
    """top = the maxima of the rows, without the keys from `limit` on; `numbers` of limits() if it is to be computed here."""
    with T.If(key + s.shape[1] > fewest):
        if numbers:  # where registers are too few to keep it
            limits(limit, *numbers)
        for r, c in T.Parallel(*s.shape):
            s[r, c] = T.if_then_else(key + c < limit[r], s[r, c], -T.infinity())
    T.reduce_max(s, top)


def copy_each(*pairs):
    for src, dst in pairs:
        T.copy(src, dst)


def raise_maximum(top, peak, factor, scale_log2):
    """peak = the maximum so far, or nearly, in powers of 2; factor = what earlier sums take."""
    for r in T.Parallel(*peak.shape):
        factor[r] = peak[r]
        peak[r] = T.if_then_else(top[r] * scale_log2 > peak[r] + SLACK, top[r] * scale_log2, peak[r])
        factor[r] = T.exp2(factor[r] - peak[r])


def take(s, p, sums, peak, factor, scale_log2):
    """s = P, against the maximum; the row sums take it; P in the other dtype."""
    exponentials(s, peak, scale_log2)
    scale(sums, factor)
    T.reduce_sum(s, sums, clear=False, partial=True)
    assign(p, s)


def exponentials(s, peak, scale_log2):
    """s = P, against the maximum."""
    for r, c in T.Parallel(*s.shape):
        s[r, c] = T.exp2(s[r, c] * scale_log2 - peak[r])


def scale(vector, factor):
    """The elements, each times its factor."""
    for r in T.Parallel(*vector.shape):
        vector[r] = vector[r] * factor[r]


def times(tile, factor):
    """The rows of the tile, each times its factor."""
    for r, c in T.Parallel(*tile.shape):
        tile[r, c] = tile[r, c] * factor[r]


def rescale(o, factor):
    """The same, in the warps that have a row whose factor is not 1."""
    with T.If(T.any_of(factor, lambda v: v != 1.0)):
        times(o, factor)


def assign(to, tile):
    """The tile in the other's dtype."""
    for r, c in T.Parallel(*tile.shape):
        to[r, c] = tile[r, c]


def clear_tail(k, columns, valid):
    """Rows of a page beyond the length may hold anything, and 0 * NaN is NaN."""
    with T.If(valid < k.shape[0]):
        T.fill(k[T.max(valid, 0) :, columns], 0.0)


def normalise(o, total, other, peak, factor):
    """o / (total + other), 0 for a row that saw no key; factor = the log-sum-exp, base 2."""
    for r in T.Parallel(*total.shape):
        total[r] = total[r] + other[r]
        factor[r] = peak[r] + T.log2(total[r])
        total[r] = T.if_then_else(total[r] > 0.0, T.reciprocal(total[r]), 0.0)
    times(o, total)
