"""What fails a build. The input is recorded text (ptxas -v) and sizes, so that an object from the cache is checked too."""

import re
from dataclasses import dataclass

from .errors import BuildError

# Straight-line SASS beyond this no longer stays in the instruction cache and swells the wheel; it is an unrolling mistake.
MAX_CODE_BYTES = 48 * 1024
# Of a product: it has one epilogue for each activation, of which a call runs one, after the loop over K.
MAX_PRODUCT_BYTES = 96 * 1024


@dataclass(frozen=True)
class Report:
    """One compiled source: text of ptxas -v, and bytes of machine code by architecture and function."""

    source: str
    log: str
    code_bytes: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Function:
    name: str
    arch: str
    stack: int
    spill_stores: int
    spill_loads: int


PROPERTIES = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def parse_ptxas(log: str) -> list[Function]:
    functions, arch, name = [], "?", "?"
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(.+)' for '(\w+)'", line):
            arch = found[2]
        elif found := re.search(r"Function properties for (\S+)", line):
            name = found[1]
        elif found := PROPERTIES.search(line):
            functions.append(Function(name, arch, *map(int, found.groups())))
    return functions


def register_problems(report: Report) -> list[str]:
    problems = []
    for f in parse_ptxas(report.log):
        if f.spill_stores or f.spill_loads:
            problems.append(
                f"{f.name} ({report.source}, {f.arch}): spills registers, {f.spill_stores} bytes of stores and "
                f"{f.spill_loads} of loads; use a smaller tile, more threads or fewer values kept across the loop"
            )
        elif f.stack:
            problems.append(
                f"{f.name} ({report.source}, {f.arch}): keeps {f.stack} bytes in local memory; "
                "index register tiles only with constants of unrolled loops, and inline every device function"
            )
    return problems


def warning_problems(report: Report) -> list[str]:
    problems = []
    for line in report.log.splitlines():
        found = re.search(r"\((C75\d\d)\)", line)
        if not found and not re.search(r"setmaxnreg.*ignored", line):
            continue
        function = re.search(r"function '([^']+)'", line)
        kernels = function[1] if function else "one of " + ", ".join(f.name for f in parse_ptxas(report.log))
        remedy = (
            "launch bounds must fix the register count at entry: state them, and let the roles' register budgets add up to it"
            if "setmaxnreg" in line
            else "a wgmma must not be disturbed until its wait: no use of its registers in between, and a smaller accumulator"
        )
        problems.append(f"{kernels} ({report.source}): ptxas says '{line.split(':', 1)[-1].strip()}'; {remedy}")
    return problems


def size_problems(report: Report, limit: int) -> list[str]:
    return [
        f"{name} ({report.source}, {arch}): {size} bytes of machine code, above the limit of {limit}; "
        "roll an unrolled loop, or move a run-time switch out of one"
        for arch, sizes in report.code_bytes.items()
        for name, size in sizes.items()
        if size > limit
    ]


def missing_problems(report: Report, kernels: list[str], archs: list[str]) -> list[str]:
    """A check that sees nothing must not pass: each kernel has a line of properties and a size on each architecture."""
    seen = {(f.arch, f.name) for f in parse_ptxas(report.log)}
    return [
        f"{kernel} ({report.source}, {arch}): no {what} in the compiler's report; "
        "if the kernel is in the manifest by mistake, correct the generator, else checks.py must learn nvcc's new output"
        for arch in archs
        for kernel in kernels
        for what, found in (
            ("register use", (arch, kernel) in seen),
            ("code size", report.code_bytes.get(arch, {}).get(kernel, 0) > 0),
        )
        if not found
    ]


def problems(report: Report, kernels: list[str], archs: list[str], limit: int = MAX_CODE_BYTES) -> list[str]:
    return [
        *register_problems(report),
        *warning_problems(report),
        *size_problems(report, limit),
        *missing_problems(report, kernels, archs),
    ]


def require(found: list[str]) -> None:
    if found:
        raise BuildError(f"{len(found)} kernel check(s) failed:\n  " + "\n  ".join(found))
