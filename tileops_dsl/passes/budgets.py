"""Registers of each role's threads: what the fragments need, and what the register file has."""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.plan import consumers, threads, words
from tileops_dsl.targets import Target

WORDS = 44  # for addresses and loop state, beside the fragments: with 43 a tile of 256 x 128 was spilled
PRODUCT = 26  # that an instruction needs beside its accumulators, of those that a thread starts with (ptxas error C7602)


def start(kernel: ir.Kernel, target: Target) -> int:
    """What each thread of a CTA begins with; groups hand them to each other."""
    return target.registers_per_cta // threads(kernel) // 8 * 8


def budget_registers(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    """A producer needs little; the consumers share what is left, in steps of 8."""
    if not kernel.roles:
        return kernel
    groups = len(consumers(kernel).groups)
    producer = 32 if groups > 2 else 40 if kernel.ctas > 1 else 24
    consumer = min((start(kernel, target) * (groups + 1) - producer) // groups // 8 * 8, 240)
    needed = sum(words(kernel, buffer) for buffer in kernel.layouts if buffer.scope == "fragment") + WORDS
    widest = max(stmt.c.shape[1] for stmt in ir.walk(kernel.body) if isinstance(stmt, ir.Gemm))
    if widest // 2 + PRODUCT > start(kernel, target):
        problem = f"a product of {widest} columns, and each thread starts with {start(kernel, target)} registers"
        raise TileError(problem, f"at most {2 * (start(kernel, target) - PRODUCT)} columns, or fewer threads", kernel.location)
    if needed > consumer:
        problem = f"fragments and addresses need {needed} registers a thread, and {consumer} are left"
        raise TileError(problem, "a smaller tile", kernel.location)
    roles = tuple(replace(r, registers=consumer if r.warp is None else producer) for r in kernel.roles)
    return replace(kernel, roles=roles)
