from tileops_dsl.targets.base import Target

GEMM = {
    "tile": ((128, 128, 32), (128, 64, 32), (64, 128, 32), (64, 64, 32)),
    "cluster": (1,),
    "group_size": (8, 16),
    "store_columns": (64, 32),
    "stages": (4, 3),
}

# Everything from Ampere on, within the shared memory of the smallest (compute capability 8.6, 8.9, 12.0: 99 KiB).
PORTABLE = Target("portable", shared_bytes=99 * 1024, candidates={"gemm": GEMM})
