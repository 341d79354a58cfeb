"""Ten planted bugs, by the emulator and by a GPU: python tests/emulator/planted.py [--build] [--out FILE] [name ...]

A bug is an edit of a kernel's text; the same file is compiled for the emulator by the host compiler and for sm_90a by nvcc.
The command runs each on a GPU of capability 9.0 in a process of its own, for a bug may hang or spoil the context: many
launches under a time limit, and compute-sanitizer's racecheck unless it hangs. It prints a table, and writes a JSON row a bug.
--build only compiles, which needs no GPU. PLANTED.md has what was found and why the two may differ.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(GOLDEN)]

import flash_attention  # noqa: E402
import gemm  # noqa: E402
import golden_launch  # noqa: E402
import launch  # noqa: E402
import mla_decode  # noqa: E402
import racecheck  # noqa: E402

from tileops_dsl.emulate import EmulatorError  # noqa: E402

LIMIT_S, REPEATS, SEEDS = 25, 20, range(3)
SOURCES = {
    "gemm": GOLDEN / "gemm.cu",
    "flash_attention": GOLDEN / "flash_attention_full.cu",
    "mla_decode": GOLDEN / "mla_decode.cu",
    "overwrite": HERE / "overwrite.cu",
}
ARRIVE_AS_SYNC = {"mla_decode"}  # for racecheck: see golden/racecheck.py


@dataclass(frozen=True)
class Planted:
    """edits: (exact text, what stands there instead). emulator: the kinds of fault that it may report."""

    kernel: str
    emulator: str
    edits: tuple[tuple[str, str], ...]


PLANTED = {
    "wrong phase": Planted("gemm", "unwritten_shared|race", (
        ("wait(full + stage, phase, site(7))", "wait(full + stage, phase ^ 1, site(7))"),
    )),
    "missing fence before a TMA store": Planted("flash_attention", "missing_fence", (
        ("fence_async_shared(site(64));", ""),
    )),
    "missing fence before wgmma": Planted("mla_decode", "missing_fence", (
        ("fence_async_shared(site(75));", ""),
    )),
    "wrong swizzle on one side": Planted("flash_attention", "wrong result", (
        ("((j % 4 * 2 + lane / 16) ^ lane % 8) * 8), o_half", "(j % 4 * 2 + lane / 16) * 8), o_half"),
    )),
    "early release": Planted("gemm", "race|barrier", (
        ("wait(full + stage, phase, site(7));",
         "wait(full + stage, phase, site(7));\n        if (thread < 2) arrive_at_rank(empty + stage, thread, site(9));"),
        ("        if (k > 0 && thread < 2) arrive_at_rank(empty + before, thread, site(9));\n        before = stage;\n", ""),
        ("      if (thread < 2) arrive_at_rank(empty + before, thread, site(9));\n\n", "\n"),
        ("      int before = 0;\n", ""),
    )),
    "short expect_tx": Planted("gemm", "barrier|race|unwritten_shared", (
        ("arrive_expect_bytes(full + stage, 49152, site(5))", "arrive_expect_bytes(full + stage, 32768, site(5))"),
    )),
    "off-by-one trip count": Planted("flash_attention", "deadlock|barrier|in_flight_at_exit|wrong result", (
        ("for (int block = blocks - 2; block >= 0; --block)", "for (int block = blocks - 2; block > 0; --block)"),
    )),
    "missing wgmma wait": Planted("gemm", "race", (
        ("wgmma_wait<1>(site(8));", ""),
    )),
    "dropped WAW order": Planted("overwrite", "race", (
        ("sync_threads(site(3));", ""),
    )),
    "wrong arrival count": Planted("flash_attention", "deadlock", (
        ("init_barrier(k_empty + i, 8, site(4))", "init_barrier(k_empty + i, 9, site(4))"),
    )),
    "aliased buffer in use": Planted("gemm", "race", (
        ("shared<float>(229504) + (group - 1) * 256", "shared<float>(196608) + (group - 1) * 4096"),
    )),
}  # fmt: skip
NAMES = (*SOURCES, *PLANTED)


def source(name: str) -> Path:
    """A file with the edited text, beside the cubins."""
    planted = PLANTED[name]
    original, folder = SOURCES[planted.kernel], launch.CACHE / "planted"
    text = original.read_text()
    for old, new in planted.edits:
        if text.count(old) != 1:
            raise ValueError(f"{original.name} has {text.count(old)} times {old!r}; {name!r} needs it once")
        text = text.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{original.stem}_{re.sub(r'[^a-z]+', '_', name.lower())}.cu"
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
    return file


# ---- launches

Cases = Iterator[Callable[[], list[torch.Tensor]]]


def normal(device: str, *shape: int, seed: int = 0, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def gemm_cases(file: Path, device: str, big: bool) -> Cases:
    kernel = launch.load(file, gemm.NAME)
    for seed, (m, n, k) in enumerate([(600, 520, 312), *[(2048, 2048, 2048)] * 2 * big]):
        make = functools.partial(normal, device, seed=seed)
        a, b, bias, residual = make(m, k), make(n, k), make(n, dtype=torch.float32), make(m, n)
        yield lambda a=a, b=b: [gemm.gemm(kernel, a, b)]
        yield lambda a=a, b=b, c=bias, d=residual: [gemm.gemm(kernel, a, b, c, "relu", d)]


def attention_cases(file: Path, device: str, big: bool) -> Cases:
    kernels = {False: launch.load(file, flash_attention.NAMES[False])}
    for seed, (sq, sk, heads) in enumerate([(200, 700, 3), *[(1000, 2048, 24)] * 2 * big]):
        q, k, v = (normal(device, 1, s, heads, 128, seed=seed + i) for i, s in enumerate((sq, sk, sk)))
        yield lambda q=q, k=k, v=v: list(flash_attention.launch(kernels, q, k, v, False))


def mla_cases(file: Path, device: str, big: bool) -> Cases:
    kernels = launch.load(file, "mla_decode"), launch.load(GOLDEN / "mla_combine.cu", "mla_combine")
    for seed, (heads, lengths, parts) in enumerate([(64, [200, 3, 140], 2), *[(128, [3000, 1, 2050] * 8, None)] * 2 * big]):
        pages = [-(-n // 64) for n in lengths]
        q, cache = normal(device, len(lengths), 1, heads, 576, seed=seed), normal(device, sum(pages), 64, 576, seed=seed)
        table, first = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device=device), 0
        for request, n in enumerate(pages):
            table[request, :n] = torch.arange(first, first := first + n)
        sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
        yield lambda q=q, c=cache, t=table, s=sizes, p=parts: list(mla_decode.launch(kernels, q, c, t, s, 0.1, num_parts=p))


def overwrite_cases(file: Path, device: str, big: bool) -> Cases:
    kernel = launch.load(file, "overwrite")
    for rows in (3, 1000)[: 1 + big]:
        x = normal(device, rows, 128, dtype=torch.float32)
        y = torch.empty_like(x)
        yield lambda x=x, y=y, rows=rows: [kernel(launch.pack(x, y, launch.I32(rows)), 1, 256, 512) or y.clone()]


CASES = {"gemm": gemm_cases, "flash_attention": attention_cases, "mla_decode": mla_cases, "overwrite": overwrite_cases}


def same(found: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """To the bit: the order of summation is the same in each run."""
    return all(torch.equal(torch.nan_to_num(f), torch.nan_to_num(r)) for f, r in zip(found, right, strict=True))


def by_emulator(gpu: golden_launch.Emulated, kernel: str, file: Path) -> tuple[str, str]:
    """The kind of the first fault and its message; or "wrong result", or "right"."""
    for run, run_right in zip(CASES[kernel](file, "cpu", False), CASES[kernel](SOURCES[kernel], "cpu", False), strict=True):
        gpu.seed = 0
        right = run_right()
        for gpu.seed in SEEDS:
            try:
                if not same(run(), right):
                    return "wrong result", "differs from the text without the bug"
            except EmulatorError as fault:
                return fault.kind, str(fault)
    return "right", ""


# ---- on a GPU


def child(kernel: str, file: Path) -> None:
    """Prints what the launches do, as it goes: the parent ends this process if it hangs."""
    cases = list(CASES[kernel](file, "cuda", True))
    right = [run() for run in CASES[kernel](SOURCES[kernel], "cuda", True)]
    torch.cuda.synchronize()
    print("started", flush=True)
    for _ in range(REPEATS):  # neighbouring launches have other inputs: what the one before left in shared memory is wrong
        for run, result in zip(cases, right, strict=True):
            found = run()
            torch.cuda.synchronize()
            print("same" if same(found, result) else "differs", flush=True)


def by_gpu(kernel: str, file: Path) -> tuple[str, str]:
    command = [sys.executable, __file__, "--child", kernel, str(file)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S)
        out, error, ended = done.stdout.decode(), done.stderr.decode(), done.returncode == 0
    except subprocess.TimeoutExpired as late:
        out, error, ended = (late.stdout or b"").decode(), "", None
    if "started" not in out:
        raise RuntimeError(f"{file.name}: the text without the bug fails, or takes {LIMIT_S} s\n{error}")
    launches, wrong = out.count("same") + out.count("differs"), out.count("differs")
    detail = f"{wrong} of {launches} launches differ"
    if ended is None:
        return "hang", f"no end after {LIMIT_S} s; {detail} before"
    if not ended:
        what = re.search(r"^[\w.]*Error: .*", error, re.MULTILINE)
        return "fault", f"{what[0] if what else 'no message'}; {detail} before"
    return ("wrong result" if wrong else "right"), detail


def by_racecheck(kernel: str, file: Path) -> str:
    """Hazards of one small launch."""
    try:
        found = racecheck.hazards([__file__, "--once", kernel, str(file)], kernel in ARRIVE_AS_SYNC, 2 * LIMIT_S)
    except RuntimeError as error:
        return f"no summary: {str(error).strip().splitlines()[-1]}"
    return f"{found} hazards" if found else "silent"


def text(name: str) -> tuple[str, Path]:
    """Kernel and file of a bug; or of a kernel without one, by its name."""
    return (name, SOURCES[name]) if name in SOURCES else (PLANTED[name].kernel, source(name))


def measure(name: str) -> dict:
    kernel, file = text(name)
    verdict, detail = by_gpu(kernel, file)
    race = "" if verdict == "hang" else by_racecheck(kernel, file)
    return {"bug": name, "kernel": kernel, "gpu": verdict, "detail": detail, "racecheck": race}


def build() -> None:
    """All cubins, those of racecheck too."""
    files = [*map(text, NAMES), ("mla_decode", GOLDEN / "mla_combine.cu")]
    with ThreadPoolExecutor(os.cpu_count()) as pool, pytest.MonkeyPatch.context() as patch:
        list(pool.map(launch.compile_cubin, [file for _, file in files]))
        patch.setenv("ARRIVE_AS_SYNC", "1")
        list(pool.map(launch.compile_cubin, [file for kernel, file in files if kernel in ARRIVE_AS_SYNC]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="of a bug, or of a kernel without one; all unless given")
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--out", type=Path, default=launch.ROOT / "build" / "planted.jsonl")
    for hidden in ("--child", "--once"):
        parser.add_argument(hidden, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child[0], Path(arguments.child[1]))
    if arguments.once:
        next(CASES[arguments.once[0]](Path(arguments.once[1]), "cuda", False))()
        return torch.cuda.synchronize()
    build()
    if arguments.build:
        return None
    rows = []
    print("| bug | kernel | emulator | GPU | racecheck |\n|---|---|---|---|---|")
    with ThreadPoolExecutor(6) as pool, pytest.MonkeyPatch.context() as patch:
        measured = {name: pool.submit(measure, name) for name in arguments.names or NAMES}
        gpu = golden_launch.Emulated(patch, multiprocessors=4)
        for name, row in measured.items():
            verdict, message = by_emulator(gpu, *text(name))
            rows.append(row.result() | {"emulator": verdict, "message": message})
            print("| {bug} | {kernel} | {emulator} | {gpu}: {detail} | {racecheck} |".format_map(rows[-1]), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
