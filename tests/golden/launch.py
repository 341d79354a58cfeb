"""Compiles a kernel written in device words and launches it through the CUDA driver, beside torch and without the library.

What the binding does for shipped kernels, in a few lines of Python: for the golden kernels and the tests of the words. All
launches go to torch's current stream, and can be captured into a graph.
"""

import ctypes
import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from build_backend import toolkit

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "csrc" / "include"
CACHE = ROOT / "build" / "golden"
SM_90A = "arch=compute_90a,code=sm_90a"

SHARED_BYTES, CLUSTER_DIMENSION = 8, 4  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
DATA_TYPES = {"uint8": 0, "float8_e4m3fn": 0, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}  # CUtensorMapDataType
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
L2_PROMOTION_256B = 3


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: an id, padding to 8 bytes, and a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


def driver():
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


def compile_cubin(source: Path, gencode: str = SM_90A) -> tuple[Path, str]:
    """The cubin of a source and what ptxas -v said, from the cache if nothing that it is made of has changed."""
    text = source.read_text()
    if os.environ.get("ARRIVE_AS_SYNC"):  # see racecheck.py
        text = text.replace("named_barrier_arrive(", "named_barrier_sync(")
    parts = [gencode.encode(), text.encode(), *(p.read_bytes() for p in sorted(INCLUDE.rglob("*.h")))]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    cubin, log = CACHE / f"{source.stem}-{key}.cubin", CACHE / f"{source.stem}-{key}.log"
    if not (cubin.exists() and log.exists()):
        CACHE.mkdir(parents=True, exist_ok=True)
        flags = ["-cubin", "-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v", f"-gencode={gencode}"]
        flags += [f"-I{INCLUDE}", f"-I{source.parent}"]
        if text != source.read_text():
            (CACHE / f"{source.stem}-{key}.cu").write_text(text)
            source = CACHE / f"{source.stem}-{key}.cu"
        done = subprocess.run([toolkit.find().nvcc, *flags, "-o", cubin, source], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc refuses {source}:\n{done.stderr}")
        log.write_text(done.stderr)
    return cubin, log.read_text()


@dataclass(frozen=True)
class I32:
    value: int


@dataclass(frozen=True)
class I64:
    value: int


@dataclass(frozen=True)
class F32:
    value: float


def tensor_map(tensor, box: tuple[int, ...], swizzle: int) -> bytes:
    """The map of a torch tensor: box and coordinates with the innermost (unit-stride, last) dimension first."""
    rank = tensor.dim()
    if tensor.stride(-1) != 1 or len(box) != rank:
        raise ValueError(f"a tensor map needs a unit last stride and a box of {rank} extents; got {tensor.stride()} and {box}")
    sizes = (ctypes.c_uint64 * rank)(*reversed(tensor.shape))
    strides = (ctypes.c_uint64 * rank)(*(s * tensor.element_size() for s in reversed(tensor.stride()[:-1])))
    storage = ctypes.create_string_buffer(128 + 64)
    address = (ctypes.addressof(storage) + 63) // 64 * 64
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        DATA_TYPES[str(tensor.dtype).removeprefix("torch.")],
        rank,
        ctypes.c_void_p(tensor.data_ptr()),
        sizes,
        strides,
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        SWIZZLES[swizzle],
        L2_PROMOTION_256B,
        0,
    )
    check(status, f"cuTensorMapEncodeTiled of {tuple(tensor.shape)} with box {box}")
    return ctypes.string_at(address, 128)


def pack(*values) -> bytes:
    """The bytes of a parameter struct: tensor maps, tensors (their pointers), I64, I32 and F32, each at its own alignment."""
    data = b""
    for value in values:
        if isinstance(value, bytes):
            part, alignment = value, 64
        elif isinstance(value, I32 | F32):
            kind = ctypes.c_int32 if isinstance(value, I32) else ctypes.c_float
            part, alignment = bytes(kind(value.value)), 4
        else:
            part, alignment = bytes(ctypes.c_int64(value.value if isinstance(value, I64) else value.data_ptr())), 8
        data += bytes(-len(data) % alignment) + part
    whole = max(64 if isinstance(value, bytes) else 8 for value in values)  # a struct is as aligned as its members
    return data + bytes(-len(data) % whole)


class Kernel:
    """A kernel of a cubin, in torch's CUDA context."""

    def __init__(self, cubin: Path, name: str):
        import torch

        torch.cuda.init()
        torch.cuda.current_stream().synchronize()
        self.name, self.image = name, cubin.read_bytes()
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        check(driver().cuModuleLoadData(ctypes.byref(module), self.image), f"loading {cubin.name}")
        check(driver().cuModuleGetFunction(ctypes.byref(self.function), module, name.encode()), f"finding {name}")

    def __call__(self, params: bytes, grid, threads: int, shared_bytes: int = 0, cluster: int = 1) -> None:
        import torch

        check(driver().cuFuncSetAttribute(self.function, SHARED_BYTES, shared_bytes), f"{shared_bytes} bytes for {self.name}")
        x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
        attribute = LaunchAttribute(CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(cluster, 1, 1))
        stream = torch.cuda.current_stream().cuda_stream
        config = LaunchConfig(x, y, z, threads, 1, 1, shared_bytes, stream, ctypes.addressof(attribute), 1)
        storage = ctypes.create_string_buffer(params, len(params))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(storage))
        check(driver().cuLaunchKernelEx(ctypes.byref(config), self.function, arguments, None), f"launching {self.name}")


def load(source, name: str) -> Kernel:
    """The kernel `name` of a .cu file."""
    return Kernel(compile_cubin(Path(source))[0], name)
