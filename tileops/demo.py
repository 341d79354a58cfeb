"""`python -m tileops.demo`: the operators of a decoder layer and of a video-VAE block on real shapes, one line per call.

With a GPU the lines show which kernel ran; without one they run in eager PyTorch at smaller shapes, and one kernel then runs on
the CPU emulator where the source tree is at hand. A new operator is one row of OPERATORS, a new line one row of CALLS.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

import tileops

CHUNK_ELEMENTS = 1 << 24  # float64 rows compared at a time: 128 MB for each temporary
WRONG = 0.05  # an error above this, relative to the row's largest value, is a fault and not rounding (bfloat16 rounds by 0.004)
GRAPH_CALLS = 10
EMULATOR_SECONDS = 40


def _rms_norm_eager(x, weight=None, dim=-1, eps=1e-6):
    """F.rms_norm knows the last dimensions only, so any other one is moved there and back."""
    rows = x.movedim(dim, -1)
    return F.rms_norm(rows, rows.shape[-1:], weight, eps).to(x.dtype).movedim(-1, dim)


def _rms_norm_exact(rows, weight=None, eps=1e-6):
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


@dataclass(frozen=True)
class Operator:
    """eager: what a user of plain PyTorch writes. exact: the formula along the last dimension of 2-D float64 rows."""

    eager: Callable
    exact: Callable


OPERATORS = {
    "softmax": Operator(lambda x, dim=-1: torch.softmax(x, dim), lambda rows: torch.softmax(rows, -1)),
    "rms_norm": Operator(_rms_norm_eager, _rms_norm_exact),
    "rms_norm_silu": Operator(
        lambda x, weight=None, dim=-1: F.silu(_rms_norm_eager(x, weight, dim, 1e-5)),
        lambda rows, weight=None: F.silu(_rms_norm_exact(rows, weight, 1e-5)),
    ),
}


@dataclass(frozen=True)
class Call:
    op: str
    where: str
    shape: tuple
    small: tuple  # the shape on a CPU and with --quick
    dim: int = -1
    weight: bool = True
    dtype: torch.dtype = field(default=torch.bfloat16)


# Llama-3-8B: hidden size 4096, 32 heads. Wan2.1 VAE decoder at 720x1280: 96, 192 and 384 channels.
CALLS = [
    Call("rms_norm", "Llama-3-8B input norm, prefill", (8192, 4096), (512, 4096)),
    Call("softmax", "Llama-3-8B attention scores", (1, 32, 2048, 2048), (1, 8, 512, 512), weight=False),
    Call("rms_norm", "Llama-3-8B final norm, decode", (64, 4096), (64, 4096)),
    Call("softmax", "Llama-3-8B sampling, float32", (64, 128256), (4, 128256), weight=False, dtype=torch.float32),
    Call("softmax", "GPT-2 vocabulary, odd rows", (1000, 50257), (16, 50257), weight=False),
    Call("rms_norm_silu", "Wan VAE residual block, BTHWC", (4, 720, 1280, 96), (1, 90, 160, 96)),
    Call("rms_norm_silu", "Wan VAE residual block, BTHWC", (2, 180, 320, 384), (1, 45, 80, 384)),
    Call("rms_norm_silu", "Wan VAE residual block, BCTHW", (1, 96, 4, 720, 1280), (1, 96, 1, 90, 160), dim=1),
    Call("rms_norm_silu", "Wan VAE residual block, BCTHW", (1, 192, 4, 360, 640), (1, 192, 1, 45, 80), dim=1),
    Call("rms_norm", "Wan VAE attention block, BCHW", (2, 384, 180, 320), (1, 384, 45, 80), dim=1),
]


def as_rows(tensor, dim):
    return tensor.movedim(dim, -1).reshape(-1, tensor.shape[dim])


def error(op, x, weight, result, dim=-1):
    """The largest distance to float64, each relative to the largest value of its row. inf: a NaN or a wrong shape."""
    if result.shape != x.shape:
        return float("inf")
    rows, ours = as_rows(x, dim), as_rows(result, dim)
    exact = OPERATORS[op].exact
    weights = () if weight is None else (weight.double(),)
    step = max(1, CHUNK_ELEMENTS // max(1, rows.shape[1]))
    worst = []
    for first in range(0, rows.shape[0], step):
        want = exact(rows[first : first + step].double(), *weights)
        off = (ours[first : first + step].double() - want).abs() / want.abs().amax(-1, keepdim=True)
        worst.append(off.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
    return max(float(value) for value in worst) if worst else 0.0


class Progress:
    """A bar on a terminal, plain dots elsewhere; always on stderr, so that stdout holds the result alone."""

    def __init__(self, total, stream=None):
        self.total, self.done, self.stream = total, 0, stream or sys.stderr
        self.terminal = self.stream.isatty()

    def step(self, doing=""):
        """Says that `doing` begins; the bar counts what was begun before it."""
        if self.terminal:
            full = 24 * self.done // max(1, self.total)
            self._write(f"\r\x1b[K[{'#' * full}{'.' * (24 - full)}] {self.done}/{self.total} {doing[:80]}")
        else:
            self._write(".")
        self.done += 1

    def clear(self):
        """Before a line goes to stdout: the terminal may be the same."""
        if self.terminal:
            self._write("\r\x1b[K")

    def close(self):
        self._write("\r\x1b[K" if self.terminal else "\n")

    def _write(self, text):
        self.stream.write(text)
        self.stream.flush()


def _cpu_timer(call):
    def seconds():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return seconds


def _graph_timer(call):
    """A graph holds the kernels alone, without what Python and the dispatcher cost between them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()

    def seconds():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / GRAPH_CALLS

    return seconds


def compare(ours, eager, device, rounds):
    """(seconds of ours, how many times faster than eager): medians over rounds in which the two take turns."""
    timer = _graph_timer if device == "cuda" else _cpu_timer
    timers = [timer(ours), timer(eager)]
    pairs = [[seconds() for seconds in timers] for _ in range(rounds + 1)][1:]
    return median(own for own, _ in pairs), median(other / own for own, other in pairs)


def run_call(call, device, small, rounds):
    """One line of the table, and its error."""
    shape = call.small if small else call.shape
    x = torch.randn(shape, dtype=call.dtype, device=device)
    tensors = {"x": x, "dim": call.dim}
    weight = None
    if call.weight:
        weight = tensors["weight"] = (1 + 0.1 * torch.randn(shape[call.dim], device=device)).to(call.dtype)
    ours = getattr(tileops, call.op)
    off = error(call.op, x, weight, ours(**tensors), call.dim)
    seconds, ratio = compare(lambda: ours(**tensors), lambda: OPERATORS[call.op].eager(**tensors), device, rounds)
    decision = tileops.explain(call.op, **tensors)
    path = decision.variant if decision.path == "kernel" else f"eager: {decision.reason}"
    size = "x".join(map(str, shape)) + (f" dim {call.dim}" if call.dim != -1 else "")
    return row(call.op, call.where, size, f"{off:.1e}", duration(seconds), f"{ratio:.2f}x", path), off


def row(op, where, size, off, taken, ratio, path):
    return f"{op:<13}  {where:<30}  {size:<22}  {off:>8}  {taken:>9}  {ratio:>8}  {path}"


def duration(seconds):
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def run_calls(device, small, rounds):
    print(row("operator", "where", "shape", "error", "time", "vs eager", "path"))
    progress = Progress(len(CALLS))
    worst = 0.0
    for call in CALLS:
        progress.step(f"{call.op} {call.where}")
        line, off = run_call(call, device, small, rounds)
        progress.clear()
        print(line, flush=True)
        worst = max(worst, off)
    progress.close()
    print("error: largest distance to float64, relative to the row's largest value. vs eager: above 1 is faster than PyTorch.")
    if worst > WRONG:
        print(f"WRONG: an error of {worst:.1e} is more than rounding; please report it with the output of tileops.status()")
    return worst <= WRONG


def emulate():
    """Runs one kernel on the CPU emulator; says in one line why, where that cannot be. False where the run found a fault."""
    spec = importlib.util.find_spec("tileops_dsl")
    if spec is None:
        print("The CPU emulator comes with the source tree; this install has none (git clone, then run this there).")
        return True
    compiler = os.environ.get("CXX", "g++").split()[0]
    if shutil.which(compiler) is None:
        print(f"The CPU emulator needs a C++ compiler and there is no {compiler}; install one or set CXX.")
        return True
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").exists():
        print(f"The CPU emulator needs {headers}/Python.h, which is missing; install it (Debian: apt install python3-dev).")
        return True
    print("Now one softmax kernel on the CPU emulator, from the text that nvcc compiles:", flush=True)
    root = str(Path(spec.submodule_search_locations[0]).parent)
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tileops_dsl.emulate", "softmax"]
    try:
        status = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, timeout=EMULATOR_SECONDS).returncode
    except subprocess.TimeoutExpired:
        print(f"The emulator took more than {EMULATOR_SECONDS} s and was stopped; run it by itself: {' '.join(command[1:])}")
        return True
    if status != 0:
        print(f"The emulator run failed with status {status}; what it said is above.")
    return status == 0


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tileops.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, few repetitions, no emulator run")
    parser.add_argument("--cpu", action="store_true", help="do not use the GPU")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    versions = f"torch {torch.__version__}, tileops {tileops.__version__}"
    torch.manual_seed(0)
    if device == "cuda":
        print(f"{torch.cuda.get_device_name()}, {versions}. Times are of kernels in a CUDA graph, each on one set of tensors;")
        print("those that fit the L2 cache are read from there.")
    else:
        print(f"No GPU in use ({versions}): eager PyTorch, at smaller shapes than a GPU gets.")
    with torch.no_grad():
        right = run_calls(device, options.quick or device == "cpu", 1 if options.quick else 5)
    if device == "cpu" and not options.quick:
        right = emulate() and right
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
