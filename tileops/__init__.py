"""tileops: PyTorch operators whose CUDA kernels are compiled ahead of time.

    tileops.gemm, tileops.softmax, tileops.rms_norm, tileops.rms_norm_silu     the operators, also as torch.ops.tileops.*
    tileops.explain(op, *args)     which path a call takes, and why
    tileops.status()               what was loaded and, if nothing, why not

Where no kernel serves (another device, no native library), the same function runs in eager PyTorch with the same result.
"""
from . import knobs
from .dispatch import explain, status
from .ops import gemm, rms_norm, rms_norm_silu, softmax

__version__ = "0.1.0"
__all__ = ["__version__", "explain", "gemm", "knobs", "rms_norm", "rms_norm_silu", "softmax", "status"]
