"""gemm's kernels over a made-up CUDA: which one is chosen, what it is launched with, and that the product comes out right.

The launch (fake_gemm.cpp) reads the operands through the tensor maps or strides that it is given, and computes in C++.
"""

import itertools
import threading

import pytest
import torch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ACTIVATIONS = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
NT_PAIR, NT = "gemm_sm_90a_bf16_bf16_128x256_nt_v8", "gemm_sm_90a_bf16_bf16_64x32_nt_v8"
LAUNCH_FAILURE = 719


def randn(*shape, dtype=BF16, seed=0, offset=0):
    """At a multiple of 64 bytes, or `offset` elements behind one."""
    size = torch.Size(shape).numel()
    buffer = torch.empty(size + 64, dtype=dtype)
    start = -buffer.data_ptr() % 64 // buffer.element_size() + offset
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return buffer[start:][:size].copy_(values).view(shape)


def stored(letter, rows, columns, *batch, seed=0, **options):
    """A matrix stored by rows (n) or by columns (t)."""
    if letter == "n":
        return randn(*batch, rows, columns, seed=seed, **options)
    return randn(*batch, columns, rows, seed=seed, **options).mT


def expected(a, b, bias=None, *, activation="none", residual=None, out_dtype=None):
    z = a.double() @ b.double()
    y = ACTIVATIONS[activation](z if bias is None else z + bias.double())
    return y if residual is None else y + residual.double()


def check(fake, a, b, *args, kernel=None, **options):
    """The kernel that served the call, whose result was right."""
    before = fake.get("launches")
    y = fake.ops.gemm(a, b, *args, **options)
    assert fake.get("launches") == before + 1
    assert y.dtype == options.get("out_dtype", a.dtype) and y.is_contiguous()
    exact = expected(a, b, *args, **options)
    assert y.shape == exact.shape
    torch.testing.assert_close(y.double(), exact, rtol=2**-7 if y.dtype == BF16 else 1e-5, atol=1e-4)
    return fake.library.fake_last_kernel().decode()


def launched(fake):
    """Grid, cluster, batch, m, n, k."""
    return tuple(map(int, fake.library.fake_last_launch().split()))


@pytest.mark.parametrize("target", ["sm_90a", "portable"])
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_layouts(fake, layout, target):
    fake.knobs(force=target)
    for m, n, k in ((8, 16, 24), (72, 40, 8), (1, 8, 16), (8, 1, 8) if layout[1] == "t" else (8, 8, 16)):
        if target == "sm_90a" and n == 1:  # rows of one column are no multiple of 16 bytes
            continue
        a, b = stored(layout[0], m, k), stored(layout[1], k, n, seed=1)
        assert f"_{target}_" in (name := check(fake, a, b)) and (f"_{layout}_" in name or 1 in (m, n))
        assert launched(fake)[2:] == (1, m, n, k)


EPILOGUES = [*itertools.product((None, BF16, F16, F32), ACTIVATIONS, (False, True))]


@pytest.mark.parametrize("target", ["sm_90a", "portable"])
@pytest.mark.parametrize(("bias", "activation", "with_residual"), EPILOGUES)
def test_epilogues(fake, target, bias, activation, with_residual):
    fake.knobs(force=target)
    a, b = stored("n", 16, 24), stored("t", 24, 8)
    addends = None if bias is None else randn(8, dtype=bias, seed=2)
    check(fake, a, b, addends, activation=activation, residual=randn(16, 8, seed=3) if with_residual else None)


def test_float32_result(fake):
    fake.knobs(force="sm_90a")
    a, b, residual = stored("n", 16, 24), stored("t", 24, 8), randn(16, 8, dtype=F32, seed=3)
    assert check(fake, a, b, residual=residual, out_dtype=F32) == "gemm_sm_90a_bf16_f32_64x32_nt_v8"


BATCHES = {  # a, b, residual; batch, m
    "a batch of each": ((3, 16, 24), (3, 24, 8), (3, 16, 8), (3, 16)),
    "b for all": ((3, 16, 24), (24, 8), (3, 16, 8), (1, 48)),
    "a for all": ((16, 24), (3, 24, 8), None, (3, 16)),
    "residual for all": ((3, 16, 24), (3, 24, 8), (16, 8), (3, 16)),
    "a residual row": ((3, 16, 24), (3, 24, 8), (8,), (3, 16)),
    "two batch dimensions": ((2, 3, 16, 24), (2, 3, 24, 8), (2, 3, 16, 8), (6, 16)),
    "of size one": ((1, 16, 24), (1, 1, 24, 8), (1, 1, 1, 8), (1, 16)),
}


@pytest.mark.parametrize("target", ["sm_90a", "portable"])
@pytest.mark.parametrize("batches", BATCHES)
def test_batches(fake, batches, target):
    fake.knobs(force=target)
    of_a, of_b, of_residual, shape = BATCHES[batches]
    a, b = randn(*of_a), stored("t", *of_b[-2:], *of_b[:-2], seed=1)
    check(fake, a, b, residual=None if of_residual is None else randn(*of_residual, seed=2))
    assert launched(fake)[2:4] == shape


def test_expanded_batches_are_not_copied(fake):
    fake.knobs(force="sm_90a")
    a, b = randn(1, 16, 24).expand(3, 16, 24), stored("t", 24, 8, 1, seed=1).expand(3, 24, 8)
    before = fake.get("copies")
    check(fake, a, b, residual=randn(3, 1, 8).expand(3, 16, 8))
    assert launched(fake)[2:4] in ((1, 48), (3, 16)) and fake.get("copies") == before


def pitched(rows, columns, pitch, seed=0):
    return randn(rows, pitch, seed=seed)[:, :columns]


WHAT_FITS = [  # a, b, residual; kernel
    (lambda: (pitched(8, 20, 24), stored("t", 24, 8)[:20]), "sm_90a", NT_PAIR),  # ragged K, padded rows
    (lambda: (randn(8, 20), stored("t", 20, 8)), "portable", "gemm_portable_bf16_bf16_64x32_nt_v1"),  # rows of 40 bytes
    (lambda: (randn(8, 16, offset=1), stored("t", 16, 8)), "portable", "gemm_portable_bf16_bf16_64x32_nt_v1"),
    (lambda: (randn(8, 16), stored("t", 16, 8)), "portable", "gemm_portable_bf16_bf16_64x32_nt_v8"),
    (lambda: (randn(8, 16), stored("t", 16, 9)), "portable", "gemm_portable_bf16_bf16_64x32_nt_v1"),  # rows of c of 18 bytes
    (lambda: (randn(1, 16), stored("t", 16, 9)), "portable", "gemm_portable_bf16_bf16_64x32_nt_v8"),  # a single row of 18 bytes
    (lambda: (randn(8, 16), stored("t", 16, 8), randn(8, 8, offset=1)), "portable", "gemm_portable_bf16_bf16_64x32_nt_v1"),
    (lambda: (randn(8, 16), stored("t", 16, 8), pitched(8, 8, 16)), "sm_90a", NT_PAIR),
]


@pytest.mark.parametrize("number", range(len(WHAT_FITS)))
def test_first_kernel_that_fits(fake, number):
    make, target, kernel = WHAT_FITS[number]
    a, b, *residual = make()
    fake.knobs(force=target)
    assert check(fake, a, b, residual=residual[0] if residual else None) == kernel
    if "_v1" in kernel:
        fake.knobs(force="sm_90a")
        with pytest.raises(RuntimeError, match=r"TILEOPS_FORCE=sm_90a cannot apply: no sm_90a gemm kernel for .* fits "):
            fake.ops.gemm(a, b, residual=residual[0] if residual else None)


def test_without_a_unit_stride_there_is_one_copy(fake):
    fake.knobs(force="sm_90a")
    a, b = randn(16, 48)[:, ::2], stored("t", 24, 16)[:, ::2][:, :8]
    before = fake.get("copies")
    kernel = check(fake, a, b)
    assert fake.get("copies") == before + 1
    path, variant, reason = fake.ops._explain_gemm(a, b).split("\t")
    assert (path, variant) == ("kernel", kernel)
    assert reason == "TILEOPS_FORCE=sm_90a is set; a is copied first, because it has no unit stride"
    both = randn(3, 16, 48)[..., ::2], randn(3, 24, 16)[..., ::2], randn(16)[::2]
    assert check(fake, *both).endswith("_nn_v8")
    assert fake.ops._explain_gemm(*both).endswith(
        "; a is copied first, because it has no unit stride; b is copied first, because it has no unit stride; "
        "bias is copied first, because its stride is not 1"
    )
    rows = randn(5, 1, 48)[..., ::2]  # contiguous across rows by itself, not when the batch becomes rows
    check(fake, rows, stored("t", 24, 8))


def test_bias_of_any_stride(fake):
    fake.knobs(force="sm_90a")
    a, b = stored("n", 16, 24), stored("t", 24, 8)
    for bias in (randn(16)[::2], randn(1, dtype=F32).expand(8), randn(8, 3, dtype=F16)[:, 1]):
        check(fake, a, b, bias)


# ---- the grid


@pytest.mark.parametrize(
    ("force", "shape", "grid"),
    [
        (NT_PAIR, (1, 8, 8), 2),  # a cluster
        (NT_PAIR, (256, 8, 8), 2),
        (NT_PAIR, (257, 8, 8), 4),
        (NT_PAIR, (257, 264, 8), 8),
        (NT_PAIR, (2000, 264, 8), 10),  # ten multiprocessors, one CTA on each
        (NT, (65, 40, 8), 4),
        (NT, (640, 64, 8), 10),
        ("portable", (640, 96, 8), 20),  # two on each
        ("portable", (64, 96, 8), 3),
    ],
)
def test_grid(fake, force, shape, grid):
    fake.knobs(force=force)
    m, n, k = shape
    check(fake, stored("n", m, k), stored("t", k, n))
    assert launched(fake)[:2] == (grid, 2 if force == NT_PAIR else 1)
    if m == 1:
        check(fake, randn(4, 8, 8), randn(4, 8, 8).mT)
        assert launched(fake)[:3] == (8, 2, 4)


# ---- the choice


def explain(fake, m, n, k, **options):
    return fake.ops._explain_gemm(stored("n", m, k), stored("t", k, n), **options).split("\t")


def test_a_kernel_is_chosen_where_it_was_measured_to_win(fake):
    won = "measured faster than cuBLAS at 64x64x64"
    for m, n, k in ((64, 64, 64), (32, 128, 64), (90, 48, 128)):
        assert explain(fake, m, n, k) == ["kernel", NT_PAIR, won]
        assert check(fake, stored("n", m, k), stored("t", k, n), randn(n)) == NT_PAIR
        assert explain(fake, m, n, k, activation="silu") == ["kernel", NT, won]  # its own measurements
        assert explain(fake, m, n, k, residual=randn(m, n)) == ["kernel", NT, won]
    assert explain(fake, 64, 64, 64, out_dtype=F32)[1] == "gemm_sm_90a_bf16_f32_64x32_nt_v8"
    a = randn(2, 2, 16, 64)
    assert fake.ops._explain_gemm(a, stored("t", 64, 64)).split("\t")[1] == NT_PAIR  # 64 rows
    assert fake.ops._explain_gemm(a[0], stored("t", 64, 64, 2)).split("\t")[1] == NT_PAIR  # 2 times 16


def test_a_tie_is_a_win(fake):
    assert explain(fake, 256, 64, 64) == ["kernel", NT, "measured faster than cuBLAS at 256x64x64"]  # 10.1 us beside 10


def test_eager_where_cublas_won(fake):
    reason = "cuBLAS measured faster at 512x64x64"
    assert explain(fake, 600, 64, 64) == ["eager", "", reason]
    a, b = stored("n", 600, 64), stored("t", 64, 64)
    assert fake.kernel(lambda: fake.ops.gemm(a, b)) == "eager"
    fake.knobs(require_native="1")
    with pytest.raises(RuntimeError, match=f"no kernel serves this call: {reason}"):
        fake.ops.gemm(a, b)


def test_an_epilogue_that_was_not_measured_there_follows_the_product_alone(fake):
    won = ["kernel", NT, "measured faster than cuBLAS at 256x64x64"]
    assert explain(fake, 256, 64, 64, activation="relu") == explain(fake, 256, 64, 64, residual=randn(256, 64)) == won
    assert explain(fake, 600, 64, 64, activation="relu") == ["eager", "", "cuBLAS measured faster at 512x64x64"]
    assert explain(fake, 64, 64, 64, out_dtype=F32, activation="relu")[1] == "gemm_sm_90a_bf16_f32_64x32_nt_v8"


@pytest.mark.parametrize("shape", [(8, 64, 64), (64, 136, 64), (64, 64, 24), (2048, 64, 64)])
def test_eager_where_nothing_was_measured(fake, shape):
    text = "x".join(map(str, shape))
    assert explain(fake, *shape)[2] == f'no kernel was measured on Fake "GPU" near bfloat16 {text} nt by TMA'


def test_another_gpu_is_another_measurement(fake):
    reason = fake.ops._explain_gemm(randn(64, 64), randn(64, 64)).split("\t")[2]
    assert reason == 'no kernel was measured on Fake "GPU" near bfloat16 64x64x64 nn by TMA'


def test_a_portable_kernel_does_not_win_by_being_the_only_one_that_fits(fake):
    a, b = randn(64, 65)[:, 1:], stored("t", 64, 64)
    assert fake.ops._explain_gemm(a, b).startswith("eager\t\tno kernel was measured on ")


def test_force_a_kernel(fake):
    a, b = stored("n", 64, 64), stored("t", 64, 64)
    for name in (NT, "gemm_portable_bf16_bf16_64x32_nt_v8"):
        fake.knobs(force=name)
        assert check(fake, a, b) == name
        assert fake.ops._explain_gemm(a, b) == f"kernel\t{name}\tTILEOPS_FORCE={name} is set"
    fake.knobs(force="sm_90a")
    assert check(fake, a, b) == NT_PAIR and check(fake, a, b, activation="relu") == NT  # the best that was measured
    assert check(fake, stored("n", 8, 8), stored("t", 8, 8)) == NT_PAIR  # the first: nothing was


CANNOT = {
    "gemm_sm_90a_bf16_bf16_64x32_nn_v8": (lambda: (randn(8, 8), stored("t", 8, 8)), "it takes a b stored by rows"),
    "gemm_sm_90a_bf16_bf16_64x32_tn_v8": (lambda: (randn(8, 8), randn(8, 8)), "it takes an a stored by columns"),
    "gemm_sm_90a_bf16_f32_64x32_nt_v8": (lambda: (randn(8, 8), randn(8, 8)), "it is for other dtypes"),
    NT: (lambda: (randn(8, 9), stored("t", 9, 8)), "it needs a and b, and their strides, at multiples of 16 bytes"),
    NT_PAIR: (
        lambda: (randn(1, 8), stored("t", 8, 9)),
        "it writes 16 bytes at a time, so rows of the result must have a multiple of 16 bytes",
    ),
    "gemm_portable_bf16_bf16_64x32_nt_v8": (
        lambda: (randn(8, 8), stored("t", 8, 9)),
        "it needs rows of the result that are contiguous and start at multiples of 16 bytes",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_forced_says_why(fake, name):
    make, why = CANNOT[name]
    fake.knobs(force=name)
    for call in (fake.ops.gemm, fake.ops._explain_gemm):
        with pytest.raises(RuntimeError) as caught:
            call(*make())
        assert f"; {why}; " in str(caught.value).replace("(the last one tried: ", "; ").replace(")", "")
    fake.knobs(force="gemm_portable_bf16_bf16_64x32_nt_v8")
    with pytest.raises(RuntimeError, match="it needs rows of a, b and residual that end at multiples of 16 bytes"):
        fake.ops.gemm(randn(1, 9), stored("t", 9, 1))
    residual = randn(8, 1).expand(8, 8)
    fake.knobs(force="portable")
    with pytest.raises(RuntimeError, match="it needs rows of residual that are contiguous and start at multiples of 16 bytes"):
        fake.ops.gemm(randn(8, 8), stored("t", 8, 8), residual=residual)


REFUSED = {
    "gemm kernels take bfloat16 and float16, and a is float32": lambda: ((randn(8, 8, dtype=F32), randn(8, 8, dtype=F32)), {}),
    "gemm kernels round to the dtype of a or to float32, and out_dtype is float16": lambda: (
        (randn(8, 8), randn(8, 8)),
        {"out_dtype": F16},
    ),
    "gemm kernels take a residual of the result's dtype, bfloat16, and it is float32": lambda: (
        (randn(8, 8), randn(8, 8)),
        {"residual": randn(8, 8, dtype=F32)},
    ),
    "gemm kernels take a residual of the result's dtype, float32, and it is bfloat16": lambda: (
        (randn(8, 8), randn(8, 8)),
        {"residual": randn(8, 8), "out_dtype": F32},
    ),
    "there is no product to sum: a has no columns": lambda: ((randn(8, 0), randn(0, 8)), {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_kernel_takes(fake, reason):
    args, options = REFUSED[reason]()
    assert fake.ops._explain_gemm(*args, **options) == f"eager\t\t{reason}"
    assert fake.kernel(lambda: fake.ops.gemm(*args, **options)) == "eager"
    fake.knobs(force="portable")
    with pytest.raises(RuntimeError, match=f"^gemm: TILEOPS_FORCE=portable cannot apply: {reason}; "):
        fake.ops.gemm(*args, **options)


# ---- results


@pytest.mark.parametrize("target", ["sm_90a", "portable"])
def test_out(fake, target):
    fake.knobs(force=target)
    a, b, bias = stored("n", 16, 24), stored("t", 24, 8), randn(8)
    for out, direct in (
        (randn(16, 8), True),
        (pitched(16, 8, 24), True),
        (pitched(16, 8, 9), target == "portable"),  # by elements
        (randn(8, 16).t(), False),
        (randn(16, 8, 2)[..., 0], False),
    ):
        storage = torch.as_strided(out, [out.untyped_storage().nbytes() // 2], [1], 0)
        storage.fill_(7)
        assert fake.ops.gemm.out(a, b, bias, activation="relu", out=out).data_ptr() == out.data_ptr()
        torch.testing.assert_close(out.double(), expected(a, b, bias, activation="relu"), rtol=2**-7, atol=1e-4)
        before = fake.get("copies")
        fake.ops.gemm.out(a, b, bias, activation="relu", out=out)
        assert fake.get("copies") - before == (not direct)
        out.fill_(7)
        assert (storage == 7).all()


def test_nothing_is_launched_for_an_empty_result(fake):
    fake.knobs(force="sm_90a")
    for a, b in ((randn(0, 8), randn(8, 8)), (randn(8, 8), randn(8, 0)), (randn(0, 8, 8), randn(8, 8))):
        assert fake.kernel(lambda a=a, b=b: fake.ops.gemm(a, b)) == "eager"


# ---- tensor maps and first calls


def test_tensor_maps_are_encoded_once(fake):
    """In a thread, which has a cache of its own. Addresses are not ours to choose: a few maps may meet in one place of it."""
    fake.knobs(force=NT)
    calls = [(randn(16, 24, seed=i), stored("t", 24, 8, seed=i), randn(16, 8), randn(16, 8)) for i in range(20)]
    found = []

    def encodes(run):
        before = fake.library.fake_encodes()
        for a, b, out, residual in calls:
            run(a, b, out, residual)
        found.append(fake.library.fake_encodes() - before)

    def rounds():
        encodes(lambda a, b, out, residual: fake.ops.gemm.out(a, b, out=out))
        encodes(lambda a, b, out, residual: fake.ops.gemm.out(a, b, out=out))
        encodes(lambda a, b, out, residual: fake.ops.gemm.out(a, b, residual=residual, out=out))
        encodes(lambda a, b, out, residual: fake.ops.gemm.out(a[:8], b, out=out[:8]))  # other extents

    for _ in range(2):
        thread = threading.Thread(target=rounds)
        thread.start()
        thread.join()
        first, again, with_residual, shorter = found
        assert first == 60 and again <= 10 and 20 <= with_residual <= 30 and 40 <= shorter <= 50
        found.clear()


def test_questions_about_a_kernel_are_asked_while_relaxed_about_captures(fake):
    fake.knobs(force="sm_90a")
    check(fake, randn(16, 24), stored("t", 24, 8))
    assert fake.get("loads_outside_relaxed") == 0 and fake.get("relaxed") == 0


def test_a_launch_that_fails_is_an_error(fake):
    fake.knobs(force="sm_90a")
    fake.set(launch_error=LAUNCH_FAILURE)
    text = f"^gemm: launching {NT_PAIR} failed: a made-up failure \\(cudaErrorMadeUp\\)$"
    with pytest.raises(RuntimeError, match=text):
        fake.ops.gemm(randn(16, 24), stored("t", 24, 8))


def test_log(fake, capfd):
    a, b = stored("n", 64, 64), stored("t", 64, 64)
    fake.knobs(log="dispatch")
    for _ in range(2):
        fake.ops.gemm(a, b)
    line = f"tileops: gemm bfloat16 [64, 64] [64, 64] -> {NT_PAIR} (measured faster than cuBLAS at 64x64x64)"
    assert capfd.readouterr().err == line + "\n"
