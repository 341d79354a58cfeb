"""gemm through the whole binding, and the problem that kernels will get, against PyTorch's own indexing."""

import ctypes
import itertools
import random
import re

import pytest
import torch

from tileops import _schemas  # and its operators, which C++ is held against

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ACTIVATIONS = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def randn(*shape, dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F32).to(dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_arguments_arrive_at_the_twin(fake, activation):
    a, b, bias, residual = randn(4, 8), randn(8, 6, seed=1), randn(6, dtype=F32, seed=2), randn(4, 1, dtype=F16, seed=3)
    y = fake.ops.gemm(a, b, bias, activation=activation, residual=residual, out_dtype=F32)
    expected = ACTIVATIONS[activation](a.double() @ b.double() + bias.double()) + residual.double()
    assert y.dtype == F32
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    out = torch.empty(6, 4, dtype=F16).t()
    assert fake.ops.gemm.out(a, b, activation=activation, out_dtype=F16, out=out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out.double(), ACTIVATIONS[activation](a.double() @ b.double()), rtol=2e-3, atol=2e-3)


def test_defaults_arrive(fake):
    a, b = randn(2, 4, 8, dtype=F16), randn(8, 6, dtype=F16)
    y = fake.ops.gemm(a, b)
    assert y.dtype == F16 and torch.equal(y, torch.matmul(a.float(), b.float()).half())


def aligned(*shape, dtype=F16, offset=0):
    """Of a dtype that the made-up table has no kernel for."""
    size = torch.Size(shape).numel()
    buffer = torch.zeros(size + 64, dtype=dtype)
    start = -buffer.data_ptr() % 128 // buffer.element_size()
    return buffer[start + offset :][:size].view(shape)


EXPLAINED = {
    "4x8x16 nn by TMA": lambda: (aligned(4, 16), aligned(16, 8)),
    "4x8x16 nt by TMA": lambda: (aligned(4, 16), aligned(8, 16).t()),
    "8x8x16 tn by TMA": lambda: (aligned(16, 8).t(), aligned(16, 8)),
    "8x8x16 tt by TMA": lambda: (aligned(16, 8).t(), aligned(8, 16).t()),
    "4x8x12 nn by vectors": lambda: (aligned(4, 12), aligned(12, 8)),
    "4x8x16 nt by vectors": lambda: (aligned(4, 16, offset=1), aligned(8, 16).t()),
    "20x8x16 nt by TMA": lambda: (aligned(5, 4, 16), aligned(8, 16).t()),  # a linear layer: the batch becomes rows
    "5x8x16 nt by TMA": lambda: (aligned(5, 1, 16), aligned(8, 16).t()),
    "5 times 4x8x16 nn by TMA": lambda: (aligned(5, 4, 16), aligned(5, 16, 8)),
    "5 times 6x8x16 nn by TMA": lambda: (aligned(6, 16), aligned(5, 16, 8)),  # a is broadcast
    "6 times 4x8x16 nn by TMA": lambda: (aligned(2, 3, 4, 16), aligned(2, 3, 16, 8)),
    "2 times 12x8x16 nn by TMA": lambda: (aligned(2, 3, 4, 16), aligned(2, 1, 16, 8)),
    "1x1x16 nt by TMA": lambda: (aligned(1, 16), aligned(16, 1)),
}


@pytest.mark.parametrize("text", EXPLAINED)
def test_explain_describes_the_problem(fake, text):
    reason = f"this build has no gemm kernel for float16 {text}"
    assert fake.ops._explain_gemm(*EXPLAINED[text]()) == f"eager\t\t{reason}"


def test_other_reasons(fake):
    explain = fake.ops._explain_gemm
    wide = explain(randn(2, 3, dtype=F32), randn(3, 2, dtype=F32))
    assert wide == "eager\t\tgemm kernels take bfloat16 and float16, and a is float32"
    assert explain(randn(2, 1, 4, 8), randn(3, 8, 4)) == (
        "eager\t\tgemm kernels take one batch dimension, and those of a, b, residual and the result do not merge into one"
    )
    for a, b in ((randn(0, 3), randn(3, 2)), (randn(2, 3), randn(3, 0)), (randn(0, 2, 3), randn(3, 2))):
        assert explain(a, b) == "kernel\t\tthe result is empty, so nothing is launched"
        y = fake.ops.gemm(a, b, out_dtype=F32)
        assert y.shape == torch.matmul(a, b).shape and y.dtype == F32 and y.is_contiguous()
    assert torch.equal(fake.ops.gemm(randn(4, 0), randn(0, 8)), torch.zeros(4, 8, dtype=BF16))
    fake.knobs(force="eager")
    assert explain(randn(2, 3), randn(3, 2)) == "eager\t\tTILEOPS_FORCE=eager is set"


def test_knobs(fake, capfd):
    a, b = aligned(4, 16), aligned(16, 8)
    reason = "this build has no gemm kernel for float16 4x8x16 nn by TMA"
    fake.knobs(require_native="1")
    with pytest.raises(RuntimeError, match=f"^gemm: TILEOPS_REQUIRE_NATIVE is set and no kernel serves this call: {reason}$"):
        fake.ops.gemm(a, b)
    fake.knobs(require_native="", log="dispatch")
    fake.ops.gemm(a, b)
    assert capfd.readouterr().err == f"tileops: gemm float16 [4, 16] [16, 8] -> eager ({reason})\n"
    for force in ("sm_90a", "portable", "softmax_sm_90a_bf16_bf16_v8"):
        fake.knobs(force=force)
        of_target = f"{force} gemm kernel for float16 4x8x16 nn by TMA"
        reason = "this build has no " + ('gemm kernel of that name for Fake "GPU"' if "softmax" in force else of_target)
        remedy = "unset it, or force a target or kernel that fits"
        for call in (fake.ops.gemm, fake.ops._explain_gemm):
            with pytest.raises(RuntimeError, match=f"^gemm: TILEOPS_FORCE={force} cannot apply: {reason}; {remedy}$"):
                call(a, b)


def test_failure_of_the_twin_is_an_error(fake):
    with pytest.raises(RuntimeError, match=r"from the eager twin|its eager form failed"):
        fake.ops.gemm(randn(2, 3), randn(3, 2))
    with pytest.raises(RuntimeError, match=r"^gemm: scale_b was given; scales do not work yet, expected None$"):
        fake.ops.gemm(randn(2, 4), randn(4, 2), scale_b=randn(1))


BAD = [  # arguments, keywords
    ((randn(4, 5).double(), randn(5, 6)), {}),
    ((randn(4, 5), randn(5, 6, dtype=F32)), {}),
    ((randn(5), randn(5, 6)), {}),
    ((randn(4, 5), randn(5)), {}),
    ((randn(()), randn(5)), {}),
    ((randn(2, 4, 5), randn(6, 5)), {}),
    ((randn(2, 1, 4, 5), randn(3, 2, 5, 6)), {}),
    ((randn(0, 4, 5), randn(2, 5, 6)), {}),
    ((randn(4, 5), randn(5, 6), randn(5)), {}),
    ((randn(4, 5), randn(5, 6), randn(1, 6)), {}),
    ((randn(4, 5), randn(5, 6), randn(6).double()), {"activation": "swish"}),
    ((randn(4, 5), randn(5, 6)), {"activation": "swish", "residual": randn(3, 6)}),
    ((randn(4, 5), randn(5, 6)), {"activation": ""}),
    ((randn(4, 5), randn(5, 6)), {"residual": randn(3, 6)}),
    ((randn(4, 5), randn(5, 6)), {"residual": randn(1, 4, 6)}),
    ((randn(4, 5), randn(5, 6)), {"residual": randn(4, 6).double(), "out_dtype": torch.float64}),
    ((randn(4, 5), randn(5, 6)), {"out_dtype": torch.float64}),
    ((randn(4, 5), randn(5, 6)), {"out": randn(4, 5)}),
    ((randn(4, 5), randn(5, 6)), {"out": randn(4, 6, dtype=F32)}),
    ((randn(4, 5), randn(5, 6)), {"out_dtype": F32, "out": randn(4, 6)}),
    ((randn(4, 5), randn(5, 6)), {"out": randn(6).expand(4, 6)}),
    (((square := randn(5, 5)), randn(5, 5)), {"out": square.t()}),
    ((randn(5, 5), square), {"out": square}),
    ((randn(5, 5), randn(5, 5), square[0]), {"out": square}),
    ((randn(5, 5), randn(5, 5)), {"residual": square[:1], "out": square}),
    ((randn(5, 5), randn(5, 5)), {"scale_a": square}),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_errors_are_those_of_python(fake, number):
    """The same words on every path: tests/ops has them written out."""
    args, kwargs = BAD[number]
    found = []
    for ops in (fake.ops, torch.ops.tileops):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            (ops.gemm.out if "out" in kwargs else ops.gemm)(*args, **kwargs)
        found.append((isinstance(caught.value, ValueError), str(caught.value)))
    assert found[0] == found[1] and re.match(r"gemm: \w+ ", found[0][1])


def test_twins_take_the_number_of_an_activation(fake):
    """Both definitions, and the order of the names."""
    in_cpp, in_python = (str(ops._eager_gemm.default._schema) for ops in (fake.ops, torch.ops.tileops))
    assert in_cpp.partition("(")[2] == in_python.partition("(")[2] and "*, int activation=0, " in in_cpp
    assert tuple(ACTIVATIONS) == _schemas.ACTIVATIONS


def collapse(probe, tensors):
    def flat(lists):
        values = [value for row in lists for value in row]
        return (ctypes.c_int64 * max(len(values), 1))(*values)

    present = [t for t in tensors if t is not None]
    ndims = flat([[0 if t is None else t.dim()] for t in tensors])
    out = (ctypes.c_int64 * 16)()
    if not probe.probe_gemm(ndims, flat(t.shape for t in present), flat(t.stride() for t in present), out):
        return None
    return tuple(out[:4]), [tuple(out[i : i + 3]) for i in (4, 7, 10, 13)]


def assert_same_product(probe, a, b, y, residual):
    """y = a @ b + residual through the strides of the problem, against torch's own."""
    problem = collapse(probe, (a, b, y, residual))
    if problem is None:
        return None
    (batch, m, n, k), strides = problem
    expected = torch.matmul(a, b) + (0 if residual is None else residual)
    shapes = (batch, m, k), (batch, k, n), (batch, m, n), (batch, m, n)
    whole = zip((a, b, y, residual), shapes, strides)
    views = [None if t is None else t.as_strided(size, stride, t.storage_offset()) for t, size, stride in whole]
    y.zero_()
    views[2].copy_(torch.matmul(views[0], views[1]) + (0 if residual is None else views[3]))
    torch.testing.assert_close(y, expected)
    return problem


def strided(chance, shape):
    """Any layout of a tensor: permuted, with gaps, repeated along a dimension."""
    order = chance.sample(range(len(shape)), len(shape))
    gaps = [size + chance.choice((0, 0, 1)) for size in (shape[d] for d in order)]
    tensor = torch.randn(gaps, dtype=torch.float64)[tuple(slice(shape[d]) for d in order)]
    return tensor.permute([order.index(d) for d in range(len(shape))])


def test_problem_against_torch(row_probe):
    chance = random.Random(0)
    collapsed = refused = rows = 0
    for _ in range(1500):
        batch = [chance.choice((1, 2, 3)) for _ in range(chance.randint(0, 3))]
        m, n, k = (chance.choice((1, 2, 5)) for _ in range(3))

        def shape(*matrix, batch=batch):
            own = [chance.choice((1, size)) if chance.random() < 0.5 else size for size in batch]
            return own[chance.choice((0, 0, len(own))) :] + list(matrix)

        plain = chance.random() < 0.5
        make = torch.randn if plain else lambda size: strided(chance, size)
        a, b = make(shape(m, k)).double(), make(shape(k, n)).double()
        size = list(torch.matmul(a, b).shape)
        y = torch.empty(size, dtype=torch.float64) if plain else strided(chance, size)
        residual = strided(chance, [chance.choice((1, s)) for s in size]) if chance.random() < 0.3 else None
        problem = assert_same_product(row_probe, a, b, y, residual)
        collapsed += problem is not None
        refused += problem is None
        rows += problem is not None and problem[0][1] > m
    assert collapsed > 800 and refused > 50 and rows > 100


def test_what_must_collapse(row_probe):
    weight = torch.randn(8, 16).t()
    for shape in ((5, 3, 16), (2, 5, 3, 16), (5, 1, 16), (1, 5, 1, 3, 16)):
        a = torch.randn(shape)
        y = torch.empty(*shape[:-1], 8)
        (batch, m, _, _), _ = assert_same_product(row_probe, a, weight, y, torch.randn(8))
        assert batch == 1 and m == a.numel() // 16
        assert assert_same_product(row_probe, a, weight, y, torch.randn(*shape[:-1], 8))[0][0] == 1
    for left, right in itertools.product(((2, 3), (1, 1), ()), repeat=2):
        a, b = torch.randn(*left, 4, 16), torch.randn(*right, 16, 8)
        assert assert_same_product(row_probe, a, b, torch.empty_like(torch.matmul(a, b)), None) is not None
    heads = torch.randn(4, 3, 16).transpose(0, 1)  # [tokens, heads, 16] as a batch of heads
    problem = assert_same_product(row_probe, heads, torch.randn(3, 16, 8), torch.empty(4, 3, 8).transpose(0, 1), None)
    assert problem[0] == (3, 4, 8, 16)
