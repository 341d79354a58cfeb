"""Row-wise kernels on the CPU emulator.

`emulate_row(config, x, ...)` compiles one row of configs/ and runs its text.
"""

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np

from tileops_dsl import emulate, output
from tileops_dsl.kernels.row_config import RowConfig

CODES = {"bfloat16": 1, "float16": 2, "float32": 3}  # DTypeCode of csrc/include/tileops/types.h
NUMPY = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to `dtype`; bfloat16 as its bits."""
    return emulate.to_bf16(values) if dtype == "bfloat16" else np.asarray(values).astype(NUMPY[dtype])


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    values = emulate.from_bf16(stored) if dtype == "bfloat16" else stored
    return values.astype(np.float64)


def emulate_row(
    config: RowConfig, x: np.ndarray, y: np.ndarray, *, weight=None, weight_dtype=None, seed=0, suppress=(), **scalars
):
    """Fill y[outer, inner, cols] from x, both stored in the configuration's dtypes; returns the emulator's report.

    scalars: eps, weight_offset, round_before_weight, as the operator has them.
    """
    values = {"x": x, "y": y, "outer": x.shape[0], "inner": x.shape[1], "cols": x.shape[2]}
    if config.op != "softmax":
        values |= {"weight": weight, "weight_dtype": 0 if weight is None else CODES[weight_dtype], **scalars}
    return emulate_rows(config, values, seed, suppress)


def emulate_rows(config: RowConfig, values: dict, seed=0, suppress=()):
    """The same for any row-wise program. `values`: each of its tensors (None: not given), extents and scalars by name."""
    kernel = output.compile_config(config)
    source = source_of(kernel)
    ranks = {name.removesuffix("_stride"): count for name, _, count in kernel.fields if name.endswith("_stride")}
    for name, rank in ranks.items():
        array = values[name]
        values[f"{name}_stride"] = [0] * rank if array is None else [s // array.itemsize for s in array.strides]
    entry = kernel.entry | {"name": config.name}
    return emulate.launch(entry, source, values, seed, (source.parent,), suppress=suppress)


def source_of(kernel: output.Generated) -> Path:
    """Its text as a file, with the struct of its parameters beside it, in a folder that is named after their content."""
    files = {f"{kernel.params}.h": output.params_header(kernel.params, kernel.fields)}
    files[f"{kernel.config.name}.cu"] = output.source_text([kernel])
    folder = emulate.ROOT / "build" / "emulator" / "sources" / hashlib.sha256(repr(files).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if not (folder / name).exists():
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as scratch:  # another process may write it, too
                scratch.write(text)
            os.replace(scratch.name, folder / name)
    return folder / f"{kernel.config.name}.cu"


def reference(op: str, x: np.ndarray, weight=None, eps=0.0, weight_offset=0.0, round_before_weight=0) -> np.ndarray:
    """The operator in float64, over the last dimension (without the extra rounding)."""
    if op == "softmax":
        p = np.exp(x - x.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)
    v = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    v = v if weight is None else v * (weight + weight_offset)
    return v / (1 + np.exp(-v)) if op == "rms_norm_silu" else v


def error_bound(config: RowConfig, exact):
    """Half a unit in the last place of the result (or of its smallest one), and float32 arithmetic."""
    relative, absolute = {"bfloat16": (2**-8, 2**-126), "float16": (2**-11, 2**-25), "float32": (2**-24, 2**-126)}[config.y]
    return np.abs(exact) * (relative + 4e-6) + absolute
