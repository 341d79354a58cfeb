"""The configuration of flash_attention."""

from dataclasses import dataclass

from build_backend.measured import MeasuredAttention
from tileops_dsl.configs import SHORT, Config
from tileops_dsl.errors import TileError


@dataclass(frozen=True)
class AttentionConfig(Config):
    """FlashAttention. `tile`: queries, keys in one step, head dimension."""

    tile: tuple[int, int, int]
    stages: int  # of the tiles of keys and of values
    causal: bool = False
    head_dim_v: int = 0  # of values and output; 0: as the tile's
    options: tuple[str, ...] = ()  # of OPTIONS: what the program has besides
    warps: int = 0  # that hold scores and output; 0: four for each 64 queries
    measured: tuple[MeasuredAttention, ...] = ()  # where the dispatcher may take it: csrc/attention_choice.cpp

    # Requests of different lengths; keys in pages; a window has both ends of its mask: causal where the call says so.
    OPTIONS = ("lengths", "paged", "window", "sinks", "softcap")
    table, measurement = "Attention", MeasuredAttention
    facts = ("causal", *OPTIONS, "tile", "head_dim_v")
    lengths = property(lambda self: "lengths" in self.options)
    paged = property(lambda self: "paged" in self.options)  # and lengths
    window = property(lambda self: "window" in self.options)
    sinks = property(lambda self: "sinks" in self.options)
    softcap = property(lambda self: "softcap" in self.options)
    dtypes = property(lambda self: (SHORT[self.x],))  # one for all
    params = property(lambda self: f"{self.op}_{self.target}{'_paged' * self.paged or '_lengths' * self.lengths}_params")
    plain = property(lambda self: not self.causal and not self.options)
    step = property(lambda self: f"{self.tile[1]} keys")
    threads = property(lambda self: (self.warps or self.tile[0] // 64 * 4) * 32)  # that hold scores and output

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.tile[2])
        object.__setattr__(self, "options", tuple(self.options))
        known = tuple(name for name in self.OPTIONS if name in self.options)
        if self.options != known or (self.causal and self.window) or (self.paged and not self.lengths):
            problem = f"configs/{self.op}.json has options {list(self.options)}{' and causal' * self.causal}"
            instead = f"some of {', '.join(self.OPTIONS)}, in this order; a window without causal, paged with lengths"
            raise TileError(problem, instead)

    @property
    def name(self) -> str:
        """flash_attention_sm_90a_bf16_128x160x128_full; .._128x112x192x128_causal where values have 128 columns."""
        tile = "x".join(map(str, (*self.tile, *[self.head_dim_v] * (self.head_dim_v != self.tile[2]))))
        mask = ["causal"] if self.causal else [] if self.window else ["full"]
        return "_".join((self.op, self.target, *self.dtypes, tile, *mask, *self.options))
