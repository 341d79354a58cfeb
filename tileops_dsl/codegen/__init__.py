"""From a kernel with layouts and plans to CUDA text, its parameter struct and its manifest entry."""

from tileops_dsl.codegen.cuda import emit_kernel
from tileops_dsl.codegen.params import param_fields, params_header

__all__ = ["emit_kernel", "param_fields", "params_header"]
