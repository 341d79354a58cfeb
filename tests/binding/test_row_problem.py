"""The strides that kernels get, against the addresses that PyTorch's own indexing gives."""

import ctypes
import itertools

import numpy as np
import pytest
import torch


def array(values):
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def collapse(probe, x, y, dim):
    out = (ctypes.c_int64 * 12)()
    strides = array(x.stride()), array(y.stride())
    if not probe.probe_collapse(ctypes.c_int64(x.dim()), array(x.shape), *strides, ctypes.c_int64(dim), out):
        return None
    assert out[0] == 1  # a third row dimension is for those who ask for it
    return tuple(out[1:4]), tuple(out[5:8]), tuple(out[9:12])


def addresses(shape, strides):
    grid = np.zeros(shape, dtype=np.int64)
    for axis, stride in enumerate(strides):
        grid += np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))]) * stride
    return grid


def expected_rows(x, y, dim):
    """The set of rows, each the addresses in x and y of its columns."""
    both = [np.moveaxis(addresses(t.shape, t.stride()), dim, -1).reshape(-1, t.shape[dim]) for t in (x, y)]
    return sorted(map(tuple, np.concatenate(both, axis=1)))


def assert_same_rows(probe, x, y, dim):
    found = collapse(probe, x, y, dim)
    assert found is not None
    shape, x_strides, y_strides = found
    both = [addresses(shape, strides).reshape(-1, shape[2]) for strides in (x_strides, y_strides)]
    assert sorted(map(tuple, np.concatenate(both, axis=1))) == expected_rows(x, y, dim)
    return found


@pytest.mark.parametrize("permutation", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 1, 4), (2, 1, 1, 1)])
def test_dense_tensors_always_collapse(row_probe, permutation, shape):
    x = torch.empty(shape).permute(permutation)
    for dim in range(4):
        assert_same_rows(row_probe, x, torch.empty_like(x), dim)


def test_random_views_collapse_or_need_three_strides(row_probe):
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(400):
        rank = int(rng.integers(1, 6))
        base = torch.empty([int(n) for n in rng.integers(1, 4, rank) * 2])
        x = base[tuple(slice(None, None, int(step)) if step < 3 else slice(1, None) for step in rng.integers(1, 4, rank))]
        x = x.permute(*map(int, rng.permutation(rank)))
        if rng.random() < 0.3:
            x = x.unsqueeze(0).expand(3, *x.shape)
        dim = int(rng.integers(x.dim()))
        y = torch.empty_like(x)
        if collapse(row_probe, x, y, dim) is None:
            refused += 1
            assert_same_rows(row_probe, y, y, dim)  # what the copy of x looks like
        else:
            assert_same_rows(row_probe, x, y, dim)
    assert 20 < refused < 300


def test_merging_does_not_depend_on_the_order_of_dimensions(row_probe):
    base = torch.empty(6, 5, 4, 3, 2)[:, :, :, :, :1]  # all but the last are one dimension of stride 2
    for permutation in itertools.permutations(range(5)):
        x = base.permute(permutation)
        found = assert_same_rows(row_probe, x, x, permutation.index(4))
        assert found[0] == (1, 360, 1)


def test_inner_is_the_unit_stride_of_x_unless_the_columns_are(row_probe):
    x = torch.empty(7, 5, 3)
    assert collapse(row_probe, x, x, 1) == ((7, 3, 5), (15, 1, 3), (15, 1, 3))
    rows = torch.empty(7, 9, 5)[:, :3]  # unit columns: the longer of the two row dimensions is inner
    assert collapse(row_probe, rows, rows, 2) == ((3, 7, 5), (5, 45, 1), (5, 45, 1))


def test_no_dimension_and_size_one(row_probe):
    assert collapse(row_probe, torch.empty(()), torch.empty(()), 0) == ((1, 1, 1), (0, 0, 0), (0, 0, 0))
    assert collapse(row_probe, torch.empty(1, 4, 1), torch.empty(1, 4, 1), 1) == ((1, 1, 4), (0, 0, 1), (0, 0, 1))


def test_offsets_are_64_bit(row_probe):
    x = torch.empty(3, 2**33, 2**20, device="meta")
    assert collapse(row_probe, x, x, 2) == ((1, 3 * 2**33, 2**20), (0, 2**20, 1), (0, 2**20, 1))


def test_dense_is_what_empty_like_keeps(row_probe):
    rng = np.random.default_rng(5)
    seen = set()
    for _ in range(500):
        rank = int(rng.integers(0, 5))
        shape = [int(n) for n in rng.integers(1, 4, rank)]
        strides = [int(n) for n in rng.choice([0, 1, 2, 3, 4, 6, 9, 12], rank)]
        if rng.random() < 0.4:
            strides = list(torch.empty(shape).permute(*map(int, rng.permutation(rank))).stride()) if rank else []
        x = torch.empty_strided(shape, strides)
        dense = bool(row_probe.probe_is_dense(ctypes.c_int64(rank), array(shape), array(strides)))
        assert dense == (sorted(addresses(shape, strides).reshape(-1)) == list(range(x.numel())))
        if dense:
            assert torch.empty_like(x).stride() == x.stride()
        seen.add(dense)
    assert seen == {True, False}


def overlap(probe, a, b):
    views = [(t.data_ptr(), t.element_size(), array(t.shape), array(t.stride())) for t in (a, b)]
    flat = [ctypes.c_int64(v) if isinstance(v, int) else v for view in views for v in view]
    return bool(probe.probe_may_overlap(ctypes.c_int64(a.dim()), *flat))


def bytes_of(t):
    first = addresses(t.shape, t.stride()).reshape(-1) * t.element_size() + t.data_ptr()
    return {int(a) + i for a in first for i in range(t.element_size())}


def test_overlap_is_never_missed(row_probe):
    rng = np.random.default_rng(9)
    counts = {(True, True): 0, (False, False): 0, (True, False): 0}
    storage = torch.empty(4000)
    for _ in range(600):
        shape = [int(n) for n in rng.integers(1, 5, 3)]
        views = []
        for _ in range(2):
            data = storage if rng.random() < 0.5 else storage.view(torch.bfloat16)
            strides = [int(n) for n in rng.permutation([1, int(rng.integers(1, 8)), int(rng.integers(8, 40))])]
            views.append(data.as_strided(shape, strides, int(rng.integers(0, 60))))
        said, true = overlap(row_probe, *views), bool(bytes_of(views[0]) & bytes_of(views[1]))
        assert said or not true
        counts[said, true] += 1
    assert counts[False, False] > 50 and counts[True, True] > 50


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda t: t[:, :8], lambda t: t[:, 8:]),
        (lambda t: t[:, ::2], lambda t: t[:, 1::2]),
        (lambda t: t[::2], lambda t: t[1::2]),
        (lambda t: t[:8], lambda t: t[8:]),
        (lambda t: t[:0], lambda t: t[:0]),
    ],
)
def test_slices_of_one_buffer_are_apart(row_probe, a, b):
    buffer = torch.empty(16, 16)
    assert not overlap(row_probe, a(buffer), b(buffer))
    assert overlap(row_probe, buffer, buffer)
    assert overlap(row_probe, buffer[:, :9], buffer[:, 7:])
