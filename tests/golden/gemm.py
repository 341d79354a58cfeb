"""Launches gemm.cu: c = a @ b.T for a [M, K] and b [N, K], bfloat16."""

import launch
import torch

NAME = "gemm_sm_90a_bf16_bf16_128x256x64"
SHARED_BYTES = 229376 + 64


def gemm(kernel, a, b):
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    maps = launch.tensor_map(a, (64, 128), 128), launch.tensor_map(b, (64, 128), 128), launch.tensor_map(c, (64, 64), 128)
    params = launch.pack(*maps, launch.I32(m), launch.I32(n), launch.I32(k))
    multiprocessors = torch.cuda.get_device_properties(a.device).multi_processor_count
    clusters = min(multiprocessors // 2, -(-m // 256) * -(-n // 256))
    kernel(params, clusters * 2, 384, SHARED_BYTES, cluster=2)
    return c
