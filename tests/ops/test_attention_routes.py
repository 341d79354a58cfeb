"""Attention through every operator on tensors of any strides and at any address, and the fallback beside the kernels."""

import itertools
import math

import pytest
import torch
from attention_ways import KINDS, LATENT, equal, ways
from ops_reference import normal

NAN = math.nan
PLAIN = tuple(kind for kind in KINDS if kind not in LATENT)


def every_second(t):
    return torch.stack((t, t * NAN), -3).flatten(-4, -3)[..., ::2, :, :]


def heads_first(t):
    return t.transpose(-3, -2).contiguous().transpose(-3, -2)


def first_half(t):
    return torch.cat((t, t * NAN), -1)[..., : t.shape[-1]]


def second_half(t):
    return torch.cat((t * NAN, t), -1)[..., t.shape[-1] :]


def unchanged(t):
    return t


LAYOUTS_OF_KEYS = {
    "every second key": (unchanged, every_second, unchanged),
    "every second value": (unchanged, unchanged, every_second),
    "halves of pairs": (unchanged, first_half, second_half),
    "values heads first": (unchanged, unchanged, heads_first),
    "keys heads first, values in pairs": (every_second, heads_first, second_half),
}


@pytest.mark.parametrize("way", ways(*PLAIN), indirect=True)
@pytest.mark.parametrize("layout", LAYOUTS_OF_KEYS)
def test_keys_and_values_have_strides_of_their_own(way, layout):  # B22
    keys = [128] * 2 if way.kind == "dense" else [128, 65]
    for rows in ([70] * 2, [2] * 2) if way.kind != "decode" else ([2] * 2,):
        tensors = way.sequences(rows, keys)
        found = way.check(*tensors, causal=True, layouts=LAYOUTS_OF_KEYS[layout])
        expected = way.run(*tensors, causal=True)
        assert equal(found, expected) or not way.has_kernels


@pytest.mark.parametrize("way", ways(*PLAIN), indirect=True)
def test_one_head_for_all(way):  # B20
    """A stride of 0 between the heads of k and v."""

    def repeat(t):
        return t.expand(*t.shape[:-2], 2, t.shape[-1])

    keys = [128] * 2 if way.kind == "dense" else [128, 65]
    way.check(*way.sequences([3] * 2, keys, 4, 1), causal=True, layouts=(unchanged, repeat, repeat))


def off_by(count):
    return lambda t: torch.cat((t.flatten()[:count], t.flatten()))[count:].view(t.shape)


def pitch(count):
    return lambda t: torch.nn.functional.pad(t, (0, count), value=NAN)[..., :-count]


def apart(t):
    return torch.stack((t, torch.full_like(t, NAN)), -1)[..., 0]


ADDRESSES = {"base + 1": off_by(1), "base + 3": off_by(3), "pitch + 1": pitch(1), "pitch + 3": pitch(3), "apart": apart}


@pytest.mark.parametrize("way", ways(*KINDS, routes=("cpu", "default")), indirect=True)
@pytest.mark.parametrize("address", ADDRESSES)
def test_any_address_and_pitch(way, address):  # B20, B24
    change, keys = ADDRESSES[address], [70] * 2 if way.kind == "dense" else [70, 9]
    for dim in (46, 64) if way.kind not in LATENT else (576,):
        tensors = way.sequences([3] * 2, keys, dim=dim)
        for changed in ((0, 1, 2), (0,), (1,), (2,)):
            way.check(*tensors, causal=True, layouts=[change if n in changed else unchanged for n in range(3)])


@pytest.mark.parametrize("way", ways("dense", "varlen", "paged", "decode", "mla", routes=("cpu", "default")), indirect=True)
@pytest.mark.parametrize("address", ADDRESSES)
def test_results_at_any_address_and_pitch(way, address):  # B24
    tensors = way.sequences([3] * 2, [70] * 2)
    call = way.call(*tensors, causal=True)
    expected = call.results()
    for names in (("out",), ("lse",), ("out", "lse")):
        given = {name: ADDRESSES[address](torch.zeros_like(t)) for name, t in zip(("out", "lse"), expected) if name in names}
        found = call.results(**given)
        assert all(found[("out", "lse").index(name)] is t for name, t in given.items())
        way.assert_right(call.split(*found), *tensors, causal=True)


MASKS = {"full": {}, "causal": {"causal": True}}
GRID = MASKS | {
    "window": {"causal": True, "window_left": 20},
    "band": {"window_left": 2, "window_right": 30},
    "softcap": {"softcap": 1.5, "causal": True},
    "softcap in a window": {"softcap": 5.0, "causal": True, "window_left": 20},
    "sinks": {"sinks": True, "causal": True},
    "sinks in a window": {"sinks": True, "causal": True, "window_left": 20, "scale": 0.3},
}


@pytest.mark.parametrize("way", ways(*KINDS), indirect=True)
def test_fallback_gives_what_the_kernel_gives(way):  # B65
    """Dtypes, strides and numbers of both, for one query and several, groups of heads, and values of another width."""
    shapes = (1, 4, 4, 64), (1, 8, 2, 64), (5, 8, 1, 40), (5, 2, 2, 64)
    for (rows, heads, kv_heads, dim_v), chosen in itertools.product(shapes, (MASKS if way.kind in LATENT else GRID).values()):
        if way.kind == "paged":
            rows *= 26  # of one tile and of two
        if "sinks" in chosen:
            chosen = chosen | {"sinks": normal(heads, device=way.device, seed=77)}
        keys = [100] * 3 if way.kind == "dense" else [100, 3, 64]
        tensors = way.sequences([rows] * 3, keys, heads, kv_heads, 64, dim_v)
        call = way.call(*tensors, **chosen)
        found = call.results()
        with way.eager():
            eager = call.function(*call.args, **call.options)
        for ours, theirs in zip(found, eager):
            assert (ours.dtype, ours.stride(), ours.device) == (theirs.dtype, theirs.stride(), theirs.device)
        way.assert_right(call.split(*found), *tensors, **chosen)
        if way.has_kernels:
            way.assert_right(call.split(*eager), *tensors, **chosen)
        else:
            assert all(map(torch.equal, found, eager))
