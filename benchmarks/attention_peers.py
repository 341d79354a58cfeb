"""`python -m benchmarks.attention_peers`: dense attention beside the fastest that there is, interleaved in one process.

Peers: FA2 and cuDNN as PyTorch has them, and FA4 (flash-attn-4, module flash_attn.cute) where it is installed. tileops is
called as anyone calls it, so the dispatcher chooses the kernel. Each problem is a row of the results: which of the peers is the
`fastest`, the ratios, and the error of each contestant against float64, root mean square over rows that are drawn at random.
"""

import importlib.util
import math
import sys
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

import tileops
from benchmarks import command, results, timing
from benchmarks.attention import of_torch
from benchmarks.table import aligned

TOKENS = 16384  # in all
HEADS = {64: 32, 128: 16, 256: 8}
SAMPLE = 128  # rows of q of the last head that are compared with float64
TOLERANCE = 2**-7  # root mean square of the difference, relative to that of the values


class Problem(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    causal: bool

    flops = property(lambda self: 4 * self.batch * self.heads * self.length**2 * self.dim / (2 if self.causal else 1))

    @property
    def label(self) -> str:
        heads = f"h{self.heads}/{self.kv_heads}"
        return f"b{self.batch} {heads} s{self.length} d{self.dim} {'causal' if self.causal else 'full'}"


PROBLEMS = [
    *(
        Problem(TOKENS // length, heads, heads, length, dim, causal)
        for dim, heads in HEADS.items()
        for length in (512, 1024, 4096, 16384)
        for causal in (False, True)
    ),
    *(Problem(TOKENS // length, 32, 8, length, 128, causal) for length in (1024, 4096) for causal in (False, True)),
    *(Problem(TOKENS // length, 64, 8, length, 64, True) for length in (4096, 8192)),
    Problem(2, 16, 4, 8192, 256, True),
]


def contestants(causal: bool) -> dict:
    found = {
        "tileops": lambda q, k, v: tileops.flash_attention(q, k, v, causal=causal)[0],
        "fa2": of_torch(SDPBackend.FLASH_ATTENTION, causal),
        "cudnn": of_torch(SDPBackend.CUDNN_ATTENTION, causal),
    }
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"):
        from flash_attn.cute import flash_attn_func

        found["fa4"] = lambda q, k, v: flash_attn_func(q, k, v, causal=causal)[0]
    return found


def error(out, q, k, v, causal: bool) -> float:
    generator = torch.Generator(q.device).manual_seed(0)
    rows = torch.randint(q.shape[1], (SAMPLE,), device=q.device, generator=generator)
    q, k, v, out = (t[-1, :, -1] for t in (q, k, v, out))
    scores = q[rows].double() @ k.double().T * q.shape[-1] ** -0.5
    scores = scores.masked_fill((torch.arange(k.shape[0], device=q.device) > rows[:, None]) & causal, -torch.inf)
    exact = scores.softmax(-1) @ v.double()
    return ((out[rows].double() - exact).square().mean() / exact.square().mean()).sqrt().item()


def measure(problem: Problem, rounds: int) -> dict:
    batch, heads, kv_heads, length, dim, causal = problem
    shapes = [(batch, length, n, dim) for n in (heads, kv_heads, kv_heads)]
    count, calls = timing.rotation(2 * sum(map(math.prod, (*shapes, shapes[0]))), timing.l2_bytes())
    sets = [tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes) for _ in range(count)]
    found = contestants(causal)
    errors = {name: error(fn(*sets[0]), *sets[0], causal) for name, fn in found.items()}
    if not max(errors.values()) < TOLERANCE:
        raise SystemExit(f"benchmarks.attention_peers: {problem.label}: wrong results, {errors}")
    measured = timing.measure({name: timing.GraphReplay(fn, sets, calls) for name, fn in found.items()}, rounds)
    us, peers = measured.us["tileops"], [name for name in found if name != "tileops"]
    fastest = min(peers, key=measured.us.get)
    return {
        "op": "attention_peers",
        "workload": problem.label,
        "target": "sm_90a",
        "variant": tileops.explain("flash_attention", *sets[0], causal=causal).variant,
        "us": round(us, 2),
        "tflops": round(problem.flops / us * 1e-6, 1),
        "peers_us": {name: round(measured.us[name], 2) for name in peers},
        "ratios": {name: round(measured.ratio(name, "tileops"), 3) for name in peers},
        "fastest": fastest,
        "errors": {name: float(f"{wrong:.3g}") for name, wrong in errors.items()},
        **results.stamp(torch.cuda.get_device_name()),
    }


def main(arguments=None):
    options = command.options_of("attention_peers", __doc__).parse_args(arguments)
    command.require_gpu("attention_peers")
    with tileops.knobs.scope(require_native=True):
        written = command.measured(options, PROBLEMS, lambda problem: measure(problem, options.rounds))
    print(summary(written))


def summary(rows: list[dict]) -> str:
    names = [name for name in ("fa2", "cudnn", "fa4") if any(name in row["ratios"] for row in rows)]
    head = ["attention", "us", "TFLOP/s", *(f"vs {name}" for name in names), "vs fastest", "error", "least of peers"]
    lines = [
        [r["workload"], r["us"], r["tflops"], *(r["ratios"].get(name, "-") for name in names), r["ratios"][r["fastest"]]]
        + [r["errors"]["tileops"], min(wrong for name, wrong in r["errors"].items() if name != "tileops")]
        for r in rows
    ]
    ratios = [row["ratios"][row["fastest"]] for row in rows]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    total = f"against the fastest: geometric mean {mean:.3f}, least {min(ratios):.3f}, {len(rows)} rows"
    return f"{aligned([head, *lines])}\n{total}"


if __name__ == "__main__":
    sys.exit(main())
