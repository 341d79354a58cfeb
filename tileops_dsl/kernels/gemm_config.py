"""The configuration of gemm."""

from dataclasses import dataclass

from build_backend.measured import Measured
from tileops_dsl.configs import Config
from tileops_dsl.ir import DTYPES

EXAMPLES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 16384, 4096))  # M, N, K


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
    facts = ("transpose_a", "transpose_b", "vector", "tile", "cluster")
    plain = property(lambda self: self.transpose_b and not self.transpose_a and self.vector > 1)  # serves a linear layer
    step = property(lambda self: f"{self.tile[2]} of K")
    threads = property(lambda self: 256 if self.alternate else (self.warps or self.tile[0] // 64 * 4) * 32)  # that hold c

    @property
    def name(self) -> str:
        """gemm_sm_90a_bf16_bf16_128x256x64_nt: t where K is the outer dimension of a, the inner one of b, as in BLAS."""
        layout = f"{'nt'[self.transpose_a]}{'nt'[self.transpose_b]}" + "_v1" * (self.vector == 1) + "_alt" * self.alternate
        tile = "x".join(map(str, self.tile))
        return "_".join(filter(None, (self.op, self.target, *self.dtypes, tile, layout, self.tag)))

    @property
    def choices(self) -> list[str]:
        cluster = f"Cluster of {self.cluster} CTAs; tiles in groups of {self.group_size} clusters of rows"
        return [cluster, f"c is stored {self.store_columns} columns at a time"]

    def examples(self, multiprocessors: int, moved: int) -> list[str]:
        """What some products take, if a step of a CTA loads `moved` bytes."""
        (bm, bn, bk), clusters = self.tile, multiprocessors // self.cluster
        lines = [f"Waves on {multiprocessors} multiprocessors, {clusters} clusters at a time:"]
        for m, n, k in EXAMPLES:
            rows, columns = -(-m // (bm * self.cluster)), -(-n // bn)
            tiles, steps = rows * columns, -(-k // bk)
            waves = f", {tiles / clusters:.2f} waves" if clusters else ""
            total = tiles * self.cluster * steps * moved
            lines.append(
                f"  {m} x {n} x {k}: {tiles} tiles of a cluster{waves}, {2 * m * n * k:.3g} FLOP, "
                f"{total:.3g} bytes loaded, {m * n * DTYPES[self.y]:.3g} stored"
            )
        return lines


@dataclass(frozen=True)
class FewRowsConfig(GemmConfig):
    """A matrix product of few rows: two groups, each with all rows of a tile and half of its columns."""

    table = None  # the operator does not call it yet
    threads = 256
