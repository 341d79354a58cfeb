"""The native library `_C.so`: found, checked and loaded once, or one plain reason why not.

The library registers the operator schemas and the CUDA kernels from `tileops_register()`, which answers with a message instead
of crashing. Nothing here touches CUDA, so a process that only imports tileops can still fork.
"""
import ctypes
import functools
import json
import os
from dataclasses import dataclass
from typing import Any

import torch

from . import _schemas, knobs

TORCH_FLOOR = (2, 10)  # the stable ABI that the library is built for; below it only the eager path works
_FLOOR_TEXT = ".".join(map(str, TORCH_FLOOR))
LIBRARY_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_C.so")


@dataclass(frozen=True)
class Native:
    library: ctypes.CDLL | None
    reason: str  # why there is no library; "" when there is one
    taken: str = ""  # not "": someone else owns our operator names, so that Python must not register them either


def torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def owned_by_another() -> str:
    """A sentence when one of our operators exists before we registered any, else ""."""
    for name in _schemas.operators():
        if torch._C._jit_get_schemas_for_operator(f"{_schemas.NAMESPACE}::{name}"):
            return (f"torch.ops.{_schemas.NAMESPACE}.{name} was already registered by another library; {_suspect()}; "
                    "keep one of the two, in a process of its own")
    return ""


def _suspect() -> str:
    from importlib import metadata  # slow to import, and needed on this path only

    try:
        version = metadata.version("tileops")
    except metadata.PackageNotFoundError:
        return "a second copy of tileops (one installed, one from a source tree?) is the usual cause"
    return (f"the distribution `tileops` {version} (tile-ai/TileOPs) is installed, which has the import name and the operator "
            "namespace of this one, the distribution `tileops-kernels`")


@functools.cache
def load() -> Native:
    """Loads the library and has it register its operators, on the first call."""
    library, reason = _open()
    if library:
        _schemas.NAMESPACE = library.tileops_namespace().decode()
    taken = owned_by_another()
    if taken or library is None:
        return Native(None, taken or reason, taken)
    message = library.tileops_register()
    if message:
        reason = f"{LIBRARY_PATH} did not register its operators: {message.decode(errors='replace')}"
        return Native(None, reason, owned_by_another())
    knobs.on_change(lambda now: _push(library, now))
    return Native(library, "")


def _open() -> tuple[ctypes.CDLL | None, str]:
    """The library, with nothing registered yet, or the reason for None."""
    refusal = _refusal()
    if refusal:
        return None, refusal
    try:
        library = ctypes.CDLL(LIBRARY_PATH, mode=ctypes.RTLD_LOCAL)
        library.tileops_namespace.restype = ctypes.c_char_p
        library.tileops_register.restype = ctypes.c_char_p
        library.tileops_status.restype = ctypes.c_char_p
        library.tileops_set_knob.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        library.tileops_set_knob.restype = None
    except AttributeError as error:
        return None, f"{LIBRARY_PATH} is of another version of tileops: {error}; build it again"
    except OSError as error:
        versions = f"built for torch {_FLOOR_TEXT} or newer, does not load under torch {torch.__version__}"
        return None, f"{LIBRARY_PATH}, {versions}: {error}"
    return library, ""


def _refusal() -> str:
    if knobs.current().disable_native:
        return "TILEOPS_DISABLE_NATIVE was set when tileops was imported"
    if torch.version.hip:
        return f"this torch is built for ROCm {torch.version.hip}, and the kernels are CUDA ones"
    if torch_version() < TORCH_FLOOR:
        return f"torch {torch.__version__} is older than {_FLOOR_TEXT}, the oldest that the native library works with"
    if not os.path.exists(LIBRARY_PATH):
        return f"{LIBRARY_PATH} does not exist: this is an install without kernels (TILEOPS_BUILD=none)"
    return ""


def _push(library: ctypes.CDLL, now: knobs.Knobs) -> None:
    for name, text in now.texts().items():
        library.tileops_set_knob(name.encode(), text.encode())


def library_status() -> dict[str, Any]:
    """What the library says of itself: targets, variants, driver, and the devices used so far."""
    native = load()
    return json.loads(native.library.tileops_status()) if native.library else {}
