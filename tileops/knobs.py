"""Every switch of tileops: one field, one environment variable each, read once at import.

    TILEOPS_FORCE            eager | portable | sm_90a | the name of one kernel: that path, or an error where it cannot apply
    TILEOPS_LOG              dispatch: each new dispatch decision is printed once, on standard error
    TILEOPS_REQUIRE_NATIVE   1: a call that no kernel serves is an error, not a fallback to eager PyTorch
    TILEOPS_DISABLE_NATIVE   1: no kernel is used; set before the import, the native library is not even loaded

In a program: `with tileops.knobs.scope(force="eager"): ...`. The knobs are of the process, not of the thread.
"""
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Knobs:
    force: str = ""
    log: str = ""
    require_native: bool = False
    disable_native: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, field.type):
                raise TypeError(f"knob {field.name} is {value!r}; expected a {field.type.__name__}")
        if self.log not in ("", "dispatch"):
            raise ValueError(f"{variable('log')} is {self.log!r}; expected dispatch or nothing")

    def texts(self) -> dict[str, str]:
        """The form the native library takes: "" is off."""
        return {name: ("1" if value else "") if isinstance(value, bool) else value for name, value in vars(self).items()}

    def __str__(self) -> str:
        return ", ".join(f"{variable(name)}={text}" for name, text in self.texts().items() if text) or "none set"


def variable(knob: str) -> str:
    return f"TILEOPS_{knob.upper()}"


def from_environment(environment: Mapping[str, str]) -> Knobs:
    values: dict[str, str | bool] = {}
    for field in fields(Knobs):
        text = environment.get(variable(field.name), "").strip()
        if field.type is bool:
            if text not in ("", "0", "1"):
                raise ValueError(f"{variable(field.name)} is {text!r}; expected 1, 0 or nothing")
            values[field.name] = text == "1"
        else:
            values[field.name] = text
    return Knobs(**values)


_current = from_environment(os.environ)
_listeners: list[Callable[[Knobs], None]] = []


def current() -> Knobs:
    return _current


def change(**changes: str | bool) -> None:
    """Sets the named knobs from now on, in Python and in the native library."""
    global _current
    _current = replace(_current, **changes)
    for listener in _listeners:
        listener(_current)


@contextmanager
def scope(**changes: str | bool) -> Iterator[None]:
    """Sets the named knobs inside the `with` block and puts all of them back after it."""
    before = vars(_current).copy()
    change(**changes)
    try:
        yield
    finally:
        change(**before)


def on_change(listener: Callable[[Knobs], None]) -> None:
    """Calls `listener` now and after each change."""
    _listeners.append(listener)
    listener(_current)
