"""How an operator gets into torch: its schemas, its eager twin, its fakes and its explanation, all from a check and a formula.

The native library, where there is one, has defined the schemas and owns the CUDA key by the time this module runs. Python
implements CompositeExplicitAutograd, which serves whatever has no kernel of its own: every device but CUDA, and CUDA too
without the library.
"""
import copy
import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _native, _schemas, dispatch
from ._checks import check_out, check_overlap

_failed = threading.local()  # .error: what the eager twin last raised under a native call, in this thread


@dataclass(frozen=True)
class Operator:
    """What the public function of an op calls."""

    name: str
    default: Callable[..., Tensor]
    out: Callable[..., Tensor]
    check: Callable[..., torch.dtype]

    def into(self, out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The op with its result in `out`."""
        if torch.compiler.is_compiling():  # an out overload without torch.Tag.out does not compile, see register
            check_out(self.name, args[0], self.check(*args, **kwargs), out)
            return out.copy_(self.default(*args, **kwargs))
        return self.out(*args, **kwargs, out=out)


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether a call on these goes through the autograd.Function: to be recorded or, in forward-mode AD, to be refused."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if getattr(tensor, "requires_grad", False):  # what is no tensor: the operator's own check names the argument
                return True
    return False


def refuse_out(op: str, out: Tensor | None) -> None:
    if out is not None:
        raise ValueError(f"{op}: out was given while a gradient is wanted; expected no out, or a call under torch.no_grad()")


def original(error: RuntimeError) -> Exception:
    """The exception to raise for a RuntimeError out of an operator: the C++ ABI of torch keeps neither the type of an exception
    nor, before torch 2.13, its text. An error of the eager twin is given back as it was, lack of memory as OutOfMemoryError.
    """
    kept = _failed.__dict__.pop("error", None)
    text = str(error)
    # one that the text does not speak of is left over from another call
    if kept is not None and ((str(kept) and str(kept) in text) or "its eager form failed" in text):
        return kept
    without_text = "torch failed while allocating" in text and text.endswith("it printed why on stderr")  # before torch 2.13
    if ("out of memory" in text or without_text) and not isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError(text)
    return error


def register(op: str, check: Callable[..., torch.dtype], formula: Callable[..., Tensor]) -> Operator:
    """Registers `op` and its companions. Both functions take the arguments of the schema.

    check: raises for bad arguments, from shapes, dtypes and devices only, and returns the dtype of the result.
    formula: the result before its one rounding, in float32, from aten operators that do not wait for the device.

    The `.out` overload is not tagged torch.Tag.out: for that tag Inductor (torch 2.13 and 2.14) turns a call of the functional
    overload into one of `.out` and passes each keyword-only argument twice, which fails at run time.
    """
    kernels = _kernels(op, check, formula)
    if _native.load().taken:  # someone else's operators bear our names: call the functions themselves
        dispatch.add_explainer(op, kernels[_schemas.explain])
        return Operator(op, kernels[_schemas.functional], kernels[_schemas.out], check)

    library = _library()
    for schema, kernel in kernels.items():
        name = schema(op).partition("(")[0]
        if _native.load().library is None:
            library.define(schema(op))
        library.impl(name, kernel, "CompositeExplicitAutograd")
        if schema is not _schemas.explain:
            torch.library.register_fake(f"{_schemas.NAMESPACE}::{name}", _fake(op, check), lib=library)

    packet = getattr(getattr(torch.ops, _schemas.NAMESPACE), op)
    dispatch.add_explainer(op, getattr(getattr(torch.ops, _schemas.NAMESPACE), f"_explain_{op}").default)
    return Operator(op, packet.default, packet.out, check)


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library(_schemas.NAMESPACE, "FRAGMENT")


def _kernels(
    op: str, check: Callable[..., torch.dtype], formula: Callable[..., Tensor]
) -> dict[Callable[[str], str], Callable[..., Any]]:
    """Schema -> implementation, for every device that has no kernel of its own."""
    names = tuple(inspect.signature(check).parameters)

    def compute(result: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not result.numel():
            return result
        with torch.no_grad():
            return result.copy_(formula(*args, **kwargs))

    def functional(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dtype = check(x, *args, **kwargs)
        dispatch.enter_eager(op, x)
        return compute(torch.empty_like(x, dtype=dtype), x, *args, **kwargs)

    def into(x: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        check_out(op, x, check(x, *args, **kwargs), out)
        inputs = {name: value for name, value in zip(names, (x, *args)) if isinstance(value, torch.Tensor)}
        check_overlap(op, out, inputs)
        dispatch.enter_eager(op, x)
        return compute(out, x, *args, **kwargs)

    def twin(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return compute(torch.empty_like(x, dtype=check(x, *args, **kwargs)), x, *args, **kwargs)
        except Exception as error:
            _failed.error = copy.copy(error)  # a copy: the traceback of the original would keep the tensors of this call alive
            raise

    def explain(x: Tensor, *args: Any, **kwargs: Any) -> str:
        check(x, *args, **kwargs)
        decision = dispatch.decide_eager(op, x)
        return "\t".join((decision.path, decision.variant, decision.reason))

    return {_schemas.functional: functional, _schemas.out: into, _schemas.eager: twin, _schemas.explain: explain}


def _fake(op: str, check: Callable[..., torch.dtype]) -> Callable[..., Tensor]:
    def fake(x: Tensor, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
        dtype = check(x, *args, **kwargs)
        if out is None:
            return torch.empty_like(x, dtype=dtype)
        check_out(op, x, dtype, out)
        return out

    return fake
