"""Attention over sequences through any of its operators, in eager PyTorch or by the kernels of a target."""

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_reference import assert_attention, cut, offsets, paged
from ops_reference import normal
from torch import Tensor

import tileops
from tileops.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

TARGETS = {"dense": ("sm_90a", "portable")}  # that have kernels of a kind; of the others sm_90a has
KINDS = ("dense", "varlen", "paged", "decode", "mla", "flash_mla")
LATENT = ("mla", "flash_mla")
MLA_SCALE = 192**-0.5
MEMORY = ("poison", "unused", "width")  # of paged()
OF_CALLS = (*MEMORY, "page", "layouts", "seqused", "num_splits")  # that change no result
needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
Results = list[tuple[Tensor, Tensor]]  # out [Sq, H, Dv] and lse [H, Sq] of each sequence


@dataclass(frozen=True)
class Way:
    """kind: the operator, and for pages of what kernels: "paged" are tiles of queries, "decode" a few queries of each request.

    route: "cpu"; on a GPU "eager", "default" (what the dispatcher takes), or the target whose kernels must serve.
    """

    kind: str
    route: str
    gpu: str = "cuda"
    latent: tuple[int, int] = (576, 512)  # widths of latent keys and values

    @property
    def device(self) -> str:
        return "cpu" if self.route == "cpu" else self.gpu

    @property
    def has_kernels(self) -> bool:
        """Which must serve."""
        return self.route in ("sm_90a", "portable")

    def operator(self, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
        return getattr(tileops, name)

    def sequences(self, rows, keys, heads=4, kv_heads=2, dim=64, dim_v=None, dtype=torch.bfloat16):
        """q, k and v of each; those of latent attention are as wide as its kernels take them, and v is a part of k."""
        kv_heads, dim = (1, self.latent[0]) if self.kind in LATENT else (kv_heads, dim)
        shapes = (rows, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim_v or dim)
        q, k, v = (
            [normal(n, h, width, dtype=dtype, device=self.device, seed=300 * which + i) for i, n in enumerate(lengths)]
            for which, (lengths, h, width) in enumerate(shapes)
        )
        return q, k, [t[..., : self.latent[1]] for t in k] if self.kind in LATENT else v

    def call(self, q, k, v, *, page=64, layouts=(), seqused=False, num_splits=0, **rest: Any) -> "Call":
        """layouts: of q, k and v, other views of their values. rest: how paged() lays out memory that no sequence owns, and the
        options of attention."""
        layouts = layouts or (lambda t: t,) * 3
        memory = {name: rest.pop(name) for name in MEMORY if name in rest}
        options, rows, keys = self.options(rest), [len(t) for t in q], [len(t) for t in k]
        if self.kind == "dense":
            tensors = [layout(torch.stack(t)) for layout, t in zip(layouts, (q, k, v))]
            return Call(self, self.operator("flash_attention"), tensors, options, list)
        if self.kind == "varlen":
            tensors = [layout(torch.cat(t)) for layout, t in zip(layouts, (q, k, v))]
            lengths = torch.tensor(keys, dtype=torch.int32, device=self.device) if seqused else None
            places = offsets(rows, self.device), offsets(keys, self.device), max(rows), max(keys)
            options |= {"seqused_k": lengths}
            return Call(self, self.operator("flash_attention_varlen"), [*tensors, *places], options, rows, lengths)
        if self.kind in LATENT:
            k = [t if self.kind == "flash_mla" else t[:, 0] for t in k]
        k_cache, table, lengths = paged(k, page, self.device, **memory)
        if self.kind == "mla":
            options |= {"causal": options.get("causal", False), "num_splits": num_splits, "head_dim_v": self.latent[1]}
            tensors = layouts[0](torch.stack(q)), layouts[1](k_cache), table, lengths, options.pop("scale")
            return Call(self, self.operator("mla_decode"), tensors, options, list, lengths)
        if self.kind == "flash_mla":
            options["softmax_scale"] = options.pop("scale")
            tensors = layouts[0](torch.stack(q)), layouts[1](k_cache), table, lengths, self.latent[1], *get_mla_metadata()
            return Call(self, flash_mla_with_kvcache, tensors, options, list, lengths)
        options |= {"num_splits": num_splits}
        caches = layouts[1](k_cache), layouts[2](paged(v, page, self.device, **memory)[0]), table, lengths
        operator = self.operator("flash_attention_paged")
        if self.kind == "decode":
            return Call(self, operator, [layouts[0](torch.stack(q)), *caches], options, list, lengths)
        # one query of each sequence, in a packed row, would be a case for the other kernels
        options |= {"cu_seqlens_q": offsets(rows, self.device), "max_seqlen_q": max(*rows, 2)}
        return Call(self, operator, [layouts[0](torch.cat(q)), *caches], options, rows, lengths)

    def options(self, given: dict) -> dict:
        return {"scale": MLA_SCALE} | given if self.kind in LATENT else dict(given)

    def scope(self, scale: float | None = None):
        """No kernel takes a scale of 0 or less: there the dispatcher must find that out."""
        if self.route == "cpu":
            return contextlib.nullcontext()
        if self.route in ("eager", "default"):
            return tileops.knobs.scope(force=self.route.replace("default", ""))
        refused = scale is not None and scale <= 0
        return tileops.knobs.scope(force="" if refused else self.route, require_native=not refused)

    def eager(self):
        return tileops.knobs.scope(force="eager")

    def run(self, q, k, v, **given: Any) -> Results:
        return self.call(q, k, v, **given).run()

    def check(self, q, k, v, **given: Any) -> Results:
        """The results, each held against float64."""
        found = self.run(q, k, v, **given)
        self.assert_right(found, q, k, v, **{name: value for name, value in given.items() if name not in OF_CALLS})
        return found

    def assert_right(self, found: Results, q, k, v, **options: Any) -> None:
        assert len(found) == len(q)
        for (out, lse), *tensors in zip(found, q, k, v):
            assert_attention(out, lse, *tensors, **self.options(options))


@dataclass(frozen=True)
class Call:
    way: Way
    function: Callable[..., tuple[Tensor, Tensor]]
    args: Any
    options: dict
    rows: Any  # of each sequence in packed results; `list` if they are not packed
    lengths: Tensor | None = None  # the keys of each sequence, on the device

    def results(self, **given: Tensor) -> tuple[Tensor, Tensor]:
        """What the operator returns; skips if the build (a smoke build, say) lacks the kind of kernel."""
        scale = self.args[4] if self.way.kind == "mla" else self.options.get("scale", self.options.get("softmax_scale"))
        try:
            with self.way.scope(scale):
                return self.function(*self.args, **self.options, **given)
        except RuntimeError as error:
            if self.way.has_kernels and "this build has no" in str(error):
                pytest.skip(str(error))
            raise

    def split(self, out: Tensor, lse: Tensor) -> Results:
        if self.way.kind == "flash_mla":  # which has +inf where a query sees no key
            assert not torch.isneginf(lse).any()
            lse = torch.where(lse == math.inf, -math.inf, lse)
        if self.rows is list:
            return list(zip(out, lse))
        return list(zip(cut(out, self.rows), cut(lse, self.rows, 1)))

    def run(self) -> Results:
        return self.split(*self.results())


def equal(found: Results, expected: Results) -> bool:
    return all(torch.equal(a, b) for pair, other in zip(found, expected) for a, b in zip(pair, other))


def ways(*kinds: str, routes: tuple[str, ...] = ("cpu", "eager", "kernels")) -> list:
    """Parameters of the fixture `way`; "kernels" stands for the targets that have any."""
    found = []
    for kind in kinds:
        targets = TARGETS.get(kind, ("sm_90a",))
        for route in itertools.chain.from_iterable(targets if of == "kernels" else (of,) for of in routes):
            found.append(pytest.param((kind, route), marks=() if route == "cpu" else needs_gpu, id=f"{kind}-{route}"))
    return found
