"""Bad calls of the attention operators: op, what differs from a good call, and the exact words, in Python and in C++."""
import math

import torch

THREE = "torch.float32, torch.float16 or torch.bfloat16"
INDEX = "torch.int32 or torch.int64"
F64, F16, I32 = torch.float64, torch.float16, torch.int32


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


def ints(*values, dtype=I32):
    return torch.tensor(values, dtype=dtype)


def good(op):
    """Arguments by name, in the order of the schema; whole new tensors."""
    if op == "flash_attention":
        return {"q": ones(2, 5, 4, 8), "k": ones(2, 6, 2, 8), "v": ones(2, 6, 2, 3)}
    if op == "flash_attention_varlen":
        lengths = {"cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 3, 6), "max_seqlen_q": 3, "max_seqlen_k": 3}
        return {"q": ones(5, 4, 8), "k": ones(6, 2, 8), "v": ones(6, 2, 3), **lengths}
    pages = {"block_table": ints([0, 1], [2, 0]), "cache_seqlens": ints(5, 3)}
    if op == "flash_attention_paged":
        return {"q": ones(2, 1, 4, 8), "k_cache": ones(3, 4, 2, 8), "v_cache": ones(3, 4, 2, 3), **pages}
    if op == "mla_decode":
        return {"q": ones(2, 1, 4, 6), "kv_cache": ones(3, 4, 6), **pages, "scale": 0.5, "head_dim_v": 4}
    return {"out_a": ones(2, 5, 4, 8), "lse_a": ones(2, 4, 5), "out_b": ones(2, 5, 4, 8), "lse_b": ones(2, 4, 5)}


def _options(op):
    """What the three forms of flash_attention share."""
    heads = "sinks has shape {}; expected [4], one for each head of q"
    yield op, {"scale": math.nan}, "scale is nan; expected a finite number or None"
    yield op, {"scale": -math.inf}, "scale is -inf; expected a finite number or None"
    yield op, {"window_left": -2}, "window_left is -2; expected -1 (no limit) or more"
    yield op, {"window_right": -5}, "window_right is -5; expected -1 (no limit) or more"
    yield op, {"softcap": -0.5}, "softcap is -0.5; expected 0 (off) or a positive number"
    yield op, {"softcap": -1.0}, "softcap is -1; expected 0 (off) or a positive number"
    yield op, {"softcap": math.inf}, "softcap is inf; expected 0 (off) or a positive number"
    yield op, {"softcap": math.nan}, "softcap is nan; expected 0 (off) or a positive number"
    yield op, {"sinks": ones(4, dtype=F64)}, f"sinks has dtype torch.float64; expected {THREE}"
    yield op, {"sinks": ones(2)}, heads.format([2])
    yield op, {"sinks": ones(1, 4)}, heads.format([1, 4])
    yield op, {"q": good(op)["q"].double()}, f"q has dtype torch.float64; expected {THREE}"


BAD = [
    ("flash_attention", {"q": ones(5, 4, 8)}, "q has shape [5, 4, 8]; expected [B, Sq, H, D]"),
    ("flash_attention", {"k": ones(2, 6, 2, 8, dtype=F16)}, "k has dtype torch.float16; expected torch.float32, that of q"),
    ("flash_attention", {"k": ones(6, 2, 8)}, "k has shape [6, 2, 8]; expected [B, Sk, Hk, D]"),
    ("flash_attention", {"v": ones(2, 6, 2, 3, dtype=F16)}, "v has dtype torch.float16; expected torch.float32, that of q"),
    ("flash_attention", {"v": ones(6, 2)}, "v has shape [6, 2]; expected [B, Sk, Hk, Dv]"),
    ("flash_attention", {"q": ones(2, 5, 4, 0)}, "q has shape [2, 5, 4, 0]; expected a head dim of 1 or more"),
    ("flash_attention", {"k": ones(2, 6, 2, 7)},
     "k has shape [2, 6, 2, 7]; expected the head dim of q, 8, as its last dimension"),
    ("flash_attention", {"v": ones(2, 7, 2, 3)},
     "v has shape [2, 7, 2, 3]; expected [2, 6, 2, Dv] for k of shape [2, 6, 2, 8]"),
    ("flash_attention", {"v": ones(2, 6, 2, 0)},
     "v has shape [2, 6, 2, 0]; expected [2, 6, 2, Dv] for k of shape [2, 6, 2, 8]"),
    ("flash_attention", {"q": ones(2, 5, 3, 8)}, "q has 3 heads and k has 2; expected a multiple of the heads of k"),
    ("flash_attention", {"k": ones(2, 6, 0, 8), "v": ones(2, 6, 0, 3)},
     "q has 4 heads and k has 0; expected a multiple of the heads of k"),
    ("flash_attention", {"q": ones(1, 5, 4, 8)}, "k has shape [2, 6, 2, 8]; expected a batch of 1, that of q"),
    *_options("flash_attention"),
    ("flash_attention_varlen", {"q": ones(1, 5, 4, 8)}, "q has shape [1, 5, 4, 8]; expected [total_q, H, D]"),
    ("flash_attention_varlen", {"k": ones(1, 6, 2, 8)}, "k has shape [1, 6, 2, 8]; expected [total_k, Hk, D]"),
    ("flash_attention_varlen", {"v": ones(5, 2, 3)}, "v has shape [5, 2, 3]; expected [6, 2, Dv] for k of shape [6, 2, 8]"),
    ("flash_attention_varlen", {"cu_seqlens_q": ones(3)}, f"cu_seqlens_q has dtype torch.float32; expected {INDEX}"),
    ("flash_attention_varlen", {"cu_seqlens_q": ints([0, 2, 5])}, "cu_seqlens_q has shape [1, 3]; expected [B + 1]"),
    ("flash_attention_varlen", {"cu_seqlens_q": ints()}, "cu_seqlens_q has shape [0]; expected [B + 1]"),
    ("flash_attention_varlen", {"cu_seqlens_k": ints(0, 6)}, "cu_seqlens_k has shape [2]; expected [3]"),
    ("flash_attention_varlen", {"cu_seqlens_k": ints(0, 3, 6, dtype=torch.int16)},
     f"cu_seqlens_k has dtype torch.int16; expected {INDEX}"),
    ("flash_attention_varlen", {"max_seqlen_q": -1}, "max_seqlen_q is -1; expected 0 or more"),
    ("flash_attention_varlen", {"max_seqlen_k": -7}, "max_seqlen_k is -7; expected 0 or more"),
    ("flash_attention_varlen", {"seqused_k": ints(1, 2, 3)}, "seqused_k has shape [3]; expected [2]"),
    ("flash_attention_varlen", {"seqused_k": ones(2)}, f"seqused_k has dtype torch.float32; expected {INDEX}"),
    *_options("flash_attention_varlen"),
    ("flash_attention_paged", {"q": ones(5, 4, 8)}, "q has shape [5, 4, 8]; expected [B, Sq, H, D]"),
    ("flash_attention_paged", {"cu_seqlens_q": ints(0, 1, 2), "max_seqlen_q": 1},
     "q has shape [2, 1, 4, 8]; expected [total_q, H, D]"),
    ("flash_attention_paged", {"k_cache": ones(4, 2, 8)}, "k_cache has shape [4, 2, 8]; expected [pages, page, Hk, D]"),
    ("flash_attention_paged", {"v_cache": ones(3, 5, 2, 3)},
     "v_cache has shape [3, 5, 2, 3]; expected [3, 4, 2, Dv] for k_cache of shape [3, 4, 2, 8]"),
    ("flash_attention_paged", {"q": ones(2, 1, 5, 8)},
     "q has 5 heads and k_cache has 2; expected a multiple of the heads of k_cache"),
    ("flash_attention_paged", {"block_table": ints(0, 1)}, "block_table has shape [2]; expected [2, W]"),
    ("flash_attention_paged", {"block_table": ints([0, 1])}, "block_table has shape [1, 2]; expected [2, W]"),
    ("flash_attention_paged", {"block_table": ones(2, 2)}, f"block_table has dtype torch.float32; expected {INDEX}"),
    ("flash_attention_paged", {"cache_seqlens": ints(5)}, "cache_seqlens has shape [1]; expected [2]"),
    ("flash_attention_paged", {"cache_seqlens": ones(2, dtype=torch.bool)},
     f"cache_seqlens has dtype torch.bool; expected {INDEX}"),
    ("flash_attention_paged", {"q": ones(2, 4, 8), "cu_seqlens_q": ints(0, 1), "max_seqlen_q": 1},
     "block_table has shape [2, 2]; expected [1, W]"),
    ("flash_attention_paged", {"q": ones(2, 4, 8), "cu_seqlens_q": ints(0, 1, 2)},
     "max_seqlen_q is 0; expected the number of queries of the longest sequence, with cu_seqlens_q"),
    ("flash_attention_paged", {"max_seqlen_q": 2}, "max_seqlen_q is 2; expected 0 or 1, as in q, without cu_seqlens_q"),
    ("flash_attention_paged", {"max_seqlen_q": -1}, "max_seqlen_q is -1; expected 0 or more"),
    ("flash_attention_paged", {"num_splits": -1}, "num_splits is -1; expected 0 or more"),
    *_options("flash_attention_paged"),
    ("mla_decode", {"q": ones(2, 1, 4, 6, dtype=F64)}, f"q has dtype torch.float64; expected {THREE}"),
    ("mla_decode", {"q": ones(2, 4, 6)}, "q has shape [2, 4, 6]; expected [B, Sq, H, D]"),
    ("mla_decode", {"kv_cache": ones(3, 4, 6, dtype=F16)},
     "kv_cache has dtype torch.float16; expected torch.float32, that of q"),
    ("mla_decode", {"kv_cache": ones(3, 4, 1, 6)}, "kv_cache has shape [3, 4, 1, 6]; expected [pages, page, D]"),
    ("mla_decode", {"kv_cache": ones(3, 4, 7)}, "kv_cache has shape [3, 4, 7]; expected [pages, page, 6], the head dim of q"),
    ("mla_decode", {"q_rope": ones(2, 1, 4, 2)}, "kv_cache has shape [3, 4, 6]; expected [pages, page, 8], the head dim of q"),
    ("mla_decode", {"q_rope": ones(2, 1, 3, 2)},
     "q_rope has shape [2, 1, 3, 2]; expected [2, 1, 4, D] for q of shape [2, 1, 4, 6]"),
    ("mla_decode", {"q_rope": ones(2, 4, 2)}, "q_rope has shape [2, 4, 2]; expected [B, Sq, H, D]"),
    ("mla_decode", {"q_rope": ones(2, 1, 4, 2, dtype=F16)},
     "q_rope has dtype torch.float16; expected torch.float32, that of q"),
    ("mla_decode", {"head_dim_v": 0}, "head_dim_v is 0; expected 1 to 6, the head dim of q"),
    ("mla_decode", {"head_dim_v": 512}, "head_dim_v is 512; expected 1 to 6, the head dim of q"),
    ("mla_decode", {"block_table": ints([0, 1])}, "block_table has shape [1, 2]; expected [2, W]"),
    ("mla_decode", {"cache_seqlens": ones(2)}, f"cache_seqlens has dtype torch.float32; expected {INDEX}"),
    ("mla_decode", {"scale": math.nan}, "scale is nan; expected a finite number"),
    ("mla_decode", {"scale": math.inf}, "scale is inf; expected a finite number"),
    ("mla_decode", {"num_splits": -3}, "num_splits is -3; expected 0 or more"),
    ("merge_attention", {"out_a": ones(2, 5, 4, 8, dtype=F64)}, f"out_a has dtype torch.float64; expected {THREE}"),
    ("merge_attention", {"out_a": ones(5, 8)}, "out_a has shape [5, 8]; expected [B, Sq, H, D] or [total, H, D]"),
    ("merge_attention", {"out_b": ones(2, 5, 4, 8, dtype=F16)},
     "out_b has dtype torch.float16; expected torch.float32, that of out_a"),
    ("merge_attention", {"out_b": ones(2, 5, 4, 9)}, "out_b has shape [2, 5, 4, 9]; expected [2, 5, 4, 8], that of out_a"),
    ("merge_attention", {"lse_a": ones(2, 4, 5, dtype=F16)}, "lse_a has dtype torch.float16; expected torch.float32"),
    ("merge_attention", {"lse_b": ones(2, 5, 4)},
     "lse_b has shape [2, 5, 4]; expected [2, 4, 5] for out_a of shape [2, 5, 4, 8]"),
    ("merge_attention", {"out_a": ones(5, 4, 8), "out_b": ones(5, 4, 8)},
     "lse_a has shape [2, 4, 5]; expected [4, 5] for out_a of shape [5, 4, 8]"),
]  # fmt: skip


_OUT_SHAPES = {
    "flash_attention": (2, 5, 4, 3),
    "flash_attention_varlen": (5, 4, 3),
    "flash_attention_paged": (2, 1, 4, 3),
    "mla_decode": (2, 1, 4, 4),
    "merge_attention": (2, 5, 4, 8),
}


def results(op):
    """Memory for the results of the good call."""
    shape = _OUT_SHAPES[op]
    return {"out": ones(*shape), "lse": ones(*shape[:-3], shape[-2], shape[-3])}


def bad_results(op):
    """What differs from a good call with results, and the words."""
    out, lse = results(op).values()
    shape, lse_shape = list(out.shape), list(lse.shape)
    own = "give it storage of its own"
    yield {"out": out.half()}, "out has dtype torch.float16; expected torch.float32"
    yield {"lse": lse.half()}, "lse has dtype torch.float16; expected torch.float32"
    yield {"out": ones(*shape, 1)}, f"out has shape {[*shape, 1]}; expected {shape}"
    yield {"lse": ones(*shape)}, f"lse has shape {shape}; expected {lse_shape}"
    yield {"out": ones(1).expand(shape)}, f"out overlaps itself (a stride is 0); {own}"
    yield {"lse": ones(1).expand(lse_shape)}, f"lse overlaps itself (a stride is 0); {own}"
    both = dict(zip(("out", "lse"), _together(out, lse_shape)))
    yield both, f"lse overlaps out in memory; {own}"
    for name, value in good(op).items():
        if isinstance(value, torch.Tensor):
            for result, size in (("out", shape), ("lse", lse_shape)):
                moved, memory = _together(value, size)
                yield {name: moved, result: memory}, f"{result} overlaps {name} in memory; {own}"


def _together(tensor, shape):
    """`tensor`, and a float32 one of `shape`, both at the start of one buffer."""
    buffer = torch.zeros(1024)
    return buffer.view(tensor.dtype)[: tensor.numel()].view(tensor.shape).copy_(tensor), buffer[: math.prod(shape)].view(shape)
