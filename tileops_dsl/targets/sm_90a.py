from tileops_dsl.targets.base import Target

# wgmma has 64 rows for each warp group; the registers of four groups hold no more than 128 columns.
GEMM = {
    "tile": tuple((m, n, 64) for m in (64, 128, 192, 256) for n in (64, 96, 128, 160, 192, 256)),
    "cluster": (2, 1),
    "alternate": (False, True),
    "group_size": (8,),
    "store_columns": (64, 32),
    "stages": (8, 7, 6, 5, 4, 3, 2),
}

# Hopper: H100, H200. Shared memory: CUDA C++ programming guide, compute capability 9.0.
SM_90A = Target("sm_90a", shared_bytes=227 * 1024, multiprocessors=132, warp_groups=True, candidates={"gemm": GEMM})
