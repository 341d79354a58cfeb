"""Problems on which kernels were timed: the `measured` of a row of configs/<op>.json, by which the dispatcher chooses."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """A problem on which a product kernel was timed, in the same run as eager PyTorch."""

    gpu: str  # as CUDA names it: NVIDIA H200
    m: int
    n: int
    k: int
    us: float
    baseline_us: float
    batch: int = 1
    epilogue: str = "none"  # or, joined by "+": bias, an activation's name, residual

    @property
    def fused(self) -> bool:
        """Whether the epilogue has more than what cuBLAS does besides."""
        return not {"none", "bias"}.issuperset(self.epilogue.split("+"))

    problem = property(lambda self: (self.batch * self.m, self.n, self.k, self.fused))  # what the dispatcher compares by


@dataclass(frozen=True)
class MeasuredAttention:
    """The same of an attention kernel."""

    gpu: str
    batch_heads: int  # batches * heads of q
    sq: int
    sk: int
    us: float
    baseline_us: float
    window: int = 0  # how many keys a query sees at most; 0: a window hides none
    head_dim: int = 0  # 0: the kernel's
    head_dim_v: int = 0

    problem = property(lambda self: (self.batch_heads, self.sq, self.sk, self.window, self.head_dim, self.head_dim_v))
