"""For some operators a small problem with ragged edges: (tensors that its program reads, its scalars, results in float64)."""

import math

import numpy as np

from tileops_dsl.emulate_rows import decode, encode, reference
from tileops_dsl.kernels.flash_attention_config import AttentionConfig
from tileops_dsl.kernels.gemm_config import GemmConfig
from tileops_dsl.kernels.row_config import RowConfig


def _stored(rng: np.random.Generator, shape: tuple, dtype: str, order=None) -> tuple[np.ndarray, np.ndarray]:
    """Random values as they are stored, and as float64; `order`: of the axes in memory, outermost first."""
    order = order or range(len(shape))
    array = encode(rng.standard_normal([shape[axis] for axis in order]), dtype).transpose(np.argsort(order))
    return array, decode(array, dtype)


def _rows(config: RowConfig) -> tuple[int, int]:
    """A CTA and a little more; the last access of a row is not full, or not there."""
    rows, columns = config.tile
    more = config.vector if config.lanes_on_rows else 1
    return rows + more, (2 * columns if config.looped else columns) - (config.column_vector if columns > 8 else 0)


def _along_rows(config: RowConfig, rng: np.random.Generator):
    return _stored(rng, (1, *_rows(config)), config.x, (0, 2, 1) if config.lanes_on_rows else None)


def softmax(config: RowConfig, rng: np.random.Generator):
    x, exact = _along_rows(config, rng)
    return (x,), {}, (reference("softmax", exact),)


def rms_norm(config: RowConfig, rng: np.random.Generator):
    x, exact = _along_rows(config, rng)
    weight, exact_weight = _stored(rng, exact.shape[2:], config.x)
    scalars = {"eps": 1e-6, "round_before_weight": 0} | ({"weight_offset": 1.0} if config.op == "rms_norm" else {})
    return (x, weight), scalars, (reference(config.op, exact, exact_weight, **scalars),)


def gemm(config: GemmConfig, rng: np.random.Generator):
    """relu(a b + bias) + residual."""
    m, n, k = 304, 264, 200
    a, exact_a = _stored(rng, (1, k, m) if config.transpose_a else (1, m, k), config.x)
    b, exact_b = _stored(rng, (1, n, k) if config.transpose_b else (1, k, n), config.x)
    (bias, exact_bias), (residual, exact_residual) = _stored(rng, (n,), "float32"), _stored(rng, (1, m, n), config.y)
    product = (np.swapaxes(exact_a, 1, 2) if config.transpose_a else exact_a) @ (
        np.swapaxes(exact_b, 1, 2) if config.transpose_b else exact_b
    )
    return (a, b, bias, residual), {"activation": 1}, (np.maximum(product + exact_bias, 0) + exact_residual,)


def flash_attention(config: AttentionConfig, rng: np.random.Generator):
    """Two heads of queries, one of keys; where the kernel has them a window of 100 keys, sinks of 0.5, a softcap of 2."""
    sq, sk, (_, _, d), dv = 200, 333, config.tile, config.head_dim_v
    shapes = ((1, 2, sq, d), (1, 1, sk, d), (1, 1, sk, dv))
    (q, exact_q), (k, exact_k), (v, exact_v) = (_stored(rng, shape, config.x, (0, 2, 1, 3)) for shape in shapes)
    scale, cap = d**-0.5, 2.0
    sinks = np.lib.stride_tricks.as_strided(np.full(2, 0.5, np.float32), (2, sq), (4, 0)) if config.sinks else None
    scores = exact_q @ np.swapaxes(exact_k, 2, 3) * scale
    scores = cap * np.tanh(scores / cap) if config.softcap else scores
    distance = np.arange(sk) - np.arange(sq)[:, None] - (sk - sq)
    if config.causal or config.window:
        scores = np.where((distance > 0) | (config.window & (distance < -100)), -np.inf, scores)
    weights = np.exp(scores)
    total = weights.sum(-1) + (math.exp(0.5) if config.sinks else 0)
    scalars = {"scale_log2": (cap if config.softcap else scale) * math.log2(math.e), "cap_scale": scale / cap}
    scalars |= {"unscale": 1 / scalars["scale_log2"], "window_left": 100, "window_right": 0, "section": 1}
    return (q, k, v, sinks), scalars, (weights @ exact_v / total[..., None], np.log(total))


PROBLEMS = {
    "gemm": gemm,
    "flash_attention": flash_attention,
    "softmax": softmax,
    "rms_norm": rms_norm,
    "rms_norm_silu": rms_norm,
}
