"""Calls through torch's dispatcher and the whole binding, on CPU tensors over a made-up CUDA (fake_cuda.cpp)."""

import re
import threading
from pathlib import Path

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2**-7, F16: 1e-3, F32: 1e-5}
LAUNCH_FAILURE = 719


def norm(x, weight, eps, dim, weight_offset=0.0):
    x = x.double()
    y = x * torch.rsqrt(x.square().mean(dim, keepdim=True) + (1.1920929e-07 if eps is None else eps))
    if weight is not None:
        y = y * (weight.double() + weight_offset).reshape([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
    return y


def randn(*shape, dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F32).to(dtype)


def assert_close(y, expected, dtype):
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected.to(dtype).double(), rtol=TOLERANCE[dtype], atol=1e-6)


LAYOUTS = {
    "contiguous": lambda: randn(6, 4, 16),
    "transposed": lambda: randn(6, 4, 16).transpose(0, 2),
    "columns of a wider buffer": lambda: randn(6, 4, 48)[..., 16:32],
    "expanded": lambda: randn(1, 4, 16).expand(6, 4, 16),
    "sliced in every dimension": lambda: randn(12, 8, 32)[::2, ::2, 1::2],
    "five dimensions, sliced": lambda: randn(4, 4, 4, 4, 16)[::2, 1:3, ::2, :3],
    "no dimension": lambda: randn(1).reshape(()),
    "one element": lambda: randn(1, 1),
    "empty": lambda: randn(0, 5),
    "no columns": lambda: randn(5, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_strides_along_every_dim(fake, layout):
    x = LAYOUTS[layout]()
    for dim in range(-max(x.dim(), 1), max(x.dim(), 1)):
        y = fake.ops.softmax(x, dim)
        assert y.stride() == torch.empty_like(x).stride()
        assert_close(y, torch.softmax(x.double(), dim), BF16)
        if x.dim():
            weight = randn(x.shape[dim], dtype=F32)
            assert_close(fake.ops.rms_norm(x, weight, 1e-5, dim=dim, weight_offset=1.0), norm(x, weight, 1e-5, dim, 1.0), BF16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out_layout", ["same", "reversed", "gaps"])
def test_out_of_any_strides(fake, layout, out_layout):
    x = LAYOUTS[layout]()
    out = torch.empty_like(x)
    if out_layout == "reversed":
        out = torch.empty(x.shape[::-1], dtype=BF16).permute(*reversed(range(x.dim()))) if x.dim() else out
    if out_layout == "gaps":
        out = torch.empty([2 * n for n in x.shape], dtype=BF16)[tuple(slice(None, None, 2) for _ in x.shape)]
    storage = torch.as_strided(out, [out.untyped_storage().nbytes() // 2], [1], 0)
    storage.fill_(7)
    result = fake.ops.softmax.out(x, out=out)
    assert result.data_ptr() == out.data_ptr() and result.stride() == out.stride()
    assert_close(out, torch.softmax(x.double(), -1), BF16)
    out.fill_(7)
    assert (storage == 7).all()  # nothing was written between the elements


def test_arguments_arrive(fake):
    x, weight = randn(5, 8, dtype=F32), randn(16, dtype=F16)[::2]
    assert_close(fake.ops.rms_norm(x, None, None), norm(x, None, None, -1), F32)
    assert_close(fake.ops.rms_norm(x, weight, 0.5), norm(x, weight, 0.5, -1), F32)
    assert_close(fake.ops.rms_norm(x * 1e-3), norm(x * 1e-3, None, 1e-6, -1), F32)  # the default eps
    half = randn(5, 8, dtype=F16)
    v = norm(half, weight, 1e-5, -1)
    assert_close(fake.ops.rms_norm_silu(half, weight), v * torch.sigmoid(v), F16)
    assert_close(fake.ops.softmax(randn(5, 8), dtype=F32), torch.softmax(randn(5, 8).double(), -1), F32)


@pytest.mark.parametrize(
    ("x", "dim", "expected"),
    [
        (lambda: randn(32, 64), -1, "softmax_sm_90a_bf16_bf16_v8"),
        (lambda: randn(32, 128), -1, "softmax_sm_90a_bf16_bf16_v1"),  # longer than the first one's max_cols
        (lambda: randn(32, 60), -1, "softmax_sm_90a_bf16_bf16_v8shifted"),  # 60 is no multiple of 8, but x and y lie alike
        (lambda: randn(32, 65)[:, 1:], -1, "softmax_sm_90a_bf16_bf16_v1"),  # misaligned, and y is not
        (lambda: randn(1, 65)[:, 1:], -1, "softmax_sm_90a_bf16_bf16_v1"),
        (lambda: randn(32, 72)[:, 8:], -1, "softmax_sm_90a_bf16_bf16_v8"),
        (lambda: randn(32, 68)[:, :64], -1, "softmax_sm_90a_bf16_bf16_v1"),  # rows of x lie apart from those of y
        (lambda: randn(2000).as_strided((3, 4, 64), (292, 72, 1)), -1, "softmax_sm_90a_bf16_bf16_v1"),  # 292 is not 8n
        (lambda: randn(32, 83)[:, :75], -1, "softmax_sm_90a_bf16_bf16_v8shifted"),  # 83 and 75 are 8 apart
        (lambda: randn(1, 68)[:, :64], -1, "softmax_sm_90a_bf16_bf16_v8"),  # the stride of a single row is not used
        (lambda: randn(32, 64), 0, "softmax_sm_90a_bf16_bf16_v1rows"),
        (lambda: randn(64).reshape(64, 1), -1, "softmax_sm_90a_bf16_bf16_v1rows"),
        (lambda: randn(64).reshape(64, 1), 0, "softmax_sm_90a_bf16_bf16_v8"),
        (lambda: randn(8, 64, 3), 1, "softmax_sm_90a_bf16_bf16_v1rows"),
        (lambda: randn(32, 64, 2)[..., 0], 0, "softmax_sm_90a_bf16_bf16_v1"),
        (lambda: randn(32, 64, dtype=F32), -1, "softmax_sm_90a_f32_f32_v4"),
        (lambda: randn(32, 63, dtype=F32), -1, "softmax_portable_f32_f32_v1"),  # no sm_90a kernel fits
    ],
)
def test_first_kernel_that_fits(fake, x, dim, expected):
    x = x()
    assert fake.kernel(lambda: fake.ops.softmax(x, dim)) == expected
    path, variant, reason = fake.ops._explain_softmax(x, dim).split("\t")
    assert (path, variant) == ("kernel", expected) and reason.startswith("the first ")


def test_vector_kernels_need_a_unit_stride_weight(fake):
    x = randn(4, 16)
    assert fake.kernel(lambda: fake.ops.rms_norm(x, randn(16))) == "rms_norm_sm_90a_bf16_bf16_v8"
    assert fake.kernel(lambda: fake.ops.rms_norm(x, randn(32)[::2])) == "rms_norm_sm_90a_bf16_bf16_v1"
    assert fake.kernel(lambda: fake.ops.rms_norm(x, randn(17)[1:])) == "rms_norm_sm_90a_bf16_bf16_v1"
    assert fake.kernel(lambda: fake.ops.rms_norm(x)) == "rms_norm_sm_90a_bf16_bf16_v8"


def test_explain_tells_of_a_copy_and_of_the_reason_for_eager(fake):
    before = fake.get("launches")
    sliced = randn(4, 4, 4, 4, 16)[::2, 1:3, ::2, :3]
    copied = "; x is copied first, because its rows need three or more strides and the kernels take two"
    assert fake.ops._explain_softmax(sliced).split("\t")[2].endswith(copied)
    assert fake.ops._explain_softmax(randn(2, 2, dtype=F16)) == "eager\t\tthis build has no kernel for float16"
    assert fake.ops._explain_softmax(randn(2, 2), dtype=F16) == "eager\t\tthis build has no kernel for bfloat16 to float16"
    assert fake.ops._explain_rms_norm_silu(randn(0, 2)) == "kernel\t\tx is empty, so nothing is launched"
    assert fake.get("launches") == before


TYPES = "torch.float32, torch.float16 or torch.bfloat16"
APART = "give it storage of its own"
ERRORS = {
    f"softmax: x has dtype torch.float64; expected {TYPES}": lambda o: o.softmax(torch.ones(2, dtype=torch.float64)),
    f"softmax: x has dtype torch.int64; expected {TYPES}": lambda o: o.softmax(torch.ones(2, dtype=torch.int64)),
    f"softmax: dtype is torch.float64; expected {TYPES}": lambda o: o.softmax(randn(2), dtype=torch.float64),
    "softmax: dim is 3; expected a value from -2 to 1 for x of shape [4, 5]": lambda o: o.softmax(randn(4, 5), 3),
    "softmax: dim is -3; expected a value from -2 to 1 for x of shape [4, 5]": lambda o: o._explain_softmax(randn(4, 5), -3),
    "softmax: dim is 1; expected a value from -1 to 0 for x of shape []": lambda o: o.softmax(randn(1).reshape(()), 1),
    "rms_norm: weight has shape [7]; expected [5], the size of x along dim -1": lambda o: o.rms_norm(randn(4, 5), randn(7)),
    "rms_norm_silu: weight has shape [4, 1]; expected [4], the size of x along dim 0": lambda o: o.rms_norm_silu(
        randn(4, 5), randn(4, 1), dim=0
    ),
    f"rms_norm: weight has dtype torch.float64; expected {TYPES}": lambda o: o.rms_norm(randn(4), randn(4).double()),
    "rms_norm: weight has shape [3]; expected [4], the size of x along dim -1": lambda o: o.rms_norm(randn(0, 4), randn(3)),
    "rms_norm: out has shape [4, 6]; expected [4, 5]": lambda o: o.rms_norm.out(randn(4, 5), out=randn(4, 6)),
    "rms_norm: out has dtype torch.float16; expected torch.bfloat16": lambda o: o.rms_norm.out(
        randn(4, 5), out=randn(4, 5, dtype=F16)
    ),
    "softmax: out has dtype torch.bfloat16; expected torch.float32": lambda o: o.softmax.out(
        randn(4, 5), dtype=F32, out=randn(4, 5)
    ),
    f"rms_norm: out overlaps itself (a stride is 0); {APART}": lambda o: o.rms_norm.out(
        randn(4, 5), out=randn(1, 5).expand(4, 5)
    ),
    f"rms_norm: out overlaps x in memory; {APART}": lambda o: o.rms_norm.out((x := randn(4, 5)), out=x),
    f"rms_norm: out overlaps weight in memory; {APART}": lambda o: o.rms_norm.out(
        randn(1, 5), (w := randn(5)), out=w.reshape(1, 5)
    ),
}


@pytest.mark.parametrize("text", ERRORS)
def test_bad_input_is_refused_before_any_launch(fake, text):
    before = fake.get("launches")
    with pytest.raises(IndexError if ": dim is " in text else ValueError, match=f"^{re.escape(text)}$"):
        ERRORS[text](fake.ops)
    assert fake.get("launches") == before


def test_knob_force(fake):
    x = randn(4, 16)
    fake.knobs(force="portable")
    assert fake.kernel(lambda: fake.ops.softmax(x)) == "softmax_portable_bf16_bf16_v8"
    assert fake.ops._explain_softmax(x) == "kernel\tsoftmax_portable_bf16_bf16_v8\tTILEOPS_FORCE=portable is set"
    fake.knobs(force="softmax_sm_90a_bf16_bf16_v1")
    assert fake.kernel(lambda: fake.ops.softmax(x)) == "softmax_sm_90a_bf16_bf16_v1"
    fake.knobs(force="eager")
    assert fake.kernel(lambda: fake.ops.softmax(x)) == "eager"
    assert fake.ops._explain_softmax(x) == "eager\t\tTILEOPS_FORCE=eager is set"
    fake.knobs(require_native="1")  # asked for by name, so no fallback
    assert fake.kernel(lambda: fake.ops.softmax(x)) == "eager"


@pytest.mark.parametrize(
    ("force", "why"),
    [
        ("softmax_sm_90a_bf16_bf16_v8", "it is for shorter rows"),
        ("softmax_sm_90a_bf16_bf16_v1rows", "it needs neighbouring rows to be neighbours in memory"),
        ("softmax_sm_90a_f32_f32_v4", "it is for other dtypes"),
        ("rms_norm_sm_90a_bf16_bf16_v8", "it is a kernel of rms_norm"),
        ("softmax_sm_90", "this build has no kernel of that name"),
    ],
)
def test_force_of_what_does_not_fit_is_an_error(fake, force, why):
    fake.knobs(force=force)
    expected = f"softmax: TILEOPS_FORCE={force} cannot apply: {why}; unset it, or force a target or kernel that fits"
    with pytest.raises(RuntimeError, match=f"^{re.escape(expected)}$"):
        fake.ops.softmax(randn(4, 128))


def test_knobs_require_and_disable(fake):
    fake.knobs(require_native="1")
    refusal = "softmax: TILEOPS_REQUIRE_NATIVE is set and no kernel serves this call: "
    with pytest.raises(RuntimeError, match=f"^{refusal}this build has no kernel for float16$"):
        fake.ops.softmax(randn(3, 4, dtype=F16))
    fake.knobs(disable_native="1")
    with pytest.raises(RuntimeError, match=f"^{refusal}TILEOPS_DISABLE_NATIVE is set$"):
        fake.ops.softmax(randn(3, 4))
    fake.knobs(require_native="")
    assert fake.kernel(lambda: fake.ops.softmax(randn(3, 4))) == "eager"


def test_log_says_each_decision_once(fake, capfd):
    fake.knobs(log="dispatch")
    for _ in range(3):
        fake.ops.softmax(randn(3, 24))
        fake.ops.softmax(randn(3, 24, dtype=F16))
    err = capfd.readouterr().err.splitlines()
    assert err == [
        "tileops: softmax bfloat16 [3, 24] -> softmax_sm_90a_bf16_bf16_v8 (the first sm_90a kernel that fits)",
        "tileops: softmax float16 [3, 24] -> eager (this build has no kernel for float16)",
    ]


@pytest.mark.parametrize("cols", [1, 2**31 - 65537, 2**31 - 65536, 2**31, 2**32 + 8])
def test_columns_beyond_32_bits_are_refused(fake, cols):
    """2^32 + 8 columns would become 8."""
    reason = fake.library.fake_refuses_columns(cols)
    assert (reason is None) == (cols < 2**31 - 65536), reason


def test_x_of_many_strides_into_an_out_with_gaps(fake):
    """Neither collapses with the other: x is copied, and so is the result."""
    x = randn(2, 3, 4, 6).permute(2, 0, 3, 1)[:, :, ::2]
    out = torch.full((*x.shape[:-1], 8), torch.nan, dtype=BF16)
    fake.ops.softmax.out(x, out=out[..., :3])
    assert_close(out[..., :3], torch.softmax(x.double(), -1), BF16)
    assert out[..., 3:].isnan().all()


def test_eager_serves_what_no_kernel_does_without_gradients(fake):
    x = randn(3, 6, dtype=F16).requires_grad_()
    y = fake.ops.softmax(x, dtype=F32)
    assert torch.equal(y, torch.softmax(x.float(), -1)) and torch.is_grad_enabled()
    assert y.grad_fn.name().endswith("WarnNotImplemented")  # torch's own mark on a raw operator; the twin recorded nothing
    out = torch.empty(6, 3, dtype=F16).t()
    assert fake.ops.rms_norm.out(x.detach(), randn(6), out=out).data_ptr() == out.data_ptr()
    assert_close(out, norm(x.detach(), randn(6), 1e-6, -1), F16)


def failed_eagerly(op, reason, torchs):
    """torch tells the text of an error behind its C functions from 2.13 on."""
    ours = f"{op}: no kernel serves this call ({reason}), and its eager form failed"
    return re.escape(torchs if TORCH >= (2, 13) else ours)


def test_error_of_the_eager_twin_keeps_its_text(fake):
    with pytest.raises(
        RuntimeError, match=failed_eagerly("rms_norm", "this build has no kernel for float16", "from the eager twin")
    ):
        fake.ops.rms_norm(randn(2, 3, dtype=F16), randn(3))
    assert torch.is_grad_enabled()


def test_missing_eager_twin_is_an_error(fake):
    fake.knobs(force="eager")
    with pytest.raises(
        RuntimeError, match=failed_eagerly("rms_norm_silu", "TILEOPS_FORCE=eager is set", "_eager_rms_norm_silu")
    ):
        fake.ops.rms_norm_silu(randn(2, 3, dtype=F16))


def test_failed_launch_names_kernel_and_cause(fake):
    fake.set(launch_error=LAUNCH_FAILURE)
    expected = "softmax: launching softmax_sm_90a_bf16_bf16_v8 failed: a made-up failure (cudaErrorMadeUp)"
    with pytest.raises(RuntimeError, match=f"^{re.escape(expected)}$"):
        fake.ops.softmax(randn(4, 16))


def test_another_current_device_is_guarded_and_given_back(fake):
    fake.set(current_device=1)
    assert fake.kernel(lambda: fake.ops.softmax(randn(4, 16))) == "softmax_sm_90a_bf16_bf16_v8"
    assert fake.get("guards") == 0


def test_loading_is_relaxed_about_captures(fake):
    fake.ops.softmax(randn(4, 16))
    assert fake.get("loads_outside_relaxed") == 0 and fake.get("relaxed") == 0


def rows_of_tables() -> int:
    """Of the kernels in fake_*.cpp: one macro each."""
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("fake_*.cpp"))]
    tables = [table for text in texts for table in re.findall(r"Variant \w+_variants\[\] = {(.*?)};\n", text, re.DOTALL)]
    assert len(tables) == 5  # of rows, products, attention, decode and mla_decode
    return sum(len(re.findall(r"\b[A-Z]+\(", table)) for table in tables)


def test_status_after_use(fake):
    fake.ops.softmax(randn(4, 16))
    status = fake.status()
    assert status["variants"] == rows_of_tables() > 30
    assert status["devices"] == {"0": {"name": 'Fake "GPU"', "capability": "9.0", "target": "sm_90a", "reason": ""}}


def test_threads(fake):
    failures = []

    def work(seed):
        for n in range(30):
            x = randn(4, 8 + n, seed=seed)
            try:
                assert_close(fake.ops.softmax(x), torch.softmax(x.double(), -1), BF16)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
