"""Every word that a kernel author may write: `import tileops_dsl.language as T`.

A tile program is a Python function that runs once, at build time, and records what it says. Two rules follow:
a Python name is bound while recording (values that change in a loop live in a fragment), and control flow over
run-time values is written with `T.serial`, `T.Parallel`, `T.If` and `T.if_then_else`. Breaking either is an error.
"""

from tileops_dsl.language.memory import alloc_fragment, alloc_shared, annotate_layout, copy, fill, vectorised_rows
from tileops_dsl.language.product import GemmWarpPolicy, Persistent, Pipelined, gemm
from tileops_dsl.language.program import Kernel, Scalar, Tensor, annotate_min_blocks_per_sm, dynamic, prim_func
from tileops_dsl.language.scalar import (
    cast,
    ceildiv,
    exp2,
    gelu,
    gelu_tanh,
    if_then_else,
    infinity,
    max,
    min,
    reciprocal,
    relu,
    rsqrt,
    silu,
)
from tileops_dsl.language.tile import If, Parallel, reduce_max, reduce_sum, serial

__all__ = [
    "GemmWarpPolicy", "If", "Kernel", "Parallel", "Persistent", "Pipelined", "Scalar", "Tensor", "alloc_fragment",
    "alloc_shared", "annotate_layout", "annotate_min_blocks_per_sm", "cast", "ceildiv", "copy", "dynamic", "exp2", "fill",
    "gelu", "gelu_tanh", "gemm", "if_then_else", "infinity", "max", "min", "prim_func", "reciprocal", "reduce_max",
    "reduce_sum", "relu", "rsqrt", "serial", "silu", "vectorised_rows",
]  # fmt: skip
