"""TILEOPS_BUILD -> what is compiled."""

import ctypes
import os
from dataclasses import dataclass

from .errors import BuildError

MODES = ("none", "smoke", "local", "all")
OLDEST_CAPABILITY = (8, 0)

# What nvcc's -gencode takes, by target. The 'f' and 'a' forms have no PTX that later GPUs can use, hence compute_120 alone.
ALL = {
    "sm_90a": ("arch=compute_90a,code=sm_90a",),
    "portable": (
        "arch=compute_80,code=sm_80",  # serves 8.x
        "arch=compute_90,code=sm_90",
        "arch=compute_100f,code=sm_100f",  # serves 10.0 and 10.3
        "arch=compute_120,code=[sm_120,compute_120]",  # serves 12.x, and later GPUs through the PTX
    ),
}
SMOKE = {"sm_90a": ALL["sm_90a"], "portable": ALL["portable"][:2]}


@dataclass(frozen=True)
class Plan:
    mode: str
    gencode: dict[str, tuple[str, ...]]  # by target; empty: nothing native is built


def capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of the GPUs that the driver shows; none without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, major, minor = (ctypes.c_int() for _ in range(4))
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for ordinal in range(count.value):
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # .._MINOR
        found.append((major.value, minor.value))
    return found


def local_gencode(gpus: list[tuple[int, int]]) -> dict[str, tuple[str, ...]]:
    """What the given GPUs run: the portable target as machine code of each, and on Hopper also its own."""
    gpus = [gpu for gpu in gpus if gpu >= OLDEST_CAPABILITY]
    sm_80, sm_90, sm_100f, sm_120 = ALL["portable"]
    by_major = {8: sm_80, 9: sm_90, 10: sm_100f, 12: sm_120}
    newer = "arch=compute_120,code=compute_120" if any(major > 12 for major, _ in gpus) else None
    portable = [by_major[major] for major in sorted({major for major, _ in gpus}) if major in by_major]
    gencode = {"sm_90a": ALL["sm_90a"]} if (9, 0) in gpus else {}
    if portable or newer:
        gencode["portable"] = tuple(portable + ([newer] if newer else []))
    return gencode


def plan(environ=os.environ, gpus=capabilities) -> Plan:
    mode = environ.get("TILEOPS_BUILD", "")
    if mode and mode not in MODES:
        raise BuildError(f"TILEOPS_BUILD is {mode!r}; expected one of {', '.join(MODES)}")
    if mode in ("none", "smoke", "all"):
        return Plan(mode, {"none": {}, "smoke": SMOKE, "all": ALL}[mode])
    found = gpus()
    gencode = local_gencode(found)
    if gencode:
        return Plan("local", gencode)
    if mode == "local":
        seen = ", ".join(f"{major}.{minor}" for major, minor in found) or "no GPU"
        raise BuildError(
            f"TILEOPS_BUILD=local: found {seen}; there are kernels for compute capability 8.x, 9.0, 10.x and from 12.0 on. "
            "Use TILEOPS_BUILD=none for the eager implementations, =smoke for one kernel of each operator, =all for every GPU"
        )
    return Plan("none", {})
