from tileops_dsl.targets.base import Target

# Hopper: H100, H200. Shared memory: CUDA C++ programming guide, compute capability 9.0.
SM_90A = Target("sm_90a", architectures=("sm_90a",), ptx=None, shared_bytes=227 * 1024, multiprocessors=132, warp_groups=True)
