"""The golden kernels of sm_90a, their text as nvcc compiles it, against float64 at small shapes that reach every edge."""

import flash_attention
import gemm
import golden_launch
import launch
import mla_decode
import pytest
import torch
from golden_launch import GOLDEN

SEEDS = range(3)


@pytest.fixture
def gpu(monkeypatch):
    return golden_launch.Emulated(monkeypatch, multiprocessors=4)


@pytest.fixture
def torch_rng():
    return torch.Generator().manual_seed(3)


def normal(rng, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=rng, dtype=dtype)


def assert_close(found, exact, ulps=1.0):
    """Rounded once to bf16, after float32 arithmetic on P rounded to bf16 where there is one (ulps 2)."""
    assert (found.double() - exact).abs().max() <= ulps * 2**-8 * exact.abs().max()


GEMMS = [  # M, N, K
    (256, 256, 64),  # one tile
    (1, 8, 8),
    (300, 264, 200),  # ragged in each dimension
    (600, 520, 320),  # more tiles than clusters, more steps than stages
]
ACTIVATIONS = {"relu": torch.relu, "silu": torch.nn.functional.silu}


@pytest.mark.parametrize("m, n, k", GEMMS)
@pytest.mark.parametrize("epilogue", ["none", "relu", "silu"])
def test_gemm(gpu, torch_rng, m, n, k, epilogue):
    kernel, batch = launch.load(GOLDEN / "gemm.cu", gemm.NAME), (2,) if epilogue == "relu" else ()
    a, b = normal(torch_rng, *batch, m, k), normal(torch_rng, *batch, n, k)
    exact, options = a.double() @ b.double().mT, {}
    if epilogue != "none":
        bias, residual = normal(torch_rng, n, dtype=torch.float32), normal(torch_rng, *batch, m, n)
        options = {"bias": bias, "activation": epilogue, "residual": residual}
        exact = ACTIVATIONS[epilogue](exact + bias.double()) + residual.double()
    for gpu.seed in SEEDS:
        assert_close(gemm.gemm(kernel, a, b, **options), exact)


def attention(q, k, v, causal):
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1 + k.shape[2] - q.shape[2]).bool(), -torch.inf)
    return (torch.nan_to_num(scores.softmax(-1)) @ v).transpose(1, 2), scores.logsumexp(-1)


ATTENTIONS = [  # B, Sq, Sk, H, Hk
    (1, 128, 160, 1, 1),
    (1, 1, 1, 1, 1),
    (2, 200, 333, 2, 1),  # ragged, grouped heads
    (1, 130, 700, 2, 2),  # more blocks than stages
    (1, 300, 100, 3, 1),  # more tiles than CTAs; causal: rows that see no key
    (1, 64, 128, 1, 1),
]


@pytest.mark.parametrize("b, sq, sk, h, hk", ATTENTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention(gpu, torch_rng, causal, b, sq, sk, h, hk):
    kernels = flash_attention.load()
    q, k, v = (normal(torch_rng, b, s, n, 128) for s, n in ((sq, h), (sk, hk), (sk, hk)))
    exact, exact_lse = attention(q, k, v, causal)
    for gpu.seed in SEEDS:
        out, lse = flash_attention.launch(kernels, q, k, v, causal)
        assert_close(out, exact, ulps=2)
        assert torch.allclose(lse.double(), exact_lse, atol=1e-3, rtol=0)


DECODES = [  # queries, heads, lengths, parts
    (1, 16, [1], 1),
    (1, 64, [64], 1),
    (1, 16, [200, 0, 65], 2),
    (2, 40, [2, 129], 2),  # rows that the mask cuts, two row tiles
    (1, 64, [700], 3),  # split
    (1, 16, [513, 300], 5),
]


@pytest.fixture(params=["by hand", "generated"])
def decode_kernels(request, gpu, tmp_path):
    by_hand, combine = mla_decode.load()
    return by_hand if request.param == "by hand" else mla_decode.Generated(folder=tmp_path), combine


@pytest.mark.parametrize("queries, heads, lengths, parts", DECODES)
def test_mla_decode(gpu, torch_rng, decode_kernels, queries, heads, lengths, parts):
    used = [-(-n // 64) for n in lengths]
    cache = torch.full((sum(used) + 2, 64, 576), torch.nan, dtype=torch.bfloat16)  # NaN behind the last token of a request
    order = torch.randperm(len(cache), generator=torch_rng).int()
    table = torch.full((len(lengths), max(1, *used)), 2**30, dtype=torch.int32)
    exact, exact_lse = [], []
    q, scale = normal(torch_rng, len(lengths), queries, heads, 576) * 3, 576**-0.5
    for request, (length, pages) in enumerate(zip(lengths, used)):
        table[request, :pages], order = order[:pages], order[pages:]
        kv = normal(torch_rng, length, 576)
        padded = torch.cat([kv, torch.full((pages * 64 - length, 576), torch.nan, dtype=kv.dtype)])
        cache[table[request, :pages].long()] = padded.view(pages, 64, 576)
        scores = torch.einsum("shd,nd->hsn", q[request].double(), kv.double()) * scale
        ends = torch.arange(queries)[:, None] + length - queries
        scores = scores.masked_fill(torch.arange(length) > ends, -torch.inf)
        exact.append(torch.einsum("hsn,nd->shd", torch.nan_to_num(scores.softmax(-1)), kv[:, :512].double()))
        exact_lse.append(scores.logsumexp(-1))
    sizes = torch.tensor(lengths, dtype=torch.int32)
    for gpu.seed in SEEDS:
        out, lse = mla_decode.launch(decode_kernels, q, cache, table, sizes, scale, num_parts=parts)
        assert_close(out, torch.stack(exact), ulps=2)
        assert torch.allclose(lse.double(), torch.stack(exact_lse), atol=5e-3, rtol=0)
