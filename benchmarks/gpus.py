"""The GPUs that tiles are chosen on: what the tuner's estimate of a time needs (tune_candidates.py)."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    name: str  # as CUDA names it
    capability: tuple[int, int]
    targets: tuple[str, ...]  # that it runs, its own first
    multiprocessors: int
    clock_ghz: float  # that products keep up
    bytes_per_us: float  # of device memory, read
    l2_bytes_per_clock: float  # into one multiprocessor while all of them read
    flops_per_clock: dict[str, int] = field(hash=False)  # of one multiprocessor, 16-bit products, by target


# The clock is that of large products at the power limit; mma.sync has 62% of wgmma's rate.
H200 = Gpu(
    "NVIDIA H200",
    capability=(9, 0),
    targets=("sm_90a", "portable"),
    multiprocessors=132,
    clock_ghz=1.6,
    bytes_per_us=4.1e6,
    l2_bytes_per_clock=46.0,
    flops_per_clock={"sm_90a": 4096, "portable": 2540},
)
GPUS = {"h200": H200}  # by the name of its results file
