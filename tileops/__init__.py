"""tileops: PyTorch operators whose CUDA kernels are compiled ahead of time.

    tileops.flash_attention, tileops.gemm, ...     the operators (tileops.ops lists them), also as torch.ops.tileops.*
    tileops.explain(op, *args)     which path a call takes, and why
    tileops.status()               what was loaded and, if nothing, why not

Where no kernel serves (another device, no native library), the same function runs in eager PyTorch with the same result.
"""
from . import knobs, ops
from .dispatch import explain, status
from .ops import *  # noqa: F403

__version__ = "0.1.0"
__all__ = ["__version__", "explain", "knobs", "status"]
__all__ += ops.__all__
