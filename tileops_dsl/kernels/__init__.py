"""The tile programs: one file for each operator, from a configuration to a kernel.

`PROGRAMS[op](config)` records the program of an operator for one row of `configs/<op>.json`.
"""

from tileops_dsl.kernels.gemm import gemm
from tileops_dsl.kernels.rms_norm import rms_norm, rms_norm_silu
from tileops_dsl.kernels.softmax import softmax

PROGRAMS = {"softmax": softmax, "rms_norm": rms_norm, "rms_norm_silu": rms_norm_silu, "gemm": gemm}
