"""What the tuner tries: the rows that a target can hold, and an estimate of a row's time that says which are worth building."""

from itertools import product
from math import ceil

from benchmarks.workloads import ITEM_BYTES
from tileops_dsl.kernels.gemm_config import GemmConfig
from tileops_dsl.passes.budgets import PRODUCT, WORDS
from tileops_dsl.targets import TARGETS

DEEPEST = ("store_columns", "stages")  # only the largest that fit are tried
START_CLOCKS = 3000  # a launch, and the first tiles on their way
EPILOGUE_CLOCKS = 600  # of a tile, beside its traffic


def candidates(op, target, x, y, layout):
    """Every row of the target's space that fits the GPU, as configs/<op>.json would have it."""
    space, best = TARGETS[target].candidates.get(op), {}
    if space is None:
        known = ", ".join(name for name, one in TARGETS.items() if op in one.candidates) or "none"
        raise SystemExit(f"tune: target {target} lists no candidates for {op}; targets that do: {known}")
    for values in product(*space.values()):
        fields = dict(zip(space, values))
        transposes = {"transpose_a": layout[0] == "t", "transpose_b": layout[1] == "t"}
        row = GemmConfig(op, target, x, y, **fields, **transposes, tag=tag(fields, space))
        if fits(row):
            depth = [fields[name] for name in DEEPEST]
            if row.name not in best or depth > best[row.name][0]:
                best[row.name] = depth, row
    return [row for _, row in best.values()]


def tag(fields, space):
    """What the kernel's name does not say: c1 for a cluster of 1."""
    untold = [name for name in space if name not in ("tile", "alternate", *DEEPEST) and fields[name] != space[name][0]]
    return "".join(f"{name[0]}{fields[name]}" for name in untold)


def fits(row):
    """Whether shared memory and registers suffice, near enough: the generator has the last word."""
    target, (bm, bn, bk) = TARGETS[row.target], row.tile
    stored = row.store_columns * ITEM_BYTES[row.y]
    if bn % row.store_columns or stored > 128:  # bytes of the widest swizzle
        return False
    operands = row.stages * (bm + bn) * bk * ITEM_BYTES[row.x]
    if not target.warp_groups:
        return operands <= target.shared_bytes
    groups = row.threads // 128
    start = target.registers_per_cta // (128 * (groups + 1)) // 8 * 8  # of each thread, before the producer gives up some
    registers = min((start * (groups + 1) - 40) // groups, 240)
    tiles = groups if row.alternate else 1  # at a time
    shared = operands + 2 * bm * stored * tiles + 4 * groups * bn + 512  # two stages of c, each group's bias, barriers
    accumulators = bm * bn * tiles // row.threads
    enough = bn // 2 + PRODUCT <= start and accumulators + WORDS + 8 <= registers  # 8: bias, a part of the result
    return shared <= target.shared_bytes and enough


def estimate_us(row, workload, gpu):
    """A roofline of one multiprocessor's work: waves of tiles, each step of K as slow as products, shared memory or L2."""
    (bm, bn, bk), (m, n, k), size = row.tile, workload.mnk, ITEM_BYTES[row.x]
    clusters = max(1, gpu.multiprocessors // row.cluster)
    waves = ceil(workload.batch * ceil(m / (bm * row.cluster)) * ceil(n / bn) / clusters)
    products = 2 * bm * bn * bk / gpu.flops_per_clock[row.target]
    operands = (bm + bm // 64 * bn) * bk * size / 128  # 128 bytes a clock: each 64 rows read all of b
    loads = (bm + bn / row.cluster) * bk * size / gpu.l2_bytes_per_clock
    stores = bm * bn * ITEM_BYTES[row.y] * (1 + ("residual" in workload.steps)) / gpu.l2_bytes_per_clock
    main, epilogue = ceil(k / bk) * max(products, operands, loads), EPILOGUE_CLOCKS + stores
    hidden = min(main, epilogue) * (waves - 1) if row.alternate else 0
    clocks = START_CLOCKS + waves * (main + epilogue) - hidden
    return max(clocks / gpu.clock_ghz * 1e-3, workload.bytes / gpu.bytes_per_us)


def prune(rows, workload, gpu, count):
    """The `count` rows that promise most on a workload, the best first."""
    return sorted(rows, key=lambda row: estimate_us(row, workload, gpu))[:count]
