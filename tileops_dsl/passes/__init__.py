"""The whole pipeline, in order. The verifier runs after each pass, always."""

from tileops_dsl import ir
from tileops_dsl.passes import groups, portable
from tileops_dsl.passes.budgets import budget_registers, whole_share
from tileops_dsl.passes.exchange import exchange
from tileops_dsl.passes.layouts import infer_layouts
from tileops_dsl.passes.pipeline import pipeline
from tileops_dsl.passes.roles import assign_roles
from tileops_dsl.passes.shared_memory import derive_barriers, plan_shared_memory
from tileops_dsl.passes.tiles import infer_tiles
from tileops_dsl.passes.verify import of_kind, unchanged, verify
from tileops_dsl.targets import Target

OF_BODIES = {"well_formed", "aliases", "roles", "schedule"}  # asked again only of other statements
CHECKED = ("well_formed", "roles", "aliases", "schedule", "layouts", "shared_memory", "budgets", "barriers")

# (name, pass, what holds after it: keys of verify.CHECKS)
PIPELINE = [
    ("record", unchanged, CHECKED[:1]),
    ("exchange", exchange, CHECKED[:1]),
    ("roles", assign_roles, CHECKED[:3]),
    ("pipeline", of_kind(pipeline, portable.schedule, ws=groups.schedule), CHECKED[:4]),
    ("infer_layouts", of_kind(infer_tiles, infer_tiles, infer_layouts), CHECKED[:5]),
    ("plan_shared_memory", plan_shared_memory, CHECKED[:6]),
    ("budgets", of_kind(budget_registers, ws=whole_share), CHECKED[:7]),
    ("barriers", of_kind(derive_barriers), CHECKED),
]


def _bodies(kernel: ir.Kernel) -> tuple:
    return kernel.body, *(role.body for role in kernel.roles)


def run_passes(kernel: ir.Kernel, target: Target, dump=lambda name, text: None) -> ir.Kernel:
    """Everything between recording and text; `dump(name, text)` sees the kernel after each pass that changed it."""
    before, bodies, held = None, (), set()
    for name, run, properties in PIPELINE:
        kernel = run(kernel, target)
        held = held if _bodies(kernel) == bodies else set()
        bodies = _bodies(kernel)
        verify(kernel, target, tuple(p for p in properties if p not in held))
        held |= OF_BODIES & set(properties)
        text = ir.to_text(kernel)
        if text != before:
            dump(name, text)
        before = text
    return kernel
