"""The words of sm_90a on a GPU: TMA, bulk copies, clusters, barriers, warps as roles, matrices to shared memory."""

import itertools

import launch
import pytest
import torch
from fragments import Matrices
from words_reference import bits, from_shared, to_registers, to_shared

from tileops_dsl.instruction_layouts import SharedTile, Swizzle

pytestmark = pytest.mark.gpu
FILE = "words.cu"
SHARED = 16384 + 64
TMA_SWIZZLE = {Swizzle.NONE: 0, Swizzle.B32: 32, Swizzle.B64: 64, Swizzle.B128: 128}  # as launch.tensor_map counts


@pytest.fixture
def run(launched, device):
    """One input, the output and n."""

    def call(name, x, *, out, n=0, **more):
        out = torch.full(out[0], 77, dtype=out[1], device=device)
        launched(FILE, name, x.contiguous().to(device), out, launch.I32(n), **{"shared": SHARED, **more})
        return out.cpu()

    return call


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_store_matrix(run, count, transposed):
    x = torch.randn(count, 8, 8).bfloat16()
    registers = to_registers(Matrices(count, transposed), x)
    out = run(f"store_matrix_{count}{'_transposed' * transposed}", registers, out=((4, 8, 8), x.dtype))
    assert torch.equal(out[:count], x) and (bits(out[count:]) == -1).all()


def test_exp2_of_pairs(run):
    special = torch.tensor([0.0, 1.0, float("-inf"), float("nan"), -1e30, -3.0])
    x = torch.cat([torch.linspace(-120, 20, 250), special]).bfloat16()
    found, exact = run("exp2_pairs", x, out=(x.shape, x.dtype)).double(), torch.exp2(x.double())
    assert found[253].isnan() and not found[[252, 254]].any()
    rest = torch.ones(256, dtype=torch.bool).index_fill(0, torch.tensor([252, 253, 254]), False)
    assert ((found / exact - 1).abs()[rest] <= 2.0**-7).all()


def test_warps(run):
    x = torch.randint(1, 100, (256,), dtype=torch.int32)
    x[32:64], x[64:96], x[100] = 0, 0, 0
    x[70] = 5
    v = run("warp_words", x, out=((256, 12), torch.int32), threads=256)
    thread, warps = torch.arange(256), x.reshape(8, 32)
    assert torch.equal(v[:, :4].long(), torch.stack([thread, thread // 32, thread // 128, thread % 32], 1))
    elected = v[:, 4].reshape(8, 32)
    assert (elected.sum(1) == 1).all() and (elected == elected[0]).all()
    ballots = [sum((lane != 0) << i for i, lane in enumerate(warp)) for warp in warps.tolist()]
    signed = [b - (b >> 31 << 32) for b in ballots]
    expected = [[(b == 2**32 - 1), b != 0, s] for b, s in zip(ballots, signed)]
    assert v[:, 5:8].reshape(8, 32, 3).tolist() == [[list(map(int, e))] * 32 for e in expected]
    lanes = torch.arange(32)
    moved = [warps[:, 5:6].expand(8, 32), *(warps[:, lanes ^ mask] for mask in (3, 8, 17))]
    assert torch.equal(v[:, 8:].reshape(8, 32, 4), torch.stack(moved, 2))


def test_named_barriers(run):
    out = run("named_barriers", torch.zeros(1), out=((128,), torch.int32), n=300, threads=256)
    first = sum(i * 128 for i in range(300))
    assert out.tolist() == [first + 300 * ((t + 37) % 128) for t in range(128)]


def test_register_budgets(run):
    x = torch.randint(-8, 9, (256, 200)).float()
    out = run("register_budgets", x, out=((256,), torch.float32), threads=384)
    assert torch.equal(out.double(), x.double() @ torch.arange(1, 201).double())


def test_phases_of_a_barrier(run):
    out = run("barrier_phases", torch.zeros(1), out=((128, 8), torch.int32))
    assert out[:, :6].tolist() == [[1, 0, 0, 1, 1, 0]] * 128


@pytest.mark.parametrize("inside", [0, 77, 128])
def test_an_arrival_waits_for_the_copies_of_its_thread(run, inside):
    x = torch.randn(128, 8).bfloat16()
    out = run("arrivals_after_copies", x, out=(x.shape, x.dtype), n=inside)
    assert torch.equal(out[:inside], x[:inside]) and not out[inside:].any()


def test_bulk_copies(run):
    x = torch.randn(4096).bfloat16()
    out = run("bulk_copies", x, out=(x.shape, x.dtype), n=6000)
    assert torch.equal(out[8:3008], x[16:3016]) and (out[:8] == 77).all() and (out[3008:] == 77).all()


def test_stores_become_visible_to_tma(launched, device):
    x, out = torch.randn(8, 64).bfloat16(), torch.zeros(16, 64, dtype=torch.bfloat16, device=device)
    tensor_map = launch.tensor_map(out[:8], (64, 8), 0)
    launched(FILE, "global_fence", tensor_map, x.to(device), out, *map(launch.I32, (256, 0, 0, 0, 0)), shared=SHARED)
    assert torch.equal(out.cpu(), torch.cat([x, x]))


# Tensors are [..., 2 or 3, 10, 80]; boxes are as wide as the swizzle, 8 rows high, and 2 in each further dimension.
STARTS = {2: [(0, 0), (8, 2), (-8, -3), (72, 6)], 3: [(16, 1, 1), (-8, 5, 2), (72, -2, -1)], 4: [(8, 2, 1, 0), (-8, -1, -1, 1)]}
BOXES = [(rank, swizzle, start) for rank in STARTS for swizzle in Swizzle for start in STARTS[rank]]
STORED = [(rank, swizzle, tuple(max(at, 0) for at in start)) for rank, swizzle, start in BOXES]  # stores begin at 0 or later


def tensor_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-99, 100, (2, 3, 10, 80)[4 - rank :]).to(dtype)


def box_of(rank: int, swizzle: Swizzle, dtype: torch.dtype) -> tuple[int, ...]:
    """Innermost first."""
    return (swizzle.row_bytes // dtype.itemsize, 8, 2, 2)[:rank]


def inside(tensor: torch.Tensor, start: tuple[int, ...], box: tuple[int, ...]):
    """Pairs of an index into the box and into the tensor, for what lies in both; both outermost first."""
    for index in itertools.product(*map(range, reversed(box))):
        at = tuple(i + s for i, s in zip(index, reversed(start)))
        if all(0 <= a < extent for a, extent in zip(at, tensor.shape)):
            yield index, at


def parameters(rank: int, swizzle: Swizzle, start, target: torch.Tensor, x: torch.Tensor, out: torch.Tensor):
    """And how many elements a box has."""
    box = box_of(rank, swizzle, target.dtype)
    elements = torch.Size(box).numel()
    tensor_map = launch.tensor_map(target, box, TMA_SWIZZLE[swizzle])
    numbers = elements * target.element_size() // 4, *start, *[0] * (4 - rank)
    return (tensor_map, x, out, *map(launch.I32, numbers)), elements


@pytest.mark.parametrize("rank, swizzle, start", BOXES)
def test_tma_load(launched, device, rank, swizzle, start):
    tensor = tensor_of(rank, torch.bfloat16)
    box = box_of(rank, swizzle, tensor.dtype)
    out = torch.full((torch.Size(box).numel(),), 77, dtype=tensor.dtype, device=device)
    source = tensor.to(device)
    values, elements = parameters(rank, swizzle, start, source, source, out)
    launched(FILE, f"tma_load_{rank}d", *values, shared=SHARED)
    expected = torch.zeros(*reversed(box), dtype=tensor.dtype)
    for index, at in inside(tensor, start, box):
        expected[index] = tensor[at]
    layout = SharedTile(elements // box[0], box[0], 2, swizzle)
    assert torch.equal(from_shared(layout, out).reshape(expected.shape), expected)


@pytest.mark.parametrize("word, dtype", [("tma_store", torch.bfloat16), ("tma_reduce_add", torch.float32)])
@pytest.mark.parametrize("rank, swizzle, start", STORED)
def test_tma_store(launched, device, rank, swizzle, start, word, dtype):
    tensor = tensor_of(rank, dtype)
    box = box_of(rank, swizzle, dtype)
    tile = torch.randint(-99, 100, tuple(reversed(box))).to(dtype)
    layout = SharedTile(tile.numel() // box[0], box[0], dtype.itemsize, swizzle)
    target = tensor.to(device)
    x = to_shared(layout, tile.reshape(layout.rows, layout.columns)).to(device)
    values, _ = parameters(rank, swizzle, start, target, x, target)
    launched(FILE, f"{word}_{rank}d", *values, shared=SHARED)
    for index, at in inside(tensor, start, box):
        tensor[at] = tile[index] + (tensor[at] if word == "tma_reduce_add" else 0)
    assert torch.equal(target.cpu(), tensor)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_tma_multicast(launched, device, rank):
    swizzle, start = Swizzle.B128, {2: (8, 0), 3: (8, 1, 0), 4: (8, 1, 0, 0)}[rank]
    tensor = tensor_of(rank, torch.bfloat16)
    box = (64, 8, 1, 1)[:rank]
    source, out = tensor.to(device), torch.full((4, 2, 512), 77, dtype=torch.bfloat16, device=device)
    numbers = 256, *start, *[0] * (4 - rank)
    values = launch.tensor_map(source, box, 128), source, out, *map(launch.I32, numbers)
    launched(FILE, f"tma_multicast_{rank}d", *values, grid=4, shared=SHARED, cluster=2)
    for cta, source_rank in itertools.product(range(4), range(2)):
        moved = (*start[:-1], start[-1] + source_rank * (8 if rank == 2 else 1))
        expected = torch.zeros(*reversed(box), dtype=tensor.dtype)
        for index, at in inside(tensor, moved, box):
            expected[index] = tensor[at]
        found = from_shared(SharedTile(8, 64, 2, swizzle), out[cta, source_rank])
        assert torch.equal(found, expected.reshape(8, 64))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_clusters(run, size):
    out = run("cluster_words", torch.zeros(1), out=((2 * size, 128, 8), torch.float32), grid=2 * size, cluster=size)
    for cta in range(2 * size):
        after = cta // size * size + (cta + 1) % size
        t = torch.arange(128)
        theirs = after * 1000
        columns = [cta % size + 0 * t, size + 0 * t, theirs + t, theirs + (t ^ 1), theirs + 127 - t, 2 + 0 * t]
        assert torch.equal(out[cta, :, :6], torch.stack(columns, 1).float())
