"""Registers of each role's threads: what the fragments need, and what the register file has."""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError
from tileops_dsl.plan import consumers, words
from tileops_dsl.targets import Target

WORDS = 24  # for addresses and loop state, beside the fragments


def budget_registers(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    """A producer needs little; the consumers share what is left, in steps of 8."""
    if not kernel.roles:
        return kernel
    groups = len(consumers(kernel).groups)
    producer = 40 if kernel.ctas > 1 else 32 if groups == 3 else 24
    # The hardware has registers_per_cta / 128 for a thread of each group together.
    consumer = min((target.registers_per_cta // 128 - producer) // groups // 8 * 8, 240)
    needed = sum(words(kernel, buffer) for buffer in kernel.layouts if buffer.scope == "fragment") + WORDS
    if needed > consumer:
        problem = f"fragments and addresses need {needed} registers a thread, and {consumer} are left"
        raise TileError(problem, "a smaller tile", kernel.location)
    roles = tuple(replace(r, registers=consumer if r.warp is None else producer) for r in kernel.roles)
    return replace(kernel, roles=roles)
