"""The configuration of mla_decode."""

from dataclasses import dataclass

from tileops_dsl.configs import SHORT, Config


@dataclass(frozen=True)
class MlaConfig(Config):
    """MLA decode. `tile`: rows (queries and heads), tokens of a block, columns of a key, columns of a value.

    `unit`: for pages of any multiple of so many tokens, 1 or those of a block; 0: a page is a block.
    """

    tile: tuple[int, int, int, int]
    unit: int = 0

    table = "Mla"
    facts = ("tile", "unit")
    plain = property(lambda self: not self.unit)
    dtypes = property(lambda self: (SHORT[self.x],))  # one for all

    @property
    def name(self) -> str:
        """mla_decode_sm_90a_bf16_64x64x576x512."""
        unit = [f"u{self.unit}"] * (self.unit > 0)
        return "_".join((self.op, self.target, *self.dtypes, "x".join(map(str, self.tile)), *unit))


@dataclass(frozen=True)
class StandardMlaConfig(MlaConfig):
    """The same as a program without T.ws. `stages`: of a page; `cluster`: CTAs with other rows of a request, which share it."""

    stages: int = 2
    cluster: int = 1

    table = None  # the operator has no use for it
    facts = ("tile", "cluster")
    threads = 256
    step = property(lambda self: f"{self.tile[1]} keys")
    name = property(lambda self: MlaConfig.name.fget(self) + f"_c{self.cluster}" * (self.cluster > 1))


@dataclass(frozen=True)
class FewMlaConfig(MlaConfig):
    """The same for at most so many rows as a tile has. `stages`: of a page. `unit`: 0, or 1: each token is looked up."""

    stages: int = 2

    threads = 128
    step = property(lambda self: f"{self.tile[1]} keys")
