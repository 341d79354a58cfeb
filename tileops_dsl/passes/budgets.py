"""Registers of each role's threads: what the fragments need, and what the register file has."""

from dataclasses import replace

from tileops_dsl import ir
from tileops_dsl.errors import TileError, require
from tileops_dsl.plan import consumers, live_words, own_columns, threads
from tileops_dsl.targets import Target

WORDS = 44  # for addresses and loop state, beside the fragments: with 43 a gemm's tile of 256 x 128 was spilled
FEWEST = 24  # the same where products follow each other, as in attention, whose end has no switches: 192 x 128 x 64 has 24
LOADING = 24  # for a group of T.ws that only loads
PRODUCT = 26  # that an instruction needs beside its accumulators, of those that a thread starts with (ptxas error C7602)


def whole_share(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    """Of groups that T.ws names, each keeps what it starts with; one that only loads hands on what it does not need."""
    have, needed = min(target.registers_per_cta // kernel.threads, target.registers_per_thread), live_words(kernel) + WORDS
    loading = sum(role.loads for role in kernel.roles)
    if loading:  # then the others have no addresses of what is loaded
        start, others = have // 8 * 8, len(kernel.roles) - loading
        have, needed = min((start * len(kernel.roles) - LOADING * loading) // others // 8 * 8, 240), live_words(kernel) + FEWEST
    problem = f"fragments and addresses need {needed} registers a thread, which has {have}"
    require(needed <= have, problem, "a smaller tile", kernel.location)
    return replace(kernel, roles=tuple(replace(r, registers=LOADING if r.loads else have) for r in kernel.roles))


def budget_registers(kernel: ir.Kernel, target: Target) -> ir.Kernel:
    """A producer needs little; the consumers share what is left, in steps of 8."""
    start = target.registers_per_cta // threads(kernel) // 8 * 8  # of each thread; then groups hand them to each other
    groups = len(consumers(kernel).groups)
    live, products = live_words(kernel), list(ir.walk(kernel.body, ir.Gemm))
    needed = live + (WORDS if len(products) == 1 else FEWEST)
    for producer in (32,) if groups > 2 else (40,) if kernel.ctas > 1 else (40, 24):  # with 24 one spilled 8 bytes
        consumer = min((start * (groups + 1) - producer) // groups // 8 * 8, 240)
        if live + WORDS <= consumer:
            break
    widest = own_columns(kernel, max(product.c.shape[1] for product in products))
    if widest // 2 + PRODUCT > start:
        problem = f"a product of {widest} columns, and each thread starts with {start} registers"
        raise TileError(problem, f"at most {2 * (start - PRODUCT)} columns, or fewer threads", kernel.location)
    problem = f"fragments and addresses need {needed} registers a thread, and {consumer} are left"
    require(needed <= consumer, problem, "a smaller tile", kernel.location)
    roles = tuple(replace(r, registers=consumer if r.warp is None else producer) for r in kernel.roles)
    return replace(kernel, roles=roles)
