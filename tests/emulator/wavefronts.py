"""Wavefronts of shared memory, counted by the emulator and by Nsight Compute: python3 tests/emulator/wavefronts.py --out FILE

On a machine with a GPU, ncu, nvcc and g++. First PATTERNS, small kernels of one access each, which show the rule that the
emulator counts by; then kernels of the library on small problems. For each, two lines of loads and stores: emulator, ncu's
counters of the LSU pipe, and the sum over ncu's rows of SASS, by opcode; the ratio of the last to the first. FILE gets a JSON
object each. The traffic of TMA and of wgmma is in none of them.
"""

import argparse
import csv
import io
import itertools
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "golden")]

import launch  # noqa: E402

from tileops_dsl import emulate  # noqa: E402
from tileops_dsl.emulate_problems import PROBLEMS  # noqa: E402
from tileops_dsl.emulate_program import bind  # noqa: E402
from tileops_dsl.kernels import PROGRAMS, configs_of  # noqa: E402

WORK = HERE.parents[1] / "build" / "emulator" / "wavefronts"

# ---- patterns: one access by one warp, and its wavefronts. `at`: the element of each lane; `lanes`: how many take part.

HEAD = "#include <tileops/sm_90a.h>\nnamespace tileops {\nstruct Pattern { void* y; };\n"
LOAD = """TILEOPS_KERNEL(pattern_NAME, Pattern, 32, 1) {
  const int lane = thread_index();
  for (int i = lane; i < 2048; i += 32) store_shared(shared<float>(0), i, 1.0f, site(1));
  sync_threads(site(2));
  Fragment<float, V> f;
  fill<V>(f, 0, 0.0f);
  if (lane < LANES) load_shared<V>(f, 0, shared<float>(0), AT, site(3));
  store_global<V>(global<float>(p.y), lane * V, f, 0, site(4));
}
"""
STORE = """TILEOPS_KERNEL(pattern_NAME, Pattern, 32, 1) {
  const int lane = thread_index();
  Fragment<float, V> f;
  fill<V>(f, 0, 1.0f);
  if (lane < LANES) store_shared<V>(shared<float>(0), AT, f, 0, site(3));
  sync_threads(site(2));
  if (lane < LANES) load_shared<V>(f, 0, shared<float>(0), AT, site(1));
  store_global<V>(global<float>(p.y), lane * V, f, 0, site(4));
}
"""
MATRIX = """TILEOPS_KERNEL(pattern_NAME, Pattern, 32, 1) {
  const int lane = thread_index();
  Fragment<bf16, 2 * V> f;
  fill<2 * V>(f, 0, from_float<bf16>(1.0f));
  store_matrix<V>(shared<bf16>(0) + (AT), f, 0, site(3));
  sync_threads(site(2));
  load_matrix<V>(f, 0, shared<bf16>(0) + (AT), site(5));
  store_global<V * 2>(global<bf16>(p.y), lane * V * 2, f, 0, site(4));
}
"""
PATTERNS = {  # name: (text, vector, at, lanes, wavefronts)
    "load_4_neighbours": (LOAD, 1, "lane", 32, 1),
    "load_4_every_second": (LOAD, 1, "lane * 2", 32, 2),
    "load_4_every_eighth": (LOAD, 1, "lane * 8", 32, 8),
    "load_4_one_bank": (LOAD, 1, "lane * 32", 32, 32),
    "load_4_same_word": (LOAD, 1, "5", 32, 1),
    "load_4_two_words_of_a_bank": (LOAD, 1, "lane % 2 * 32", 32, 2),
    "load_8_neighbours": (LOAD, 2, "lane * 2", 32, 2),
    "load_8_half_a_warp": (LOAD, 2, "lane * 2", 16, 1),
    "load_8_same": (LOAD, 2, "4", 32, 1),
    "load_8_pairs": (LOAD, 2, "lane / 2 * 2", 32, 1),
    "load_8_by_columns": (LOAD, 2, "lane % 4 * 2", 32, 2),  # of a row of an accumulator
    "load_8_apart": (LOAD, 2, "lane * 4", 32, 4),
    "load_16_neighbours": (LOAD, 4, "lane * 4", 32, 4),
    "load_16_same": (LOAD, 4, "8", 32, 2),
    "load_16_pairs": (LOAD, 4, "lane / 2 * 4", 32, 2),
    "load_16_apart": (LOAD, 4, "lane * 8", 32, 8),
    "load_16_rows": (LOAD, 4, "lane * 32", 32, 32),
    "store_4_neighbours": (STORE, 1, "lane", 32, 1),
    "store_4_every_second": (STORE, 1, "lane * 2", 32, 2),
    "store_4_two_lanes": (STORE, 1, "lane * 32", 2, 2),
    "store_8_neighbours": (STORE, 2, "lane * 2", 32, 2),
    "store_8_accumulator": (STORE, 2, "lane / 4 * 32 + (lane % 4 / 2 ^ lane / 4) * 4 + lane % 2 * 2", 32, 4),  # group_fragments
    "store_16_neighbours": (STORE, 4, "lane * 4", 32, 4),
    "store_16_rows": (STORE, 4, "lane * 32", 32, 32),
    "matrix_1_rows_of_16_bytes": (MATRIX, 1, "lane * 8", 32, 1),
    "matrix_1_rows_of_128_bytes": (MATRIX, 1, "lane * 64", 32, 8),
    "matrix_2_swizzled": (MATRIX, 2, "lane * 64 + lane % 8 * 8", 32, 2),
    "matrix_4_rows_of_16_bytes": (MATRIX, 4, "lane * 8", 32, 4),
    "matrix_4_rows_of_128_bytes": (MATRIX, 4, "lane * 64", 32, 32),
    "matrix_4_rows_of_64_bytes": (MATRIX, 4, "lane * 32", 32, 16),
    "matrix_4_swizzled": (MATRIX, 4, "lane % 16 * 64 + (lane / 16 ^ lane % 8) * 8", 32, 4),
}


def pattern_file() -> Path:
    texts = []
    for name, (text, vector, at, lanes, _) in PATTERNS.items():
        for word, value in {"NAME": name, "LANES": lanes, "AT": at, "V": vector}.items():
            text = text.replace(word, str(value))
        texts.append(text)
    WORK.mkdir(parents=True, exist_ok=True)
    file, whole = WORK / "patterns.cu", HEAD + "\n".join(texts) + "}  // namespace tileops\n"
    if not file.exists() or file.read_text() != whole:
        file.write_text(whole)
    return file


def pattern_reports() -> dict[str, list[dict]]:
    """The emulator's counts of the accesses of each pattern."""
    found = {}
    for name in PATTERNS:
        y = np.zeros(32 * 8, np.float32)
        values = [emulate.Out(y)]
        found[name] = emulate.launch_kernel(pattern_file(), f"pattern_{name}", values, 1, 32, 16384)["shared_accesses"]
    return found


# ---- kernels of the library: (name in configs/<op>.json, tensors of PROBLEMS[op] that are not passed)

KERNELS = {
    "softmax, 2 warps a row": ("softmax_sm_90a_bf16_bf16_v8_t64_r64x2x1", ()),
    "softmax, 16 warps a row, looped": ("softmax_sm_90a_bf16_bf16_v8_t512_r512x4x1_loop", ()),
    "softmax, shifted, 4 warps a row": ("softmax_sm_90a_bf16_bf16_v8_t128_r128x4x1_shifted", ()),
    "softmax, lanes on rows": ("softmax_sm_90a_bf16_bf16_v1_t256_r8x12x1_rows", ()),
    "softmax, lanes on rows, looped": ("softmax_sm_90a_bf16_bf16_v1_t512_r32x8x1_rows_loop", ()),
    "softmax, vectors of rows": ("softmax_sm_90a_bf16_bf16_v4_t512_r32x12x1_rows", ()),
    "gemm": ("gemm_sm_90a_bf16_bf16_128x160x64_nt_alt", (2, 3)),
    "gemm, bias": ("gemm_sm_90a_bf16_bf16_128x160x64_nt_alt", (3,)),
    "gemm, bias and residual": ("gemm_sm_90a_bf16_bf16_128x160x64_nt_alt", ()),
    "gemm of two groups, bias and residual": ("gemm_sm_90a_bf16_bf16_128x192x64_nt", ()),
    "gemm, float32, bias and residual": ("gemm_sm_90a_bf16_f32_128x128x64_nt_alt", ()),
    "portable gemm, bias and residual": ("gemm_portable_bf16_bf16_128x256x32_nt", ()),
    "portable gemm, elements, bias": ("gemm_portable_bf16_bf16_128x128x32_nt_v1", (3,)),
    "portable gemm, float32, bias and residual": ("gemm_portable_bf16_f32_128x128x32_nt", ()),
    "flash_attention": ("flash_attention_sm_90a_bf16_128x160x128_full", ()),
}


def bound(case: str):
    """The kernel of a case with its arguments, and the row of configs."""
    name, left_out = KERNELS[case]
    row = next(row for op in PROBLEMS for row in configs_of(op) if row.name == name)
    tensors, scalars, _ = PROBLEMS[row.op](row, np.random.default_rng(0))
    tensors = [None if i in left_out else tensor for i, tensor in enumerate(tensors)]
    return bind(PROGRAMS[row.op], *tensors, config=row, **scalars), row


def emulated(case: str) -> list[dict]:
    b, row = bound(case)
    options = {"cluster": b.cluster, "names": b.names, "include_dirs": (b.source.parent,), "sites": b.generated.entry["sites"]}
    report = emulate.launch_kernel(b.source, row.name, b.values, b.grid, b.threads, b.shared_bytes, **options)
    return report["shared_accesses"]


# ---- on the GPU


def launch_all() -> None:
    """Each pattern and each kernel once, in order: what ncu runs."""
    import torch

    patterns, _ = launch.compile_cubin(pattern_file())
    y = torch.empty(256, device="cuda")
    for name in PATTERNS:
        launch.Kernel(patterns, f"pattern_{name}")(launch.pack(y), 1, 32, 16384)
    torch.cuda.synchronize()
    for case in KERNELS:
        b, row = bound(case)
        held: list = []
        params = launch.pack(*(on_gpu(value, held) for value in b.values))
        launch.Kernel(launch.compile_cubin(b.source)[0], row.name)(params, b.grid, b.threads, b.shared_bytes, b.cluster)
        torch.cuda.synchronize()


def cubin_of(case: str) -> Path:
    return launch.compile_cubin(bound(case)[0].source)[0]


def on_gpu(value, held: list):
    """A field of the emulator's parameter struct as launch.pack takes it; `held` keeps what the kernel reads alive."""
    import torch

    if isinstance(value, bytes | None):
        return value if value else launch.I64(0)
    if isinstance(value, emulate.Number):
        return getattr(launch, type(value).__name__)(value.value)
    signed = value.array.view(np.int16) if value.array.dtype == np.uint16 else value.array
    tensor = torch.from_numpy(signed).cuda()
    held.append(tensor.view(torch.bfloat16) if value.array.dtype == np.uint16 else tensor)
    return launch.tensor_map(held[-1], value.box, value.swizzle) if isinstance(value, emulate.TensorMap) else held[-1]


# Base names of counters; those that this ncu does not know are left out. The pipe's have all that goes through the LSU.
PIPE, SASS = "l1tex__data_pipe_lsu_wavefronts_mem_shared", "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared"
COUNTERS = [f"{PIPE}_op_ld", f"{PIPE}_op_st", PIPE, f"{SASS}_op_ld", f"{SASS}_op_st", f"{SASS}_op_ldgsts", SASS]
COUNTERS += [f"smsp__inst_executed_op_{op}" for op in ("shared_ld", "shared_st", "ldsm", "ldgsts")]
OF_LINES = ["inst_executed", "memory_l1_wavefronts_shared", "memory_l1_wavefronts_shared_ideal"]


def profile() -> tuple[list[dict], list[dict]]:
    """For each launch, ncu's counters, and (instructions, wavefronts) by opcode from its rows of SASS."""
    listed = subprocess.run(["ncu", "--query-metrics", "--chip", "gh100"], capture_output=True, text=True).stdout
    known = {line.split()[0] for line in listed.splitlines() if line.split()}
    missing = [name for name in COUNTERS if name not in known]
    if missing:
        print(f"ncu does not know {', '.join(missing)}; it knows")
        print(*sorted(n for n in known if re.search("wavefronts_mem_shared|inst_executed_op_(shared|ldsm|stsm)", n)), sep="\n")
    sums = ",".join(f"{name}.sum" for name in [n for n in COUNTERS if n in known] or COUNTERS[:3])
    report = WORK / "report.ncu-rep"
    fixed = ["ncu", "-f", "-o", str(report), "--clock-control", "none", "-k", "regex:^(pattern|softmax|gemm|flash)_"]
    command = [sys.executable, __file__, "--launch"]
    section = ["--section", "SourceCounters"]
    for asked in (["--metrics", ",".join([sums, *OF_LINES])], ["--metrics", sums, *section], section):
        report.unlink(missing_ok=True)
        done = subprocess.run([*fixed, *asked, *command], capture_output=True, text=True)
        if done.returncode == 0 and report.exists():
            break
        print(f"ncu {' '.join(asked)}: {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}", flush=True)
    return parsed_counters(imported(report, "raw")), parsed_lines(imported(report, "source"))


def imported(report: Path, page: str) -> str:
    command = ["ncu", "--import", str(report), "--page", page, "--csv"]
    done = subprocess.run(command, capture_output=True, text=True)
    (WORK / f"{page}.csv").write_text(done.stdout)
    return done.stdout


def parsed_counters(text: str) -> list[dict]:
    """A row for each launch, behind the rows of names and units."""
    rows = [row for row in csv.reader(io.StringIO(text)) if len(row) > 2]
    begin = next((i for i, row in enumerate(rows) if row[0] == "ID"), len(rows))
    columns = {name.removesuffix(".sum"): i for names in rows[begin : begin + 1] for i, name in enumerate(names)}
    return [{name: count(row[columns[name]]) for name in COUNTERS if name in columns} for row in rows[begin + 2 :]]


def parsed_lines(text: str) -> list[dict]:
    """A table for each launch, which begins with the names of its columns."""
    found: list[dict] = []
    for row in csv.reader(io.StringIO(text)):
        if "Source" in row:
            names = [cell.lower().replace("_", " ") for cell in row]
            executed = [i for i, n in enumerate(names) if n in ("instructions executed", "# inst executed", "inst executed")]
            waves = [i for i, n in enumerate(names) if n.endswith("wavefronts shared")]
            if not (executed and waves):
                print(f"no instructions or wavefronts among the columns {row}")
                return []
            found.append({})
        elif found and len(row) == len(names):
            words = [word for word in row[names.index("source")].split() if not word.startswith(("@", "{"))]
            opcode = words[0].rstrip(";").split(".")[0] if words else ""
            if opcode in OPCODES or count(row[waves[0]]):
                instructions, wavefronts = found[-1].get(opcode, (0, 0))
                found[-1][opcode] = instructions + count(row[executed[0]]), wavefronts + count(row[waves[0]])
    return found


def count(cell: str) -> int:
    return int(float(cell.replace(",", "") or 0)) if cell.replace(",", "").replace(".", "").isdigit() else 0


OPCODES = {"LDS": "load_shared", "LDSM": "load_matrix", "STS": "store_shared", "STSM": "store_matrix"}
SIDES = {"ld": ("LDS", "LDSM"), "st": ("STS", "STSM")}


def compared(case: str, accesses: list[dict], counters: dict, lines: dict) -> list[dict]:
    """For loads and stores, what each counted; by opcode wavefronts and instructions, of the emulator and of ncu."""
    results = []
    for side, opcodes in SIDES.items():
        by_opcode = {}
        for opcode in opcodes:
            own = [a for a in accesses if a["word"] == OPCODES[opcode]]
            mine = sum(a["instructions"] for a in own), sum(a["wavefronts"] for a in own)
            if any(mine) or opcode in lines:
                by_opcode[opcode] = {"emulator": mine, "ncu": lines.get(opcode, (0, 0))}
        mine, theirs = (sum(b[who][1] for b in by_opcode.values()) for who in ("emulator", "ncu"))
        theirs = theirs if lines else counters.get(f"{SASS}_op_{side}", counters.get(f"{PIPE}_op_{side}", 0))
        agree = abs(mine - theirs) <= 0.02 * theirs
        row = {"case": case, "side": side, "emulator": mine, "ncu": theirs, "agree": agree, "by_opcode": by_opcode}
        results.append(row | {"counters": counters, "lines": lines})
    return results


def printed(row: dict) -> str:
    def of(who, by):
        return ", ".join(f"{opcode} {b[who][1]} of {b[who][0]}" for opcode, b in by.items())

    ratio = f"{row['emulator'] / row['ncu']:.3f}" if row["ncu"] else "-"
    both = f"{row['emulator']} | {row['ncu']} = {ratio}{'' if row['agree'] else ' DIFFERS'}"
    counters = " ".join(str(row["counters"].get(f"{base}_op_{row['side']}")) for base in (PIPE, SASS))
    by = row["by_opcode"]
    return f"{row['case']}, {row['side']}: {both} ({of('emulator', by)} | {of('ncu', by)}; pipe, sass {counters})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--launch", action="store_true", help="only launch; what the command runs under ncu")
    parser.add_argument("--build", action="store_true", help="only compile, for the GPU and for the emulator")
    given = parser.parse_args()
    if given.launch:
        launch_all()
        return 0
    start = time.perf_counter()
    emulate._driver()
    distinct = list({name: case for case, (name, _) in KERNELS.items()}.values())
    with ProcessPoolExecutor() as pool:
        first = [pool.submit(launch.compile_cubin, pattern_file()), *(pool.submit(cubin_of, case) for case in distinct)]
        counts = pattern_reports() | dict(zip(KERNELS, pool.map(emulated, KERNELS), strict=True))
        for job in first:
            job.result()
    print(f"compiled and emulated in {time.perf_counter() - start:.0f} s", flush=True)
    if given.build:
        return 0
    counters, lines = profile()
    if not len(counts) == len(counters) == len(lines):
        print(f"{len(counts)} launches, {len(counters)} rows of counters, {len(lines)} tables of SASS; see {WORK}")
    both = itertools.zip_longest(counters, lines, fillvalue={})
    rows = [r for (case, own), theirs in zip(counts.items(), both) for r in compared(case, own, *theirs)]
    for row in rows:
        print(printed(row))
    if given.out:
        given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kernels = [row for row in rows if row["case"] in KERNELS]
    print(f"{sum(row['agree'] for row in kernels)} of {len(kernels)} agree within 2%; {time.perf_counter() - start:.0f} s")
    return 0 if all(row["agree"] for row in kernels) else 1


if __name__ == "__main__":
    sys.exit(main())
