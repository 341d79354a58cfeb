"""Runs generated CUDA text on the CPU: the host compiler compiles it against csrc/emulator, a driver launches it.

    report = launch(entry, "softmax_sm_90a_bf16.cu", {"x": x, "y": y, "outer": 1, "inner": 8, "cols": 100, ...}, seed=3)

    report = launch_kernel("gemm.cu", "gemm", [TensorMap(a, (64, 128), 128), Out(c), I32(m)], grid=2, threads=384, cluster=2)

Arrays are NumPy's and are filled in place; bfloat16 travels as uint16 (to_bf16, from_bf16). A fault (an access out of bounds,
a race, a deadlock ...) raises EmulatorError with its line.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shlex
import struct
import subprocess
import sys
import sysconfig
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
EMULATOR = ROOT / "csrc" / "emulator"
WORDS = (EMULATOR / "include", ROOT / "csrc" / "include")  # in this order: device.h and reduce.h are the device's own
GENERATED = (ROOT / "csrc" / "generated",)

# No contraction: a*b+c rounds twice unless the text says fma, on every host.
KERNEL_FLAGS = ("-x", "c++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared")
# No _FORTIFY_SOURCE: its longjmp refuses to go to another stack.
DRIVER_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-U_FORTIFY_SOURCE")

CTYPES = {
    "const void*": ctypes.c_void_p,
    "void*": ctypes.c_void_p,
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
}
# A tensor map as csrc/emulator/tensor_map.h reads it; elements as CUtensorMapDataType counts.
MAP_MAGIC = 0x70616D726F736E74
ELEMENTS = {"u8": 0, "i32": 3, "f16": 6, "f32": 7, "bf16": 9}
NUMPY_ELEMENTS = {"uint8": "u8", "int32": "i32", "float16": "f16", "float32": "f32", "uint16": "bf16"}
WORDS_TO_MUTATE = (
    *("sync_threads", "sync_warp", "named_barrier_sync", "named_barrier_arrive", "cluster_arrive", "cluster_wait"),
    *("init_barrier", "fence_barrier_init", "arrive", "arrive_expect_bytes", "arrive_at_rank", "arrive_after_copies"),
    *("wait", "wait_cluster", "test_wait", "fence_async_shared", "register_budget_increase", "register_budget_decrease"),
    *("tma_load", "tma_load_multicast", "tma_store", "tma_reduce_add", "bulk_load", "bulk_store", "store_async_of_rank"),
    *("store_commit", "store_wait_read", "store_wait", "copy_commit", "copy_wait"),
    *("wgmma", "wgmma_fence", "wgmma_commit", "wgmma_wait"),
    *("load_shared", "store_shared", "load_matrix", "store_matrix", "copy_async"),
)
# Registers are no words, so these faults know only the last word before them.
INEXACT = (
    "crash",
    "register_index",
    "unwritten_register",
    "missing_operand_fence",
    "accumulator_in_flight",
    "operand_in_flight",
)


class EmulatorError(Exception):
    """A fault of a kernel. kind: out_of_bounds, read_only, misaligned, unwritten_register, register_index, unwritten_shared,
    race, diverged, deadlock, shuffle, crash; with the words of sm_90a also barrier, barrier_as_data, cluster, registers,
    tensor_map, wgmma, missing_fence, missing_release, missing_wgmma_fence, missing_operand_fence, accumulator_in_flight,
    operand_in_flight, in_flight_at_exit. site: its number; thread: in the block, or None if it is the whole block's."""

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
    flags = [*DRIVER_FLAGS, *(f"-I{d}" for d in (pybind11.get_include(), headers, WORDS[0]))]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    key = [*DRIVER_FLAGS, pybind11.__version__, sys.version, suffix]
    path = _compile(EMULATOR / "driver.cpp", suffix, flags, key, (EMULATOR, WORDS[0]))
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


def run(so, kernel, params, grid, threads, shared_bytes, buffers, seed=0, *, cluster=1, suppress=(), mutate=None, sites=None):
    """Launches `kernel` of the shared object once.

    params: the bytes of the parameter struct. grid: (x, y) or (x, y, z). buffers: (address, bytes, writable, name) of what
    pointers may reach; a fifth item may be a byte mask that is 0 in the gaps between the elements of a strided tensor.
    suppress: sites whose barriers, arrivals, waits, fences and commits shall do nothing. mutate: {"wait@4": "suppress" |
    "flip" | number}: a word of a site does nothing; has the other parity or swizzle (of a wgmma, B's; "flip_a": A's); counts so
    many more bytes, threads, arrivals or pending groups. sites: {"12": "softmax.py:31"} for messages.

    Returns {"barriers", "shuffles", "asynchronous" (copies and products), "buffers": {name: {"bytes_read", "bytes_written",
    "unwritten", "rewritten"}}}: the last two count the bytes that no thread, and that more than one thread, wrote (0 unless
    the buffer is writable). Also "words": {word: instructions of warps}; "bytes": {"global" | "shared": {by whom, "threads",
    "copy_async", "tma" or "wgmma": {"read", "written"}}}; "shared_accesses": [{"word", "site", "line", "instructions",
    "wavefronts", "conflicts"}] (conflicts: wavefronts that accesses to different banks would not take); "peak_shared_bytes".
    """
    full = [(address, nbytes, bool(writable), name, bytes(*mask)) for address, nbytes, writable, name, *mask in buffers]
    mutations = [("", site, "suppress", 0) for site in suppress]
    for place, change in (mutate or {}).items():
        word, _, site = place.partition("@")
        if word not in WORDS_TO_MUTATE:
            raise ValueError(f"mutate names {place}; expected WORD@SITE with one of {', '.join(WORDS_TO_MUTATE)}")
        kind, amount = (change, 0) if isinstance(change, str) else ("add", change)
        mutations.append((word, int(site), kind, amount))
    xyz = (*grid, 1)[:3]
    report = _driver().run(str(so), kernel, bytes(params), xyz, threads, shared_bytes, cluster, full, seed, mutations)
    if "fault" in report:
        *fault, block = report["fault"]
        _raise(kernel, *fault, block[: len(grid)], sites or {})
    for access in report["shared_accesses"]:
        access["line"] = (sites or {}).get(str(access["site"]))
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
        rows = -(-arrays["inner"] // entry["rows_per_block"])
        grid = (rows, *(arrays[extent] for extent in ("outer", "batch") if extent in arrays))
    buffers = [
        buffer(field, arrays[field], ctype == "void*")
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


def buffer(field, array, writable):
    """What run() wants to know of an array: address, bytes, writable, name, mask of the gaps between its elements."""
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


# ---- launch with any parameters


@dataclass
class TensorMap:
    """Where the device has a CUtensorMap. box: extents, innermost (last) dimension first; swizzle: bytes, 0, 32, 64 or 128."""

    array: np.ndarray
    box: tuple[int, ...]
    swizzle: int = 0
    writable: bool = False
    dtype: str | None = None  # "bf16" ..., by default that of the array (uint16: bf16)

    def pack(self) -> bytes:
        array, box = self.array, self.box
        code, rank, size = ELEMENTS[self.dtype or NUMPY_ELEMENTS[array.dtype.name]], array.ndim, array.itemsize
        address, strides = array.__array_interface__["data"][0], array.strides[-2::-1]
        problems = {
            f"a box of {len(box)} extents for {rank} dimensions": len(box) != rank or not 2 <= rank <= 5,
            "a last stride other than 1": array.shape[-1] > 1 and array.strides[-1] != size,
            f"address {address:#x}, no multiple of 16 bytes": address % 16,
            f"strides of {strides} bytes, not all multiples of 16": any(s % 16 or s < 0 for s in strides),
            f"a box {box}, not all of 1 to 256": any(not 1 <= b <= 256 for b in box),
            f"rows of {box[0] * size} bytes, no multiple of 16": box[0] * size % 16,
            f"rows of {box[0] * size} bytes in a swizzle of {self.swizzle}": self.swizzle and box[0] * size != self.swizzle,
            f"a swizzle of {self.swizzle}": self.swizzle not in (0, 32, 64, 128),
            f"extents {array.shape}": any(not 1 <= n <= 2**32 for n in array.shape),
        }
        wrong = [text for text, holds in problems.items() if holds]
        if wrong:
            raise ValueError(f"no tensor map has {wrong[0]}")

        def padded(values, n):
            return (*values, *(0,) * (n - len(values)))

        values = padded(array.shape[::-1], 5) + padded(strides, 4) + padded(box, 5)
        record = struct.pack("=QQ5q4q5i2h2i", MAP_MAGIC, address, *values, rank, size, code, self.swizzle)
        return record.ljust(128, b"\0")


@dataclass
class In:
    """A pointer to what the kernel reads."""

    array: np.ndarray
    writable = False

    def pack(self) -> bytes:
        return struct.pack("=Q", self.array.__array_interface__["data"][0])


class Out(In):
    """A pointer to what it writes, too."""

    writable = True


@dataclass
class Number:
    value: float
    code = "f"

    def pack(self) -> bytes:
        return struct.pack("=" + self.code, self.value)


class F32(Number):
    pass


class I32(Number):
    code = "i"


class I64(Number):
    code = "q"


NUMBERS = {"int32_t": I32, "int64_t": I64, "float": F32}


def fields(entry, arrays, written):
    """What launch_kernel() takes of a manifest's entry: (values, names).

    arrays: by field, arrays (None: not given), and numbers; strides follow from the arrays, 0 for dimensions that they lack.
    written: the tensor maps that the kernel writes through; of pointers the field says it: void*.
    """
    values, names = [], []
    for field, ctype, count in entry["params"]:
        given = None if field.endswith("_stride") else arrays[field]
        if ctype == "tensor_map" and given is None:  # nothing looks at it
            values.append(bytes(128))
        elif ctype == "tensor_map":
            at = entry["maps"][field]
            columns, rows = at["box"]
            rows = arrays[at["rows"]] if "rows" in at else rows  # of a box that the host chooses
            box = (columns, rows, *[1] * (given.ndim - 2))
            values.append(TensorMap(given, box, at["swizzle"], writable=field in written))
        elif ctype.endswith("*"):
            values.append(None if given is None else (Out if ctype == "void*" else In)(given))
        elif field.endswith("_stride"):
            of = arrays[field.removesuffix("_stride")]
            own = [] if of is None else [s // of.itemsize for s in of.strides]
            values += map(I64, own + [0] * (count - len(own)))
        else:
            values.append(NUMBERS[ctype](given))
        names += [field] * (len(values) - len(names))
    return values, names


def launch_kernel(
    source, name, values, grid, threads, shared_bytes=0, *, cluster=1, seed=0, names=None, include_dirs=GENERATED, **more
):
    """Builds `source` and runs its kernel `name`; returns the report of run(), which also explains `more`.

    values: the fields of the parameter struct in order: TensorMap, In, Out (or None: null), I64, I32, F32, or bytes. names: one
    for each value, for messages and the report; an array that several values point to goes by the first of them.
    """
    params, buffers = b"", {}
    for i, value in enumerate(values):
        part = value if isinstance(value, bytes) else bytes(8) if value is None else value.pack()
        params += bytes(-len(params) % (64 if isinstance(value, TensorMap) else min(len(part), 8))) + part
        if isinstance(value, TensorMap | In) and value.array.size:
            known_as = buffer(names[i] if names else f"argument {i}", value.array, value.writable)
            known = buffers.setdefault(known_as[:2], known_as)
            buffers[known_as[:2]] = (*known[:2], known[2] or known_as[2], *known[3:])
    align = 64 if any(isinstance(v, TensorMap) for v in values) else 8 if any(isinstance(v, In | I64) for v in values) else 4
    params += bytes(-len(params) % align)
    grid = (grid, 1) if isinstance(grid, int) else grid
    so = build(source, include_dirs)
    return run(so, name, params, grid, threads, shared_bytes, list(buffers.values()), seed, cluster=cluster, **more)


class _Module(types.ModuleType):
    """A module that can be called: emulate(program, *tensors, config=row) is emulate_program.emulate."""

    def __call__(self, program, *tensors, **more):
        from tileops_dsl.emulate_program import emulate  # which uses this module

        return emulate(program, *tensors, **more)


sys.modules[__name__].__class__ = _Module

if __name__ == "__main__":
    from tileops_dsl.emulate_program import main

    sys.exit(main(sys.argv[1:]))
