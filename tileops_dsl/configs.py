"""The rows of configs/<op>.json: one kernel each, with the sizes that tuning may change and what was measured."""

import json
from dataclasses import dataclass
from pathlib import Path

from tileops_dsl.errors import TileError
from tileops_dsl.ir import FLOATS
from tileops_dsl.layouts import VectorisedRows

SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
CONFIGS = Path(__file__).parent.parent / "configs"


@dataclass(frozen=True)
class RowConfig:
    """A kernel of a row-wise operator. `x`, `y`: dtypes. A tile is `rows` of threads_per_row * chunks * vector columns."""

    op: str
    target: str
    x: str
    y: str
    vector: int  # elements of one access
    threads: int
    threads_per_row: int
    chunks: int  # accesses of one thread to one row
    passes: int = 1  # rows of one thread
    lanes_on_rows: bool = False  # a vector takes neighbouring rows, not columns
    shifted: bool = False  # rows that start anywhere in a vector
    looped: bool = False  # rows longer than the tile
    min_blocks: int = 1  # CTAs that must fit on a multiprocessor
    workload: str | None = None  # what it was chosen on: a label of configs/workloads.json
    us: float | None = None  # measured there, microseconds
    baseline_us: float | None = None  # an elementwise copy of the same bytes, in the same run

    def __post_init__(self):
        for dtype in (self.x, self.y):
            if dtype not in FLOATS:
                raise TileError(f"configs/{self.op}.json has dtype {dtype!r}", f"one of {', '.join(FLOATS)}")

    @property
    def tile(self) -> tuple[int, int]:
        slots = self.threads // self.threads_per_row
        rows = slots * self.vector if self.lanes_on_rows else slots * self.passes
        return rows, self.threads_per_row * self.chunks * self.column_vector

    @property
    def column_vector(self) -> int:
        """Neighbouring columns of one access."""
        return 1 if self.lanes_on_rows else self.vector

    @property
    def layout(self) -> VectorisedRows:
        return VectorisedRows(*self.tile, self.threads, self.threads_per_row, self.vector, self.lanes_on_rows, self.shifted)

    @property
    def max_cols(self) -> int:
        """The longest row that it serves; 0 for any."""
        return 0 if self.looped else self.tile[1] + (self.vector - 1) * self.shifted

    @property
    def name(self) -> str:
        """The kernel's name: softmax_sm_90a_bf16_bf16_v8_t128_r32x4x1 has rows of 32 threads x 4 accesses, 1 row a thread."""
        dtypes = f"{SHORT[self.x]}_{SHORT[self.y]}"
        shape = f"v{self.vector}_t{self.threads}_r{self.threads_per_row}x{self.chunks}x{self.passes}"
        suffix = "_rows" * self.lanes_on_rows + "_shifted" * self.shifted + "_loop" * self.looped
        return f"{self.op}_{self.target}_{dtypes}_{shape}{suffix}"


@dataclass(frozen=True)
class Measured:
    """A problem on which a product kernel was timed, in the same run as eager PyTorch."""

    gpu: str  # as CUDA names it: NVIDIA H200
    m: int
    n: int
    k: int
    us: float
    baseline_us: float
    batch: int = 1
    epilogue: str = "none"  # or, joined by "+": bias, an activation's name, residual

    @property
    def fused(self) -> bool:
        """Whether the epilogue has more than what cuBLAS does besides."""
        return not {"none", "bias"}.issuperset(self.epilogue.split("+"))


@dataclass(frozen=True)
class GemmConfig:
    """A matrix product. `tile`: rows and columns of c, and of K in one step."""

    op: str
    target: str
    x: str
    y: str
    tile: tuple[int, int, int]
    stages: int  # of the tiles of a and b
    cluster: int  # CTAs with the same columns, which share the tile of b
    group_size: int  # rows of clusters whose tiles are visited together
    store_columns: int  # of a part of c that is stored at a time
    transpose_a: bool = False  # a is stored [K, M], not [M, K]
    transpose_b: bool = True  # b is stored [N, K], not [K, N]
    vector: int = 8  # elements of one access; 1: any alignment
    warps: int | None = None  # that hold c: four for each 64 rows unless given
    alternate: bool = False  # two groups take whole tiles in turn
    tag: str = ""  # ends the name, where kernels differ in what the name does not say: c1 for a cluster of 1
    measured: tuple[Measured, ...] = ()  # where the dispatcher may take it: csrc/gemm_choice.cpp

    @property
    def threads(self) -> int:
        """Those that hold c."""
        return 256 if self.alternate else (self.warps or self.tile[0] // 64 * 4) * 32

    @property
    def name(self) -> str:
        """gemm_sm_90a_bf16_bf16_128x256x64_nt: t where K is the outer dimension of a, the inner one of b, as in BLAS."""
        layout = f"{'nt'[self.transpose_a]}{'nt'[self.transpose_b]}" + "_v1" * (self.vector == 1) + "_alt" * self.alternate
        tile = "x".join(map(str, self.tile))
        parts = [self.op, self.target, SHORT[self.x], SHORT[self.y], tile, layout, self.tag]
        return "_".join(filter(None, parts))


KINDS = {"gemm": GemmConfig}


def load(op: str) -> list[RowConfig] | list[GemmConfig]:
    """The rows of an operator, in order of preference."""
    path = CONFIGS / f"{op}.json"
    if not path.exists():
        raise TileError(f"configs/{op}.json, which names the kernels of {op}, is missing", "python -m benchmarks.row_configs")
    return [_row(op, fields) for fields in json.loads(path.read_text())]


def _row(op: str, fields: dict) -> RowConfig | GemmConfig:
    if "measured" in fields:
        fields = {**fields, "measured": tuple(Measured(**problem) for problem in fields["measured"])}
    return KINDS.get(op, RowConfig)(op=op, **fields)
