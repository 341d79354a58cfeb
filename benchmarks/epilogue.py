"""`python -m benchmarks.epilogue`: what each epilogue of gemm costs over none, all interleaved in one process."""

import argparse
import sys
from pathlib import Path

import torch

import tileops
from benchmarks import products, results, timing
from benchmarks.table import aligned
from tileops import knobs

SHAPES = ((4096, 16384, 4096),)
ACTIVATIONS = ("relu", "silu", "gelu_tanh", "gelu")
CALLS = 6
TOLERANCE = 2**-8  # of the largest result, for bfloat16


def epilogues(bias, residual):
    """Name -> the arguments of gemm that ask for it."""
    found = {"none": {}, "bias": {"bias": bias}}
    found |= {f"bias + {name}": {"bias": bias, "activation": name} for name in ACTIVATIONS}
    return found | {"bias + residual": {"bias": bias, "residual": residual}}


def exact(rows, a, b, arguments):
    """In float64, some rows of it."""
    z = a[rows].double() @ b.double()
    if "bias" in arguments:
        z = z + arguments["bias"].double()
    y = products.ACTIVATIONS[arguments.get("activation", "none")](z)
    return y + arguments["residual"][rows].double() if "residual" in arguments else y


def measure(m, n, k, rounds):
    """Rows of a results file. b is scaled so that activations see values of about 1."""

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    sets = [(normal(m, k), (normal(n, k) * k**-0.5).t(), normal(n), normal(m, n)) for _ in range(2)]
    a, b, bias, residual = sets[0]
    rows = torch.arange(0, m, 61, device="cuda")
    replays, variants, errors = {}, {}, {}
    for name, arguments in epilogues(bias, residual).items():
        wanted = exact(rows, a, b, arguments)
        errors[name] = ((tileops.gemm(a, b, **arguments)[rows].double() - wanted).abs().max() / wanted.abs().max()).item()
        if not errors[name] < TOLERANCE:
            raise SystemExit(f"benchmarks.epilogue: {name} at {m}x{n}x{k} is off by {errors[name]:.1e} of the largest result")
        variants[name] = tileops.explain("gemm", a, b, **arguments).variant
        replays[name] = timing.GraphReplay(
            lambda a, b, bias, residual, name=name: tileops.gemm(a, b, **epilogues(bias, residual)[name]), sets, CALLS
        )
    measured = timing.measure(replays, rounds)
    for name in replays:
        yield {
            "op": "epilogue",
            "workload": f"{m}x{n}x{k} bf16 nt {name}",
            "target": "sm_90a" if "sm_90a" in variants[name] else "portable",
            "variant": variants[name],
            "us": round(measured.us[name], 2),
            "tflops": round(2e-6 * m * n * k / measured.us[name], 1),
            "peers_us": {"none": round(measured.us["none"], 2)},
            "ratios": {"none": round(measured.ratio("none", name), 4)},
            "error": float(f"{errors[name]:.3g}"),
            **results.stamp(torch.cuda.get_device_name()),
        }


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.epilogue", description=__doc__)
    parser.add_argument("--rounds", type=int, default=timing.ROUNDS)
    parser.add_argument("--out", type=Path, help="results file (default: benchmarks/results/<gpu>.jsonl)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.epilogue: torch sees no GPU; expected one, since only kernels are timed")
    torch.manual_seed(0)
    path = options.out or results.RESULTS / f"{results.slug(torch.cuda.get_device_name())}.jsonl"
    with knobs.scope(require_native=True):
        for shape in SHAPES:
            rows = list(measure(*shape, options.rounds))
            results.write(path, rows)
            head = ["epilogue", "us", "TFLOP/s", "costs", "error", "variant"]
            lines = [
                [row["workload"], f"{row['us']:.1f}", f"{row['tflops']:.0f}", f"{100 / row['ratios']['none'] - 100:+.1f}%"]
                + [f"{row['error']:.1e}", row["variant"]]
                for row in rows
            ]
            print(aligned([head, *lines], left={0, 5}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
