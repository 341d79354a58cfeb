"""The text of mla_decode beside the one by hand: the order of what each group does for two pages, and the names of numbers."""

import re
from pathlib import Path

import pytest

from tileops_dsl import output
from tileops_dsl.kernels import LIBRARY, MODULES, PROGRAMS, configs_of

GOLDEN = Path(__file__).parents[1] / "golden" / "mla_decode.cu"
ROW = configs_of("mla_decode")[0]
# The order matters of: barriers of both groups, products, waits for them, loads, and what stands before a product.
WORD = re.compile(
    r"named_barrier_(?P<barrier>sync|arrive)\((?P<number>[\w +]+),|(?P<wait>wgmma_wait<\d>)|(?P<word>any_of_warp|store_matrix)"
    r"|tma_load<[^>]*>\((?:shared<bf16>\()?(?P<load>\w+)"
    r"|wgmma<(?P<columns>\d+)>\((?P<acc>\w+), 0, .*?(?P<tile>[kv][01]_tile)|const auto b = matrix_at<[^(]*>\((?P<b>k[01])"
)
NUMBERS = {"kMax0Ready": "1", "kMax1Ready": "2", "kP1Ready": "3", "kP0Ready": "4"}


@pytest.fixture(scope="module")
def made() -> output.Generated:
    return output.compile_config(ROW)


def loops(text: str, head: str) -> list[list[str]]:
    """Of each group, what happens in the loop over pages."""
    found = re.finditer(rf"^( *)for \(int {head} = begin[^\n]*\n.*?^\1}}$", text, re.M | re.S)
    return [_events(loop[0]) for loop in found]


def _events(body: str) -> list[str]:
    events = []
    for m in WORD.finditer(body):
        if m["barrier"]:
            number = NUMBERS.get(m["number"], m["number"])
            events += [f"{m['barrier']} {number}"] if number in NUMBERS.values() else []  # others are a group's own
        elif m["tile"] or m["b"]:
            events.append(f"product of {(m['tile'] or m['b'])[:2].replace('v', 'k')}")
        elif m["load"]:
            events.append(f"load {m['load'].lower().removeprefix('k').replace('k', '')}")
        else:
            events.append(m["wait"] or m["word"])
    return events


def test_each_group_does_things_in_the_order_of_the_text_by_hand(made):
    by_hand, generated = loops(GOLDEN.read_text(), "page"), loops(made.text, "i")
    assert len(by_hand) == len(generated) == 2
    for found in generated:  # the scores are two products, one for each half of Q, and what is left is waited for again
        (last,) = {n for n, event in enumerate(found) if found[n : n + 2] == [event, event] and event.startswith("product")}
        del found[last]
        assert found.pop() == found[-1] == "wgmma_wait<0>"
    at = by_hand[1].index("store_matrix")  # P1 is stored behind the rescaling, and announced behind one product, not two
    by_hand[1][at : at + 2] = by_hand[1][at + 1 : at - 1 : -1]
    by_hand[1].remove("arrive 3")
    by_hand[1].insert(at + 3, "arrive 3")
    assert generated == by_hand


def test_numbers_have_the_authors_names(made):
    """Each where its loop variable has a value; another request's or page's in a block of its own, its page known."""
    names = re.findall(r"^ *(?:const \w+|Fragment<int, 1>) (\w+)(?: = |;)", made.text, re.M)
    assert {"length", "begin", "end", "fewest", "whole", "piece", "page0", "page1"} <= set(names)
    assert [names.count(name) for name in ("schedule_0", "fewest", "whole", "piece")] == [1, 2, 2, 2]
    ahead = re.findall(r"const int next = i \+ 2;\n *const int i = next;\n *if \(i < end\) \{\n((?:.*\n){6})", made.text)
    assert ahead and not [block for block in ahead if "load_global" in block]
    assert "next_page0" in ahead[0] and any("const int page1 = ((i + 1) < end ? next_block_table" in block for block in ahead)


def test_pages_are_read_two_iterations_ahead(made):
    """In front of the loop those of the second iteration, in it those behind the next one, where they exist."""
    lines = re.findall(r"if \((\w+ \+ \d) < end\) load_global<1>\((ahead_\w+), .*?p.block_table\), (.*), site", made.text)
    for group in (lines[:4], lines[4:]):
        assert [(at, name) for at, name, _ in group] == [
            (at, name) for at in ("begin + 2", "i + 4") for name in ("ahead_page0", "ahead_block_table")
        ]
        assert [place.split(" + ", 1)[1] for _, _, place in group] == [
            "(begin + 2)", "min(begin + 2 + 1, end - 1)", "(i + 4)", "min(i + 4 + 1, end - 1)",
        ]  # fmt: skip


def test_rows_of_a_page_have_places_of_their_own():
    """By boxes of rows: bytes are told once, then each warp takes its boxes, whose places its lanes know."""
    texts = {row.unit: output.compile_config(row).text for row in configs_of("mla_decode") if row.x == "bfloat16"}
    assert set(texts) == {0, 1, 64} and len({text.count("p.kv_cache, at(") for text in texts.values()}) == 1
    head = "for (int x = 0; (x * 4 + warp) * p.unit < 64; ++x) {"
    assert [texts[unit].count(head) for unit in texts] == [0, 0, texts[1].count(head)] and texts[1].count(head) >= 12
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
    for unit in (1, 64):
        ahead = re.findall(
            r"if \(i \+ 4 < end\) load_global<1>\((ahead_\w+), .*p.block_table.*stop - 1.*p.inverse", texts[unit]
        )
        assert len(ahead) == 4 and len(set(ahead)) == 2


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
    assert made.entry["threads"] == 256 and made.entry["maps"]["kv_cache"] == {"box": (64, 64), "swizzle": 128}


def test_the_library_has_it_and_goes_without_the_readable_form():
    assert {"mla_decode", "mla_combine"} <= set(LIBRARY) and "mla_decode_standard" in set(PROGRAMS) - set(LIBRARY)
