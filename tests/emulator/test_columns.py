"""Kernels whose groups divide columns (FullCol), on the emulator: against float64, and that each word of them is needed."""

import functools
from collections import Counter
from dataclasses import replace

import columns
import launch
import library
import mutants
import pytest

from build_backend import checks, toolkit
from tileops_dsl import output
from tileops_dsl.kernels import configs_of

KERNELS = {  # with a problem in which every word matters
    **{
        f"gemm {'nt' if row.transpose_b else 'nn'}": (
            lambda row=row: library.Kernel(row),
            lambda row=row: library.gemm_problem(row, 1, 130, 250, 312, "float32", 4, residual=True, ctas=2),
        )
        for row in columns.FEW_ROWS
    },
    "attention": (columns.attention_kernel, lambda: columns.attention_problem(columns.ATTENTION, 2, 150, 277)),
    "late attention": (
        lambda: columns.attention_kernel(stage=1),
        lambda: columns.attention_problem(columns.ATTENTION, 2, 150, 277),
    ),
    "mla": (lambda: library.Kernel(columns.SMALL_MLA), lambda: columns.mla_problem(columns.SMALL_MLA, [250, 64, 70], 40, 2)),
}
KERNEL = functools.cache(lambda name: KERNELS[name][0]())


@pytest.mark.parametrize("row", columns.FEW_ROWS, ids=lambda row: row.name)
def test_gemm(row):
    """Ragged rows and columns, more tiles than CTAs, all that a call may switch on."""
    kernel = library.Kernel(row)
    for seed, problem in enumerate(library.gemm_edges(row)):
        kernel.check(problem, seed)


@pytest.mark.parametrize("tile, stage", [((64, 64, 64, 128), 1), ((64, 96, 64, 256), 0), ((128, 64, 64, 128), 1)])
@pytest.mark.parametrize("x", ["float16", "bfloat16"])
def test_attention(x, tile, stage):
    """Two reductions and an operand are exchanged in each iteration; masks are of row and column."""
    row = replace(columns.ATTENTION, x=x, y=x, tile=tile, op=f"attention_by_columns_{stage}")
    kernel = columns.attention_kernel(row, stage)
    for seed, shape in enumerate([(1, 64, 64), (2, 100, 277), (1, 70, 30), (3, 1, 450)]):
        kernel.check(columns.attention_problem(row, *shape), seed)


LENGTHS = [([64], 64), ([1], 16), ([0, 130, 0], 16), ([200, 63, 129], 80), ([700, 5], 128)]


@pytest.mark.parametrize("lengths, heads", LENGTHS)
def test_mla_decode(lengths, heads):
    """Pages anywhere, NaN behind each length, empty requests, rows beyond the last, more tiles than CTAs."""
    for seed, (sq, causal) in enumerate([(1, 1), (3, 1), (2, 0)]):
        KERNEL("mla").check(columns.mla_problem(columns.SMALL_MLA, lengths, heads, sq, causal), seed)


@pytest.mark.parametrize("row", configs_of("mla_decode_standard"), ids=lambda row: row.name)
def test_mla_decode_at_its_tile(row):
    kernel = library.Kernel(row)
    for seed in range(2):
        kernel.check(columns.mla_problem(row, [150, 0, 64], 40, 2), seed)


# ---- mutants

# Right too, with the reason. A fence: no register of the product was written since the fence of one before it.
EQUIVALENT = {name: Counter() for name in KERNELS}


@pytest.mark.parametrize("name", KERNELS)
def test_a_wrong_word_is_noticed(name):
    """Each wait, arrival, fence, barrier and commit of the text left out, and each with another number, parity or swizzle."""
    kernel, missed = KERNEL(name), Counter()
    runs = [lambda seed, mutant, problem=KERNELS[name][1](): list(kernel(problem, seed, mutate=mutant).values())]
    subject = mutants.Subject(mutants.of_kernel(kernel), runs, kernel.made.entry["sites"])
    right = mutants.results(subject)
    for mutant in subject.mutants:
        if not mutants.caught(subject, right, mutant):
            ((place, change), *_) = mutant.items()
            missed[f"{place.split('@')[0]} {change}", subject.sites[place.split("@")[1]]] += 1
    assert missed == EQUIVALENT[name]


# ---- what nvcc makes of them


@pytest.mark.parametrize("row", [*configs_of("gemm_few_rows"), *configs_of("mla_decode_standard")], ids=lambda row: row.name)
def test_nvcc_makes_no_spill_and_serialises_nothing(row):
    try:
        toolkit.find()
    except Exception:
        pytest.skip("needs nvcc")
    _, log = launch.compile_cubin(library.write([output.compile_config(row)]))
    report = checks.Report(row.name, log, {})
    assert checks.parse_ptxas(log), "ptxas named no kernel"
    assert checks.register_problems(report) + checks.warning_problems(report) == []
