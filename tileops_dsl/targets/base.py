from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """What the compiler must know of a GPU family."""

    name: str
    shared_bytes: int  # most that one CTA can have
    multiprocessors: int = 0  # of the GPU that tiles are chosen on
    warp_groups: bool = False  # products, copies and barriers of Hopper: wgmma, TMA, mbarriers, clusters
    registers_per_thread: int = 255
    registers_per_cta: int = 65536
    # What the tuner tries, by operator and field of a row of configs/<op>.json. A value other than a field's first becomes
    # part of the row's tag; of `store_columns` and `stages` only the largest that fit are tried.
    candidates: dict[str, dict[str, tuple]] = field(default_factory=dict, hash=False)
