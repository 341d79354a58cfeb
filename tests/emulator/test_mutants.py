"""The table of mutants (mutation.json), what a mutant is, and a sample of them."""

import library
import mutants
import pytest

from tileops_dsl.emulate import WORDS_TO_MUTATE
from tileops_dsl.kernels.row_config import RowConfig

TABLE = mutants.scores()
AGAIN = "python tests/emulator/mutants.py is to run again"


def test_the_table_is_of_the_schedules_of_configs():
    assert list(TABLE) == [*mutants.GOLDEN, *library.all_schedules()], AGAIN


@pytest.mark.parametrize("name", TABLE)
def test_score(name):
    """98 of 100 of those that are not known to be right; of these there are at most 10 in 100."""
    mutants_, caught, equivalent = (TABLE[name][count] for count in ("mutants", "caught", "equivalent"))
    assert 0 <= caught <= mutants_ - equivalent
    assert caught >= 0.98 * (mutants_ - equivalent) and equivalent <= 0.1 * mutants_


def test_the_table_is_of_the_texts():
    """Those of row-wise kernels; test_library.py looks at the others, which take long to compile."""
    for name, row in library.all_schedules().items():
        if isinstance(row, RowConfig):
            assert len(mutants.of_kernel(library.Kernel(row))) == TABLE[name]["mutants"], f"{name}: {AGAIN}"


TEXT = """
//        0  a_tile       2 stages x 8192 bytes; shared 64 x 64, swizzle of 128 bytes
//    16384  bias_row     512 bytes; 128 elements over 128 threads
cluster_sync(site(1));  // wait(full, 0, site(99));
init_barrier(full + s, min(1, 2), site(2));
fence_barrier_init(site(3));
wait(empty + stage, phase ^ 1, site(4));
arrive_expect_bytes(full + stage, 32768, site(5));
tma_load<L2::kEvictLast>(a_tile + stage * 8192, p.a, at(i * 64, row * 128, item), full + stage, site(6));
wgmma<64>(acc, 0, a + q * 32, b + (q / 2 * 8192), i + q > 0,
          site(7));
wgmma<64>(acc, 0, p_half, q * 8, b + q * 32, i > 0, site(8));
wgmma_wait<1>(site(9));
store_shared<2>(a_tile_row, (x / 4 * 16) * 32, out, x, site(10));
load_shared<8>(line, 0, from, a_tile_place, site(11));
load_shared<8>(line, 0, bias_row, thread, site(12)); store_shared(bias_row, thread, v[0], site(12));
reduce_members<Sum, 8>(total, shared<float>(32), 1, slot, member / 32, member % 32 == 0, site(13));
store_matrix<4>(a_tile_row, out, 0, site(14)); fence_async_shared(site(14));
copy_async<8>(to, a_tile_place + x * 2048, a_first, 0, inside && a_row + x * 64 < p.m, site(15));
store_wait_read<0>(site(16));
"""
EXPECTED = [
    {"cluster_arrive@1": "suppress", "cluster_wait@1": "suppress"},
    *({"init_barrier@2": -1}, {"init_barrier@2": 1}, {"fence_barrier_init@3": "suppress"}),
    *({"wait@4": "suppress"}, {"wait@4": "flip"}),
    *({"arrive_expect_bytes@5": "suppress"}, {"arrive_expect_bytes@5": -16384}, {"arrive_expect_bytes@5": 16384}),
    *({"tma_load@6": "flip"}, {"wgmma@7": "flip"}, {"wgmma@7": "flip_a"}, {"wgmma@8": "flip"}),
    *({"wgmma_wait@9": "suppress"}, {"wgmma_wait@9": 1}),
    *({"store_shared@10": "flip"}, {"load_shared@11": "flip"}, {"sync_threads@13": "suppress"}),
    *({"store_matrix@14": "flip"}, {"fence_async_shared@14": "suppress"}, {"copy_async@15": "flip"}),
    *({"store_wait_read@16": "suppress"}, {"store_wait_read@16": 1}),
]


def test_mutants_of_a_text():
    assert mutants.mutants(TEXT, {"a": 16384}) == EXPECTED


def test_each_word_that_orders_is_mutated():
    left_out = {"test_wait", "register_budget_increase", "register_budget_decrease"}  # a budget orders nothing
    left_out |= {"tma_reduce_add", "bulk_load", "bulk_store", "store_async_of_rank"}  # in no kernel
    words = {*mutants.SILENT, *mutants.FLIPPED, *mutants.SWIZZLED, *mutants.COUNTED}
    assert words - {"cluster_sync", "reduce_members"} == set(WORDS_TO_MUTATE) - left_out


SAMPLE = {
    "gemm/sm_90a_nt_cooperative_cluster2": 4,
    "gemm/sm_90a_tn_alternate_cluster2_float32": 4,
    "gemm/portable_nt": 2,
    "flash_attention/sm_90a_causal": 5,
    "flash_attention/sm_90a_window_sinks": 5,
    "mla_decode/sm_90a_u64": 5,
    "mla_decode_few/sm_90a_16rows": 3,
    "mla_decode/sm_90a_u1": 12,
    "softmax/sm_90a_vectors_lanes_on_rows_shared": 1,
}


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name):
    """Each n-th mutant, of the words of each kind by turns, is reported or known to be right."""
    subject = mutants.library_subject(name)
    right = mutants.results(subject)
    kinds = sorted(subject.mutants, key=lambda mutant: (str(next(iter(mutant.values()))), next(iter(mutant))))
    for mutant in kinds[:: SAMPLE[name]]:
        text = mutants.described(name, mutant, subject.sites)
        assert mutants.caught(subject, right, mutant) or mutants.equivalent(text), text
