"""tileops: PyTorch operators whose CUDA kernels are compiled ahead of time.

    tileops.flash_attention, tileops.gemm, ...     the operators (tileops.ops lists them), also as torch.ops.tileops.*
    tileops.explain(op, *args)     which path a call takes, and why
    tileops.status()               what was loaded and, if nothing, why not

Where no kernel serves (another device, no native library), the same function runs in eager PyTorch with the same result.
"""
from . import knobs
from .dispatch import explain, status
from .ops import (
    flash_attention,
    flash_attention_paged,
    flash_attention_varlen,
    gemm,
    merge_attention,
    mla_decode,
    rms_norm,
    rms_norm_silu,
    softmax,
)

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "explain",
    "flash_attention",
    "flash_attention_paged",
    "flash_attention_varlen",
    "gemm",
    "knobs",
    "merge_attention",
    "mla_decode",
    "rms_norm",
    "rms_norm_silu",
    "softmax",
    "status",
]
