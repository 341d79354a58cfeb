"""The configuration of attention_decode."""

from dataclasses import dataclass

from tileops_dsl.configs import SHORT, Config


@dataclass(frozen=True)
class DecodeConfig(Config):
    """Attention of a few queries over a paged cache. `tile`: queries and heads of a group, keys in one step, head dimension."""

    tile: tuple[int, int, int]
    stages: int  # of the tiles of keys and of values
    head_dim_v: int = 0  # of values and output; 0: as the tile's
    softcap: bool = False

    table = "Decode"
    facts = ("tile", "head_dim_v", "softcap")
    dtypes = property(lambda self: (SHORT[self.x],))  # one for all
    plain = property(lambda self: not self.softcap)
    step = property(lambda self: f"{self.tile[1]} keys")
    threads = property(lambda self: self.tile[0] // 64 * 128)

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.tile[2])

    @property
    def name(self) -> str:
        """attention_decode_sm_90a_bf16_64x128x128."""
        tile = "x".join(map(str, (*self.tile, *[self.head_dim_v] * (self.head_dim_v != self.tile[2]))))
        return "_".join((self.op, self.target, *self.dtypes, tile, *["softcap"] * self.softcap))
