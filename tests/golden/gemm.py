"""Launches gemm.cu: activation(a @ b.mT + bias) + residual for a [M, K] and b [N, K], or a batch of them, bfloat16."""

import launch
import torch

NAME = "gemm_sm_90a_bf16_bf16_128x256x64_nt"
SHARED_BYTES = 229504 + 2048
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def gemm(kernel, a, b, bias=None, activation="none", residual=None):
    (*items, m, k), n = a.shape, b.shape[-2]
    c = torch.empty(*items, m, n, dtype=a.dtype, device=a.device)
    boxes = ((a, (64, 128)), (b, (64, 128)), (c, (64, 64)), (c if residual is None else residual, (64, 64)))
    batch = items[0] if items else 1
    params = launch.pack(
        *(launch.tensor_map(tensor if items else tensor[None], (*box, 1), 128) for tensor, box in boxes),
        launch.I64(0) if bias is None else bias,
        *map(launch.I32, (batch, m, n, k, 0 if bias is None else DTYPES[bias.dtype])),
        *map(launch.I32, (ACTIVATIONS.index(activation), residual is not None)),
    )
    multiprocessors = torch.cuda.get_device_properties(a.device).multi_processor_count
    clusters = min(multiprocessors // 2, batch * -(-m // 256) * -(-n // 256))
    kernel(params, clusters * 2, 384, SHARED_BYTES, cluster=2)
    return c
