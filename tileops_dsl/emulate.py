"""Runs generated CUDA text on the CPU: the host compiler compiles it against csrc/emulator, a driver launches it.

    report = launch(entry, "softmax_sm_90a_bf16.cu", {"x": x, "y": y, "outer": 1, "inner": 8, "cols": 100, ...}, seed=3)

`y` is filled in place. A fault (an access out of bounds, a race, a deadlock ...) raises EmulatorError with its line.
Arrays are NumPy's; bfloat16 travels as uint16 (to_bf16, from_bf16).
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
EMULATOR = ROOT / "csrc" / "emulator"
WORDS = (EMULATOR / "include", ROOT / "csrc" / "include")  # in this order: device.h and reduce.h are the device's own
GENERATED = (ROOT / "csrc" / "generated",)

# No contraction: a*b+c rounds twice unless the text says fma, on every host.
KERNEL_FLAGS = ("-x", "c++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared")
# No _FORTIFY_SOURCE: its longjmp refuses to go to another stack.
DRIVER_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-U_FORTIFY_SOURCE")

CTYPES = {
    "const void*": ctypes.c_void_p,
    "void*": ctypes.c_void_p,
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
}
# Registers are no words, so these faults know only the last word before them.
INEXACT = ("register_index", "unwritten_register")


class EmulatorError(Exception):
    """A fault of a kernel. kind: out_of_bounds, read_only, misaligned, unwritten_register, register_index, unwritten_shared,
    race, diverged, deadlock or shuffle; site: its number; thread: in the block, or None if it is the whole block's."""

    def __init__(self, message, kernel, kind, site, block, thread):
        super().__init__(message)
        self.kernel, self.kind, self.site, self.block, self.thread = kernel, kind, site, block, thread


def to_bf16(values):
    """float array -> uint16 array of bfloat16 bits, rounded to nearest even; NaN becomes 0x7fff."""
    values = np.asarray(values, np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def from_bf16(bits):
    """uint16 array of bfloat16 bits -> float32 array."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


# ---- build


def build(source, include_dirs=GENERATED):
    """Path of the shared object of a .cu file. Built anew only if the file or a header it includes has other content."""
    dirs = (*WORDS, *map(Path, include_dirs))
    return _compile(Path(source), ".so", [*KERNEL_FLAGS, *(f"-I{d}" for d in dirs)], [*KERNEL_FLAGS], dirs)


@functools.cache
def _driver():
    import pybind11  # the development extra: nothing that is installed for users imports this module

    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").exists():
        raise RuntimeError(f"the emulator's driver needs {headers}/Python.h; install it (Debian: apt install python3-dev)")
    flags = [*DRIVER_FLAGS, *(f"-I{d}" for d in (pybind11.get_include(), headers))]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    key = [*DRIVER_FLAGS, pybind11.__version__, sys.version, suffix]
    path = _compile(EMULATOR / "driver.cpp", suffix, flags, key, (EMULATOR,))
    spec = importlib.util.spec_from_file_location("tileops_emulator", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(source, suffix, flags, key, include_dirs):
    digest = hashlib.sha256(repr((_compiler(), key)).encode())
    for file in _closure(source, include_dirs):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    target = ROOT / "build" / "emulator" / f"{source.stem}-{digest.hexdigest()[:20]}{suffix}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:  # and a rename: another process may build it too
            command = [*_compiler(), *flags, str(source), "-o", f"{scratch}/out"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{source.name}: the host compiler refuses it\n{shlex.join(command)}\n{done.stderr}")
            os.replace(f"{scratch}/out", target)
    return target


def _compiler():
    return shlex.split(os.environ.get("CXX", "g++"))


def _closure(source, include_dirs):
    """The source and every header of ours that it includes, in order of first mention. System headers are left out."""
    files = [source]
    for file in files:
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', file.read_text(), re.M):
            found = next((d / name for d in (file.parent, *include_dirs) if (d / name).is_file()), None)
            if found and found not in files:
                files.append(found)
    return files


# ---- run


def run(so, kernel, params, grid, threads, shared_bytes, buffers, seed=0, *, suppress=(), sites=None):
    """Launches `kernel` of the shared object once.

    params: the bytes of the parameter struct. grid: (x, y). buffers: (address, bytes, writable, name) of what pointers may
    reach; a fifth item may be a byte mask that is 0 in the gaps between the elements of a strided tensor.
    suppress: sites of barriers that shall do nothing (mutants). sites: {"12": "softmax.py:31"} for messages.

    Returns {"barriers", "shuffles", "buffers": {name: {"bytes_read", "bytes_written", "unwritten", "rewritten"}}}: the last
    two count the bytes that no thread, and that more than one thread, wrote (0 unless the buffer is writable).
    """
    full = [(address, nbytes, bool(writable), name, bytes(*mask)) for address, nbytes, writable, name, *mask in buffers]
    report = _driver().run(str(so), kernel, bytes(params), tuple(grid), threads, shared_bytes, full, seed, set(suppress))
    if "fault" in report:
        _raise(kernel, *report["fault"], sites or {})
    return report


def _raise(kernel, kind, site, text, thread, block, sites):
    def name(number):
        return "its first word" if int(number) == 0 else sites.get(str(number), f"site {number}")

    who = f"block {block}" if thread < 0 else f"block {block}, thread {thread}"
    at = ("before" if site == 0 else "at or after") if kind in INEXACT else "at"
    text = re.sub(r"\bsite (\d+)", lambda m: name(m[1]), text)
    message = f"{kernel}: {who}, {at} {name(site)}: {text}"
    raise EmulatorError(message, kernel, kind, site, block, None if thread < 0 else thread)


# ---- launch


def launch(entry, source, arrays, seed=0, include_dirs=GENERATED, *, name=None, grid=None, suppress=()):
    """Builds `source` and runs the kernel of a manifest entry; returns the report of run().

    arrays: parameter field -> array (None for a null pointer), number, or sequence of numbers. An array is writable if its
    field is `void*`. name: the kernel's, if the entry has no "name". grid: that of a row kernel unless given.
    """
    name = name or entry["name"]
    if grid is None:
        grid = (-(-arrays["inner"] // entry["rows_per_block"]), arrays["outer"])
    buffers = [
        _buffer(field, arrays[field], ctype == "void*")
        for field, ctype, _ in entry["params"]
        if ctype in ("void*", "const void*") and arrays[field] is not None and arrays[field].size
    ]
    return run(
        build(source, include_dirs),
        name,
        pack(entry["params"], arrays),
        grid,
        entry["threads"],
        entry["shared_bytes"],
        buffers,
        seed,
        suppress=suppress,
        sites=entry.get("sites"),
    )


def pack(params, values):
    """The bytes of a parameter struct, laid out as C does; params is the manifest's list of (field, ctype, count)."""
    wrong = set(values) ^ {field for field, _, _ in params}
    if wrong:
        raise ValueError(f"values for {sorted(wrong)} do not match the parameter struct; give each of its fields, and no other")
    types = [CTYPES[ctype] * count if count > 1 else CTYPES[ctype] for _, ctype, count in params]
    struct = type("Params", (ctypes.Structure,), {"_fields_": [(p[0], t) for p, t in zip(params, types)]})()
    for field, ctype, count in params:
        value = values[field]
        if ctype.endswith("*"):
            setattr(struct, field, None if value is None else value.__array_interface__["data"][0])
            continue
        items = np.atleast_1d(value).tolist()
        if len(items) != count:
            raise ValueError(f"{field} has {len(items)} values; expected {count}, as in the parameter struct")
        setattr(struct, field, tuple(items) if count > 1 else items[0])
    return bytes(struct)


def _buffer(field, array, writable):
    start = array.__array_interface__["data"][0]
    low = start + sum(min(0, s * (n - 1)) for s, n in zip(array.strides, array.shape))
    high = start + sum(max(0, s * (n - 1)) for s, n in zip(array.strides, array.shape)) + array.itemsize
    mask = b""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        cells = np.zeros(high - low, np.uint8)
        inside = np.ndarray((*array.shape, array.itemsize), np.uint8, cells, start - low, (*array.strides, 1))
        inside[...] = 1
        mask = cells.tobytes()
    return low, high - low, writable and array.flags.writeable, field, mask


if __name__ == "__main__":
    from tileops_dsl.emulate_rows import main

    sys.exit(main(sys.argv[1:]))
