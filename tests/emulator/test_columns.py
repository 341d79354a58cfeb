"""Kernels whose groups divide columns (FullCol), on the emulator: against float64, and that each word of them is needed."""

import functools
import re
from dataclasses import replace
from pathlib import Path

import columns
import launch
import library
import mutants
import numpy as np
import pytest

from build_backend import checks, toolkit
from tileops_dsl import emulate, output
from tileops_dsl.codegen import emit_roles, param_fields, params_header
from tileops_dsl.kernels import MODULES, configs_of
from tileops_dsl.passes import run_passes
from tileops_dsl.targets import TARGETS

NT, NN = columns.FEW_ROWS
KERNELS = {
    "gemm nt": lambda: library.Kernel(NT),
    "gemm nn": lambda: library.Kernel(NN),
    "attention": columns.attention_kernel,
    "late attention": lambda: columns.attention_kernel(stage=1),
    "mla": lambda: library.Kernel(columns.SMALL_MLA),
    "mla of two": lambda: library.Kernel(columns.SHARED_MLA),
}
SOURCES = {f"{name}.py": Path(module.__file__) for name, module in MODULES.items()} | {"columns.py": Path(columns.__file__)}
KERNEL = functools.cache(lambda name: KERNELS[name]())


def problems(name) -> list[library.Problem]:
    """In which every word matters: more tiles than CTAs, more steps than stages."""
    if name.startswith("mla"):
        return [columns.mla_problem(KERNEL(name).row, [250, 64, 70], 40, 2, spread=8.0)]
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


ATTENTIONS = [  # tile, stage of the product with the values, groups
    ((64, 64, 64, 128), 1, 2),
    ((64, 96, 64, 256), 0, 2),
    ((128, 64, 64, 128), 1, 2),
    ((64, 96, 64, 192), 0, 3),
    ((64, 32, 64, 64), 1, 1),
]


@pytest.mark.parametrize("tile, stage, groups", ATTENTIONS)
@pytest.mark.parametrize("x", ["float16", "bfloat16"])
def test_attention(x, tile, stage, groups):
    """Two reductions and an operand are exchanged in each iteration; masks are of row and column."""
    row = replace(columns.ATTENTION, x=x, y=x, tile=tile, op=f"attention_by_columns_{stage}_{groups}")
    kernel = columns.attention_kernel(row, stage, groups)
    for seed, shape in enumerate([(1, 64, 64), (2, 100, 277), (1, 70, 30), (3, 1, 450)]):
        kernel.check(columns.attention_problem(row, *shape), seed)


LENGTHS = [([64], 64), ([1], 16), ([0, 130, 0], 16), ([200, 63, 129], 80), ([700, 5], 128)]


@pytest.mark.parametrize("name", ["mla", "mla of two"])
@pytest.mark.parametrize("lengths, heads", LENGTHS)
def test_mla_decode(name, lengths, heads):
    """Pages anywhere, NaN behind each length, empty requests, rows beyond the last, more tiles than CTAs."""
    for seed, (sq, causal) in enumerate([(1, 1), (3, 1), (2, 0)]):
        problem = columns.mla_problem(KERNEL(name).row, lengths, heads, sq, causal, spread=1 + 5 * seed)
        KERNEL(name).check(problem, seed)


@pytest.mark.parametrize("row", configs_of("mla_decode_standard"), ids=lambda row: row.name)
def test_mla_decode_at_its_tile(row):
    kernel = library.Kernel(row)
    for seed in range(2):
        kernel.check(columns.mla_problem(row, [150, 0, 64], 40, 2), seed)


@pytest.mark.parametrize("missing", [None, "named_barrier_sync", "fence_async_shared"])
def test_groups_that_divide_rows_clear_a_tile_of_all(run_words, missing):
    """Behind the length b is NaN. All groups meet behind the zeros, or it is noticed."""
    kernel = run_passes(columns.ends_early, TARGETS["sm_90a"])
    header = params_header("ends_early_params", param_fields(kernel)).split("namespace tileops {")[1].split("}  //")[0]
    text, rng = f"{header}\n{emit_roles(kernel, 'ends_early', 'ends_early_params')[0]}", np.random.default_rng(5)
    site = re.search(rf"{missing}\((?:3, 256, )?site\((\d+)\)", text)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((200, 200), (200, 144)))
    c, lengths = np.full((200, 144), np.nan, np.float32), np.array([150, 64], np.int32)
    exact = np.concatenate([a[:128, :150].astype(float) @ b[:150], a[128:, :64].astype(float) @ b[:64]])
    b[150:] = np.nan
    maps = [emulate.TensorMap(a, (64, 128), 128), emulate.TensorMap(b, (64, 64), 128)]
    values = [*maps, emulate.Out(c), emulate.In(lengths), *map(emulate.I32, (200, 144, 200, 2)), *map(emulate.I64, (144, 1))]
    more = {"threads": 384, "grid": 2, "shared": kernel.shared_bytes}
    mutate = {f"{missing}@{site[1]}": "suppress"} if missing else None
    for seed in range(3):
        try:
            run_words(text, "ends_early", values, seed=seed, mutate=mutate, **more)
            right = np.allclose(c, exact, atol=1e-3, rtol=1e-3)
        except emulate.EmulatorError as fault:
            assert missing, fault
            return
        if not right:
            break
    assert right == (missing is None)


# ---- mutants

# Right too, each once: the word, and the line of the program.
LANES = ("sync_warp suppress", "with T.Kernel(threads")  # promises that the producer's lanes come together again
LATE = ("wgmma_fence suppress", "T.gemm(p_half, v_tile")  # nothing is written to its registers behind the fence before it
ZEROS = ("store_shared flip", "T.fill(k[T.max(valid, 0)")  # of whole rows, in whatever order
EQUIVALENT = {name: [LANES] + [LATE] * (name == "late attention") + [ZEROS] * name.startswith("mla") for name in KERNELS}


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
