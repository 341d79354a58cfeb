"""python tests/golden/bench.py [gemm|attention|mla]... [--out FILE]: the golden kernels beside the peers, interleaved in one
process; FILE gets a row of benchmarks/results for each workload (h200_golden.jsonl).

Run from the root of the tree with PYTHONPATH=. on a GPU of capability 9.0. FA4 and FlashMLA must be importable (peers of the
benchmark, never dependencies); a missing peer is an error. Each result is checked against float64 before it is timed.
"""

import argparse
from pathlib import Path

import flash_attention
import gemm
import launch
import mla_decode
import torch

from benchmarks import results, timing
from benchmarks.table import aligned
from tileops_dsl import output
from tileops_dsl.kernels.gemm_config import GemmConfig

HERE = Path(__file__).parent
written = []  # what --out gets
HEADER = ("workload", "contestant", "us", "TFLOP/s", "golden is", "error")


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def rows(label, flops, contestants, sets, calls, check):
    """One table row for each contestant; "golden is" how many times as fast as it."""
    errors = {name: check(fn(*sets[0])) for name, fn in contestants.items()}
    ours = [error for name, error in errors.items() if name in ("golden", "generated")]
    allowed = 2 * max(error for name, error in errors.items() if name not in ("golden", "generated"))
    if not (max(ours) < allowed < 0.02):
        raise SystemExit(f"{label}: wrong results, {errors}")
    measured = timing.measure({name: timing.GraphReplay(fn, sets, calls) for name, fn in contestants.items()})
    us = {name: round(measured.us[name], 2) for name in contestants}
    for name in contestants:
        ratio = measured.ratio(name, "golden")
        yield label, name, f"{us[name]:.1f}", f"{flops / us[name] / 1e6:.0f}", f"{ratio:.3f}x", f"{errors[name]:.1e}"
    op, workload = label.split(" ", 1)
    written.append(
        {
            "op": op,
            "workload": workload,
            "target": "sm_90a",
            "variant": "golden",
            "us": us.pop("golden"),
            "tflops": round(flops / measured.us["golden"] / 1e6, 1),
            "peers_us": us,
            "ratios": {name: round(measured.ratio(name, "golden"), 4) for name in us},
            "error": errors["golden"],
            **results.stamp(torch.cuda.get_device_name()),
        }
    )


def generated_gemm():
    """What the compiler writes for the tile of gemm.cu, which has the same parameters."""
    row = GemmConfig("gemm", "sm_90a", "bfloat16", "bfloat16", (128, 256, 64), 4, 2, 8, 64)
    kernel, folder = output.compile_config(row), launch.CACHE / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{row.name}.cu").write_text(output.source_text([kernel]))
    (folder / f"{kernel.params}.h").write_text(output.params_header(kernel.params, kernel.fields))
    return launch.load(folder / f"{row.name}.cu", row.name)


def gemm_rows():
    kernel, generated = launch.load(HERE / "gemm.cu", gemm.NAME), generated_gemm()
    for size in (4096, 8192):
        sets = [(normal(size, size), normal(size, size)) for _ in range(3)]
        sample = torch.arange(0, size, 61, device="cuda")
        a, b = sets[0]
        exact = a[sample].double() @ b.double().T

        def check(c, exact=exact, sample=sample):
            return ((c[sample].double() - exact).abs().max() / exact.abs().max()).item()

        contestants = {
            "golden": lambda a, b: gemm.gemm(kernel, a, b),
            "generated": lambda a, b: gemm.gemm(generated, a, b),
            "cuBLAS": lambda a, b: a @ b.T,
        }
        yield from rows(f"gemm {size}x{size}x{size}", 2 * size**3, contestants, sets, 24 if size == 4096 else 6, check)


def exact_attention(q, k, v, causal, queries):
    """Float64 attention of some queries of the last head of the last batch."""
    q, k, v = (t[-1, :, -1].double() for t in (q, k, v))
    scores = q[queries] @ k.T * q.shape[-1] ** -0.5
    if causal:
        scores.masked_fill_(torch.arange(len(k), device=k.device) > queries[:, None] + len(k) - len(q), -torch.inf)
    return scores.softmax(-1) @ v


def attention_rows():
    from flash_attn.cute import flash_attn_func
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def cudnn(q, k, v, causal):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            heads_first = (t.transpose(1, 2) for t in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    kernels = flash_attention.load()
    generated = {causal: flash_attention.Generated(flash_attention.config(causal)) for causal in (False, True)}
    for batch, length in ((4, 4096), (1, 16384)):
        for causal in (False, True):
            sets = [tuple(normal(batch, length, 16, 128) for _ in range(3)) for _ in range(3)]
            queries = torch.arange(0, length, 97, device="cuda")
            exact = exact_attention(*sets[0], causal, queries)

            def check(out, exact=exact, queries=queries):
                return ((out[-1, queries, -1].double() - exact).abs().max() / exact.abs().max()).item()

            contestants = {
                "golden": lambda q, k, v, causal=causal: flash_attention.launch(kernels, q, k, v, causal)[0],
                "generated": lambda q, k, v, causal=causal: generated[causal](q, k, v)[0],
                "FA4": lambda q, k, v, causal=causal: flash_attn_func(q, k, v, causal=causal)[0],
                "cuDNN": lambda q, k, v, causal=causal: cudnn(q, k, v, causal),
            }
            flops = 4 * batch * 16 * length**2 * 128 // (2 if causal else 1)
            label = f"attention b{batch} h16 s{length} d128 {'causal' if causal else 'full'}"
            yield from rows(label, flops, contestants, sets, 6, check)


def mla_rows():
    import flash_mla  # noqa: F401  (registers its operators)

    kernels = mla_decode.load()
    generated = mla_decode.Generated(), kernels[1]
    batch, length, heads, scale = 128, 8192, 128, 576**-0.5
    pages = length // 64
    lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    sets = []
    for _ in range(2):
        table = torch.randperm(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages)
        sets.append((normal(batch, 1, heads, 576), normal(batch * pages, 64, 576), table))
    q, cache, table = sets[0]
    kv = cache[table[-1].long()].reshape(length, 576).double()
    exact = (q[-1, 0].double() @ kv.T * scale).softmax(-1) @ kv[:, :512]

    def check(out):
        return ((out[-1, 0].double() - exact).abs().max() / exact.abs().max()).item()

    def peer(q, cache, table):
        arguments = (q, cache.unsqueeze(2), 512, lengths, table, scale, False, None, None)
        return torch.ops.flash_mla_legacy.dense_decode_fwd(*arguments)[0]

    contestants = {
        "golden": lambda q, cache, table: mla_decode.launch(kernels, q, cache, table, lengths, scale)[0],
        "generated": lambda q, cache, table: mla_decode.launch(generated, q, cache, table, lengths, scale)[0],
        "FlashMLA": peer,
    }
    flops = 2 * batch * length * heads * (576 + 512)
    yield from rows(f"mla b{batch} s{length} h{heads}", flops, contestants, sets, 4, check)


PARTS = {"gemm": gemm_rows, "attention": attention_rows, "mla": mla_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS), help="all of them if none is named")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for name in arguments.parts or PARTS:
        print(aligned([HEADER, *PARTS[name]()], left=(0, 1)), flush=True)
    if arguments.out:
        results.write(arguments.out, written)


if __name__ == "__main__":
    main()
