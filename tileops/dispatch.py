"""Which path a call takes, and why: a kernel of the native library, or eager PyTorch.

The choice among kernels is made in C++, on the hot path. What C++ is not asked about (tensors that are not on a CUDA device, or
no native library) is decided here, and there is only one outcome: the eager twin, or an error where a knob forbids it.
"""
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import _native, knobs


@dataclass(frozen=True)
class Decision:
    path: str  # "kernel" or "eager"
    variant: str  # the kernel's name; "" for eager
    reason: str

    def __str__(self) -> str:
        return f"{self.path} {self.variant}".strip() + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Status:
    loaded: bool
    reason: str  # why the native library is not loaded; "" when it is
    targets: tuple[str, ...]  # the GPU targets that this build has kernels for
    variants: int
    driver: int  # the CUDA version of the driver, 13000 for 13.0; 0: none, or not looked at
    driver_message: str
    devices: dict[str, dict[str, Any]]  # by device index, those used so far
    torch: str
    torch_cuda: str
    knobs: knobs.Knobs

    def __str__(self) -> str:
        driver = f"CUDA {self.driver // 1000}.{self.driver % 1000 // 10}" if self.driver else "none"
        lines = [
            f"torch: {self.torch}, " + (f"CUDA {self.torch_cuda}" if self.torch_cuda else "without CUDA"),
            "native library: " + ("loaded" if self.loaded else f"not loaded: {self.reason}"),
            f"kernels: {self.variants} variants for {', '.join(self.targets)}" if self.targets else "kernels: none",
            f"driver: {driver}" + (f" ({self.driver_message})" if self.driver_message else ""),
        ]
        for index, device in self.devices.items():
            served = device.get("target") or f"eager: {device.get('reason')}"
            lines.append(f"device {index}: {device.get('name')}, capability {device.get('capability')}: {served}")
        return "\n".join([*lines, f"knobs: {self.knobs}"])


_explainers: dict[str, Callable[..., str]] = {}
_announced: set[str] = set()


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Decision:
    """Says which path `op(*args, **kwargs)` takes now, without running it: `tileops.explain("softmax", x, dim=0)` or
    `tileops.explain(tileops.softmax, x)`.

    The arguments are those of the function less those that take results; what the function refuses is refused here, with the
    same error.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in _explainers:
        raise ValueError(f"explain: op is {name!r}; expected one of {', '.join(_explainers)}")
    for result in ("out", "lse"):
        if result in kwargs:
            raise ValueError(
                f"explain: {result} was given; expected the other arguments only, since the decision is for a new result"
            )
    if kwargs.get("softcap", 0.0) is None:  # the functions of attention take it for 0
        kwargs["softcap"] = 0.0
    return Decision(*_explainers[name](*args, **kwargs).split("\t"))


def status() -> Status:
    """What was loaded and, if nothing, why not. Does not initialise CUDA, so only devices used so far are known."""
    native, told = _native.load(), _native.library_status()
    return Status(
        loaded=native.library is not None,
        reason=native.reason,
        targets=tuple(told.get("targets", ())),
        variants=told.get("variants", 0),
        driver=told.get("driver", 0),
        driver_message=told.get("driver_message", ""),
        devices=told.get("devices", {}),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda or "",
        knobs=knobs.current(),
    )


def add_explainer(op: str, explainer: Callable[..., str]) -> None:
    _explainers[op] = explainer


def decide_eager(op: str, **operands: torch.Tensor) -> Decision:
    """The decision for a call that reached Python, from its tensors by name; RuntimeError where another path is forced."""
    now = knobs.current()
    reason = _reason(*next(iter(operands.items())), now)
    if now.force not in ("", "eager"):
        remedy = "unset it, or force a target or kernel that fits"
        raise RuntimeError(f"{op}: TILEOPS_FORCE={now.force} cannot apply: {reason}; {remedy}")
    return Decision("eager", "", reason)


def enter_eager(op: str, **operands: torch.Tensor) -> None:
    """To be called before the eager path is taken: says so where asked to, and raises RuntimeError where a knob forbids it."""
    now, decision = knobs.current(), decide_eager(op, **operands)
    x = next(iter(operands.values()))
    if now.require_native and now.force != "eager":  # what was forced by name is no fallback
        raise RuntimeError(f"{op}: TILEOPS_REQUIRE_NATIVE is set and no kernel serves this call: {decision.reason}")
    if now.log == "dispatch":
        shapes = " ".join(str(list(tensor.shape)) for tensor in operands.values())
        problem = f"{op} {str(x.dtype).removeprefix('torch.')} {shapes}"
        _once(f"tileops: {problem} -> {decision.path} ({decision.reason})", lambda line: print(line, file=sys.stderr))
    if x.is_cuda and not now.force and not now.disable_native:
        _once(f"tileops runs in eager PyTorch on this GPU: {decision.reason}", _warn)


def _reason(name: str, x: torch.Tensor, now: knobs.Knobs) -> str:
    if now.force == "eager":
        return "TILEOPS_FORCE=eager is set"
    if not x.is_cuda:
        return f"{name} is on {x.device}"
    if now.disable_native:
        return "TILEOPS_DISABLE_NATIVE is set"
    return f"no kernels are loaded: {_native.load().reason or 'the native library is older than this operator; build it again'}"


def _once(line: str, say: Callable[[str], None]) -> None:
    if len(_announced) > 4096:  # shapes may change without end: rather say a decision again than grow
        _announced.clear()
    if line not in _announced:
        _announced.add(line)
        say(line)


def _warn(line: str) -> None:
    warnings.warn(line, RuntimeWarning, stacklevel=2)
