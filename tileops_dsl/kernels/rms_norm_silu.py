"""rms_norm_silu: the program of rms_norm.py with SiLU behind it."""

from tileops_dsl.kernels.rms_norm import rms_norm_silu

__all__ = ["rms_norm_silu"]
