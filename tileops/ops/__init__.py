"""One module per operator, top to bottom: check, eager formula, gradient, public function.

Written by python -m build_backend.operators.
"""
from .flash_attention import flash_attention
from .flash_attention_paged import flash_attention_paged
from .flash_attention_varlen import flash_attention_varlen
from .gemm import gemm
from .merge_attention import merge_attention
from .mla_decode import mla_decode
from .rms_norm import rms_norm
from .rms_norm_silu import rms_norm_silu
from .softmax import softmax

__all__ = [
    "flash_attention",
    "flash_attention_paged",
    "flash_attention_varlen",
    "gemm",
    "merge_attention",
    "mla_decode",
    "rms_norm",
    "rms_norm_silu",
    "softmax",
]
