from tileops_dsl.targets.base import Target

GEMM = {
    "tile": ((128, 128, 32), (128, 64, 32), (64, 128, 32), (64, 64, 32)),
    "cluster": (1,),
    "group_size": (8, 16),
    "store_columns": (64, 32),
    "stages": (4, 3),
}

# Everything from Ampere on, within the shared memory of the smallest (compute capability 8.6, 8.9, 12.0: 99 KiB).
# sm_80 code serves all 8.x, sm_100f 10.0 and 10.3.
PORTABLE = Target(
    "portable",
    architectures=("sm_80", "sm_90", "sm_100f", "sm_120"),
    ptx="compute_120",
    shared_bytes=99 * 1024,
    candidates={"gemm": GEMM},
)
