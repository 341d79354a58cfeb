"""How many mutants of the golden kernels the emulator reports: python tests/emulator/mutants.py [kernel ...]

A mutant does one word of the text differently, wherever its site is reached: a barrier, arrival, wait, fence or commit does
nothing; a wait has the other parity; a copy or product the other swizzle on its side; an expectation 4096 bytes more or
less, an mbarrier one arrival more or less, a wait one group more pending. It is caught if any launch ends in a fault or in a
wrong result. Writes mutation.json beside this file, and prints the mutants that were missed.
"""

import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE.parent / "golden")]

import flash_attention  # noqa: E402
import gemm  # noqa: E402
import golden_launch  # noqa: E402
import launch  # noqa: E402
import mla_decode  # noqa: E402

from tileops_dsl.emulate import EmulatorError  # noqa: E402

SILENT = (
    *(
        "sync_threads",
        "sync_warp",
        "named_barrier_sync",
        "named_barrier_arrive",
        "cluster_sync",
        "cluster_arrive",
        "cluster_wait",
    ),
    *("arrive", "arrive_expect_bytes", "arrive_at_rank", "wait", "wait_cluster", "fence_async_shared", "fence_barrier_init"),
    *("wgmma_fence", "wgmma_commit", "wgmma_wait", "store_commit", "store_wait_read", "store_wait"),
)
FLIPPED = ("wait", "wait_cluster", "tma_load", "tma_load_multicast", "tma_store", "wgmma")
COUNTED = {"arrive_expect_bytes": (-4096, 4096), "init_barrier": (-1, 1), "wgmma_wait": (1,), "store_wait_read": (1,)}
PARTS = {"cluster_sync": ("cluster_arrive", "cluster_wait")}
SEEDS = range(3)
# Mutants that are right too, with the reason.
FENCED = "no register of these products is written between the fence before this one and this one"
EQUIVALENT = {
    "gemm": {"sync_warp@3 suppress": "brings the lanes of the loading warp together again; orders no memory that they share"},
    "flash_attention_full": {"wgmma_fence@42 suppress": FENCED},
    "flash_attention_causal": {"wgmma_fence@50 suppress": FENCED, "wgmma_fence@67 suppress": FENCED},
    "mla_decode": {
        **{f"wgmma_fence@{site} suppress": FENCED for site in (41, 90, 100, 148, 158)},
        "named_barrier_sync@84 suppress": "all of group 0 sync at site 85 before the product that reads what they have cleared",
    },
}


def words(text: str) -> list[tuple[str, int]]:
    """Each (word, site) of a kernel's text, in order of sites."""
    found = set()
    for start in re.finditer(r"\b([a-z_]+)(?:<[^;()]*>)?\(", text):
        depth, end = 1, start.end()
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        site = re.search(r"\bsite\((\d+)\)\)$", text[start.start() : end])
        if site:
            found.add((start[1], int(site[1])))
    return sorted(found, key=lambda pair: (pair[1], pair[0]))


def mutants(text: str) -> list[dict]:
    result = []
    for word, site in words(text):
        if word in SILENT:
            result.append({f"{part}@{site}": "suppress" for part in PARTS.get(word, (word,))})
        if word in FLIPPED:
            result.append({f"{word}@{site}": "flip"})
        result += [{f"{word}@{site}": amount} for amount in COUNTED.get(word, ())]
    return result


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


KERNELS = {
    "gemm": ("gemm.cu", gemm_launches),
    "flash_attention_full": ("flash_attention_full.cu", lambda: attention_launches(False)),
    "flash_attention_causal": ("flash_attention_causal.cu", lambda: attention_launches(True)),
    "mla_decode": ("mla_decode.cu", mla_launches),
}


def caught(gpu, launches, right) -> bool:
    for gpu.seed in SEEDS:
        for run, result in zip(launches, right):
            try:
                if not torch.equal(torch.nan_to_num(run()), result):  # the order of summation is the same in each run
                    return True
            except EmulatorError:
                return True
    return False


def score(gpu, name: str) -> dict:
    source, make = KERNELS[name]
    launches = list(make())
    gpu.mutate = None
    right = [torch.nan_to_num(run()) for run in launches]
    start, missed, all_of_them = time.perf_counter(), [], mutants((golden_launch.GOLDEN / source).read_text())
    for gpu.mutate in all_of_them:
        if not caught(gpu, launches, right):
            missed.append(" ".join(f"{place} {change}" for place, change in gpu.mutate.items()))
    seconds, known = time.perf_counter() - start, EQUIVALENT.get(name, {})
    score = {
        "mutants": len(all_of_them),
        "caught": len(all_of_them) - len(missed),
        "equivalent": len(known.keys() & set(missed)),
    }
    print(f"{name}: {score} in {seconds:.0f} s; missed: {[m for m in missed if m not in known]}")
    return score


def main(names: list[str]) -> None:
    file = HERE / "mutation.json"
    scores = json.loads(file.read_text()) if file.exists() else {}
    with pytest.MonkeyPatch.context() as patch:
        gpu = golden_launch.Emulated(patch, multiprocessors=4)
        for name in names or KERNELS:
            gpu.arrays.clear()
            scores[name] = score(gpu, name)
    file.write_text(json.dumps(scores, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
