"""flash_attention_varlen's kernels over a made-up CUDA: which one is chosen, what it is launched with, and what comes out.

The launches (fake_schedule.cpp, fake_lengths.cpp) list the tiles of all requests and compute them through the tensor maps,
addresses and numbers that they are given.
"""

import math
import sys
from pathlib import Path

import pytest
import torch

import tileops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from attention_reference import cut, exact, offsets
from test_attention_kernels import BF16, F16, F32, FULL, LAUNCH_FAILURE, randn

KERNEL = "flash_attention_sm_90a_{}_lengths"
CAUSAL, SINKS = KERNEL.format("bf16_128x128x64_causal"), KERNEL.format("bf16_128x128x64") + "_window_sinks"
SOFTCAP = KERNEL.format("bf16_64x96x64") + "_window_softcap"
WIDE = KERNEL.format("bf16_128x112x192x128_causal")
LENGTHS = [  # queries and keys of each request
    ([130, 0, 1, 60, 7], [130, 40, 70, 61, 0]),
    ([70, 140, 3], [0, 20, 3]),
    ([1, 1, 1], [5, 0, 9]),
    ([257], [5]),
]


def sinks_of(heads=4, dtype=F32):
    return randn(2 * heads, dtype=dtype, seed=7)[::2]


MASKS = {
    "full": ({}, SINKS),
    "causal": ({"causal": True, "scale": 0.3}, CAUSAL),
    "window": ({"causal": True, "window_left": 3}, SINKS),
    "band": ({"window_left": 2, "window_right": 1}, SINKS),
    "right": ({"window_right": 2, "sinks": sinks_of(dtype=BF16)}, SINKS),
    "sinks": ({"causal": True, "sinks": sinks_of()}, SINKS),
    "softcap": ({"softcap": 1.5}, SOFTCAP),
    "all of one": ({"causal": True, "window_left": 5, "softcap": 0.5, "scale": -0.3}, SOFTCAP),
}


def ragged(rows, keys, heads=4, kv_heads=2, d=64, dv=None, dtype=BF16):
    """Of each request q, k and v."""
    shapes = (rows, heads, d), (keys, kv_heads, d), (keys, kv_heads, dv or d)
    return [[randn(n, h, m, dtype=dtype, seed=s + 9 * i) for i, n in enumerate(of)] for s, (of, h, m) in enumerate(shapes)]


def arguments(q, k, v, index=torch.int32):
    counts = [[len(t) for t in tensors] for tensors in (q, k)]
    return *map(torch.cat, (q, k, v)), *(offsets(n, dtype=index) for n in counts), *map(max, counts)


def close(out, lse, q, k, v, **options):
    """Results of each request, of a kernel, against float64."""
    assert out.dtype == q[0].dtype and lse.dtype == F32
    for n, wanted in enumerate(zip(*(exact(*tensors, **options) for tensors in zip(q, k, v, strict=True)), strict=True)):
        if n == 0:
            outs = torch.cat(wanted)
            torch.testing.assert_close(out.double(), outs, rtol=torch.finfo(out.dtype).eps, atol=1e-5)
        else:
            torch.testing.assert_close(lse.double(), torch.cat(wanted, 1), rtol=1e-5, atol=1e-5)


def check(fake, q, k, v, given=None, **options):
    """The kernel that served the call, whose results were right and new, and which `explain` knows."""
    given = given or arguments(q, k, v)
    before = fake.get("launches")
    out, lse = fake.ops.flash_attention_varlen(*given, **options)
    assert fake.get("launches") == before + 1 and out.is_contiguous() and lse.is_contiguous()
    assert out.shape == (*given[0].shape[:2], given[2].shape[2]) and lse.shape == given[0].shape[1::-1]
    counts = {"seqused_k": options.pop("seqused_k")} if "seqused_k" in options else {}
    used = counts["seqused_k"].tolist() if counts else [len(t) for t in k]
    close(out, lse, q, *([t[:n] for t, n in zip(of, used, strict=True)] for of in (k, v)), **options)
    name = fake.library.fake_last_kernel().decode()
    assert explain(fake, *given, **counts, **options)[:2] == ["kernel", name]
    return name


def same_as_eager(fake, op, *args, **options):
    """Of a call that a kernel serves."""
    run, before = getattr(fake.ops, op), fake.get("launches")
    found = run(*args, **options)
    assert fake.get("launches") > before
    fake.knobs(force="eager")
    launches, eager = fake.get("launches"), run(*args, **options)
    fake.knobs(force="")
    assert fake.get("launches") == launches
    for ours, theirs, atol in zip(found, eager, (0.02, 2e-3), strict=True):
        assert (ours.dtype, ours.stride(), ours.device) == (theirs.dtype, theirs.stride(), theirs.device)
        torch.testing.assert_close(ours, theirs, rtol=0.01, atol=atol)


def explain(fake, *args, **options):
    return fake.ops._explain_flash_attention_varlen(*args, **options).split("\t")


def launched(fake):
    """Grid, tiles, and how many there may be."""
    return tuple(map(int, fake.library.fake_last_launch().split()))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: str(lengths[0]))
def test_lengths_and_masks(fake, lengths, mask):
    options, name = MASKS[mask]
    assert check(fake, *ragged(*lengths), **options) == name
    rows, bm = lengths[0], 64 if name == SOFTCAP else 128
    most = sum(rows) // bm + min(2 * len(rows) + 2, sum(rows))
    assert launched(fake) == (min(10, 4 * most), sum(-(-n // bm) for n in rows), most)


PORTABLE = "flash_attention_portable_bf16_64x64x64_lengths_window_sinks"


@pytest.mark.parametrize("mask", MASKS)
def test_portable(fake, mask):
    """One kernel serves all masks; by addresses and strides, of head dims that end anywhere in rows of whole 16 bytes."""
    options, _ = MASKS[mask]
    fake.knobs(force="portable")
    name = PORTABLE + "_softcap" * ("softcap" in options)
    for lengths in LENGTHS:
        assert check(fake, *ragged(*lengths), **options) == name
    q, k, v = ragged([5, 9], [7, 11], d=40, dv=24)
    tensors = (LAYOUTS["padded rows"](t) for t in arguments(q, k, v)[:3])
    assert check(fake, q, k, v, (*tensors, *arguments(q, k, v)[3:]), **options) == name


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (6, 1), (8, 4)])
def test_heads(fake, heads, kv_heads):
    for options in ({"causal": True}, {"sinks": sinks_of(heads)}):
        check(fake, *ragged([5, 1], [7, 4], heads, kv_heads), **options)


def test_dtypes(fake):
    assert check(fake, *ragged([5, 1], [7, 4], dtype=F16)) == KERNEL.format("f16_128x128x64") + "_window_sinks"


@pytest.mark.parametrize(
    "d, dv, causal, name", [(8, 8, False, SINKS), (40, 24, True, CAUSAL), (56, 64, True, CAUSAL), (160, 104, True, WIDE)]
)
def test_head_dims_below_the_tile(fake, d, dv, causal, name):
    assert check(fake, *ragged([5, 1], [7, 4], d=d, dv=dv), causal=causal) == name


INDICES = {
    "int64": lambda t: t.long(),
    "strided": lambda t: torch.stack((t, t), 1)[:, 0],
    "int64, strided": lambda t: torch.stack((t, t), 1)[:, 0].long(),
    "within another": lambda t: torch.cat((t[:1] - 9, t, t[-1:]))[1:-1],
}


@pytest.mark.parametrize("index", INDICES)
def test_index_tensors(fake, index):
    q, k, v = ragged([5, 0, 9], [7, 3, 11])
    given = list(arguments(q, k, v))
    given[3:5] = map(INDICES[index], given[3:5])
    used = INDICES[index](torch.tensor([6, 3, 0], dtype=torch.int32))
    check(fake, q, k, v, given, seqused_k=used, causal=True)


LAYOUTS = {
    "heads first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "half of a pair": lambda t: torch.cat((t, t), -1)[..., t.shape[-1] :],
    "every second row": lambda t: torch.stack((t, t), 1).flatten(0, 1)[::2],
    "padded rows": lambda t: torch.nn.functional.pad(t, (0, 8), value=math.nan)[..., :-8],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read_where_they_are(fake, layout):  # B22, B24
    q, k, v = ragged([5, 9], [7, 11])
    tensors, before = arguments(q, k, v)[:3], fake.get("copies")
    for changed in ((0, 1, 2), (1,), (2,)):
        given = [LAYOUTS[layout](t) if n in changed else t for n, t in enumerate(tensors)]
        check(fake, q, k, v, (*given, *arguments(q, k, v)[3:]), causal=True)
    assert fake.get("copies") == before


@pytest.mark.parametrize("mask", MASKS)
def test_the_fallback_gives_the_same(fake, mask):  # B65
    for rows, dv in (([1, 1], 64), ([40, 3], 64), ([40, 3], 40)):
        same_as_eager(fake, "flash_attention_varlen", *arguments(*ragged(rows, [70, 45], dv=dv)), **MASKS[mask][0])


def test_a_head_that_is_repeated(fake):  # B20
    q, k, v = ragged([5, 9], [7, 11], kv_heads=1)
    before, given = fake.get("copies"), list(arguments(q, k, v))
    given[1:3] = (t.expand(-1, 2, -1) for t in given[1:3])
    assert check(fake, q, k, v, given, causal=True) == CAUSAL and fake.get("copies") == before


# ---- lengths that do not go together


def none(out, lse, rows):
    assert not out[rows].any() and (lse[:, rows] == -math.inf).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sinks": sinks_of()}])
def test_rows_that_no_request_has(fake, options):
    q, k, v = (randn(300, h, 64, seed=h) for h in (4, 2, 1))
    v = v.expand(300, 2, 64)
    index = torch.tensor([140, 143, 145], dtype=torch.int32)
    out, lse = fake.ops.flash_attention_varlen(q, k, v, index, index, 3, 3, **options)
    assert launched(fake)[1] == 2 + 2 + 1 + 1
    for rows in (slice(0, 140), slice(145, 300)):
        none(out, lse, rows)
    parts = [cut(t[140:145], [3, 2]) for t in (q, k, v)]
    close(out[140:145], lse[:, 140:145], *parts, **options)


def test_no_request(fake):
    q, k, v = (randn(5, h, 64) for h in (4, 2, 2))
    index = torch.zeros(1, dtype=torch.int32)
    out, lse = fake.ops.flash_attention_varlen(q, k, v, index, index, 0, 0, seqused_k=index[:0])
    none(out, lse, slice(0, 5))
    assert launched(fake)[1] == 1


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_left": 2, "window_right": 1}, {"causal": True, "softcap": 2.0}]
)
@pytest.mark.parametrize("most", [(0, 9), (3, 4), (5, 2), (9, 0)])
def test_the_rest_of_a_longer_request_is_left_out(fake, most, options):
    """As if it were not there; the same in Python."""
    q, k, v = ragged([9, 2], [9, 3])
    given = *arguments(q, k, v)[:5], *most
    out, lse = fake.ops.flash_attention_varlen(*given, **options)
    assert fake.library.fake_last_kernel().decode() == explain(fake, *given, **options)[1]
    rows = cut(out, [9, 2]), [part.mT for part in cut(lse, [9, 2], 1)]
    for n in range(2):
        none(rows[0][n], rows[1][n].mT, slice(most[0], None))
    parts = [q[n][: most[0]] for n in range(2)], *([t[: most[1]] for t in of] for of in (k, v))
    whole = [torch.cat([part[: most[0]] for part in of]) for of in rows]
    close(whole[0], whole[1].mT, *parts, **options)
    eager = tileops.flash_attention_varlen(*given, **options)
    torch.testing.assert_close(out, eager[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, eager[1], rtol=0.01, atol=0.02)


@pytest.mark.parametrize("most", [100, 2**31 - 1, 2**31, 2**32 + 1, 2**62])
def test_more_than_the_longest(fake, most):
    q, k, v = ragged([9, 2], [9, 3])
    given = *arguments(q, k, v)[:5], most, most
    for mask in ("full", "causal", "band"):
        options, name = MASKS[mask]
        assert check(fake, q, k, v, given, **options) == name
    for options in ({"window_left": 2**62}, {"window_right": 2**62}):
        check(fake, q, k, v, given, **options)


def test_what_is_not_in_use_does_not_count(fake):
    q, k, v = ragged([5, 3, 2], [9, 6, 4])
    for n, count in enumerate((7, 6, 0)):
        k[n][count:], v[n][count:] = math.nan, math.inf
    check(fake, q, k, v, seqused_k=torch.tensor([7, 6, 0], dtype=torch.int32), causal=True)


def test_no_more_is_in_use_than_there_is(fake):
    given = arguments(*ragged([5, 3], [9, 6]))
    out = fake.ops.flash_attention_varlen(*given, seqused_k=torch.tensor([99, 99]))
    assert all(map(torch.equal, out, fake.ops.flash_attention_varlen(*given)))


def test_empty(fake):
    empty = "the results are empty, so nothing is launched"
    for sizes in ({"rows": [0, 0]}, {"rows": [3], "heads": 0, "kv_heads": 0}):
        sizes = {"keys": [5] * len(sizes["rows"])} | sizes
        given = arguments(*ragged(**sizes))
        assert fake.kernel(lambda given=given: fake.ops.flash_attention_varlen(*given)) == "eager"
        assert explain(fake, *given) == ["kernel", "", empty]
    given = arguments(*ragged([3, 2], [0, 0]))
    assert explain(fake, *given) == ["eager", "", "there are no keys to sum over"]
    none(*fake.ops.flash_attention_varlen(*given), slice(0, 5))


# ---- the choice


def test_what_is_said(fake):
    given = arguments(*ragged([5], [7]))
    assert explain(fake, *given, causal=True) == ["kernel", CAUSAL, "it serves bfloat16 causal head dim 64"]
    found = explain(fake, *given, window_left=2, sinks=sinks_of())
    assert found == ["kernel", SINKS, "it serves bfloat16 head dim 64 with a window and sinks"]


COPIES = "; by copies with rows of whole 16 bytes: "
REFUSED = [
    ({"dtype": F32}, {}, "flash_attention_varlen kernels take bfloat16 and float16, and q is float32"),
    *(({}, {"scale": s}, "flash_attention_varlen kernels take a scale above 0 in float32") for s in (0.0, -1.0, 1e-60)),
    ({"d": 300}, {}, "this build has no flash_attention_varlen kernel for bfloat16 head dim 300"),
    ({"d": 192, "dv": 128}, {}, "this build has no flash_attention_varlen kernel for bfloat16 head dims 192 and 128"),
    (
        {"dtype": F16},
        {"softcap": 2.0},
        "this build has no flash_attention_varlen kernel for float16 head dim 64 with a softcap",
    ),
]


@pytest.mark.parametrize("sizes, options, reason", REFUSED)
def test_what_no_kernel_serves(fake, sizes, options, reason):
    q, k, v = ragged([5, 1], [7, 4], **sizes)
    given = arguments(q, k, v)
    assert explain(fake, *given, **options) == ["eager", "", reason]
    assert fake.kernel(lambda: fake.ops.flash_attention_varlen(*given, **options)) == "eager"
    fake.knobs(force="sm_90a")
    with pytest.raises(RuntimeError, match=r"^flash_attention_varlen: TILEOPS_FORCE=sm_90a cannot apply: "):
        fake.ops.flash_attention_varlen(*given, **options)


@pytest.mark.parametrize("number", range(3))
def test_what_tma_cannot_address_is_copied(fake, number):
    q, k, v = ragged([5, 1], [7, 4])
    given = list(arguments(q, k, v))
    for change in (lambda t: torch.stack((t, t), -1)[..., 0], lambda t: torch.nn.functional.pad(t, (0, 1))[..., :-1]):
        tensors = [change(t) if n == number else t for n, t in enumerate(given)]
        assert check(fake, q, k, v, tensors, causal=True) == CAUSAL
        assert explain(fake, *tensors)[2] == f"it serves bfloat16 head dim 64{COPIES}{'qkv'[number]}"


DIMS = [(60, 60, "q, k, v, out"), (64, 36, "v, out"), (37, 64, "q, k"), (1, 3, "q, k, v, out")]


@pytest.mark.parametrize("d, dv, names", DIMS)
@pytest.mark.parametrize("mask", ["full", "causal", "sinks"])
def test_other_head_dims_are_copied(fake, mask, d, dv, names):
    options, name = MASKS[mask]
    q, k, v = ragged([130, 0, 5], [40, 9, 70], d=d, dv=dv)
    before = fake.get("copies")
    assert check(fake, q, k, v, **options) == name
    assert fake.get("copies") - before == len(names.split(", "))
    assert explain(fake, *arguments(q, k, v), **options)[2].endswith(COPIES + names)


def test_force(fake):
    q, k, v = ragged([5, 1], [7, 4])
    for force, causal, name in (("sm_90a", True, CAUSAL), (SINKS, True, SINKS), (CAUSAL, True, CAUSAL), (SINKS, False, SINKS)):
        fake.knobs(force=force)
        assert check(fake, q, k, v, causal=causal) == name
        assert explain(fake, *arguments(q, k, v), causal=causal)[2] == f"TILEOPS_FORCE={force} is set"
    fake.knobs(force=WIDE)
    assert check(fake, q, k, v, causal=True) == WIDE


CANNOT = [
    (CAUSAL, {}, "it is for causal attention"),
    (CAUSAL, {"causal": True, "window_left": 1}, "it has no window"),
    (SINKS, {"softcap": 2.0}, "it has no softcap"),
    (SOFTCAP, {}, "it is for a softcap"),
    (SOFTCAP, {"softcap": 2.0, "sinks": sinks_of()}, "it has no sinks"),
    (FULL, {}, "it is for keys that lie otherwise"),
    (CAUSAL + "_paged", {"causal": True}, "it is for keys that lie otherwise"),
]


@pytest.mark.parametrize("name, options, why", CANNOT)
def test_what_cannot_be_forced_says_why(fake, name, options, why):
    fake.knobs(force=name)
    with pytest.raises(RuntimeError, match=rf"TILEOPS_FORCE={name} cannot apply: no .* fits \(the last one tried: {why}\); "):
        fake.ops.flash_attention_varlen(*arguments(*ragged([5], [7])), **options)


def test_names_and_targets_without_such_a_kernel(fake):
    given = arguments(*ragged([5], [7], dtype=F16))
    texts = {"portable": "this build has no portable flash_attention_varlen kernel for float16 head dim 64"}
    texts["softmax_sm_90a_bf16_bf16_v8"] = 'this build has no flash_attention_varlen kernel of that name for Fake "GPU"'
    for force, text in texts.items():
        fake.knobs(force=force)
        with pytest.raises(RuntimeError, match=f"^flash_attention_varlen: TILEOPS_FORCE={force} cannot apply: {text}; "):
            fake.ops.flash_attention_varlen(*given)


def test_numbers_beyond_32_bits(fake):
    q, index = randn(1, 1, 64), torch.zeros(2, dtype=torch.int32)
    reason = "(the last one tried: it counts queries, keys, heads and tiles in 32 bits)"
    for rows, keys, path in ((1, 2**31 - 65538, "kernel"), (1, 2**31 - 65537, "eager"), (2**30, 2**30 - 65538, "eager")):
        k = q.expand(keys, 1, 64)
        found = explain(fake, q.expand(rows, 2, 64), k, k, index, index, 1, 1)
        assert found[0] == path and (path == "kernel" or found[2].endswith(reason))


# ---- results


@pytest.mark.parametrize("number", range(6))
def test_out(fake, number):
    q, k, v = ragged([5, 9], [7, 11])
    outs = [  # and whether a kernel writes there itself
        (torch.empty(14, 4, 64, dtype=BF16), True),
        (randn(4, 14, 64).transpose(0, 1), True),
        (randn(14, 4, 72)[..., :64], True),
        (randn(14, 4, 65)[..., :64], False),
        (randn(14, 4, 64, 2)[..., 0], False),
        (randn(14, 4, 64, offset=1), False),
    ]
    (out, direct), lse = outs[number], randn(14, 4, 3, dtype=F32)[..., 1].mT
    storages = [torch.as_strided(t, [t.untyped_storage().nbytes() // t.element_size()], [1], 0) for t in (out, lse)]
    for storage in storages:
        storage.fill_(7)
    before = fake.get("copies")
    given = fake.ops.flash_attention_varlen.out(*arguments(q, k, v), causal=True, out=out, lse=lse)
    assert fake.get("copies") - before == (not direct)
    assert (given[0].data_ptr(), given[1].data_ptr()) == (out.data_ptr(), lse.data_ptr())
    close(out, lse, q, k, v, causal=True)
    out.fill_(7)
    lse.fill_(7)
    assert all((storage == 7).all() for storage in storages)


def test_launches(fake):
    given = arguments(*ragged([5, 9], [7, 11]))
    fake.ops.flash_attention_varlen(*given)
    assert fake.get("loads_outside_relaxed") == 0 and fake.get("relaxed") == 0
    fake.set(launch_error=LAUNCH_FAILURE)
    with pytest.raises(RuntimeError, match=r"^flash_attention: launching attention_tiles failed: a made-up failure"):
        fake.ops.flash_attention_varlen(*given)
