"""From a kernel with layouts and plans to CUDA text, its parameter struct and its manifest entry."""

from tileops_dsl.codegen.cuda import emit_kernel
from tileops_dsl.codegen.params import param_fields, params_header
from tileops_dsl.codegen.portable import emit_threads
from tileops_dsl.codegen.roles import emit_roles

__all__ = ["emit_kernel", "emit_roles", "emit_threads", "param_fields", "params_header"]
