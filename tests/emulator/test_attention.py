"""FlashAttention as the compiler writes it: its text, what nvcc makes of it, and what it computes, against float64."""

import itertools
import re
import sys
from pathlib import Path

import flash_attention
import golden_launch
import launch
import pytest
import torch
from test_golden_kernels import ATTENTIONS, assert_close, attention, normal

from build_backend import checks, toolkit
from tileops_dsl.emulate import EmulatorError
from tileops_dsl.kernels import MODULES, configs_of
from tileops_dsl.kernels.flash_attention_config import AttentionConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

from attention_reference import exact as exact_attention

PROGRAM = Path(MODULES["flash_attention"].__file__)
TILES = {  # beside those of the texts by hand
    "three groups": {"tile": (192, 48, 128)},
    "one group": {"tile": (64, 96, 128), "stages": 3, "x": "float16"},
    "heads of 64": {"tile": (128, 128, 64)},
    "heads of 80": {"tile": (128, 144, 80)},
}


@pytest.fixture
def gpu(monkeypatch):
    return golden_launch.Emulated(monkeypatch, multiprocessors=4)


@pytest.fixture
def generated(gpu, tmp_path):
    """The kernel of the text by hand's tile, or of another one."""
    return lambda causal, **changes: flash_attention.Generated(flash_attention.config(causal, **changes), tmp_path)


def inputs(b, sq, sk, h, hk, d=128, dtype=torch.bfloat16, dv=None):
    rng = torch.Generator().manual_seed(b + sq + sk + h)
    return [normal(rng, b, s, n, c, dtype=dtype) for s, n, c in ((sq, h, d), (sk, hk, d), (sk, hk, dv or d))]


def check(gpu, kernel, q, k, v, seeds=2, **options):
    results = [exact_attention(*tensors, **{"causal": kernel.row.causal} | options) for tensors in zip(q, k, v, strict=True)]
    wanted, wanted_lse = map(torch.stack, zip(*results, strict=True))
    for gpu.seed in range(seeds):
        out, lse = kernel(q, k, v, **options)
        assert_close(out, wanted, ulps=2)
        assert torch.allclose(lse.double(), wanted_lse, atol=1e-3, rtol=0)


LENGTHS = [(1, 63), (1, 300), (63, 1), (63, 128), (128, 129), (129, 63), (129, 300), (300, 1), (300, 129), (300, 300)]


@pytest.mark.parametrize("b, sq, sk, h, hk", [*ATTENTIONS, *((1, sq, sk, 4, 2) for sq, sk in LENGTHS)])
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(gpu, generated, causal, b, sq, sk, h, hk):
    """Ragged lengths, rows that see no key, grouped heads, more tiles than CTAs, more blocks than stages."""
    check(gpu, generated(causal), *inputs(b, sq, sk, h, hk))


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_maxima_that_grow(gpu, generated, causal, sign):
    """Scores of one sign, from block to block larger, by more and by less than what a maximum may be exceeded by."""
    q, k, v = inputs(1, 300, 700, 2, 1)
    growing = torch.linspace(0.1, 4, 700) if sign < 0 else torch.linspace(4, 0.1, 700)
    check(gpu, generated(causal), q.abs(), sign * k.abs() * growing[:, None, None].to(k.dtype), v)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("causal", [False, True])
def test_other_tiles(gpu, generated, causal, tile):
    kernel = generated(causal, **TILES[tile])
    check(gpu, kernel, *inputs(2, 200, 333, 2, 1, kernel.row.tile[2], getattr(torch, kernel.row.x)))


def options_of(row):
    """A call with all that the kernel has."""
    options = {"causal": True, "window_left": 170} if row.window else {}
    options |= {"sinks": torch.linspace(-2, 3, 4)} if row.sinks else {}
    return options | ({"softcap": 2.0} if row.softcap else {})


BELOW = [  # the kernel, and head dims below those of its tile
    ("bf16_128x128x32_causal", 24, 24),
    ("bf16_192x128x64_full", 40, 40),
    ("f16_128x128x96_causal", 72, 80),
    ("bf16_128x128x128_causal", 104, 112),
    ("bf16_128x128x128_full", 40, 64),  # boxes that lie outside of the tensor
    ("bf16_128x96x192_full", 160, 136),
    ("bf16_128x112x192x128_causal", 144, 72),
    ("bf16_128x64x256_full", 200, 200),
    ("bf16_128x128x64_window_sinks", 37, 45),  # rows that end within 16 bytes
    ("f16_128x128x32_full", 1, 3),
]


@pytest.mark.parametrize("name, dim, dim_v", BELOW)
def test_head_dims_below_the_tile(gpu, name, dim, dim_v, tmp_path):
    """Behind each row of the tensors is NaN, which must not be read."""
    row = next(row for row in configs_of("flash_attention") if row.name.endswith(name))
    kernel = flash_attention.Generated(row, tmp_path)
    tensors = inputs(1, 150, 200, 2, 1, dim, getattr(torch, row.x), dim_v)
    beyond = [torch.nn.functional.pad(t, (0, -t.shape[-1] % 8 + 8), value=torch.nan)[..., : t.shape[-1]] for t in tensors]
    options = options_of(row) | ({"sinks": torch.linspace(-2, 3, 2)} if row.sinks else {})
    check(gpu, kernel, *beyond, seeds=1, **options)


WINDOWS = [
    {},
    {"causal": True},
    {"causal": True, "window_left": 0},
    {"causal": True, "window_left": 40},
    {"causal": True, "window_left": 129},
    {"window_left": 64},
    {"window_right": 70},
    {"window_left": 31, "window_right": 100},
]


@pytest.mark.parametrize("options", WINDOWS)
def test_windows(gpu, generated, options):
    """Blocks that are cut at the left, at the right, at both, at neither; rows that see no key; more tiles than CTAs."""
    kernel = generated(False, tile=(128, 64, 64), options=("window",))
    for sq, sk in ((300, 300), (1, 300), (129, 333), (300, 100), (130, 700)):
        check(gpu, kernel, *inputs(1, sq, sk, 2, 1, 64), seeds=1, **options)


@pytest.mark.parametrize("options", [("sinks",), ("window", "sinks"), ("softcap",), ("sinks", "softcap")])
def test_sinks_and_softcap(gpu, generated, options):
    """Sinks far below, among and far above the scores, of two dtypes, or none; caps that bend much and little."""
    kernel = generated("window" not in options, tile=(128, 64, 64), options=options)
    tensors, given = inputs(2, 130, 150, 4, 2, 64), {"causal": True}
    caps = (0.5, 30.0) if "softcap" in options else (0.0,)
    dtypes = (torch.bfloat16, torch.float32, None) if "sinks" in options else (None,)
    for dtype, cap in itertools.product(dtypes, caps):
        sinks = None if dtype is None else torch.tensor([-200.0, 0, 1.5, 0, 9.0, 0, 300.0, 0], dtype=dtype)[::2]
        check(gpu, kernel, *tensors, seeds=1, **given, softcap=cap, sinks=sinks)
    if "sinks" in options:  # rows that see no key
        sinks = torch.linspace(-1, 2, 2)
        q, k, v = inputs(1, 200, 70, 2, 1, 64)
        check(gpu, kernel, q, k, v, seeds=1, **given, softcap=caps[0], sinks=sinks)
        q[:, 190] = torch.nan
        assert all(result.isnan().any() for result in kernel(q, k, v, **given, softcap=caps[0], sinks=sinks))


@pytest.mark.parametrize("causal", [False, True])
def test_value_head_dim(gpu, generated, causal):
    kernel = generated(causal, tile=(128, 48, 96), head_dim_v=64)
    check(gpu, kernel, *inputs(2, 200, 133, 2, 1, 96, dv=64))


@pytest.mark.parametrize("causal", [False, True])
def test_128_rows_of_a_group(gpu, generated, causal, monkeypatch):
    monkeypatch.setattr(AttentionConfig, "threads", property(lambda self: 128))
    check(gpu, generated(causal, tile=(128, 32, 64)), *inputs(2, 200, 133, 2, 1, 64))


@pytest.mark.parametrize("seed", range(5))
def test_orders(gpu, generated, seed):
    gpu.seed, kernel = seed, generated(True)
    q, k, v = inputs(1, 300, 500, 2, 2)
    assert_close(kernel(q, k, v)[0], attention(q, k, v, True)[0], ulps=2)


def test_heads_first(gpu, generated):
    """Strides are arguments: the storage may be [B, H, S, D]."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(2, 130, 170, 2, 1))
    check(gpu, generated(False), q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_batch_invariance(gpu, generated, causal):
    """From one kernel a sequence has the same result whatever else is in the batch: the dispatcher may take another one."""
    kernel, tensors = generated(causal), inputs(2, 150, 200, 2, 1)
    whole = kernel(*tensors)
    for b in range(2):
        alone = kernel(*(t[b : b + 1] for t in tensors))
        assert all(torch.equal(one[0], all_[b]) for one, all_ in zip(alone, whole, strict=True))


WORDS = (
    *("wait", "arrive", "arrive_expect_bytes", "fence_barrier_init", "sync_threads", "named_barrier_sync"),
    *("wgmma_fence", "wgmma_commit", "wgmma_wait<0>", "wgmma_wait<1>"),
    *("fence_async_shared", "store_commit", "store_wait_read<1>", "store_wait<0>"),
)


@pytest.mark.parametrize("causal, options", [(False, ()), (True, ()), (False, ("window", "sinks", "softcap"))])
def test_a_missing_word_is_noticed(gpu, generated, causal, options):
    """Each wait, arrival, fence, barrier and commit of the text: a fault is reported, or the result is wrong, of tiles with
    several blocks of keys or with one, where the next tile's queries come soon.

    But for the fence of a product that is issued behind another: its registers were written before the fence of that one.
    """
    kernel, missed = generated(causal, options=options), []
    problems, given = [inputs(1, 384, keys, 5, 1) for keys in (700, 120)], {"causal": causal}
    if options:
        given = {"causal": True, "window_left": 400, "sinks": torch.linspace(-1, 2, 5), "softcap": 3.0}
    exact = [exact_attention(*(t[0] for t in tensors), **given)[0] for tensors in problems]
    sites = re.findall(rf"\b({'|'.join(WORDS)})\((?:[^;]*, )?site\((\d+)\)\);", kernel.path.read_text())
    assert {word for word, _ in sites} == set(WORDS)
    for word, site in sites:
        gpu.mutate = {f"{word.split('<')[0]}@{site}": "suppress"}
        runs = ((*problem, seed) for problem in zip(problems, exact, strict=True) for seed in range(3))
        if not any(_fails(gpu, kernel, *run, given) for run in runs):
            missed.append((word, kernel.entry["sites"][site]))
    late = next(n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if "T.gemm" in line and "stage=1" in line)
    assert missed == [("wgmma_fence", f"flash_attention.py:{late}")] * (2 if causal or options else 1)


def _fails(gpu, kernel, tensors, exact, seed, options):
    gpu.seed = seed
    try:
        assert_close(kernel(*tensors, **options)[0], exact, ulps=2)
    except (EmulatorError, AssertionError):
        return True
    return False


# ---- the text


@pytest.mark.parametrize("causal", [False, True])
def test_each_site_is_mapped_and_used_once(generated, causal):
    kernel = generated(causal)
    numbers = re.findall(r"\bsite\((\d+)\)", kernel.path.read_text())
    assert sorted(map(int, numbers)) == sorted(map(int, kernel.entry["sites"])) == list(range(1, len(numbers) + 1))


def test_each_source_comment_is_a_line_of_the_program(generated):
    program = PROGRAM.read_text().splitlines()
    quoted = re.findall(r"^ *// flash_attention\.py:(\d+): (.*)$", generated(True).path.read_text(), re.M)
    assert len(set(quoted)) > 40
    for number, line in quoted:
        assert program[int(number) - 1].strip() == line


def test_parameters_and_report(generated):
    kernel = generated(False)
    assert [name for name, _, _ in kernel.entry["params"]] == (
        ["q", "k", "v", "out", "lse", "sinks", "batches", "heads", "kv_heads", "sq", "sk", "lse_stride", "sinks_stride"]
        + ["sinks_dtype", "scale_log2", "cap_scale", "unscale", "window_left", "window_right", "section"]
    )
    assert kernel.entry["threads"] == 384 and kernel.entry["shared_bytes"] == 229456
    for line in (
        "  k_full         2 stages             arrivals 1, bytes 40960",
        "  q_empty        1 stage              arrivals 8 (2 groups x 4 warps), bytes 0",
        "Registers of a thread: 24 for the producer; 240 for the consumer",
        "  v            64 x 160, 128 bytes",
        "Work of a CTA for 160 keys: 10485760 FLOP, 81920 bytes of k and v (128 FLOP a byte)",
    ):
        assert line in kernel.report.splitlines()


def test_named_numbers(generated):
    """Once in each role, of those that it uses; the last of them is made of the others."""
    text = generated(False, tile=(128, 64, 64), options=("window",)).path.read_text()
    found = re.findall(r"^ *const int (begin|blocks|cut|whole|steps) = (.*);$", text, re.M)
    assert [name for name, _ in found] == ["begin", "blocks", "cut", "begin", "blocks", "cut", "whole"]
    assert found[-1] == ("whole", "max(min(block * 128 + 1 + p.sk - p.sq + p.window_right, p.sk) / 64, begin)")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", ["by hand", *TILES])
def test_nvcc_makes_no_spill_and_serialises_nothing(generated, causal, tile):
    check_machine_code(generated(causal, **TILES.get(tile, {})))


OTHERS = [
    row
    for row in configs_of("flash_attention")
    if row.options or row.head_dim_v != row.tile[2] or row.tile[2] not in (64, 96, 128, 256)
]


@pytest.mark.parametrize("row", [row for row in OTHERS if row.x == "bfloat16"], ids=lambda row: row.name)
def test_nvcc_makes_no_spill_of_other_kernels(gpu, row, tmp_path):
    check_machine_code(flash_attention.Generated(row, tmp_path))


def check_machine_code(kernel):
    try:
        toolkit.find()
    except Exception:
        pytest.skip("needs nvcc")
    _, log = launch.compile_cubin(kernel.path)
    report = checks.Report(kernel.row.name, log, {})
    assert checks.parse_ptxas(log), "ptxas named no kernel"
    assert checks.register_problems(report) + checks.warning_problems(report) == []
