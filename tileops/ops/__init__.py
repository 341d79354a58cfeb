"""One module per operator, top to bottom: check, eager formula, gradient, public function."""
from .gemm import gemm
from .rms_norm import rms_norm
from .rms_norm_silu import rms_norm_silu
from .softmax import softmax

__all__ = ["gemm", "rms_norm", "rms_norm_silu", "softmax"]
