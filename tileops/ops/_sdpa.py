"""PyTorch's own attention with its LSE, where its options and its masks are those asked for."""
import torch
from torch import Tensor

from ._attention import FAR, Options
from ._matmul import without_autocast

_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_ON_CUDA = torch.ops.aten._scaled_dot_product_flash_attention.default
_MAX_GRID = 65535  # batch and heads are y and z of a CUDA grid


def sdpa(q: Tensor, k: Tensor, v: Tensor, o: Options) -> tuple[Tensor, Tensor] | None:
    """out [B, Sq, H, D] and lse [B, H, Sq] of q [B, Sq, H, D], or None where it does not serve: sinks, caps, windows, two head
    dims, no keys, a causal mask that is not square (PyTorch aligns it with the first key), and a scale that is not positive
    (its kernels mask before they scale)."""
    rows, keys = q.shape[1], k.shape[1]
    causal = o.window_right == 0 and rows > 1
    plain = not o.softcap and o.sinks is None and o.window_left == FAR and o.window_right in (0, FAR) and o.scale > 0
    if not plain or keys == 0 or k.shape[-1] != v.shape[-1] or (causal and rows != keys):
        return None
    if q.device.type == "cpu":
        attention = _ON_CPU
        shared = q.shape[2] // k.shape[2]  # heads of k are repeated: it has taken fewer than q has only of late
        k, v = (t if shared == 1 else t.repeat_interleave(shared, 2) for t in (k, v))
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    elif _flash_takes(q, k, v):
        attention = _ON_CUDA
    else:
        return None
    with without_autocast(q):
        out, lse = attention(*(t.transpose(1, 2) for t in (q, k, v)), 0.0, causal, scale=o.scale)[:2]
    return out.transpose(1, 2), lse


def _flash_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """FlashAttention 2 as PyTorch has it reads 16 bytes at a time and does not check that it may."""
    if q.device.type != "cuda" or torch.version.hip is not None or q.dtype == torch.float32:
        return False
    if not torch.backends.cuda.is_flash_attention_available() or torch.cuda.get_device_capability(q.device) < (8, 0):
        return False
    if q.shape[-1] > 256 or q.shape[-1] % 8 or max(q.shape[0], q.shape[2]) > _MAX_GRID:
        return False
    return all(
        t.data_ptr() % 16 == 0 and t.stride(-1) == 1 and all(stride % 8 == 0 for stride in t.stride()[:-1]) for t in (q, k, v)
    )
