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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _native, _schemas, dispatch
from ._checks import check_out, check_overlap

_failed = threading.local()  # .error: what the eager twin last raised under a native call, in this thread


Results = Tensor | tuple[Tensor, ...]  # of an operator: a tuple where it has several


@dataclass(frozen=True)
class Contract:
    """What an operator asks of a call and promises of its results. Both functions take the arguments of the schema.

    check: raises for bad arguments, from shapes, dtypes and devices only, and returns the dtype of the result.
    shape: of the result, contiguous; None: the shape of the first argument, with the strides of torch.empty_like.
    An operator with several results has a tuple of dtypes and a tuple of shapes in their place.
    """

    op: str
    check: Callable[..., Any]
    shape: Callable[..., Any] | None = None
    results: tuple[str, ...] = field(init=False)  # their names

    def __post_init__(self) -> None:  # no cached property: torch.compile guards on what a compiled call is the first to cache
        object.__setattr__(self, "results", _schemas.results(self.op))

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.check).parameters)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The tensors without a default."""
        parameters = inspect.signature(self.check).parameters.values()
        return tuple(p.name for p in parameters if p.default is p.empty and p.annotation is Tensor)

    def empty(self, x: Tensor, *args: Any, **kwargs: Any) -> Results:
        """Memory for the results, of checked arguments."""
        dtype = self.check(x, *args, **kwargs)
        if self.shape is None:
            return torch.empty_like(x, dtype=dtype)
        shape = self.shape(x, *args, **kwargs)
        if len(self.results) == 1:
            return x.new_empty(shape, dtype=dtype)
        return tuple(x.new_empty(size, dtype=kind) for size, kind in zip(shape, dtype))

    def check_out(self, outs: Sequence[Tensor], x: Tensor, *args: Any, **kwargs: Any) -> None:
        dtype = self.check(x, *args, **kwargs)
        shape = x.shape if self.shape is None else self.shape(x, *args, **kwargs)
        expected = [(shape, dtype)] if len(self.results) == 1 else zip(shape, dtype)
        for name, out, (size, kind) in zip(self.results, outs, expected):
            check_out(self.op, x, self.names[0], size, kind, out, name)


@dataclass(frozen=True)
class Operator:
    """What the public function of an op calls."""

    name: str
    default: Callable[..., Any]
    out: Callable[..., Any]
    twin: Callable[..., Any]
    contract: Contract

    def into(self, out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The op with its result in `out`."""
        return self.into_each((out,), *args, **kwargs)[0]

    def into_each(self, outs: Sequence[Tensor | None], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """The op with each result in the tensor given for it; a new one where that is None."""
        if any(out is None for out in outs):
            outs = [new if out is None else out for out, new in zip(outs, self.contract.empty(*args, **kwargs))]
        if torch.compiler.is_compiling():  # an out overload without torch.Tag.out does not compile, see register
            self.contract.check_out(outs, *args, **kwargs)
            values = self.default(*args, **kwargs)
            return tuple(out.copy_(value) for out, value in zip(outs, _each(values)))
        self.out(*args, **kwargs, **dict(zip(self.contract.results, outs)))
        return tuple(outs)


def _each(results: Results) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether a call on these goes through the autograd.Function: to be recorded or, in forward-mode AD, to be refused."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if getattr(tensor, "requires_grad", False):  # what is no tensor: the operator's own check names the argument
                return True
    return False


def distinct(*args: Any) -> Sequence[Any]:
    """The arguments of an autograd.Function. Dynamo refuses one that gets the same tensor twice: the second becomes a view."""
    if not torch.compiler.is_compiling():
        return args
    seen: list[Any] = []
    for arg in args:
        again = isinstance(arg, torch.Tensor) and any(arg is other for other in seen)
        seen.append(arg.view_as(arg) if again else arg)
    return seen


def refuse_out(op: str, out: Tensor | None, name: str = "out") -> None:
    if out is not None:
        raise ValueError(
            f"{op}: {name} was given while a gradient is wanted; expected no {name}, or a call under torch.no_grad()"
        )


def refuse_gradients(op: str, **tensors: Tensor | None) -> None:
    """For an operator that has none."""
    if not differentiates(*tensors.values()):
        return
    for name, tensor in tensors.items():
        wanted = torch.is_grad_enabled() and getattr(tensor, "requires_grad", False)
        if wanted or (isinstance(tensor, torch.Tensor) and _has_tangent(tensor)):
            raise NotImplementedError(
                f"{op}: {name} wants a gradient, which this operator does not have; expected a call under torch.no_grad()"
            )


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


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
    schema: str,
    check: Callable[..., Any],
    formula: Callable[..., Results],
    shape: Callable[..., Any] | None = None,
) -> Operator:
    """Registers an operator and its companions. The functions take the arguments of the schema; see Contract for `check` and
    `shape`.

    schema: "op(arguments) -> results", as torch writes it, in a file of its own, op.py: the build reads it there.

    formula: the results before their one rounding, in float32, from aten operators that do not wait for the device; or rounded
    already, if they round once themselves. They are new memory.

    The `.out` overload is not tagged torch.Tag.out: for that tag Inductor (torch 2.13 and 2.14) turns a call of the functional
    overload into one of `.out` and passes each keyword-only argument twice, which fails at run time.
    """
    op = _schemas.declare(schema)
    contract = Contract(op, check, shape)
    kernels = _kernels(contract, formula)
    if _native.load().taken:  # someone else's operators bear our names: call the functions themselves
        dispatch.add_explainer(op, kernels[_schemas.explain])
        return Operator(op, kernels[_schemas.functional], kernels[_schemas.out], kernels[_schemas.eager], contract)

    library = _library()
    in_library = torch._C._jit_get_schemas_for_operator(f"{_schemas.NAMESPACE}::{op}")  # not one that was added since its build
    for schema_of, kernel in kernels.items():
        name = schema_of(op).partition("(")[0]
        if not in_library:
            library.define(schema_of(op))
        library.impl(name, kernel, "CompositeExplicitAutograd")
        if schema_of is not _schemas.explain:
            library.impl(name, _fake(contract), "Meta")  # torch.library.register_fake reads source files: 10 ms of an import

    namespace = getattr(torch.ops, _schemas.NAMESPACE)
    packet = getattr(namespace, op)
    dispatch.add_explainer(op, getattr(namespace, f"_explain_{op}").default)
    return Operator(op, packet.default, packet.out, getattr(namespace, f"_eager_{op}").default, contract)


def register_helper(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """A private operator without kernels of its own: what must be one node of a compiled graph, such as a backward pass."""
    if _native.load().taken:
        return function
    name = schema.partition("(")[0]

    def run(*args: Any) -> Any:
        with torch.no_grad():
            return function(*args)

    library = _library()
    library.define(schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    library.impl(name, fake, "Meta")
    return getattr(getattr(torch.ops, _schemas.NAMESPACE), name).default


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library(_schemas.NAMESPACE, "FRAGMENT")


def _kernels(contract: Contract, formula: Callable[..., Results]) -> dict[Callable[[str], str], Callable[..., Any]]:
    """Schema -> implementation, for every device that has no kernel of its own."""
    op, names = contract.op, contract.names

    def named(args: tuple[Any, ...]) -> dict[str, Tensor]:
        return {name: value for name, value in zip(names, args) if name in contract.operands}

    def new(results: Results, *args: Any, **kwargs: Any) -> Results:
        with torch.no_grad():
            if isinstance(results, torch.Tensor):
                return _rounded(formula(*args, **kwargs), results) if results.numel() else results
            if not any(result.numel() for result in results):
                return results
            return tuple(map(_rounded, formula(*args, **kwargs), results))

    def functional(*args: Any, **kwargs: Any) -> Results:
        results = contract.empty(*args, **kwargs)
        dispatch.enter_eager(op, **named(args))
        return new(results, *args, **kwargs)

    def into(*args: Any, **kwargs: Any) -> Results:
        outs = [kwargs.pop(name) for name in contract.results]
        contract.check_out(outs, *args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        used = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        for name, out in zip(contract.results, outs):
            check_overlap(op, out, used, name)
            used[name] = out
        dispatch.enter_eager(op, **named(args))
        if any(out.numel() for out in outs):
            with torch.no_grad():
                for out, value in zip(outs, _each(formula(*args, **kwargs))):
                    out.copy_(value)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def twin(*args: Any, **kwargs: Any) -> Results:
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


def _rounded(value: Tensor, result: Tensor) -> Tensor:
    """`value`, or `result` with that value where the two differ in dtype or layout."""
    return value if value.dtype == result.dtype and value.stride() == result.stride() else result.copy_(value)


def _activation_by_name(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Of the arguments of a twin, which takes the number: see _schemas.eager."""
    number = kwargs.get("activation")
    return {**kwargs, "activation": _schemas.ACTIVATIONS[number]} if isinstance(number, int) else kwargs


def _fake(contract: Contract) -> Callable[..., Results]:
    def fake(*args: Any, **kwargs: Any) -> Results:
        outs = tuple(kwargs.pop(name) for name in contract.results if name in kwargs)
        kwargs = _activation_by_name(kwargs)
        if not outs:
            return contract.empty(*args, **kwargs)
        contract.check_out(outs, *args, **kwargs)
        return outs[0] if len(outs) == 1 else outs

    return fake
