"""Launches flash_attention_full.cu and flash_attention_causal.cu: softmax(scale q k^T) v and its LSE for bfloat16, D = 128.

Beside them, what the compiler writes from its tile program, which takes parameters of its own.
"""

import functools
import math
from pathlib import Path

import launch as gpu
import torch

from tileops_dsl import output
from tileops_dsl.kernels.flash_attention_config import AttentionConfig

NAMES = {False: "flash_attention_full", True: "flash_attention_causal"}
KEY_BLOCKS = {False: 160, True: 128}
SHARED_BYTES = {False: 229376 + 96, True: 196608 + 96 + 8}
DTYPE_CODES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}  # csrc/include/tileops/types.h
HERE = Path(__file__).parent
L2_BYTES = 32 << 20  # of keys and values that a section of heads may take


def load():
    return {causal: gpu.load(HERE / f"{name}.cu", name) for causal, name in NAMES.items()}


@functools.cache
def counter(device):
    """The tile counter of the causal kernel; each launch leaves it at 0."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def heads_of_section(heads: int, kv_bytes_per_head: int) -> int:
    """A power of two, or all the heads."""
    fitting = max(1, L2_BYTES // kv_bytes_per_head)
    return min(heads, 1 << (fitting.bit_length() - 1))


def launch(kernels, q, k, v, causal: bool):
    """q [B, Sq, H, 128], k and v [B, Sk, Hk, 128] -> out [B, Sq, H, 128], lse [B, H, Sq]. kernels[causal]: the loaded one."""
    (batch, seqlen_q, heads, dim), (seqlen_k, heads_kv) = q.shape, k.shape[1:3]
    out, lse = torch.empty_like(q), torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q.device)
    tiles_m = -(-seqlen_q // 128)
    tiles = tiles_m * heads * batch
    queries, keys = (64, 1, 64, 1), (64, 1, KEY_BLOCKS[causal], 1)
    maps = *(gpu.tensor_map(t, queries, 128) for t in (q, out)), *(gpu.tensor_map(t, keys, 128) for t in (k, v))
    kv_bytes_per_head = 2 * seqlen_k * dim * k.element_size() * heads_kv // heads
    numbers = [seqlen_q, seqlen_k, heads, heads // heads_kv, tiles_m, tiles]
    if causal:
        numbers.append(heads_of_section(heads * batch, kv_bytes_per_head))
    pointers = (lse, counter(q.device)) if causal else (lse,)
    params = gpu.pack(*maps, *pointers, *map(gpu.I32, numbers), gpu.F32(dim**-0.5 * math.log2(math.e)))
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
    kernels[causal](params, min(multiprocessors, tiles), 384, SHARED_BYTES[causal])
    return out, lse


def config(causal: bool, **changes):
    """The tile of the text by hand."""
    row = {"op": "flash_attention", "target": "sm_90a", "x": "bfloat16", "tile": (128, KEY_BLOCKS[causal], 128), "stages": 2}
    row |= {"causal": causal, **changes}
    return AttentionConfig(y=row["x"], **row)


class Generated:
    """The compiler's kernel of a configuration, which is written into `folder`."""

    def __init__(self, row, folder: Path = gpu.CACHE / "generated"):
        self.row, made = row, output.compile_config(row)
        self.entry, self.report, self.path = made.entry, made.report, folder / f"{row.file}.cu"
        folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(output.source_text([made]))
        (folder / f"{made.params}.h").write_text(output.params_header(made.params, made.fields))
        self.kernel = gpu.load(self.path, row.name)

    def __call__(self, q, k, v, *, causal=False, scale=None, window_left=-1, window_right=-1, softcap=0.0, sinks=None):
        """As launch(), of any strides that TMA takes and head dims up to the tile's; `causal` is for a kernel with a window."""
        (batch, seqlen_q, heads, dim), (seqlen_k, heads_kv) = q.shape, k.shape[1:3]
        out = q.new_empty(batch, seqlen_q, heads, -(-v.shape[3] // 8) * 8)  # a store writes whole 16 bytes
        lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q.device)
        boxes = [self.entry["maps"][name] for name in ("q", "k", "v", "out")]
        pairs = zip((q, k, v, out), boxes, strict=True)
        maps = (gpu.tensor_map(t.transpose(1, 2), (*box["box"], 1, 1), box["swizzle"]) for t, box in pairs)
        numbers = *map(gpu.I32, (batch, heads, heads_kv, seqlen_q, seqlen_k)), *map(gpu.I64, lse.stride())
        sink = (gpu.I64(0), gpu.I64(0), gpu.I64(0), gpu.I32(0))  # address, strides, dtype
        if sinks is not None:
            sink = (sinks, gpu.I64(sinks.stride(0)), gpu.I64(0), gpu.I32(DTYPE_CODES[sinks.dtype]))
        scale = dim**-0.5 if scale is None else scale
        scale_log2 = (softcap or scale) * math.log2(math.e)
        scales = scale_log2, scale / softcap if softcap else 0.0, 1 / scale_log2
        section = heads_of_section(heads * batch, seqlen_k * (dim + v.shape[3]) * k.element_size() * heads_kv // heads)
        left = seqlen_k if window_left < 0 else min(window_left, seqlen_k)
        right = 0 if causal else seqlen_q if window_right < 0 else min(window_right, seqlen_q)
        integers = map(gpu.I32, (left, right, section))
        params = gpu.pack(*maps, lse, sink[0], *numbers, *sink[1:], *map(gpu.F32, scales), *integers)
        tiles = -(-seqlen_q // self.row.tile[0]) * heads * batch
        multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
        grid = tiles if self.row.longest_first else min(multiprocessors, tiles)
        self.kernel(params, grid, self.entry["threads"], self.entry["shared_bytes"])
        return out[..., : v.shape[3]], lse
