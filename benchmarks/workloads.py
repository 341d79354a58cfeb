"""The labelled real shapes of configs/workloads.json, and what each must move and compute at least."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "configs" / "workloads.json"
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
# Arithmetic per element, an exponential or a division counted as one:
# softmax: max, subtract, exp, add, multiply; rms_norm: square, add, two products; silu adds negate, exp, add, divide.
FLOPS_PER_ELEMENT = {"softmax": 5, "rms_norm": 4, "rms_norm_silu": 8}


@dataclass(frozen=True)
class Workload:
    op: str
    label: str
    shape: tuple
    dtype: str
    dim: int
    weight: str  # "none", "same" (the dtype of x) or a dtype name
    source: str

    @property
    def name(self):
        """What a result row calls it: shape, dtype and all that departs from the usual."""
        parts = ["x".join(map(str, self.shape)), SHORT[self.dtype]]
        if self.axis != len(self.shape) - 1:
            parts.append(f"dim {self.dim}")
        if self.op != "softmax" and self.weight != "same":
            parts.append("no weight" if self.weight == "none" else f"{SHORT[self.weight]} weight")
        return " ".join(parts)

    @property
    def axis(self):
        return self.dim % len(self.shape)

    @property
    def cols(self):
        return self.shape[self.axis]

    @property
    def result_dtype(self):
        return self.dtype

    @property
    def elements(self):
        return math.prod(self.shape)

    @property
    def weight_dtype(self):
        return {"none": None, "same": self.dtype}.get(self.weight, self.weight)

    @property
    def bytes(self):
        """The fewest bytes a call moves: x and the weight read once, y written once."""
        weight = self.cols * ITEM_BYTES[self.weight_dtype] if self.weight_dtype else 0
        return 2 * self.elements * ITEM_BYTES[self.dtype] + weight

    @property
    def flops(self):
        return self.elements * FLOPS_PER_ELEMENT[self.op]


@dataclass(frozen=True)
class GemmWorkload:
    op: str
    label: str
    shape: tuple  # [batch,] M, N, K
    dtype: str
    source: str
    layout: str = "nt"  # a stored [M, K] is n, [K, M] is t; b stored [K, N] is n, [N, K] is t
    epilogue: str = "none"  # or, joined by "+": bias, an activation's name, residual
    out: str = "same"  # the dtype of the result: that of a, or a dtype name

    @property
    def name(self):
        """What a result row calls it: M x N x K, layout and all that departs from the usual."""
        parts = ["x".join(map(str, self.shape[-3:])), SHORT[self.dtype], self.layout]
        parts += [f"batch {self.batch}"] if self.batch > 1 else []
        parts += [f"{SHORT[self.out]} out"] if self.out != "same" else []
        return " ".join(parts + ([self.epilogue] if self.epilogue != "none" else []))

    @property
    def batch(self):
        return self.shape[0] if len(self.shape) == 4 else 1

    @property
    def mnk(self):
        return self.shape[-3:]

    @property
    def result_dtype(self):
        return self.dtype if self.out == "same" else self.out

    @property
    def steps(self):
        """The parts of the epilogue."""
        return () if self.epilogue == "none" else tuple(self.epilogue.split("+"))

    @property
    def activation(self):
        return next((step for step in self.steps if step not in ("bias", "residual")), "none")

    @property
    def bytes(self):
        """The fewest bytes a call moves: a, b, bias and residual read once, the result written once."""
        (m, n, k), size = self.mnk, ITEM_BYTES[self.dtype]
        results = m * n * (1 + ("residual" in self.steps)) * ITEM_BYTES[self.result_dtype]
        return self.batch * ((m + n) * k * size + results) + n * size * ("bias" in self.steps)

    @property
    def flops(self):
        return 2 * self.batch * math.prod(self.mnk)


KINDS = {"gemm": GemmWorkload}
PRODUCTS = ("gemm",)  # whose speed is in FLOP/s


def load(op=None, match=None, path=FILE):
    """The workloads of one op (None: all) whose name or label contains `match`, in file order."""
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    found = [KINDS.get(row["op"], Workload)(**{**row, "shape": tuple(row["shape"])}) for row in rows]
    ops = sorted({w.op for w in found})
    if op is not None and op not in ops:
        raise SystemExit(f"workloads: no operator {op!r} in {Path(path).name}; expected one of {', '.join(ops)}")
    kept = [w for w in found if op in (None, w.op)]
    if match is not None:
        kept = [w for w in kept if match.lower() in f"{w.name} {w.label}".lower()]
        if not kept:
            raise SystemExit(f"workloads: nothing matches {match!r}; expected a part of a name or label in {Path(path).name}")
    return kept
