"""How an operator gets into torch: its schemas, its eager twin, its fakes and its explanation, all from a check and a formula.

The native library, where there is one, has defined the schemas and owns the CUDA key by the time this module runs. Python
implements CompositeExplicitAutograd, which serves whatever has no kernel of its own: every device but CUDA, and CUDA too
without the library.
"""
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _native, _schemas, dispatch
from ._checks import check_out, check_overlap

_failed = threading.local()  # .error: what the eager twin last raised under a native call, in this thread


@dataclass(frozen=True)
class Contract:
    """What an operator asks of a call and promises of its result. Both functions take the arguments of the schema.

    check: raises for bad arguments, from shapes, dtypes and devices only, and returns the dtype of the result.
    shape: of the result, contiguous; None: the shape of the first argument, with the strides of torch.empty_like.
    """

    op: str
    check: Callable[..., torch.dtype]
    shape: Callable[..., Sequence[int]] | None = None

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.check).parameters)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The arguments without a default."""
        parameters = inspect.signature(self.check).parameters.values()
        return tuple(p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD)

    def empty(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Memory for the result, of checked arguments."""
        dtype = self.check(x, *args, **kwargs)
        if self.shape is None:
            return torch.empty_like(x, dtype=dtype)
        return x.new_empty(self.shape(x, *args, **kwargs), dtype=dtype)

    def check_out(self, out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
        dtype = self.check(x, *args, **kwargs)
        shape = x.shape if self.shape is None else self.shape(x, *args, **kwargs)
        check_out(self.op, x, self.names[0], shape, dtype, out)


@dataclass(frozen=True)
class Operator:
    """What the public function of an op calls."""

    name: str
    default: Callable[..., Tensor]
    out: Callable[..., Tensor]
    twin: Callable[..., Tensor]
    contract: Contract

    def into(self, out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The op with its result in `out`."""
        if torch.compiler.is_compiling():  # an out overload without torch.Tag.out does not compile, see register
            self.contract.check_out(out, *args, **kwargs)
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


def register(
    op: str,
    check: Callable[..., torch.dtype],
    formula: Callable[..., Tensor],
    shape: Callable[..., Sequence[int]] | None = None,
) -> Operator:
    """Registers `op` and its companions. The functions take the arguments of the schema; see Contract for `check` and `shape`.

    formula: the result before its one rounding, in float32, from aten operators that do not wait for the device; or rounded
    already, if they round once themselves. It is new memory.

    The `.out` overload is not tagged torch.Tag.out: for that tag Inductor (torch 2.13 and 2.14) turns a call of the functional
    overload into one of `.out` and passes each keyword-only argument twice, which fails at run time.
    """
    contract = Contract(op, check, shape)
    kernels = _kernels(contract, formula)
    if _native.load().taken:  # someone else's operators bear our names: call the functions themselves
        dispatch.add_explainer(op, kernels[_schemas.explain])
        return Operator(op, kernels[_schemas.functional], kernels[_schemas.out], kernels[_schemas.eager], contract)

    library = _library()
    for schema, kernel in kernels.items():
        name = schema(op).partition("(")[0]
        if _native.load().library is None:
            library.define(schema(op))
        library.impl(name, kernel, "CompositeExplicitAutograd")
        if schema is not _schemas.explain:
            torch.library.register_fake(f"{_schemas.NAMESPACE}::{name}", _fake(contract), lib=library)

    namespace = getattr(torch.ops, _schemas.NAMESPACE)
    packet = getattr(namespace, op)
    dispatch.add_explainer(op, getattr(namespace, f"_explain_{op}").default)
    return Operator(op, packet.default, packet.out, getattr(namespace, f"_eager_{op}").default, contract)


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library(_schemas.NAMESPACE, "FRAGMENT")


def _kernels(contract: Contract, formula: Callable[..., Tensor]) -> dict[Callable[[str], str], Callable[..., Any]]:
    """Schema -> implementation, for every device that has no kernel of its own."""
    op, names, operands = contract.op, contract.names, contract.operands

    def named(args: tuple[Any, ...]) -> dict[str, Tensor]:
        return dict(zip(operands, args))

    def compute(result: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not result.numel():
            return result
        with torch.no_grad():
            return result.copy_(formula(*args, **kwargs))

    def new(result: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not result.numel():
            return result
        with torch.no_grad():
            value = formula(*args, **kwargs)
            done = value.dtype == result.dtype and value.stride() == result.stride()
            return value if done else result.copy_(value)

    def functional(*args: Any, **kwargs: Any) -> Tensor:
        result = contract.empty(*args, **kwargs)
        dispatch.enter_eager(op, **named(args))
        return new(result, *args, **kwargs)

    def into(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
        contract.check_out(out, *args, **kwargs)
        inputs = {**dict(zip(names, args)), **kwargs}
        check_overlap(op, out, {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)})
        dispatch.enter_eager(op, **named(args))
        return compute(out, *args, **kwargs)

    def twin(*args: Any, **kwargs: Any) -> Tensor:
        kwargs = _activation_by_name(kwargs)
        try:
            return new(contract.empty(*args, **kwargs), *args, **kwargs)
        except Exception as error:
            _failed.error = copy.copy(error)  # a copy: the traceback of the original would keep the tensors of this call alive
            raise

    def explain(*args: Any, **kwargs: Any) -> str:
        contract.check(*args, **kwargs)
        decision = dispatch.decide_eager(op, **named(args))
        return "\t".join((decision.path, decision.variant, decision.reason))

    return {_schemas.functional: functional, _schemas.out: into, _schemas.eager: twin, _schemas.explain: explain}


def _activation_by_name(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Of the arguments of a twin, which takes the number: see _schemas.eager."""
    number = kwargs.get("activation")
    return {**kwargs, "activation": _schemas.ACTIVATIONS[number]} if isinstance(number, int) else kwargs


def _fake(contract: Contract) -> Callable[..., Tensor]:
    def fake(*args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
        kwargs = _activation_by_name(kwargs)
        if out is None:
            return contract.empty(*args, **kwargs)
        contract.check_out(out, *args, **kwargs)
        return out

    return fake
