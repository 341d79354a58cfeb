"""Attention of Hugging Face Transformers over tileops.flash_attention and flash_attention_varlen.

    from tileops.integrations import transformers as tileops_transformers

    tileops_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tileops")

The mask function says once per forward what the queries see; the attention functions of all layers do as it says:

    causal, bidirectional, with or without a window      flash_attention; with a cache, the last query stands on the last key
    the same, of a padded batch                           flash_attention_varlen over the real tokens; out is 0 for the padding
    any other mask: static caches, packed or chunked      the host's own attention with its 4-D mask: the model's eager one
    sequences, padding in the middle of a windowed one,   where scores are capped or have sinks, else sdpa
    2-D masks and windows under torch.compile, a 4-D mask

What neither serves (dropout, position biases) raises. TILEOPS_REQUIRE_NATIVE=1 makes the last row an error as well.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from .. import knobs
from ..ops.flash_attention import flash_attention
from ..ops.flash_attention_varlen import flash_attention_varlen

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        prepare_padding_mask,
        sdpa_mask,
        sliding_window_bidirectional_mask_function,
        sliding_window_causal_mask_function,
    )
    from transformers.utils.import_utils import is_tracing
except ImportError as error:
    raise ImportError(
        f"tileops.integrations.transformers needs Hugging Face Transformers, 5.17 or newer, and this import failed: {error}; "
        "install it with: python -m pip install 'transformers>=5.17'"
    ) from None

__all__ = ["register"]

_UNSERVED = ("position_bias", "sinks", "indices", "block_indices")  # arguments of some models that change the result


class _Packed(NamedTuple):
    """Where the real tokens of a padded batch are: (sequence, position) of each, and where each sequence begins."""

    queries: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


class _Mask(NamedTuple):
    """What the queries of one forward see, in the operators' words. A tuple, so that what moves the arguments of layers between
    devices moves its tensors."""

    rows: int
    keys: int
    window_left: int
    window_right: int
    packed: _Packed | None = None

    @property
    def ndim(self) -> int:
        """generate() makes the masks of static caches ahead of the forward, which hands anything but 2-D masks on."""
        return 4


def register() -> None:
    """Makes `attn_implementation="tileops"` known to Transformers, for every model that takes its attention from there."""
    AttentionInterface.register("tileops", _attention)
    AttentionMaskInterface.register("tileops", _make_mask)


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | _Mask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> _Mask | Tensor:
    """The host's mask function: a `_Mask` where that can say it, else the host's 4-D mask, True where a query sees a key."""
    if isinstance(attention_mask, _Mask):
        return attention_mask
    window = _window(mask_function, local_size)
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length  # no room of a static cache
    readable = attention_mask is None or (attention_mask.dim() == 2 and not is_tracing(attention_mask))
    may_skip = allow_is_causal_skip or allow_is_bidirectional_skip  # else the model changes the mask, or compiles with it
    if window is not None and (aligned or window == (-1, -1)) and readable and may_skip:
        mask = _Mask(q_length, kv_length, *window)
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is None or (real := padding[:, kv_offset : kv_offset + kv_length]).all():
            return mask
        starts = real & ~nn.functional.pad(real, (1, 0))[:, :-1]
        if window[0] < 0 or starts.sum(1).max() <= 1:  # packing moves what padding separates, which only a window would see
            real = real.expand(batch_size, -1)
            by_position = window != (-1, -1)  # else the queries may be of other tokens than the keys
            queries = real[:, kv_length - q_length :] if by_position else real.new_ones(batch_size, q_length)
            return mask._replace(packed=_pack(queries, real))
    options |= dict(mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False)
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **options)


def _window(mask_function: Callable, local_size: int | None) -> tuple[int, int] | None:
    """(window_left, window_right) of a mask function of the host, or None for one that is more than a window."""
    if mask_function is causal_mask_function:
        return -1, 0
    if mask_function is bidirectional_mask_function:
        return -1, -1
    if local_size is None or torch.compiler.is_compiling():  # the compiler does not trace what a function closes over
        return None
    if _same(mask_function, sliding_window_causal_mask_function(local_size)):
        return local_size - 1, 0  # the query's own key counts
    if _same(mask_function, sliding_window_bidirectional_mask_function(local_size)):
        return local_size, local_size
    return None


def _same(a: Any, b: Any) -> bool:
    """Whether two functions compute the same because they are one piece of code over the same functions and numbers."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if hasattr(a, "__code__") and hasattr(b, "__code__"):
        closed_over = (tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (a, b))
        return a.__code__ is b.__code__ and _same(*closed_over)
    return isinstance(a, int) and isinstance(b, int) and a == b


def _pack(queries: Tensor, keys: Tensor) -> _Packed:
    """Of [B, Sq] and [B, Sk], True for real tokens."""
    offsets = (nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int() for real in (queries, keys))
    return _Packed(queries.nonzero(as_tuple=True), keys.nonzero(as_tuple=True), *offsets)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The host's attention function, of query [B, H, Sq, D], key [B, Hk, Sk, D] and value [B, Hk, Sk, Dv]; returns
    [B, Sq, H, Dv] and no weights. Of masks and flags only `attention_mask` counts, as for the host's eager attention."""
    if isinstance(attention_mask, Tensor):
        options |= dict(dropout=dropout, scaling=scaling, is_causal=is_causal, sliding_window=sliding_window)
        return _host_attention(module, query, key, value, attention_mask, softcap=softcap, s_aux=s_aux, **options)
    if attention_mask is None:  # the model asked for no mask, or is used without its outer part
        causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        attention_mask = _Mask(query.shape[2], query.shape[2] if causal else key.shape[2], -1, 0 if causal else -1)
        if sliding_window is not None:
            _refuse(module, f"has sliding_window={sliding_window} and no mask", "the mask that Transformers makes for it")
    unserved = [name for name in _UNSERVED if options.get(name) is not None] + ["dropout"] * (dropout > 0)
    if unserved:
        _refuse(module, f"has {', '.join(unserved)}, which tileops lacks", 'attn_implementation="sdpa" or "eager" for it')
    if (query.shape[2], key.shape[2]) != attention_mask[:2]:
        found, made = f"{query.shape[2]} queries and {key.shape[2]} keys", "a mask for {} and {}".format(*attention_mask[:2])
        _refuse(module, f"has {found} and {made}", "one mask for each kind of layer, as Transformers makes it")
    return _attend(query, key, value, attention_mask, scale=scaling, softcap=softcap or 0.0, sinks=s_aux), None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: _Mask, **options: Any) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    options |= dict(window_left=mask.window_left, window_right=mask.window_right)
    if mask.packed is None:
        return flash_attention(q, k, v, **options)[0]
    queries, keys, *offsets = mask.packed
    real = flash_attention_varlen(q[queries], k[keys], v[keys], *offsets, mask.rows, mask.keys, **options)[0]
    return real.new_zeros(*q.shape[:3], v.shape[3]).index_put(queries, real)


def _host_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, softcap: Any, s_aux: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if knobs.current().require_native:
        _refuse(module, "has a 4-D mask, for Transformers' own attention, and TILEOPS_REQUIRE_NATIVE is set", "no such mask")
    if softcap is None and s_aux is None and options.get("sinks") is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        _refuse(module, "has a 4-D mask beside softcap or sinks, and no eager_attention_forward", "a batch without such a mask")
    if mask.dtype == torch.bool:  # eager attention adds it to the scores
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return eager(module, query, key, value, mask, softcap=softcap, s_aux=s_aux, **options)


def _refuse(module: nn.Module, found: str, expected: str) -> NoReturn:
    raise NotImplementedError(f"tileops attention: {type(module).__name__} {found}; expected {expected}")
