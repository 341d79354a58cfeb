"""The golden kernels against float64, and against themselves: 50 runs without a changed bit."""

import functools
from pathlib import Path

import flash_attention
import gemm
import launch
import mla_decode
import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no GPU of capability 9.0")]
HERE = Path(__file__).parent
# (M, N, K): one tile, ragged in each dimension, less than a K step, more tiles than the GPU has clusters.
GEMMS = [(256, 256, 64), (128, 256, 128), (1, 8, 8), (300, 264, 200), (1000, 1016, 1000), (4096, 8192, 256), (2048, 1024, 4096)]


def normal(rng, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=rng, device="cuda", dtype=dtype)


def assert_close(found, exact, eager):
    """At most twice the error of the same-dtype eager result, plus one unit in the last place of the largest value."""
    floor = exact.abs().max().item() * 2.0**-9
    limit = 2 * (eager.double() - exact).abs().max().item() + floor
    assert (found.double() - exact).abs().max().item() <= limit


@pytest.fixture(scope="module")
def gemm_kernel():
    return launch.load(HERE / "gemm.cu", gemm.NAME)


@pytest.mark.parametrize("m, n, k", GEMMS)
def test_gemm(gemm_kernel, rng, m, n, k):
    a, b = normal(rng, m, k), normal(rng, n, k)
    assert_close(gemm.gemm(gemm_kernel, a, b), a.double() @ b.double().T, a @ b.T)


FUNCTIONS = {
    "none": lambda v: v,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("with_residual", [False, True])
def test_gemm_epilogue(gemm_kernel, rng, activation, bias_dtype, with_residual):
    m, n, k = 600, 1000, 192
    a, b = normal(rng, m, k), normal(rng, n, k)
    bias = None if bias_dtype is None else normal(rng, n, dtype=bias_dtype)
    residual = normal(rng, m, n) if with_residual else None

    def formula(dtype):
        v = a.to(dtype) @ b.to(dtype).T + (0 if bias is None else bias.to(dtype))
        return FUNCTIONS[activation](v) + (0 if residual is None else residual.to(dtype))

    assert_close(gemm.gemm(gemm_kernel, a, b, bias, activation, residual), formula(torch.float64), formula(torch.bfloat16))


def test_gemm_is_deterministic(gemm_kernel, rng):
    a, b = normal(rng, 1024, 2048), normal(rng, 2048, 2048)
    first = gemm.gemm(gemm_kernel, a, b)
    assert all(torch.equal(gemm.gemm(gemm_kernel, a, b), first) for _ in range(50))


def test_gemm_of_one_hot_rows_copies_columns(gemm_kernel, rng):
    b = normal(rng, 512, 512)
    assert torch.equal(gemm.gemm(gemm_kernel, torch.eye(512, device="cuda", dtype=b.dtype), b), b.T)


# (B, Sq, Sk, H, Hk): one tile, one key, ragged rows and keys, grouped heads, rows that see no key, more tiles than CTAs.
ATTENTIONS = [
    (1, 128, 128, 1, 1),
    (1, 1, 1, 1, 1),
    (1, 77, 333, 2, 2),
    (3, 300, 200, 3, 1),
    (2, 256, 512, 4, 2),
    (2, 1024, 1000, 16, 4),
    (1, 130, 5, 1, 1),
    (4, 512, 512, 16, 16),
]


def attention(q, k, v, causal, dtype):
    """out [B, Sq, H, D] and lse [B, H, Sq], all in `dtype`."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        ends = torch.arange(q.shape[2], device="cuda")[:, None] + k.shape[2] - q.shape[2]
        scores = scores.masked_fill(torch.arange(k.shape[2], device="cuda") > ends, -torch.inf)
    return (torch.nan_to_num(scores.softmax(-1)) @ v).transpose(1, 2), scores.logsumexp(-1)


def assert_lse(found, exact):
    seen = exact.isfinite()
    assert torch.equal(found.isfinite(), seen) and (found[~seen] == -torch.inf).all()
    assert (found[seen].double() - exact[seen]).abs().max().item() < 2e-5 if seen.any() else True


@pytest.fixture(scope="module", params=["by hand", "generated"])
def attend(request):
    """(q, k, v, causal) -> (out, lse), by the text that somebody wrote or by the compiler's."""
    if request.param == "by hand":
        return functools.partial(flash_attention.launch, flash_attention.load())
    kernels = {causal: flash_attention.Generated(flash_attention.config(causal)) for causal in (False, True)}
    return lambda q, k, v, causal: kernels[causal](q, k, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", ATTENTIONS)
def test_flash_attention(attend, rng, shape, causal):
    batch, seqlen_q, seqlen_k, heads, kv_heads = shape
    q = normal(rng, batch, seqlen_q, heads, 128)
    k, v = (normal(rng, batch, seqlen_k, kv_heads, 128) for _ in range(2))
    out, lse = attend(q, k, v, causal)
    exact, exact_lse = attention(q, k, v, causal, torch.float64)
    assert_close(out, exact, attention(q, k, v, causal, torch.bfloat16)[0])
    assert_lse(lse, exact_lse)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_is_deterministic(attend, rng, causal):
    q, k, v = (normal(rng, 2, 2048, 16, 128) for _ in range(3))
    first = attend(q, k, v, causal)
    for _ in range(50):
        assert all(map(torch.equal, attend(q, k, v, causal), first))


# (Sq, H, lengths, parts): one page, odd and even pages, no token, several pieces of a request, rows without a key.
DECODES = [
    (1, 64, [64], 1),
    (1, 64, [200], 1),
    (1, 128, [1000], 1),
    (1, 16, [5, 0, 300], None),
    (2, 64, [1, 65, 777, 2048], 3),
    (1, 128, [8192, 13, 500, 64, 3000], None),
    (3, 40, [2, 129], 2),
    (1, 128, [1024] * 16, None),
]


def paged_cache(rng, lengths):
    """Cache and block table: pages in random order; what lies behind a request's last token is NaN, unused entries are 2^30."""
    used = [-(-length // 64) for length in lengths]
    cache = normal(rng, sum(used) + 3, 64, 576)
    order = torch.randperm(len(cache), generator=rng, device="cuda").int()
    table = torch.full((len(lengths), max(1, *used)), 2**30, device="cuda", dtype=torch.int32)
    for request, (length, pages) in enumerate(zip(lengths, used)):
        table[request, :pages], order = order[:pages], order[pages:]
        if length % 64:
            cache[table[request, pages - 1], length % 64 :] = torch.nan
    cache[order] = torch.nan
    return cache, table


def decode(q, cache, table, lengths, scale, dtype):
    """out [B, Sq, H, 512] and lse [B, H, Sq], causal among the queries."""
    outs, lses = [], []
    for request, length in enumerate(lengths):
        kv = cache[table[request, : -(-length // 64)].long()].reshape(-1, 576)[:length].to(dtype)
        scores = torch.einsum("shd,nd->hsn", q[request].to(dtype), kv) * scale
        ends = torch.arange(q.shape[1], device="cuda")[:, None] + length - q.shape[1]
        scores = scores.masked_fill(torch.arange(length, device="cuda") > ends, -torch.inf)
        outs.append(torch.einsum("hsn,nd->shd", torch.nan_to_num(scores.softmax(-1)), kv[:, :512]))
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses)


@pytest.fixture(scope="module", params=["by hand", "generated"])
def decode_kernels(request):
    by_hand, combine = mla_decode.load()
    return by_hand if request.param == "by hand" else mla_decode.Generated(), combine


@pytest.mark.parametrize("queries, heads, lengths, parts", DECODES)
def test_mla_decode(decode_kernels, rng, queries, heads, lengths, parts):
    cache, table = paged_cache(rng, lengths)
    q, scale = normal(rng, len(lengths), queries, heads, 576), 576**-0.5
    sizes = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    out, lse = mla_decode.launch(decode_kernels, q, cache, table, sizes, scale, num_parts=parts)
    exact, exact_lse = decode(q, cache, table, lengths, scale, torch.float64)
    assert_close(out, exact, decode(q, cache, table, lengths, scale, torch.bfloat16)[0])
    assert_lse(lse, exact_lse)


def test_mla_decode_is_deterministic(decode_kernels, rng):
    lengths = [4096, 100, 1, 2000, 777, 4000]
    cache, table = paged_cache(rng, lengths)
    sizes = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    q = normal(rng, len(lengths), 1, 128, 576)
    first = mla_decode.launch(decode_kernels, q, cache, table, sizes, 576**-0.5)
    for _ in range(50):
        assert all(map(torch.equal, mla_decode.launch(decode_kernels, q, cache, table, sizes, 576**-0.5), first))
