from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """What the compiler must know of a GPU family."""

    name: str
    architectures: tuple[str, ...]  # machine code that is shipped, as nvcc's sm_ names
    ptx: str | None  # PTX for GPUs to come, as nvcc's compute_ name
    shared_bytes: int  # most that one CTA can have
    multiprocessors: int = 0  # of the GPU that tiles are chosen on
    warp_groups: bool = False  # products, copies and barriers of Hopper: wgmma, TMA, mbarriers, clusters
    registers_per_thread: int = 255
    registers_per_cta: int = 65536
    # What the tuner tries, by operator and field of a row of configs/<op>.json. A value other than a field's first becomes
    # part of the row's tag; of `store_columns` and `stages` only the largest that fit are tried.
    candidates: dict[str, dict[str, tuple]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Gpu:
    """One GPU that tiles are chosen on: what the tuner's estimate of a time needs."""

    name: str  # as CUDA names it
    capability: tuple[int, int]
    targets: tuple[str, ...]  # that it runs, its own first
    multiprocessors: int
    clock_ghz: float  # that products keep up
    bytes_per_us: float  # of device memory, read
    l2_bytes_per_clock: float  # into one multiprocessor while all of them read
    flops_per_clock: dict[str, int] = field(hash=False)  # of one multiprocessor, 16-bit products, by target
