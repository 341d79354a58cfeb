"""The text of mla_decode: the order of what each group does for two pages, and the names of numbers."""

import re
from pathlib import Path

import pytest

from tileops_dsl import output
from tileops_dsl.kernels import LIBRARY, MODULES, PROGRAMS, configs_of

ROW = configs_of("mla_decode")[0]
# The order matters of: barriers of both groups, products, waits for them, loads, and what stands before a product.
WORD = re.compile(
    r"named_barrier_(?P<barrier>sync|arrive)\((?P<number>\d),|(?P<wait>wgmma_wait<\d>)|(?P<word>any_of_warp|store_matrix)"
    r"|tma_load<[^>]*>\((?P<load>k\d(?: \+ \d+)?)|(?P<free>k\d_free \+ \d)|const auto b = matrix_at<[^(]*>\((?P<b>k[01])"
)
BETWEEN_GROUPS = "1234"  # barriers: the maximum of block 0, P0, the maximum of block 1, P1


@pytest.fixture(scope="module")
def made() -> output.Generated:
    return output.compile_config(ROW)


def loops(text: str) -> list[list[str]]:
    """Of each group, what happens in the loop over pages."""
    found = re.finditer(r"^( *)for \(int i = begin[^\n]*\n.*?^\1}$", text, re.M | re.S)
    return [_events(loop[0]) for loop in found]


def _events(body: str) -> list[str]:
    events = []
    for m in WORD.finditer(body):
        if m["barrier"]:
            events += [f"{m['barrier']} {m['number']}"] if m["number"] in BETWEEN_GROUPS else []  # others are a group's own
        elif m["b"]:
            events.append(f"product of {m['b']}")
        else:
            events.append(m["load"] or m["free"] or m["wait"] or m["word"])
    return events


GROUPS = [
    [  # the first boxes of what is read, in the order in which they are free
        *("k0_free + 8", "k0 + 32768", "k1_free + 8", "k1 + 32768", "k0_free + 0", "k0"),
        *("k0_free + 4", "k0 + 16384", "k1_free + 4", "k1 + 16384", "k1_free + 6", "k1 + 24576", "k1_free + 0", "k1"),
    ],
    [
        *("k0_free + 8", "arrive 1", "store_matrix", "arrive 2", "any_of_warp", "product of k0", "sync 3"),
        *("wgmma_wait<0>", "k0_free + 0", "any_of_warp", "sync 4", "product of k1"),
        *("product of k0", "wgmma_wait<1>", "k1_free + 0", "product of k0", "product of k0", "wgmma_wait<0>", "wgmma_wait<0>"),
    ],
    [
        *("k1_free + 8", "sync 1", "any_of_warp", "sync 2", "product of k0", "arrive 3", "wgmma_wait<0>", "k0_free + 4"),
        *("store_matrix", "arrive 4", "any_of_warp", "product of k1", "product of k1"),
        *("product of k1", "wgmma_wait<2>", "k1_free + 4", "wgmma_wait<1>", "k1_free + 6"),
        *("product of k1", "product of k1", "wgmma_wait<0>", "wgmma_wait<0>"),
    ],
]


def test_the_order_of_what_each_group_does(made):
    """Boxes are freed behind their last product; P0 goes to group 1 with its softmax, and what it reads is free before P1."""
    assert loops(made.text) == GROUPS


def test_numbers_have_the_authors_names(made):
    """Each where its loop variable has a value; another request's or page's in a block of its own, its page known."""
    names = re.findall(r"^ *(?:const \w+|Fragment<int, 1>) (\w+)(?: = |;)", made.text, re.M)
    assert {"length", "begin", "end", "fewest", "whole", "begins", "page0", "page1"} <= set(names)
    assert [names.count(name) for name in ("dealt_first", "fewest", "whole", "begins")] == [1, 2, 2, 2]
    assert made.text.count(", global<int>(p.block_table),") == 2  # by the group that loads


def test_rows_of_a_page_have_places_of_their_own():
    """By boxes of rows: bytes are told once, then each warp takes its boxes, whose places its lanes know."""
    texts = {row.unit: output.compile_config(row).text for row in configs_of("mla_decode") if row.x == "bfloat16"}
    assert set(texts) == {1, 64} and len({text.count("p.kv_cache, at(") for text in texts.values()}) == 1
    head = "for (int x = 0; (x * 4 + warp) * p.unit < 64; ++x) {"
    assert [texts[unit].count(head) for unit in texts] == [0, texts[1].count(head)] and texts[1].count(head) == 7
    for body in texts[1].split(head)[1:]:
        lines = [line.strip() for line in body[: body.index("elect_one")].splitlines()[1:-1]]
        assert len(lines) in (2, 4) and all(
            re.match(r"const int place_\d = shuffle\((page|row)[01], x, ", line) for line in lines
        )
    moved = [line for line in texts[1].splitlines() if "p.kv_cache, at(" in line]
    assert all(
        re.search(r"\+ \(x \* 4 \+ warp\) \* p.unit \* 64, p.kv_cache, at\(.*, place_[13], place_[02]\)", line)
        for line in moved
    )
    assert texts[1].count("const int box_row = (thread_index() % 32 * 4 + warp_index() % 4) * p.unit;") == 1


def test_boxes_are_waited_for_one_by_one(made):
    waits = re.findall(r"wait\(k0_full \+ (.*), k0_phase >> (.*) & 1", made.text)
    assert waits == [("8", "8"), ("box", "box"), ("4 + box", "(4 + box)")] * 2


def test_each_site_is_mapped_and_used_once(made):
    numbers = re.findall(r"\bsite\((\d+)\)", made.text)
    assert sorted(map(int, numbers)) == sorted(map(int, made.entry["sites"])) == list(range(1, len(numbers) + 1))


def test_each_source_comment_is_a_line_of_the_program(made):
    quoted = re.findall(r"^ *// (mla_decode|attention)\.py:(\d+): (.*)$", made.text, re.M)
    programs = {name: Path(MODULES[name].__file__).read_text().splitlines() for name in ("mla_decode", "attention")}
    assert len(set(quoted)) > 60
    assert all(programs[name][int(number) - 1].strip() == line for name, number, line in quoted)


def test_parameters(made):
    names = [name for name, _, _ in made.fields]
    assert names[:3] == ["q", "kv_cache", "out"] and names[-2:] == ["causal", "scale_log2"]
    assert {ctype for name, ctype, _ in made.fields if name in ("n", "rows", "heads", "sq")} == {"int32_t"}
    assert {name: ctype for name, ctype, _ in made.fields if name in ("lse", "block_table")} == {
        "lse": "void*",
        "block_table": "const void*",
    }
    assert made.entry["threads"] == 384 and made.entry["maps"]["kv_cache"] == {"box": (64, 64), "swizzle": 128}


def test_the_library_has_it_and_goes_without_the_readable_form():
    assert {"mla_decode", "mla_combine"} <= set(LIBRARY) and "mla_decode_standard" in set(PROGRAMS) - set(LIBRARY)
