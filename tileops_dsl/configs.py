"""The rows of configs/<op>.json: one kernel each, with the sizes that tuning may change and what was measured."""

import json
from dataclasses import dataclass
from pathlib import Path

from build_backend.measured import Measured, MeasuredAttention
from tileops_dsl.errors import TileError
from tileops_dsl.ir import FLOATS
from tileops_dsl.layouts import VectorisedRows

SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
CONFIGS = Path(__file__).parent.parent / "configs"


@dataclass(frozen=True)
class Config:
    """What all rows have. `x`, `y`: dtypes of what is read and of what is written."""

    op: str
    target: str
    x: str
    y: str
    dtypes = property(lambda self: (SHORT[self.x], SHORT[self.y]))

    def __post_init__(self):
        for dtype in (self.x, self.y):
            if dtype not in FLOATS:
                raise TileError(f"configs/{self.op}.json has dtype {dtype!r}", f"one of {', '.join(FLOATS)}")


@dataclass(frozen=True)
class RowConfig(Config):
    """A kernel of a row-wise operator. A tile is `rows` of threads_per_row * chunks * vector columns."""

    vector: int  # elements of one access
    threads: int
    threads_per_row: int
    chunks: int  # accesses of one thread to one row
    passes: int = 1  # rows of one thread
    lanes_on_rows: bool = False  # a vector takes neighbouring rows, not columns
    shifted: bool = False  # rows that start anywhere in a vector
    looped: bool = False  # rows longer than the tile
    min_blocks: int = 1  # CTAs that must fit on a multiprocessor
    paced: bool = False  # its CTAs start more slowly: kernels/NOTES.md
    workload: str | None = None  # what it was chosen on: a label of configs/workloads.json
    us: float | None = None  # measured there, microseconds
    baseline_us: float | None = None  # an elementwise copy of the same bytes, in the same run

    table = "Row"  # of csrc/variant.h
    facts = ("vector", "lanes_on_rows", "shifted", "max_cols", "rows_per_block", "paced")  # that the dispatcher chooses by
    params = property(lambda self: f"{self.op}_params")  # the struct that it takes
    file = property(lambda self: f"{self.op}_{self.target}_{SHORT[self.x]}")  # with the others of a dtype
    rows_per_block = property(lambda self: self.tile[0])
    column_vector = property(lambda self: 1 if self.lanes_on_rows else self.vector)  # neighbouring columns of one access
    plain = property(lambda self: self.looped and self.vector == 1 and not self.lanes_on_rows)  # serves any length and stride

    @property
    def tile(self) -> tuple[int, int]:
        slots = self.threads // self.threads_per_row
        rows = slots * self.vector if self.lanes_on_rows else slots * self.passes
        return rows, self.threads_per_row * self.chunks * self.column_vector

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
        shape = f"v{self.vector}_t{self.threads}_r{self.threads_per_row}x{self.chunks}x{self.passes}"
        suffix = "_rows" * self.lanes_on_rows + "_shifted" * self.shifted + "_loop" * self.looped
        return "_".join((self.op, self.target, *self.dtypes, shape)) + suffix


@dataclass(frozen=True)
class GemmConfig(Config):
    """A matrix product. `tile`: rows and columns of c, and of K in one step."""

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

    table, measurement = "Product", Measured
    facts = ("transpose_a", "transpose_b", "vector", "tile", "cluster")  # that the dispatcher chooses by
    params = property(lambda self: f"{self.op}_{self.target}_params")  # the struct that it takes
    file = property(lambda self: self.name)  # of its own: nvcc takes long enough for one
    plain = property(lambda self: self.transpose_b and not self.transpose_a and self.vector > 1)  # serves a linear layer
    threads = property(lambda self: 256 if self.alternate else (self.warps or self.tile[0] // 64 * 4) * 32)  # that hold c

    @property
    def name(self) -> str:
        """gemm_sm_90a_bf16_bf16_128x256x64_nt: t where K is the outer dimension of a, the inner one of b, as in BLAS."""
        layout = f"{'nt'[self.transpose_a]}{'nt'[self.transpose_b]}" + "_v1" * (self.vector == 1) + "_alt" * self.alternate
        tile = "x".join(map(str, self.tile))
        return "_".join(filter(None, (self.op, self.target, *self.dtypes, tile, layout, self.tag)))


@dataclass(frozen=True)
class AttentionConfig(Config):
    """FlashAttention. `tile`: queries, keys in one step, head dimension."""

    tile: tuple[int, int, int]
    stages: int  # of the tiles of keys and of values
    causal: bool = False
    head_dim_v: int = 0  # of values and output; 0: as the tile's
    options: tuple[str, ...] = ()  # of OPTIONS: what the program has besides
    measured: tuple[MeasuredAttention, ...] = ()  # where the dispatcher may take it: csrc/attention_choice.cpp

    OPTIONS = ("window", "sinks", "softcap")  # a window has both ends of its mask, so it is causal where the call says so
    table, measurement = "Attention", MeasuredAttention
    facts = ("causal", *OPTIONS, "tile", "head_dim_v")
    window = property(lambda self: "window" in self.options)
    sinks = property(lambda self: "sinks" in self.options)
    softcap = property(lambda self: "softcap" in self.options)
    dtypes = property(lambda self: (SHORT[self.x],))  # one for all
    params = property(lambda self: f"{self.op}_{self.target}_params")
    file = property(lambda self: self.name)
    plain = property(lambda self: not self.causal and not self.options)
    threads = property(lambda self: self.tile[0] // 64 * 128)  # that hold scores and output: four warps for each 64 queries

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.tile[2])
        object.__setattr__(self, "options", tuple(self.options))
        known = tuple(name for name in self.OPTIONS if name in self.options)
        if self.options != known or (self.causal and self.window):
            problem = f"configs/{self.op}.json has options {list(self.options)}{' and causal' * self.causal}"
            raise TileError(problem, f"some of {', '.join(self.OPTIONS)}, in this order; a window without causal")

    @property
    def name(self) -> str:
        """flash_attention_sm_90a_bf16_128x160x128_full; .._128x112x192x128_causal where values have 128 columns."""
        tile = "x".join(map(str, (*self.tile, *[self.head_dim_v] * (self.head_dim_v != self.tile[2]))))
        mask = ["causal"] if self.causal else [] if self.window else ["full"]
        return "_".join((self.op, self.target, *self.dtypes, tile, *mask, *self.options))


@dataclass(frozen=True)
class MlaConfig(Config):
    """MLA decode. `tile`: rows (queries and heads), tokens of a page, columns of a key, columns of a value."""

    tile: tuple[int, int, int, int]

    table = None  # of csrc/variant.h: the operator does not call it yet, and the library goes without
    facts = ("tile",)
    dtypes = property(lambda self: (SHORT[self.x],))  # one for all
    params = property(lambda self: f"{self.op}_{self.target}_params")
    file = property(lambda self: self.name)
    plain = True

    @property
    def name(self) -> str:
        """mla_decode_sm_90a_bf16_64x64x576x512."""
        return "_".join((self.op, self.target, *self.dtypes, "x".join(map(str, self.tile))))


KINDS = {"gemm": GemmConfig, "flash_attention": AttentionConfig, "mla_decode": MlaConfig}


def load(op: str) -> list[Config]:
    """The rows of an operator, in order of preference."""
    path = CONFIGS / f"{op}.json"
    if not path.exists():
        raise TileError(f"configs/{op}.json, which names the kernels of {op}, is missing", "python -m benchmarks.row_configs")
    rows, kind = json.loads(path.read_text()), KINDS.get(op, RowConfig)
    for row in rows:
        row["op"] = op
        if "measured" in row:
            row["measured"] = tuple(kind.measurement(**problem) for problem in row["measured"])
    return [kind(**row) for row in rows]
