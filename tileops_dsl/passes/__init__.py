"""The whole pipeline, in order. The verifier runs after each pass, always."""

from tileops_dsl import ir
from tileops_dsl.passes.layouts import infer_layouts
from tileops_dsl.passes.shared_memory import plan_shared_memory
from tileops_dsl.passes.verify import verify
from tileops_dsl.targets import Target

# (name, pass, what holds after it: keys of verify.CHECKS)
PIPELINE = [
    ("record", lambda kernel, target: kernel, ("well_formed",)),
    ("infer_layouts", infer_layouts, ("well_formed", "layouts")),
    ("plan_shared_memory", plan_shared_memory, ("well_formed", "layouts", "shared_memory")),
]


def run_passes(kernel: ir.Kernel, target: Target, dump=lambda name, text: None) -> ir.Kernel:
    """Everything between recording and text; `dump(name, text)` sees the kernel after each pass that changed it."""
    before = None
    for name, run, properties in PIPELINE:
        kernel = run(kernel, target)
        verify(kernel, target, properties)
        text = ir.to_text(kernel)
        if text != before:
            dump(name, text)
        before = text
    return kernel
