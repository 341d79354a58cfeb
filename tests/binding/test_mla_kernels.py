"""mla_decode's kernels over a made-up CUDA: which one serves which page size, what it is launched with, and that it is right.

The launch (fake_mla.cpp) reads q and the cache through the tensor maps, page numbers and quotients that it is given.
"""

import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from attention_reference import exact, paged
from test_lengths_kernels import INDICES, same_as_eager

BF16, F16 = torch.bfloat16, torch.float16
KERNEL = "mla_decode_sm_90a_bf16_64x64x24x16_u{}"
LENGTHS = [130, 0, 1, 64, 65]
# Of a page: the unit of the kernel, and the rows that are loaded together.
PAGES = {1: (1, 1), 2: (1, 2), 3: (1, 1), 4: (1, 4), 8: (1, 8), 16: (1, 16), 32: (1, 32), 48: (1, 16), 64: (64, 64)}
PAGES |= {96: (1, 32), 100: (1, 4), 128: (64, 64), 192: (64, 64), 1024: (64, 64)}


def normal(*shape, dtype=BF16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def requests(page, dtype=BF16, lengths=LENGTHS, **cache):
    tokens = [normal(length, 24, dtype=dtype, seed=9 + n) for n, length in enumerate(lengths)]
    return tokens, paged(tokens, page, "cpu", **cache)


def check(fake, q, tokens, cache, **given):
    """The right result; the name of the kernel, which `explain` knows."""
    before = fake.get("launches")
    out, lse = fake.ops.mla_decode(q, *cache, 0.3, head_dim_v=16, **given)
    assert fake.get("launches") == before + (1 if given.get("num_splits") == 1 else 2)  # the merge is one, too
    for b, token in enumerate(tokens):
        key = token[:, None]
        wanted, wanted_lse = exact(q[b], key, key[..., :16], scale=0.3, causal=given.get("causal", True))
        torch.testing.assert_close(out[b].double(), wanted, rtol=torch.finfo(q.dtype).eps, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), wanted_lse, rtol=1e-5, atol=1e-5)
    path, name, reason = explain(fake, q, *cache)
    assert path == "kernel" and reason == f"it serves {str(q.dtype)[6:]} head dims 24 and 16, page {cache[0].shape[1]}"
    return name


def explain(fake, *args):
    return fake.ops._explain_mla_decode(*args, 0.3, head_dim_v=16).split("\t")


def launched(fake):
    """Tokens of a page, rows of a box, pieces of split requests at most."""
    return tuple(map(int, fake.library.fake_last_launch().split()))


@pytest.mark.parametrize("page", PAGES)
def test_pages(fake, page):
    unit, together = PAGES[page]
    for causal, index in ((True, torch.int32), (False, torch.int64)):
        tokens, cache = requests(page, index=index)
        name = check(fake, normal(5, 3, 2, 24), tokens, cache, causal=causal)
        assert name == KERNEL.format(unit) and launched(fake)[:2] == (page, together)


@pytest.mark.parametrize("page", PAGES)
def test_portable(fake, page):
    """One kernel for pages of any size and any number of rows; a forced target is the only way to it on this GPU."""
    q, (tokens, cache) = normal(5, 3, 20, 24), requests(page, unused=-1, poison=torch.nan, width=200)
    assert check(fake, q, tokens, cache) == KERNEL.format(PAGES[page][0])
    fake.knobs(force="portable")
    out, lse = fake.ops.mla_decode(q, *cache, 0.3, head_dim_v=16)
    assert explain(fake, q, *cache)[1] == "mla_decode_few_portable_bf16_16x64x24x16_u1" and launched(fake)[:2] == (page, 1)
    fake.knobs(force="sm_90a")
    for found, wanted in zip((out, lse), fake.ops.mla_decode(q, *cache, 0.3, head_dim_v=16), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("page", [64, 16, 128])
@pytest.mark.parametrize("unused", [-1, 2**30])
def test_entries_that_no_request_owns(fake, page, unused):  # B03, B29
    q = normal(5, 1, 70, 24)
    for poison in (torch.inf, torch.nan):
        tokens, cache = requests(page, unused=unused, poison=poison, width=200)
        check(fake, q, tokens, cache, num_splits=1)
    none = [token[:0] for token in tokens]
    check(fake, q, none, (*cache[:2], torch.zeros_like(cache[2])))


@pytest.mark.parametrize("page", [64, 16, 192])
def test_layouts_are_read_where_they_are(fake, page):  # B24
    q, (tokens, (pages, *rest)) = normal(5, 2, 3, 24), requests(page)
    before = fake.get("copies")
    for cache in (torch.stack((pages, pages), 1)[:, 1], torch.nn.functional.pad(pages, (0, 8))[..., :-8]):
        check(fake, q, tokens, (cache, *rest))
    assert fake.get("copies") == before


@pytest.mark.parametrize("index", INDICES)
def test_index_tensors(fake, index):
    q, (tokens, (pages, table, used)) = normal(5, 2, 3, 24), requests(16)
    tables = {"strided": torch.stack((table, table), -1)[..., 0], "int64": table.long(), "within another": table}
    tables["int64, strided"] = tables["strided"].long().mT.contiguous().mT
    wide = torch.nn.functional.pad(table, (3, 5), value=2**30)[:, 3:-5]
    for given in (tables[index], wide):
        check(fake, q, tokens, (pages, given, INDICES[index](torch.cat((used[:1], used)))[1:]))


def test_rotary_part_at_any_address(fake):  # B24
    """With the rest of q aligned, and not."""
    _, cache = requests(64)
    q = normal(5, 2, 3, 24)
    wanted = fake.ops.mla_decode(q, *cache, 0.3, head_dim_v=16)
    views = (lambda t: t.contiguous(), lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape))
    for latent, rope in itertools.product((view(q[..., :16]) for view in views), (view(q[..., 16:]) for view in views)):
        found = fake.ops.mla_decode(latent, *cache, 0.3, q_rope=rope, head_dim_v=16)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("page", [64, 16])
def test_the_fallback_gives_the_same(fake, page):  # B65
    _, cache = requests(page)
    for rows, heads in ((1, 1), (3, 2), (1, 70)):
        for causal in (False, True):
            options = {"head_dim_v": 16, "causal": causal}
            same_as_eager(fake, "mla_decode", normal(5, rows, heads, 24), *cache, 0.3, **options)


def refused(fake, *args):
    path, _, reason = explain(fake, *args)
    assert path == "eager"
    return reason


def test_what_no_kernel_serves(fake):
    q, (_, cache) = normal(1, 1, 3, 24), requests(16, lengths=[9])
    half = refused(fake, q.to(F16), cache[0].to(F16), *cache[1:])
    problem = "float16 head dims 24 and 16, page 16"
    assert half == f"this build has no mla_decode kernel for {problem}; there is one for pages of 64"
    empty = "bfloat16 head dims 24 and 16, page 0; there is one for pages of a multiple of 64 or a multiple of 1"
    assert refused(fake, q, cache[0][:, :0], *cache[1:]).endswith(empty)
    assert refused(fake, q[..., :16], cache[0][..., :16], *cache[1:]).endswith("head dim 16, page 16")
    assert refused(fake, q, cache[0], cache[1][:, :0], cache[2]).endswith("(the last one tried: block_table lists no page)")


def test_quotients_that_are_not_exact(fake):
    """Of a page that is no power of 2, of which a table may list 2^32 / error tokens."""
    q, lengths = normal(1, 1, 3, 24), torch.ones(1, dtype=torch.int32)
    cache = torch.zeros(1, 24, dtype=BF16).expand(1, 1000, 24)
    inverse = -(-(2**32) // 1000)
    most = 2**32 // (inverse * 1000 - 2**32) // 1000
    for width, path in ((most, "kernel"), (most + 1, "eager")):
        token = width * 1000 - 1
        assert path == "eager" or token * inverse >> 32 == token // 1000
        table = torch.zeros(1, 1, dtype=torch.int32).expand(1, width)
        found = explain(fake, q, cache, table, lengths)
        assert found[0] == path and (path == "kernel" or "block_table lists more tokens than it can number" in found[2])
    table = torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**40)
    assert explain(fake, q, cache[:, :512], table, lengths)[0] == "kernel"


def test_a_forced_kernel(fake):
    q, (tokens, cache) = normal(5, 2, 3, 24), requests(64)
    for unit in (64, 1):
        fake.knobs(force=KERNEL.format(unit))
        out = fake.ops.mla_decode(q, *cache, 0.3, head_dim_v=16)[0]
        assert launched(fake)[:2] == (64, 64) and explain(fake, q, *cache)[1] == KERNEL.format(unit)
        key = tokens[0][:, None]
        wanted = exact(q[0], key, key[..., :16], scale=0.3, causal=True)[0]
        torch.testing.assert_close(out[0].double(), wanted, rtol=0.01, atol=1e-5)
    fake.knobs(force=KERNEL.format(64))
    with pytest.raises(RuntimeError, match="it is for other page sizes"):
        fake.ops.mla_decode(q, *requests(16)[1], 0.3, head_dim_v=16)
