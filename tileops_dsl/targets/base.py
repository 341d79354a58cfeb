from dataclasses import dataclass


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
    vector_bytes: int = 16  # widest access of one thread
