"""flash_attention's kernels over a made-up CUDA: which one is chosen, what it is launched with, and that the result is right.

The launch (fake_attention.cpp) reads q, k and v through the tensor maps, or the strides, that it is given, and computes in C++.
"""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

from attention_reference import exact

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FULL, CAUSAL = "flash_attention_sm_90a_bf16_128x160x64_full", "flash_attention_sm_90a_bf16_128x128x64_causal"
SMALL = "flash_attention_sm_90a_bf16_64x96x64_full"
SINKS = "flash_attention_sm_90a_bf16_128x128x64_window_sinks"
PORTABLE = "flash_attention_portable_bf16_128x64x64_full"
LAUNCH_FAILURE = 719


@pytest.fixture
def forced(fake):
    fake.knobs(force="sm_90a")
    return fake


def randn(*shape, dtype=BF16, seed=0, offset=0):
    """At a multiple of 64 bytes, or `offset` elements behind one."""
    size = math.prod(shape)
    buffer = torch.empty(size + 64, dtype=dtype)
    start = -buffer.data_ptr() % 64 // buffer.element_size() + offset
    return buffer[start:][:size].copy_(torch.randn(size, generator=torch.Generator().manual_seed(seed))).view(shape)


def qkv(b=2, sq=5, sk=7, h=4, hk=2, d=64, dtype=BF16, dv=None):
    shapes = (b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv or d)
    return tuple(randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))


def close(found, q, k, v, **options):
    """The results of a kernel against float64."""
    out, lse = found
    assert out.dtype == q.dtype and lse.dtype == F32
    for b in range(q.shape[0]):
        wanted, wanted_lse = exact(q[b], k[b], v[b], **options)
        torch.testing.assert_close(out[b].double(), wanted, rtol=torch.finfo(q.dtype).eps, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), wanted_lse, rtol=1e-5, atol=1e-5)


def check(fake, q, k, v, **options):
    """The kernel that served the call, whose results were right and new."""
    before = fake.get("launches")
    out, lse = fake.ops.flash_attention(q, k, v, **options)
    assert fake.get("launches") == before + 1
    assert out.shape == (*q.shape[:3], v.shape[3]) and out.is_contiguous()
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and lse.is_contiguous()
    close((out, lse), q, k, v, **options)
    return fake.library.fake_last_kernel().decode()


def explain(fake, *args, **options):
    return fake.ops._explain_flash_attention(*args, **options).split("\t")


def launched(fake):
    """Grid, batches, heads, kv_heads, sq, sk."""
    return tuple(map(int, fake.library.fake_last_launch().split()))


SHAPES = [(2, 5, 7, 4, 2), (1, 1, 1, 1, 1), (1, 9, 3, 6, 1), (3, 130, 2, 2, 2), (1, 4, 4, 8, 4), (2, 1, 70, 2, 1)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(forced, shape, causal):
    """Grouped heads, and rows that see no key."""
    b, sq, sk, h, hk = shape
    assert check(forced, *qkv(b, sq, sk, h, hk), causal=causal) == (CAUSAL if causal else FULL)
    assert launched(forced) == (min(10, -(-sq // 128) * h * b), b, h, hk, sq, sk)


@pytest.mark.parametrize(
    "shape, section",
    [
        ((2, 300, 7, 4, 2), 8),  # all heads' keys fit the cache: the power of two that is as many
        ((1, 130, 32000, 4, 4), 1),  # 20 MB for each head
        ((1, 130, 32000, 4, 1), 4),  # which share them
    ],
)
def test_longest_first(fake, shape, section):
    """A CTA for each tile, beyond those that run at a time; heads whose keys and values take 32 MB together."""
    fake.knobs(force="sm_90a")
    b, sq, sk, h, hk = shape
    assert check(fake, *qkv(b, sq, sk, h, hk, d=256, dv=64), causal=True).endswith("_causal_longest_first")
    assert launched(fake) == (-(-sq // 128) * h * b, section)


def test_dtypes_and_head_dims(forced):
    assert check(forced, *qkv(d=128)) == "flash_attention_sm_90a_bf16_128x160x128_full"
    assert check(forced, *qkv(dtype=F16)) == "flash_attention_sm_90a_f16_128x160x64_full"


@pytest.mark.parametrize("scale", [None, 0.3, 2.0])
def test_scale(forced, scale):
    check(forced, *qkv(), scale=scale)
    check(forced, *qkv(d=128), scale=scale)


LAYOUTS = {
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "batch second": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "half of a pair": lambda t: torch.cat((t, t), -1)[..., t.shape[-1] :],
    "every second token": lambda t: torch.stack((t, t), 2).flatten(1, 2)[:, ::2],
    "padded rows": lambda t: torch.nn.functional.pad(t, (0, 8))[..., :-8],
    "batch, repeated": lambda t: t[:1].expand(t.shape),
    "a head, repeated": lambda t: t[:, :, :1].expand(t.shape),
    "one batch of any stride": lambda t: t[:1].as_strided((1, *t.shape[1:]), (3, *t.stride()[1:])),
    "one token of any stride": lambda t: t[:, :1].as_strided((t.shape[0], 1, *t.shape[2:]), (t.stride(0), 3, *t.stride()[2:])),
}


SIZES = {"one batch of any stride": (1,), "one token of any stride": (2, 1, 1)}


@pytest.mark.parametrize("target", ["sm_90a", "portable"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read_where_they_are(fake, layout, target):  # B22, B24
    fake.knobs(force=target)
    before = fake.get("copies")
    for changed in ((0, 1, 2), (1,), (2,)):
        given = [LAYOUTS[layout](t) if n in changed else t for n, t in enumerate(qkv(*SIZES.get(layout, ())))]
        check(fake, *given, causal=True)
    assert fake.get("copies") == before


def test_slices_of_one_projection(forced):
    rows = randn(2, 5, 8, 64)
    check(forced, rows[:, :, :4], rows[:, :, 4:6], rows[:, :, 6:])


REFUSED = {
    "flash_attention kernels take a scale above 0 in float32": [{"scale": s} for s in (0.0, -1.0, 1e-60, 1e39)],
    "flash_attention kernels take a softcap, and a scale divided by it, that are normal numbers of float32": [
        *({"softcap": c} for c in (1e-40, 1e39)),
        *({"softcap": 2.0, "scale": s} for s in (1e-40, -1e40)),
    ],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_options_without_a_kernel(fake, reason):
    for options in REFUSED[reason]:
        assert explain(fake, *qkv(), **options) == ["eager", "", reason]
        assert fake.kernel(lambda options=options: fake.ops.flash_attention(*qkv(), **options)) == "eager"
    fake.knobs(force="sm_90a")
    for run in (fake.ops.flash_attention, fake.ops._explain_flash_attention):
        with pytest.raises(RuntimeError, match=f"^flash_attention: TILEOPS_FORCE=sm_90a cannot apply: {reason}; "):
            run(*qkv(), **REFUSED[reason][0])


def test_targets_without_a_kernel(fake):
    fake.knobs(force="portable")
    with pytest.raises(RuntimeError, match="cannot apply: this build has no portable flash_attention kernel for float16 head"):
        fake.ops.flash_attention(*qkv(dtype=F16))


@pytest.mark.parametrize("shape", SHAPES)
def test_portable(fake, shape):
    """Only where it is asked for: no measurement says that it wins."""
    fake.knobs(force="portable")
    b, sq, sk, h, hk = shape
    assert check(fake, *qkv(b, sq, sk, h, hk)) == PORTABLE
    assert launched(fake) == (min(10, -(-sq // 128) * h * b), b, h, hk, sq, sk)
    assert check(fake, *qkv(b, sq, sk, h, hk), causal=True) == PORTABLE.replace("full", "causal")
    options = {"window_left": 2, "window_right": 1, "softcap": 3.0, "sinks": randn(h, dtype=F32)}
    assert check(fake, *qkv(b, sq, sk, h, hk), **options) == PORTABLE.replace("128x64x64_full", "64x64x64_window_sinks_softcap")
    fake.knobs(force=PORTABLE)
    assert explain(fake, *qkv(b, sq, sk, h, hk)) == ["kernel", PORTABLE, f"TILEOPS_FORCE={PORTABLE} is set"]


def test_without_keys(fake):
    assert explain(fake, *qkv(sk=0)) == ["eager", "", "there are no keys to sum over"]
    out, lse = fake.ops.flash_attention(*qkv(sk=0))
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({"window_right": 0}, CAUSAL),
        ({"causal": True, "window_right": 2}, CAUSAL),
        ({"window_left": 6, "window_right": 4}, FULL),
        ({"causal": True, "window_left": 2**62}, CAUSAL),
    ],
)
def test_windows_that_hide_no_more_than_the_mask(forced, options, kernel):
    q, k, v = qkv()
    assert check(forced, q, k, v, **options) == kernel
    for name in ("window_left", "window_right"):
        if options.get(name, 0) in (4, 6):
            assert check(forced, q, k, v, **{name: options[name] - 1}) == SINKS


def test_grid(forced):
    """Ten multiprocessors, one CTA on each."""
    for (b, sq, h), grid in {(1, 129, 1): 2, (1, 128, 3): 3, (2, 300, 2): 10, (1, 1, 1): 1}.items():
        check(forced, *qkv(b, sq, 2, h, 1))
        assert launched(forced)[0] == grid


# ---- the choice


def of(sq=64, sk=64, **sizes):
    return qkv(sq=sq, sk=sk, **sizes)  # 8 heads in all


def test_a_kernel_is_chosen_where_it_was_measured_to_win(fake):
    won = "measured faster than eager PyTorch at 8 heads of 64x64"
    for sizes in ({}, {"sq": 100, "sk": 40}, {"b": 1}, {"b": 4}):
        assert explain(fake, *of(**sizes)) == ["kernel", FULL, won]
    assert check(fake, *of(sk=33)) == FULL
    fake.knobs(require_native="1")
    assert check(fake, *of()) == FULL


def test_a_tie_is_a_win(fake):
    assert explain(fake, *of(sq=16)) == ["kernel", SMALL, "measured faster than eager PyTorch at 8 heads of 16x64"]


def test_eager_where_pytorch_won(fake):
    reason = "eager PyTorch measured faster at 8 heads of 64x64"
    assert explain(fake, *of(), causal=True) == ["eager", "", reason]
    assert fake.kernel(lambda: fake.ops.flash_attention(*of(), causal=True)) == "eager"
    assert explain(fake, *of(d=128))[0] == "kernel"  # each kind of kernel by itself
    fake.knobs(require_native="1")
    with pytest.raises(RuntimeError, match=f"no kernel serves this call: {reason}"):
        fake.ops.flash_attention(*of(), causal=True)


@pytest.mark.parametrize("sizes", [{"sq": 7}, {"sk": 129}, {"b": 1, "h": 2}, {"b": 17, "h": 1, "hk": 1}])
def test_eager_where_nothing_was_measured(fake, sizes):
    q, k, v = of(**sizes)
    shape = f"{q.shape[0] * q.shape[2]} heads of {q.shape[1]}x{k.shape[1]}"
    reason = f'no kernel was measured on Fake "GPU" near bfloat16 head dim 64, {shape}'
    assert explain(fake, q, k, v) == ["eager", "", reason]


def test_another_gpu_is_another_measurement(fake):
    reason = explain(fake, *of(dtype=F16))[2]
    assert reason == 'no kernel was measured on Fake "GPU" near float16 head dim 64, 8 heads of 64x64'


def test_force_a_kernel(fake):
    fake.knobs(force=SMALL)
    assert check(fake, *of()) == SMALL
    assert explain(fake, *of()) == ["kernel", SMALL, f"TILEOPS_FORCE={SMALL} is set"]
    fake.knobs(force="sm_90a")
    assert check(fake, *of(sq=16)) == SMALL  # the best that was measured there
    assert check(fake, *of(sq=1)) == FULL  # the first: nothing was


CANNOT = {
    "it is for another dtype": {"dtype": F16},
    "it is for smaller head dims": {"d": 128},
}


@pytest.mark.parametrize("why", CANNOT)
def test_what_cannot_be_forced_says_why(fake, why):
    fake.knobs(force=FULL)
    with pytest.raises(RuntimeError, match=rf"TILEOPS_FORCE={FULL} cannot apply: no .* fits \(the last one tried: {why}\); "):
        fake.ops.flash_attention(*qkv(**CANNOT[why]))


def test_masks_and_names_that_cannot_be_forced(fake):
    for name, causal, why in (
        (FULL, True, "(the last one tried: it has no causal mask)"),
        (CAUSAL, False, "(the last one tried: it is for causal attention)"),
        ("softmax_sm_90a_bf16_bf16_v8", False, 'this build has no flash_attention kernel of that name for Fake "GPU"'),
    ):
        fake.knobs(force=name)
        with pytest.raises(RuntimeError) as caught:
            fake.ops.flash_attention(*qkv(), causal=causal)
        assert f"{why}; " in str(caught.value)


def test_numbers_beyond_32_bits(fake):
    fake.knobs(force="sm_90a")
    k = randn(1, 1, 1, 64).expand(1, 2**31 - 65537, 1, 64)
    with pytest.raises(RuntimeError, match="the last one tried: it counts queries, keys, heads and tiles in 32 bits"):
        fake.ops._explain_flash_attention(randn(1, 1, 1, 64), k, k, causal=True)
    k = k[:, : 2**31 - 65538]
    assert fake.ops._explain_flash_attention(randn(1, 1, 1, 64), k, k, causal=True).split("\t")[1] == CAUSAL
    q = randn(1, 1, 1, 64).expand(2**17, 1, 2**14 + 1, 64)
    with pytest.raises(RuntimeError, match="the last one tried: it counts queries, keys, heads and tiles in 32 bits"):
        fake.ops._explain_flash_attention(q, q[:, :, :1], q[:, :, :1])


# ---- results


def outs(q):
    """(out, whether a kernel writes there itself, not by a copy of out)."""
    b, s, h, d = q.shape
    yield torch.empty_like(q), True
    yield randn(b, h, s, d).transpose(1, 2), True
    yield randn(b, s, h, d + 8)[..., :d], True
    yield randn(b, s, h, d + 1)[..., :d], False
    yield randn(b, s, h, d, 2)[..., 0], False
    yield randn(b, s, h, d, offset=1), False


@pytest.mark.parametrize("number", range(6))
def test_out(forced, number):
    q, k, v = qkv()
    out, direct = list(outs(q))[number]
    lse = randn(2, 5, 4, 2, dtype=F32)[..., 1].transpose(1, 2)
    storages = [torch.as_strided(t, [t.untyped_storage().nbytes() // t.element_size()], [1], 0) for t in (out, lse)]
    for storage in storages:
        storage.fill_(7)
    before = forced.get("copies")
    given = forced.ops.flash_attention.out(q, k, v, causal=True, out=out, lse=lse)
    assert forced.get("copies") - before == (0 if direct else 1)
    assert (given[0].data_ptr(), given[1].data_ptr()) == (out.data_ptr(), lse.data_ptr())
    close((out, lse), q, k, v, causal=True)
    out.fill_(7)
    lse.fill_(7)
    assert all((storage == 7).all() for storage in storages)


def test_nothing_is_launched_for_an_empty_result(forced):
    for sizes in ({"sq": 0}, {"b": 0}, {"h": 0, "hk": 0}):
        assert forced.kernel(lambda sizes=sizes: forced.ops.flash_attention(*qkv(**sizes))) == "eager"


# ---- tensor maps and first calls


def test_tensor_maps_are_encoded_once(forced):
    tensors, out, lse = qkv(), torch.empty(2, 5, 4, 64, dtype=BF16), torch.empty(2, 4, 5)
    counts = []
    for _ in range(2):
        before = forced.library.fake_encodes()
        forced.ops.flash_attention.out(*tensors, out=out, lse=lse)
        counts.append(forced.library.fake_encodes() - before)
    assert counts[0] <= 4 and counts[1] <= 2  # two of them may meet in one place of the cache


def test_questions_about_a_kernel_are_asked_while_relaxed_about_captures(forced):
    check(forced, *qkv())
    assert forced.get("loads_outside_relaxed") == 0 and forced.get("relaxed") == 0


def test_a_launch_that_fails_is_an_error(forced):
    forced.set(launch_error=LAUNCH_FAILURE)
    text = f"^flash_attention: launching {FULL} failed: a made-up failure \\(cudaErrorMadeUp\\)$"
    with pytest.raises(RuntimeError, match=text):
        forced.ops.flash_attention(*qkv())


def test_log(fake, capfd):
    q, k, v = of()
    fake.knobs(log="dispatch")
    for _ in range(2):
        fake.ops.flash_attention(q, k, v)
    reason = "measured faster than eager PyTorch at 8 heads of 64x64"
    shapes = "[2, 64, 4, 64] [2, 64, 2, 64] [2, 64, 2, 64]"
    assert capfd.readouterr().err == f"tileops: flash_attention bfloat16 {shapes} -> {FULL} ({reason})\n"
