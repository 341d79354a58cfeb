"""The configuration of row-wise kernels."""

from dataclasses import dataclass

from tileops_dsl.configs import SHORT, Config
from tileops_dsl.layouts import VectorisedRows


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

    table = "Row"
    facts = ("vector", "lanes_on_rows", "shifted", "max_cols", "rows_per_block", "paced")
    params = property(lambda self: f"{self.op}_params")
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
    def lengths(self) -> str:
        return "any row length" if self.looped else f"rows of up to {self.max_cols} columns"

    @property
    def name(self) -> str:
        """The kernel's name: softmax_sm_90a_bf16_bf16_v8_t128_r32x4x1 has rows of 32 threads x 4 accesses, 1 row a thread."""
        shape = f"v{self.vector}_t{self.threads}_r{self.threads_per_row}x{self.chunks}x{self.passes}"
        suffix = "_rows" * self.lanes_on_rows + "_shifted" * self.shifted + "_loop" * self.looped
        return "_".join((self.op, self.target, *self.dtypes, shape)) + suffix
