"""flash_attention's kernels with options over a made-up CUDA: windows, sinks, softcaps, value head dims of their own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_attention_kernels import BF16, CAUSAL, F16, F32, FULL, SINKS, check, explain, of, qkv, randn

SOFTCAP = SINKS.replace("sinks", "softcap")
WIDE = "flash_attention_sm_90a_bf16_128x112x192x128_causal"


@pytest.fixture
def forced(fake):
    fake.knobs(force="sm_90a")
    return fake


def sinks_of(dtype=F32, h=4):
    return randn(2 * h, dtype=dtype, seed=7)[::2]


WITH_OPTIONS = [
    ({"window_left": 3}, SINKS),
    ({"window_right": 2}, SINKS),
    ({"window_left": 0, "window_right": 0}, SINKS),
    ({"causal": True, "window_left": 2}, SINKS),
    ({"window_left": 2**62, "window_right": 1}, SINKS),
    ({"sinks": sinks_of()}, SINKS),
    ({"sinks": sinks_of(BF16), "causal": True}, SINKS),
    ({"sinks": sinks_of(F16), "causal": True, "window_left": 1, "scale": 0.5}, SINKS),
    ({"softcap": 1.5}, SOFTCAP),
    ({"softcap": 0.5, "causal": True}, SOFTCAP),
    ({"softcap": 20.0, "causal": True, "window_left": 3, "scale": -0.3}, SOFTCAP),
    ({"softcap": 2.0, "scale": 0.0}, SOFTCAP),
]


@pytest.mark.parametrize(("options", "kernel"), WITH_OPTIONS)
@pytest.mark.parametrize("shape", [(2, 5, 7, 4, 2), (1, 9, 5, 4, 1), (1, 130, 70, 4, 4)])
def test_options(forced, shape, options, kernel):
    """Windows at both ends, rows that see no key, sinks of each dtype and of any stride."""
    assert check(forced, *qkv(*shape), **options) == kernel


def test_value_head_dims(forced):
    for sq, sk in ((5, 7), (9, 3)):
        assert check(forced, *qkv(sq=sq, sk=sk, d=192, dv=128), causal=True) == WIDE


LACKING = {
    "head dim 128 with a window": {"window_left": 3},
    "causal head dim 128 with a window and sinks": {"causal": True, "window_left": 3, "sinks": sinks_of()},
    "head dim 128 with a softcap": {"softcap": 1.5},
}


@pytest.mark.parametrize("what", LACKING)
def test_options_without_a_kernel_for_the_head_dim(fake, what):
    options, reason = LACKING[what], f"this build has no flash_attention kernel for bfloat16 {what}"
    assert explain(fake, *qkv(d=128), **options) == ["eager", "", reason]
    assert fake.kernel(lambda: fake.ops.flash_attention(*qkv(d=128), **options)) == "eager"


def test_options_that_no_kernel_has_together(fake):
    reason = "this build has no flash_attention kernel for float16 head dim 64 with sinks and a softcap"
    assert explain(fake, *qkv(dtype=F16), sinks=sinks_of(), softcap=2.0) == ["eager", "", reason]
    reason = "this build has no flash_attention kernel for bfloat16 head dims 192 and 128"
    assert explain(fake, *qkv(d=192, dv=128)) == ["eager", "", reason]


def test_options_are_chosen_by_what_was_measured_with_such_a_window(fake):
    won, lost = "measured faster than eager PyTorch at 8 heads of 64x64", "eager PyTorch measured faster at 8 heads of 64x64"
    for left in (7, 15, 31):
        assert explain(fake, *of(), causal=True, window_left=left) == ["kernel", SINKS, won]
    for left in (6, 32):
        reason = 'no kernel was measured on Fake "GPU" near bfloat16 causal head dim 64 with a window, 8 heads of 64x64'
        assert explain(fake, *of(), causal=True, window_left=left) == ["eager", "", reason]
    assert explain(fake, *of(), causal=True, sinks=sinks_of()) == ["eager", "", lost]
    assert explain(fake, *of(), causal=True, softcap=3.0) == ["kernel", SOFTCAP, won]
    assert explain(fake, *of(d=192, dv=128), causal=True) == ["kernel", WIDE, won]


CANNOT_OPTIONS = [
    (FULL, "it has no window", {"window_left": 2}),
    (CAUSAL, "it has no sinks", {"causal": True, "sinks": sinks_of()}),
    (CAUSAL, "it has no softcap", {"causal": True, "softcap": 2.0}),
    (SOFTCAP, "it is for a softcap", {"window_left": 2}),
    (SINKS, "it is for a window or sinks", {}),
    (SINKS, "it has no softcap", {"sinks": sinks_of(), "softcap": 2.0}),
]


@pytest.mark.parametrize(("name", "why", "options"), CANNOT_OPTIONS)
def test_options_that_cannot_be_forced_say_why(fake, name, why, options):
    fake.knobs(force=name)
    with pytest.raises(RuntimeError, match=rf"cannot apply: no .* fits \(the last one tried: {why}\); "):
        fake.ops.flash_attention(*qkv(), **options)
