"""flash_attention's kernels over a made-up CUDA: head dims below a kernel's tile, and tensors that TMA cannot address."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_attention_kernels import CAUSAL, FULL, SINKS, SMALL, check, close, explain, of, qkv, randn

WIDE = "flash_attention_sm_90a_bf16_128x160x128_full"
UNEQUAL = "flash_attention_sm_90a_bf16_128x112x192x128_causal"
NARROW = "flash_attention_sm_90a_bf16_128x128x96_causal"  # after the former in the table
COPIES = "; by copies with rows of whole 16 bytes: "


@pytest.fixture
def forced(fake):
    fake.knobs(force="sm_90a")
    return fake


def copies(fake, run):
    before = fake.get("copies")
    run()
    return fake.get("copies") - before


SERVED = [
    *((d, d, False, FULL) for d in (8, 32, 40, 56, 64)),
    *((d, d, False, WIDE) for d in (72, 80, 96, 104, 112, 120)),
    *((d, d, True, CAUSAL) for d in (16, 40)),
    (80, 80, True, NARROW),
    (160, 104, True, UNEQUAL),
    (64, 72, False, WIDE),
    (24, 64, True, CAUSAL),
]


@pytest.mark.parametrize("d, dv, causal, name", SERVED)
def test_head_dims_of_whole_16_bytes_are_read_where_they_are(forced, d, dv, causal, name):
    """By the kernel whose tile has the fewest columns of those that hold them."""
    assert copies(forced, lambda: check(forced, *qkv(d=d, dv=dv), causal=causal)) == 0
    assert forced.library.fake_last_kernel().decode() == name
    assert explain(forced, *qkv(d=d, dv=dv), causal=causal) == ["kernel", name, "TILEOPS_FORCE=sm_90a is set"]
    check(forced, *qkv(d=d, dv=dv), causal=causal, window_left=2) if d <= 64 and dv <= 64 else None


@pytest.mark.parametrize(
    "d, dv, copied", [(1, 1, "q, k, v, out"), (37, 37, "q, k, v, out"), (100, 64, "q, k"), (96, 90, "v, out")]
)
def test_other_head_dims_are_copied(forced, d, dv, copied):
    q, k, v = qkv(d=d, dv=dv)
    for options in ({}, {"scale": 0.7}):
        assert copies(forced, lambda options=options: check(forced, q, k, v, **options)) == len(copied.split(", "))
    name = FULL if d <= 64 else WIDE
    assert explain(forced, q, k, v) == ["kernel", name, f"TILEOPS_FORCE=sm_90a is set{COPIES}{copied}"]


@pytest.mark.parametrize("d, dv, copied", [(40, 24, 0), (37, 37, 4), (64, 33, 2)])
def test_portable(fake, d, dv, copied):
    if d == 40:  # a narrower kernel that was not measured is no reason not to take another target's
        won = ["kernel", FULL, "measured faster than eager PyTorch at 8 heads of 64x64 with head dim 64"]
        assert explain(fake, *of(d=32)) == won
    fake.knobs(force="portable")
    assert check(fake, *qkv(d=24)) == "flash_attention_portable_bf16_128x64x32_full"
    assert copies(fake, lambda: check(fake, *qkv(d=d, dv=dv), causal=True)) == copied
    if d == 37:  # rows that start at 16 bytes are read where they are, and written
        q, k, v = (torch.nn.functional.pad(t, (0, 3), value=torch.nan)[..., :37] for t in qkv(d=d))
        assert copies(fake, lambda: check(fake, q, k, v)) == 1


def test_padded_rows_of_a_ragged_head_dim_are_read_where_they_are(forced):
    """Behind each row is NaN, and what is written stays inside of out."""
    q, k, v = (torch.nn.functional.pad(t, (0, 3), value=torch.nan)[..., :37] for t in qkv(d=37))
    assert explain(forced, q, k, v)[2].endswith(f"{COPIES}out")
    out, lse = randn(2, 5, 4, 40)[..., :37], torch.empty(2, 4, 5)
    storage = torch.as_strided(out, [out.untyped_storage().nbytes() // 2], [1], 0).fill_(7)
    assert copies(forced, lambda: forced.ops.flash_attention.out(q, k, v, causal=True, out=out, lse=lse)) == 1
    close((out, lse), q, k, v, causal=True)
    out.fill_(7)
    assert (storage == 7).all()


NOT_BY_TMA = {
    "q": lambda q, k, v: (torch.stack((q, q), -1)[..., 0], k, v),
    "k": lambda q, k, v: (q, torch.nn.functional.pad(k, (0, 1))[..., :-1], v),
    "v": lambda q, k, v: (q, k, randn(*v.shape, offset=1)),
    "q, k, v": lambda *tensors: [t.mT.contiguous().mT for t in tensors],
}


@pytest.mark.parametrize("names", NOT_BY_TMA)
def test_what_tma_cannot_address_is_copied(forced, names):
    tensors = NOT_BY_TMA[names](*qkv())
    assert copies(forced, lambda: check(forced, *tensors, causal=True)) == len(names.split(", "))
    assert explain(forced, *tensors) == ["kernel", FULL, f"TILEOPS_FORCE=sm_90a is set{COPIES}{names}"]


@pytest.mark.parametrize(
    "d, dv, causal, what", [(300, 300, False, "head dim 300"), (64, 136, True, "causal head dims 64 and 136")]
)
def test_head_dims_without_a_kernel(fake, d, dv, causal, what):
    reason = f"this build has no flash_attention kernel for bfloat16 {what}"
    assert explain(fake, *qkv(d=d, dv=dv), causal=causal) == ["eager", "", reason]
    assert fake.kernel(lambda: fake.ops.flash_attention(*qkv(d=d, dv=dv), causal=causal)) == "eager"


MEASURED = [
    (56, 56, "kernel", FULL, ""),
    (40, 40, "kernel", FULL, ""),
    (120, 120, "kernel", WIDE, " with head dim 128"),
    (96, 96, "eager", "", " with head dim 80"),
    (60, 60, "kernel", FULL, ""),
    (50, 50, "kernel", FULL, " with head dim 60"),
    (90, 90, "eager", "", " with head dim 100"),
]


@pytest.mark.parametrize("d, dv, path, name, at", MEASURED)
def test_the_nearest_head_dim_that_was_measured_decides(fake, d, dv, path, name, at):
    """Of those whose tensors were copied, if the call's are; and of the kernels with the fewest columns."""
    found = explain(fake, *of(d=d, dv=dv))
    assert found[:2] == [path, name]
    won = "measured faster than eager PyTorch" if path == "kernel" else "eager PyTorch measured faster"
    at = at or ("" if d == 60 else " with head dim 64")
    assert found[2] == f"{won} at 8 heads of 64x64{at}" + f"{COPIES}q, k, v, out" * (path == "kernel" and d % 8 > 0)


def test_where_no_head_dim_near_was_measured(fake):
    for d, with_copies in ((24, ""), (20, ", with copies")):
        reason = f'no kernel was measured on Fake "GPU" near bfloat16 head dim {d}, 8 heads of 64x64{with_copies}'
        assert explain(fake, *of(d=d)) == ["eager", "", reason]


def test_a_wider_tile_can_be_forced(fake):
    fake.knobs(force=WIDE)
    assert check(fake, *qkv(d=40)) == check(fake, *qkv(d=33)) == WIDE
    fake.knobs(force="sm_90a")
    assert check(fake, *of(sq=16, d=48)) == SMALL  # the best that was measured, of tiles with as many columns


@pytest.mark.parametrize("options", [{"sinks": randn(4)}, {"softcap": 2.0}, {"window_left": 1}])
def test_options(forced, options):
    name = SINKS.replace("sinks", "softcap") if "softcap" in options else SINKS
    for d in (40, 37):
        assert check(forced, *qkv(d=d), **options) == name


def test_scale_is_that_of_the_head_dim_and_not_of_the_tile(forced):
    q, k, v = qkv(d=40)
    assert all(map(torch.equal, forced.ops.flash_attention(q, k, v), forced.ops.flash_attention(q, k, v, scale=40**-0.5)))
