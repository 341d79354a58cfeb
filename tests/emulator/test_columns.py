"""Kernels whose groups divide columns (FullCol), on the emulator: against float64, and that each word of them is needed."""

import functools
from dataclasses import replace
from pathlib import Path

import columns
import launch
import library
import mutants
import pytest

from build_backend import checks, toolkit
from tileops_dsl import output
from tileops_dsl.kernels import MODULES, configs_of

NT, NN = columns.FEW_ROWS
KERNELS = {
    "gemm nt": lambda: library.Kernel(NT),
    "gemm nn": lambda: library.Kernel(NN),
    "attention": columns.attention_kernel,
    "late attention": lambda: columns.attention_kernel(stage=1),
    "mla": lambda: library.Kernel(columns.SMALL_MLA),
}
SOURCES = {f"{name}.py": Path(module.__file__) for name, module in MODULES.items()} | {"columns.py": Path(columns.__file__)}
KERNEL = functools.cache(lambda name: KERNELS[name]())


def problems(name) -> list[library.Problem]:
    """In which every word matters: more tiles than CTAs, more steps than stages."""
    if name == "mla":
        return [columns.mla_problem(columns.SMALL_MLA, [250, 64, 70], 40, 2)]
    if name.endswith("attention"):
        return [columns.attention_problem(columns.ATTENTION, 2, 150, 277)]
    row, shape = {"gemm nt": NT, "gemm nn": NN}[name], (1, 130, 248, 312)
    with_all = library.gemm_problem(row, *shape, "float32", 4, residual=True, ctas=2)
    return [with_all, library.gemm_problem(row, *shape, ctas=2)]


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

# Right too, each once: the word, and the line of the program.
LANES = ("sync_warp suppress", "with T.Kernel(threads")  # promises that the producer's lanes come together again
LATE = ("wgmma_fence suppress", "T.gemm(p_half, v_tile")  # nothing is written to its registers behind the fence before it
ZEROS = ("store_shared flip", "T.fill(k[T.max(valid, 0)")  # of whole rows, in whatever order
EQUIVALENT = {name: [LANES] for name in KERNELS} | {"late attention": [LANES, LATE], "mla": [LANES, ZEROS]}


@pytest.mark.parametrize("name", KERNELS)
def test_a_wrong_word_is_noticed(name):
    """Each wait, arrival, fence, barrier and commit of the text left out, and each with another number, parity or swizzle."""
    kernel, missed = KERNEL(name), []
    runs = [lambda seed, mutant, p=p: list(kernel(p, seed, mutate=mutant).values()) for p in problems(name)]
    subject = mutants.Subject(mutants.of_kernel(kernel), runs, kernel.made.entry["sites"])
    right = mutants.results(subject)
    for mutant in subject.mutants:
        if not mutants.caught(subject, right, mutant):
            ((place, change), *_) = mutant.items()
            word, site = place.split("@")
            file, line = subject.sites[site].split(":")
            missed.append((f"{word} {change}", SOURCES[file].read_text().splitlines()[int(line) - 1].strip()))
    unknown = [(word, line) for word, line in missed if not any(w == word and line.startswith(t) for w, t in EQUIVALENT[name])]
    assert not unknown and len(missed) <= len(EQUIVALENT[name])


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
