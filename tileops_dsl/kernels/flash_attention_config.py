"""The configuration of flash_attention."""

from dataclasses import dataclass

from build_backend.measured import MeasuredAttention
from tileops_dsl.configs import SHORT, Config
from tileops_dsl.errors import TileError

Q_REGISTERS = 196  # that queries, scores, weights and output may have, 16 fewer with a window: more are spilled
SHARED_BYTES = 226 * 1024  # that tiles may have beside barriers


@dataclass(frozen=True)
class AttentionConfig(Config):
    """FlashAttention. `tile`: queries, keys in one step, head dimension."""

    tile: tuple[int, int, int]
    stages: int  # of the tiles of keys and of values
    causal: bool = False
    head_dim_v: int = 0  # of values and output; 0: as the tile's
    options: tuple[str, ...] = ()  # of OPTIONS: what the program has besides
    longest_first: bool = False  # tiles in this order, with a CTA for each: even work where a mask makes it uneven
    warps: int = 0  # that hold scores and output; 0: four for each 64 queries
    measured: tuple[MeasuredAttention, ...] = ()  # where the dispatcher may take it: csrc/attention_choice.cpp

    # Requests of different lengths; keys in pages; a window has both ends of its mask: causal where the call says so.
    OPTIONS = ("lengths", "paged", "window", "sinks", "softcap")
    table, measurement = "Attention", MeasuredAttention
    facts = ("causal", *OPTIONS, "longest_first", "tile", "head_dim_v")
    lengths = property(lambda self: "lengths" in self.options)
    paged = property(lambda self: "paged" in self.options)  # and lengths
    window = property(lambda self: "window" in self.options)
    sinks = property(lambda self: "sinks" in self.options)
    softcap = property(lambda self: "softcap" in self.options)
    dtypes = property(lambda self: (SHORT[self.x],))  # one for all
    params = property(lambda self: f"{self.op}_{self.target}{'_paged' * self.paged or '_lengths' * self.lengths}_params")
    plain = property(lambda self: not self.causal and not self.options)
    step = property(lambda self: f"{self.tile[1]} keys")
    groups = property(lambda self: self.threads // 128)
    # How it runs on warp groups (NOTES.md, "What the main loop does"). Three groups, which are few columns each, take turns.
    warp_groups = property(lambda self: self.target == "sm_90a")
    turns = property(lambda self: self.warp_groups and self.groups == 3)
    early = property(lambda self: 0 if self.turns else 32)  # columns whose exponentials run beside a product of the values
    threads = property(lambda self: (self.warps or self.tile[0] // 64 * 4) * 32)  # that hold scores and output

    @property
    def q_registers(self) -> bool:
        """Whether the queries stay in registers, beside scores, weights and output: shared memory is read the less."""
        (_, keys, dim), dim_v = self.tile, self.head_dim_v
        words = keys // 2 + keys // 4 + dim // 4 + dim_v // 2
        return self.warp_groups and self.groups == 2 and words <= Q_REGISTERS - 16 * self.window

    @property
    def o_over_q(self) -> bool:
        """Whether the output goes out through the queries' shared memory, where nothing else is left."""
        (rows, keys, dim), dim_v = self.tile, self.head_dim_v
        own = 2 * (rows * dim + self.stages * keys * (dim + dim_v) + rows * 128)
        return self.warp_groups and own > SHARED_BYTES

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.tile[2])
        object.__setattr__(self, "options", tuple(self.options))
        known = tuple(name for name in self.OPTIONS if name in self.options)
        apart = (self.causal and self.window) or (self.longest_first and self.lengths)
        if self.options != known or apart or (self.paged and not self.lengths):
            besides = f"{' and causal' * self.causal}{' and longest_first' * self.longest_first}"
            problem = f"configs/{self.op}.json has options {list(self.options)}{besides}"
            instead = f"some of {', '.join(self.OPTIONS)}, in this order; a window without causal, paged with lengths"
            instead += ", longest_first without"
            raise TileError(problem, instead)

    @property
    def name(self) -> str:
        """flash_attention_sm_90a_bf16_128x160x128_full; .._128x112x192x128_causal where values have 128 columns."""
        tile = "x".join(map(str, (*self.tile, *[self.head_dim_v] * (self.head_dim_v != self.tile[2]))))
        mask = ["causal"] if self.causal else [] if self.window else ["full"]
        order = ["longest_first"] * self.longest_first
        return "_".join((self.op, self.target, *self.dtypes, tile, *mask, *self.options, *order))
