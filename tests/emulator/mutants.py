"""How many mutants of each kernel the emulator reports: python tests/emulator/mutants.py [KERNEL/SCHEDULE ...]

Of each schedule of the library (library.py) and of the golden kernels, at a small tile. A mutant does one word of the text
differently, wherever its site is reached: a barrier, arrival, wait, fence or commit does nothing; a wait has the other parity;
one side of a swizzle is another one (the map of a copy, the descriptor of a product, the address of an access); an expectation
is one box more or less, an mbarrier one arrival more or less, a wait one group more pending. It is caught if a launch ends in a
fault or in a wrong result, for one of a few seeds. Writes mutation.json beside this file, and prints the mutants that were
missed and are not known to be right.
"""

import argparse
import functools
import json
import re
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
FILE, KERNELS = HERE / "mutation.json", HERE.parents[1] / "tileops_dsl" / "kernels"
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE.parent / "golden")]

import flash_attention  # noqa: E402
import gemm  # noqa: E402
import golden_launch  # noqa: E402
import launch  # noqa: E402
import library  # noqa: E402
import mla_decode  # noqa: E402

from tileops_dsl.emulate import EmulatorError  # noqa: E402

SEEDS = range(5)
SILENT = (
    *("sync_threads", "sync_warp", "named_barrier_sync", "named_barrier_arrive", "cluster_sync", "reduce_members"),
    *("cluster_arrive", "cluster_wait", "arrive", "arrive_expect_bytes", "arrive_at_rank", "arrive_after_copies"),
    *("wait", "wait_cluster", "fence_async_shared", "fence_barrier_init"),
    *("wgmma_fence", "wgmma_commit", "wgmma_wait", "store_commit", "store_wait_read", "store_wait", "copy_commit", "copy_wait"),
)
PARTS = {"cluster_sync": ("cluster_arrive", "cluster_wait"), "reduce_members": ("sync_threads",)}  # of other words
FLIPPED = ("wait", "wait_cluster", "tma_load", "tma_load_multicast", "tma_store", "wgmma", "load_matrix", "store_matrix")
SWIZZLED = ("load_shared", "store_shared", "copy_async")  # where the buffer is
SAME = {"copy_async_part": "copy_async"}  # to the emulator
COUNTED = {"init_barrier": (-1, 1), "wgmma_wait": (1,), "store_wait_read": (1,)}


# ---- the mutants of a text


@dataclass(frozen=True)
class Call:
    word: str
    arguments: tuple[str, ...]
    site: int


def calls(text: str) -> list[Call]:
    """Those that end in a site, in order of sites."""
    text, found = re.sub(r"//.*", "", text), []
    for start in re.finditer(r"\b([a-z_]+)(?:<[^;()]*>)?\(", text):
        depth, parts = 1, [""]
        for character in text[start.end() :]:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if depth == 0:
                break
            if character == "," and depth == 1:
                parts.append("")
            else:
                parts[-1] += character
        site = re.fullmatch(r"\s*site\((\d+)\)", parts[-1])
        if site:
            found.append(Call(start[1], tuple(part.strip() for part in parts[:-1]), int(site[1])))
    return sorted(found, key=lambda call: call.site)


def box_bytes(at: int, found: list[Call], boxes: dict[str, int]) -> int:
    """Of the first copy behind an expectation."""
    load = next(call for call in found[at:] if call.word in ("tma_load", "tma_load_multicast"))
    return boxes[load.arguments[1].removeprefix("p.")]


def mutants(text: str, boxes: dict[str, int]) -> list[dict]:
    """What run() of emulate.py takes as `mutate`, each once. boxes: bytes of the box of each tensor map."""
    buffers = re.findall(r"^// +\d+  (\w+) .*swizzle of", text, re.M)  # in the plan of shared memory above a generated kernel
    swizzled = re.compile(rf"(?:{'|'.join([*buffers, *(f'{name}_row' for name in buffers), 'to', 'from'])})\b")
    found, result = calls(text), []
    for at, call in enumerate(found):
        word = SAME.get(call.word, call.word)
        place = f"{word}@{call.site}"
        if word in SILENT:
            result.append({f"{part}@{call.site}": "suppress" for part in PARTS.get(word, (word,))})
        if word in FLIPPED or (word in SWIZZLED and buffers and swizzled.match(pointer(call))):
            result.append({place: "flip"})
        if word == "wgmma" and len(call.arguments) == 5:  # with A in shared memory
            result.append({place: "flip_a"})
        changes = COUNTED.get(word, ())
        if word == "arrive_expect_bytes":
            changes = (-box_bytes(at, found, boxes), box_bytes(at, found, boxes))
        result += [{place: amount} for amount in changes]
    return [mutant for at, mutant in enumerate(result) if mutant not in result[:at]]


def of_kernel(kernel: library.Kernel) -> list[dict]:
    boxes = {}
    for name, map_ in kernel.made.entry.get("maps", {}).items():
        size = 4 if kernel.row.y == "float32" and name in ("c", "residual") else 2
        boxes[name] = size * map_["box"][0] * map_["box"][1]
    return mutants(kernel.path.read_text(), boxes)


def pointer(call: Call) -> str:
    """To shared memory: the first argument, or the one behind a fragment and its register."""
    return call.arguments[2 if call.word == "load_shared" and len(call.arguments) == 4 else 0]


# ---- launches


@dataclass
class Subject:
    """runs: each launches with a seed and a mutant, and returns the results."""

    mutants: list[dict]
    runs: list
    sites: dict[str, str]


def normal(*shape, dtype=torch.bfloat16, scale=1.0):
    rng = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=rng) * scale).to(dtype)


def gemm_launches():
    kernel = launch.load(golden_launch.GOLDEN / "gemm.cu", gemm.NAME)
    a, b = normal(600, 312), normal(520, 312)
    bias, residual = normal(520, dtype=torch.float32), normal(600, 520)
    yield lambda: gemm.gemm(kernel, a, b)
    yield lambda: gemm.gemm(kernel, a[:300], b, bias, "relu", residual[:300])


def attention_launches(causal):
    kernels = flash_attention.load()

    def run(q, k, v):
        flash_attention.counter(q.device).zero_()  # a mutant before may have left it otherwise
        return torch.cat([x.double().flatten() for x in flash_attention.launch(kernels, q, k, v, causal)])

    for batch, sq, sk, heads, heads_kv in ((1, 200, 700, 2, 1), (1, 300, 350, 3, 3), (2, 300, 150, 3, 3)):
        q, k, v = (normal(batch, s, h, 128) for s, h in ((sq, heads), (sk, heads_kv), (sk, heads_kv)))
        yield lambda q=q, k=k, v=v: run(q, k, v)


def mla_launches():
    kernels = mla_decode.load()
    several = (1, 16, [130, 200, 129], 1)
    for queries, heads, lengths, parts in ((2, 16, [200, 3, 140], 2), (1, 64, [700], 3), (1, 32, [754], 1), several):
        pages = sum(-(-n // 64) for n in lengths)
        cache, table = normal(pages, 64, 576), torch.zeros(len(lengths), -(-max(lengths) // 64), dtype=torch.int32)
        first = 0
        for request, n in enumerate(lengths):
            table[request, : -(-n // 64)] = torch.arange(first, first := first + -(-n // 64))
        q, sizes = normal(len(lengths), queries, heads, 576, scale=4.0), torch.tensor(lengths, dtype=torch.int32)
        yield lambda q=q, c=cache, t=table, s=sizes, p=parts: mla_decode.launch(kernels, q, c, t, s, 1 / 24, num_parts=p)[0]


GOLDEN = {  # launches, bytes of a box of each tensor map
    "gemm/golden": ("gemm.cu", gemm_launches, {"a": 16384, "b": 16384, "residual": 8192}),
    "flash_attention/golden_full": (
        "flash_attention_full.cu",
        lambda: attention_launches(False),
        {"q": 8192, "k": 20480, "v": 20480},
    ),
    "flash_attention/golden_causal": (
        "flash_attention_causal.cu",
        lambda: attention_launches(True),
        {"q": 8192, "k": 16384, "v": 16384},
    ),
    "mla_decode/golden": ("mla_decode.cu", mla_launches, {"q": 8192, "kv": 8192}),
}


def golden_subject(name: str, patch) -> Subject:
    source, make, boxes = GOLDEN[name]
    gpu = golden_launch.Emulated(patch, multiprocessors=4)
    torch.use_deterministic_algorithms(True)  # so that what a launch does not write is NaN

    def run(go, seed, mutant):
        gpu.seed, gpu.mutate = seed, mutant
        return [go().double().numpy()]

    runs = [functools.partial(run, go) for go in make()]
    return Subject(mutants((golden_launch.GOLDEN / source).read_text(), boxes), runs, {})


def library_subject(name: str) -> Subject:
    row = library.all_schedules()[name]
    kernel = library.Kernel(row)

    def run(problem, seed, mutant):
        return list(kernel(problem, seed, mutate=mutant).values())

    runs = [functools.partial(run, problem) for problem in problems(row)]
    return Subject(of_kernel(kernel), runs, kernel.made.entry["sites"])


def problems(row) -> list[library.Problem]:
    """Few tiles a CTA and few steps more than stages, ragged; with all that a call may switch on, and without it."""
    if row.op == "gemm":
        (bm, bn, bk), odd = row.tile, 1 if row.vector == 1 else 8
        shape = 1, 2 * bm * row.cluster - odd, 2 * bn - odd, (row.stages + 1) * bk + odd
        narrow = 3 * (row.target == "portable" and row.transpose_b)  # rows of c may end anywhere, where none is read
        everything = {"bias": "bfloat16", "activation": 4, "residual": True}
        plain = library.gemm_problem(row, *shape[:2], shape[2] - narrow, shape[3])
        return [library.gemm_problem(row, *shape, **everything), plain]
    if row.op == "flash_attention":
        bm, bn, _ = row.tile
        options = library.options_of(row, 3, left=bm + 3 * bn)  # so that some blocks have no mask
        if row.lengths:
            calls = ([bm + 44, 20], [3 * bn, (row.stages + 5) * bn + 5]), ([2 * bm + 44], [bm + 5]), ([bm], [bm + 5])
            more = options | {"page": 16 * row.paged}
            return [library.Problem(*library.lengths.lengths_problem(row, *call, 3, 1, **more)) for call in calls]
        shapes = [(1, bm + 44, (row.stages + 5) * bn + 5, 3, 1), (1, 2 * bm + 44, bm + 5, 3, 3)]
        shapes += [(1, 2 * bm + 44, bn - 3, 3, 3)] * (row.target == "sm_90a")  # the next tile's queries come soon
        ragged = 3 * (row.target == "portable")
        dims = [row.tile[2] - ragged, row.head_dim_v - ragged]
        return [library.attention_problem(row, *shape, dims=dims, **options) for shape in shapes]
    if row.op == "mla_decode":
        calls = ([200, 3, 140], 16, 2, 1, 2), ([700], 64, 1, 1, 3), ([754], 32), ([130, 200, 129], 16)
        page = library.mla.PAGES[row.unit][0]
        return [library.mla_problem(row, *call, spread=4.0, page=page) for call in calls]
    if row.op == "mla_decode_few":
        calls = ([200, 3, 140], row.tile[0] // 2, 2, 1, 2), ([700], row.tile[0] - 1, 1, 1, 3), ([130, 200, 129], 5)
        return [library.mla_problem(row, *call, spread=4.0, page=library.mla.PAGES[row.unit][0]) for call in calls]
    return library.edges(row)[:3]


# ---- the score

# Mutants that are right too, or whose mistake has no effect that could be seen: class and reason; what it is of. In the library
# by the line of the tile program, in the golden texts by site.
LANES = "promises that lanes come together again, as compiled code does behind such a branch anyway; orders no memory of theirs"
FENCED = "no register of this product is written between the fence of the product before it and this one"
WHOLE = "where b has rows of N, N is a multiple of a vector, so no row of c ends inside one and the word is never reached"
MEET = "all of group 0 sync at site 85 before the product that reads what they have cleared"
TAKEN = "the next commit takes the product along, and nothing is waited for before it"
TAILS = "where a page has a tail, the next one has, too, behind which the group fences what it wrote to both"
ZEROS = "clears whole rows, in whatever order"
READ = "what the stores read lies over the queries, which are handed back when it has been read"
MLA_DECODE, MLA_SCORES = r"mla_decode/sm_90a\S*", r"(done = |first = T.wgmma_gemm\(q_rope)"
DEALT = "the CTA meets in deal_part again, before anybody touches the barriers that were initialised"
EQUIVALENT = [
    ("reconvergence", LANES, r"\S+ sync_warp@\d+ suppress .*"),
    ("late fence", FENCED, r"flash_attention/\S+ wgmma_fence@\d+ suppress T.gemm\(.* stage=1\)"),
    ("late fence", FENCED, r"flash_attention/golden_\w+ wgmma_fence@(42|50|67) suppress "),
    ("late fence", FENCED, r"mla_decode/golden wgmma_fence@(41|90|100|148|158) suppress "),
    ("late fence", FENCED, rf"{MLA_DECODE} wgmma_fence@\d+ suppress ({MLA_SCORES}|T.wgmma_gemm\(p0).*"),
    ("late commit", TAKEN, rf"{MLA_DECODE} wgmma_commit@\d+ suppress {MLA_SCORES}.*"),
    ("fence of two tails", TAILS, rf"{MLA_DECODE} fence_async_shared@\d+ suppress T.fill\(k.*"),
    ("read before", READ, r"flash_attention/\w+_over_queries store_wait@\d+ suppress T.copy\(o_tile, out.*"),
    ("zeros", ZEROS, r"\w+/\S+ store_shared@\d+ flip T.fill\((k|v_tile).*"),
    ("second barrier", MEET, r"mla_decode/golden named_barrier_sync@84 suppress "),
    ("meets again", DEALT, r"(attention|mla)_decode(_few)?/sm_90a\S* sync_threads@\d+ suppress with T.Kernel\(.*"),
    ("never reached", WHOLE, r"gemm/portable_.n\S* load_shared@\d+ flip T.copy\(c_tile, c.*"),
]


def described(name: str, mutant: dict, sites: dict[str, str]) -> str:
    """gemm/golden wait@4 flip, and the line of the tile program."""
    place, change = next(iter(mutant.items()))  # of cluster_sync, its arrival
    file, _, number = sites.get(place.split("@")[1], "").partition(":")
    line = (KERNELS / file).read_text().splitlines()[int(number) - 1].strip() if number else ""
    return f"{name} {place} {change} {line}"


def equivalent(text: str) -> str | None:
    """The class of a mutant that is described so, if it has one."""
    return next((kind for kind, _, pattern in EQUIVALENT if re.fullmatch(pattern, text)), None)


def caught(subject: Subject, right: list, mutant: dict | None) -> bool:
    for seed in SEEDS:
        for run, wanted in zip(subject.runs, right, strict=True):
            try:
                found = run(seed, mutant)
            except EmulatorError:
                return True
            if not all(np.array_equal(*pair, equal_nan=True) for pair in zip(found, wanted, strict=True)):
                return True
    return False


def results(subject: Subject) -> list:
    """Those without a mutant, the same for each seed: the order of summation does not depend on it."""
    right = [run(0, None) for run in subject.runs]
    assert not caught(subject, right, None), "a kernel without a mutant fails, or its results depend on the seed"
    return right


def score(name: str) -> tuple[dict, list[str], float]:
    """The counts, the descriptions of those that were missed, seconds."""
    start = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:
        subject = golden_subject(name, patch) if name in GOLDEN else library_subject(name)
        right = results(subject)
        missed = [described(name, m, subject.sites) for m in subject.mutants if not caught(subject, right, m)]
    known = sum(map(bool, map(equivalent, missed)))
    counts = {"mutants": len(subject.mutants), "caught": len(subject.mutants) - len(missed), "equivalent": known}
    return counts, missed, time.perf_counter() - start


def scores() -> dict:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def save(table: dict) -> None:
    """A line for each, in the order of the schedules."""
    order = [name for name in (*GOLDEN, *library.all_schedules()) if name in table]
    FILE.write_text("{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(table[name])}" for name in order) + "\n}\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="KERNEL/SCHEDULE", help="or the beginning of one; all by default")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    names = [name for name in (*GOLDEN, *library.all_schedules()) if name.startswith(tuple(options.names or [""]))]
    table, gaps, classes = scores(), [], Counter()
    with ProcessPoolExecutor(options.jobs) as pool:
        running = {pool.submit(score, name): name for name in names}
        for number, done in enumerate(as_completed(running), 1):
            table[running[done]], missed, seconds = done.result()
            print(f"[{number}/{len(names)}] {running[done]}: {table[running[done]]} in {seconds:.0f} s", flush=True)
            gaps += (new := [text for text in missed if not equivalent(text)])
            print("".join(f"    missed: {text}\n" for text in new), end="", flush=True)
            classes.update(filter(None, map(equivalent, missed)))
            save(table)
    for kind, reason in {kind: reason for kind, reason, _ in EQUIVALENT if classes[kind]}.items():
        print(f"{kind}: {classes[kind]} mutants; {reason}")
    return 1 if gaps else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
