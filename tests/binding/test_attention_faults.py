"""The faults of tests/ops/test_attention_faults.py and test_attention_routes.py on kernels over a made-up CUDA: what the host
code chooses, binds and copies for them."""

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

import test_attention_faults as faults
import test_attention_routes as routes
from attention_ways import Way

PLAIN = ("dense", "varlen", "paged", "decode")
ALL, PAGED = (*PLAIN, "mla"), ("paged", "decode", "mla")
LATENT = (24, 16)  # widths of the made-up kernel of mla_decode


class MadeUp(Way):
    """The operators of the binding under test; `fake` is set by the fixture."""

    fake: Any
    device = "cpu"

    def operator(self, name):
        operator = getattr(self.fake.ops, name)

        @functools.wraps(operator.default)
        def run(*args, **options):
            results = [options.pop(result, None) for result in ("out", "lse")]
            found = operator(*args, **options)
            if results == [None, None]:
                return found
            results = [new if given is None else given for given, new in zip(results, found)]
            operator.out(*args, **options, out=results[0], lse=results[1])
            return tuple(results)

        return run

    @contextlib.contextmanager
    def scope(self, scale=None):
        forced = self.route != "default" and (scale is None or scale > 0)
        self.fake.knobs(force=self.route if forced else "", require_native="1" if forced else "")
        yield
        self.fake.knobs(force="", require_native="")

    @contextlib.contextmanager
    def eager(self):
        self.fake.knobs(force="eager")
        yield
        self.fake.knobs(force="")


@pytest.fixture
def start(fake, monkeypatch):
    monkeypatch.setattr(MadeUp, "fake", fake, raising=False)
    return lambda kind, route="sm_90a": MadeUp(kind, route, latent=LATENT)


def each(function, name, values, kinds):
    return [(function, kinds, {name: value}) for value in values]


FAULTS = [  # which, on which kinds, with what
    *((function, ALL, {}) for function in (faults.test_more_queries_than_keys, faults.test_scales)),
    *((function, PAGED, {}) for function in (faults.test_only_the_keys_in_use_count, faults.test_padded_requests)),
    *each(faults.test_nan_of_one_request_stays_there, "spoiled", ("keys", "values", "both"), ALL[1:]),
    (faults.test_rows_without_keys_beside_split_ones, ALL[1:], {}),
    *each(faults.test_equal_weights, "causal", (False, True), ALL),
    *each(faults.test_halves_of_the_keys_make_the_whole, "share", (0.0, 0.5), PAGED),
    *((function, PLAIN, {}) for function in (
        faults.test_window_counts_both_ends, faults.test_spellings_of_causal, faults.test_cap_comes_before_the_mask,
        faults.test_large_scores_with_a_cap, routes.test_one_head_for_all,
    )),
    *each(routes.test_keys_and_values_have_strides_of_their_own, "layout", routes.LAYOUTS_OF_KEYS, PLAIN),
    (routes.test_fallback_gives_what_the_kernel_gives, ALL, {}),
]  # fmt: skip
AT_ANY_ADDRESS = (routes.test_any_address_and_pitch, routes.test_results_at_any_address_and_pitch)
CASES = {
    f"{kind}, {function.__name__.removeprefix('test_')} {' '.join(map(str, given.values()))}".rstrip(): (function, kind, given)
    for function, kinds, given in FAULTS
    for kind in kinds
}


@pytest.mark.parametrize("case", CASES)
def test_fault(start, case):
    function, kind, given = CASES[case]
    function(start(kind), **given)


@pytest.mark.parametrize("address", routes.ADDRESSES)
@pytest.mark.parametrize("kind", ALL)
def test_any_address(start, kind, address):  # B24
    """What a kernel cannot read is copied, or left to the fallback."""
    for function in AT_ANY_ADDRESS:
        function(start(kind, "default"), address=address)
