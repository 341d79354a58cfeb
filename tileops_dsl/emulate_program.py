"""A tile program on the CPU, in one call and from the command line.

    from tileops_dsl import emulate

    (c,), report = emulate(gemm, a, b, None, None, config=row, activation=1, seed=3)

`python -m tileops_dsl.emulate OP [--program FILE] [--kernel PART OF A NAME] [--target T] [--seed N]` runs the program of an
operator, or the changed one in FILE, on a small ragged problem, compares with float64, and prints the report.
"""

import argparse
import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tileops_dsl import emulate as emulator
from tileops_dsl import ir, output, plan
from tileops_dsl.configs import Config
from tileops_dsl.emulate_problems import PROBLEMS
from tileops_dsl.emulate_rows import NUMPY, decode, source_of
from tileops_dsl.kernels import PROGRAMS, configs_of
from tileops_dsl.passes.meaning import number

CODES = {"uint16": 1, "float16": 2, "float32": 3}  # DTypeCode of csrc/include/tileops/types.h, by NumPy's dtype
HALF_UNITS = {"uint16": 2**-8, "float16": 2**-11, "float32": 2**-24}  # relative, of the last place
SLACK = {"flash_attention": 2**-7}  # of the largest result: weights are rounded to 16 bits; elsewhere sums in float32


@dataclass(frozen=True)
class Bound:
    """A program and the arrays that it shall run on: what a launch needs. values: of the struct's fields, in order."""

    generated: output.Generated
    source: Path
    outputs: tuple[np.ndarray, ...]
    values: list
    names: list[str]
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    cluster: int


def emulate(program: Callable[[Config], ir.Kernel], *tensors, config: Config, seed: int = 0, **more) -> tuple[tuple, dict]:
    """The outputs of `program(config)` on `tensors`, and a report of what the launch did.

    tensors: those that the program reads, in its order, as NumPy arrays of any strides (bfloat16 as uint16, see to_bf16); None
    for an optional one that is not passed. more: its T.Scalar parameters, by name; `multiprocessors` (4) that a kernel without
    a grid runs on. An output has the shape that the program gives it, and the strides of the first tensor of that shape.

    The report is that of run(): instructions of warps by word, bytes by memory and by who moves them, bank conflicts of each
    line's accesses to shared memory, and the shared memory that was used. A fault of the kernel is an EmulatorError.
    """
    b = bind(program, *tensors, config=config, **more)
    options = {"cluster": b.cluster, "seed": seed, "names": b.names, "sites": b.generated.entry["sites"]}
    options["include_dirs"] = (b.source.parent,)
    report = emulator.launch_kernel(b.source, config.name, b.values, b.grid, b.threads, b.shared_bytes, **options)
    return b.outputs, report


def bind(program, *tensors, config: Config, multiprocessors: int = 4, **scalars) -> Bound:
    kernel = program(config)
    read, written = ([t for t in kernel.tensors if (t in plan.written(kernel)) is wanted] for wanted in (False, True))
    if len(tensors) != len(read) or set(scalars) != {s.name for s in kernel.scalars}:
        names = ", ".join([*(t.name for t in read), *(f"{s.name}=.." for s in kernel.scalars)])
        raise TypeError(f"{kernel.name} takes {names}, and config=..")
    given = dict(zip(read, (t if t is None else np.asarray(t) for t in tensors), strict=True))
    dims = _extents(given)
    generated = output.compile_config(config, program=program)
    made = {tensor: _output(tensor, dims, given) for tensor in written}
    arrays = {tensor.name: array for tensor, array in (given | made).items()}
    for tensor in kernel.tensors:
        array = arrays[tensor.name]
        arrays |= {tensor.flag: int(array is not None), f"{tensor.name}_dtype": 0 if array is None else CODES[array.dtype.name]}
    values, names = emulator.fields(generated.entry, arrays | dims | scalars, {t.name for t in made})
    launch = generated.entry["threads"], generated.entry["shared_bytes"], kernel.ctas
    grid = _grid(kernel, dims, multiprocessors)
    return Bound(generated, source_of(generated), tuple(made.values()), values, names, grid, *launch)


def _extents(arrays: dict) -> dict[str, int]:
    """What the shapes say of each dimension."""
    found: dict[str, int] = {}
    for tensor, array in ((t, a) for t, a in arrays.items() if a is not None):
        shape = [found.setdefault(d.name, n) if isinstance(d, ir.Var) else d.value for d, n in zip(tensor.dims, array.shape)]
        if tuple(shape) != array.shape or len(tensor.dims) != array.ndim:
            raise ValueError(f"{tensor.name} has shape {array.shape}; expected {tensor} with {found}")
        dtypes = [*NUMPY.values()] if tensor.dtype == "any" else [NUMPY[tensor.dtype]]
        if array.dtype not in dtypes:
            raise TypeError(f"{tensor.name} is {array.dtype}; expected {' or '.join(np.dtype(d).name for d in dtypes)}")
    return found


def _output(tensor: ir.Tensor, dims: dict[str, int], arrays: dict) -> np.ndarray:
    like = next((a for t, a in arrays.items() if t.dims == tensor.dims and a is not None), None)
    shape = [dims[d.name] if isinstance(d, ir.Var) else d.value for d in tensor.dims]
    dtype = np.dtype(NUMPY[tensor.dtype])
    made = np.empty(shape, dtype) if like is None else np.empty_like(like, dtype, order="K")
    made[...] = np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0]  # NaN
    return made


def _grid(kernel: ir.Kernel, dims: dict[str, int], multiprocessors: int) -> tuple[int, ...]:
    if kernel.grid:
        return tuple(number(extent, dims) for extent in kernel.grid)
    *items, rows, columns = (number(extent, dims) for extent in plan.tile_loop(kernel).extents)
    clusters = math.prod(items) * -(-rows // kernel.ctas) * columns
    return min(multiprocessors // kernel.ctas, clusters) * kernel.ctas, 1


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tileops_dsl.emulate", description=__doc__)
    parser.add_argument("op", choices=list(PROBLEMS), nargs="?", default="softmax")
    parser.add_argument("--program", type=Path, metavar="FILE", help="a changed copy of tileops_dsl/kernels/<op>.py")
    parser.add_argument("--kernel", default="", help="part of the name of a kernel of configs/<op>.json; the first that has it")
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    rows = [row for row in configs_of(given.op) if row.target == given.target and given.kernel in row.name]
    if not rows:
        parser.error(f"configs/{given.op}.json has no kernel for {given.target} with {given.kernel!r} in its name")
    row = next((r for r in rows if r.op != "softmax" or given.kernel or (r.vector == 8 and r.max_cols == 1024)), rows[0])
    start = time.perf_counter()
    tensors, scalars, exact = PROBLEMS[given.op](row, np.random.default_rng(given.seed))
    outputs, report = emulate(load(given.program, given.op), *tensors, config=row, seed=given.seed, **scalars)
    print(f"{row.name}: {', '.join('x'.join(map(str, t.shape)) for t in tensors if t is not None)}")
    right = [_compare(found, wanted, SLACK.get(given.op, 4e-6)) for found, wanted in zip(outputs, exact, strict=True)]
    print(described(report))
    print(f"{time.perf_counter() - start:.1f} s with compilation")
    return 0 if all(right) else 1


def load(file: Path | None, op: str) -> Callable[[Config], ir.Kernel]:
    """The program of an operator, or the function of that name in a file."""
    if file is None:
        return PROGRAMS[op]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, op)


def _compare(found: np.ndarray, exact: np.ndarray, slack: float) -> bool:
    """Prints the largest error against float64, and says whether all are what one rounding and `slack` explain."""
    values = decode(found, "bfloat16" if found.dtype == np.uint16 else found.dtype.name)
    error, largest = np.abs(values - exact), np.abs(exact).max()
    right = bool((error <= np.abs(exact) * HALF_UNITS[found.dtype.name] + slack * largest).all())
    print(f"  largest error against float64 {error.max():.1e}, of results up to {largest:.2g}: {'right' if right else 'WRONG'}")
    return right


def described(report: dict) -> str:
    """The report in a few lines."""
    lines = [f"  {memory} memory: {_moved(by)}" for memory, by in report["bytes"].items()]
    lines.append(f"  {report['peak_shared_bytes']} bytes of shared memory used")
    lines.append("  instructions of warps: " + ", ".join(f"{n} {word}" for word, n in report["words"].items()))
    for a in report["shared_accesses"]:
        what = f"{a['instructions']} {a['word']}, {a['wavefronts']} wavefronts, {a['conflicts']} by bank conflicts"
        lines.append(f"  {a['line']}: {what}")
    return "\n".join(lines)


def _moved(by: dict[str, dict[str, int]]) -> str:
    return ", ".join(f"{n} bytes {way} by {who}" for who, ways in by.items() for way, n in ways.items() if n) or "not used"
