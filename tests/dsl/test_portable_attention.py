"""The flash_attention program without warp groups: its text, what nvcc makes of it, and that each wait and barrier is needed.

What it computes is in tests/emulator.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tileops_dsl import ir, output, plan
from tileops_dsl.errors import TileError
from tileops_dsl.instruction_layouts import AccumulatorRows, WgmmaAccumulator
from tileops_dsl.kernels import MODULES, PROGRAMS, configs_of
from tileops_dsl.passes import run_passes
from tileops_dsl.passes.meaning import Run, events, number, numbers, ways
from tileops_dsl.passes.simulate import Fault, simulate
from tileops_dsl.schedule import Commit, Issue, Retire, Sync
from tileops_dsl.targets import TARGETS

ROWS = [row for row in configs_of("flash_attention") if row.target == "portable"]
TWO = next(row for row in ROWS if row.causal and row.stages == 2)
ONE = next(row for row in ROWS if row.causal and row.stages == 1)
LENGTHS, PAGED = (next(r for r in ROWS if r.lengths and r.paged == paged and r.tile[2] == 128) for paged in (False, True))
GOLDEN = Path(__file__).parents[1] / "golden"


def compiled(row, change=lambda kernel: kernel) -> ir.Kernel:
    return run_passes(change(PROGRAMS["flash_attention"](row)), TARGETS["portable"])


def text(row) -> str:
    return output.compile_config(row).text


# ---- the plan


def words(row, steps: int) -> list[str]:
    """What is done for a tile, in order: load k 0, .., commit, wait 2, sync, product s 0."""
    kernel, found = compiled(row), []
    for event in events(kernel.roles[0].body, Run(numbers(kernel, {}, steps), tiles=1)):
        i = event.values.get("i", 0)
        match event.stmt:
            case Issue(op=op):
                found.append(f"load {op.src.tensor.name} {number(event.stmt.index, event.values)}")
            case Commit():
                found.append("commit")
            case Retire(pending=pending):
                found.append(f"wait {pending}")
            case Sync():
                found.append("sync")
            case ir.Gemm(c=c):
                found.append(f"product {c.name} {i}")
            case ir.Fill(buffer=tile) if tile.scope == "shared":
                found.append(f"clear {tile.buffer.name} {i}")
    return found


def test_one_stage():
    """K lands while the weights are computed and multiplied with V, V while the scores are."""
    assert words(ONE, 2) == [
        *("load q 0", "load k 0", "commit"),
        *("wait 0", "sync", "load v 0", "commit", "product s 0", "wait 0", "sync", "load k 1", "commit", "product o 0"),
        *("wait 0", "sync", "load v 1", "commit", "product s 1", "wait 0", "sync", "commit", "product o 1"),
        *["sync"] * 4,  # of the parts of o
    ]


def test_two_stages():
    """Three groups are on their way; behind the last iteration there is nothing to load."""
    assert words(TWO, 3)[:-2] == [
        *("load q 0", "load k 0", "commit", "load v 0", "commit", "load k 1", "commit"),
        *("wait 2", "sync", "load v 1", "commit", "product s 0", "wait 2", "sync", "load k 2", "commit", "product o 0"),
        *("wait 2", "sync", "load v 2", "commit", "product s 1", "wait 2", "sync", "commit", "product o 1"),
        *("wait 2", "sync", "commit", "product s 2", "wait 2", "sync", "commit", "product o 2"),
    ]


def test_what_lies_behind_the_last_key_is_cleared_where_it_has_landed():
    """By other threads than those that loaded it. Behind the tile, whose output goes through no shared memory, all meet."""
    found = words(LENGTHS, 3)
    before, cleared = found[: found.index("product o 0")], ["wait 2", "sync", "clear v_tile 0", "sync"]
    assert before[-6:] == [*cleared, "load k 2", "commit"] and found[-1] == "sync"
    assert found[found.index("product o 0") :].count("clear v_tile 1") == found.count("clear v_tile 1")
    assert words(replace(LENGTHS, stages=1), 3)[-1] == "product o 2"


def without(body, left_out):
    return tuple(replace(s, body=without(s.body, left_out)) if hasattr(s, "body") else s for s in body if s is not left_out)


def is_noticed(kernel: ir.Kernel) -> bool:
    """Whether an order shows the fault."""
    for seed in range(12):
        try:
            simulate(kernel, ways(kernel)[0], seed)
        except Fault:
            return True
    return False


@pytest.mark.parametrize("row, count", [(ONE, 8), (TWO, 10), (LENGTHS, 11)], ids=lambda value: getattr(value, "name", ""))
def test_no_wait_no_barrier_and_no_commit_can_be_left_out(row, count):
    kernel = compiled(row)
    (role,) = kernel.roles
    orders = [s for s in ir.walk(role.body) if isinstance(s, Retire | Sync | Commit)]
    assert not is_noticed(kernel) and len(orders) == count
    for stmt in orders:
        assert is_noticed(replace(kernel, roles=(replace(role, body=without(role.body, stmt)),))), stmt


def test_layouts():
    kernel = compiled(next(row for row in ROWS if row.tile[0] == 128 and row.tile[2] == 64))
    layouts = {buffer.name: layout for buffer, layout in kernel.layouts.items()}
    assert layouts["s"] == layouts["p_half"] == layouts["o"] == WgmmaAccumulator(64, 128)
    assert layouts["shift"] == AccumulatorRows(128)
    assert layouts["s"].place((80, 3)) == ({32 + 1}, 64 // 2 + 1)  # row 16 of the second block: the second warp
    assert {ring.buffers[0].name: ring.stages for ring in kernel.rings} == {"q_tile": 1, "k_tile": 2, "v_tile": 2, "o_tile": 1}


# ---- the text


def test_rows():
    """Head dims up to 256, for all that a call may ask for, within the shared memory of the smallest."""
    for x in ("bfloat16", "float16"):
        mine = [row for row in ROWS if row.x == x]
        for causal in (False, True):
            plain = sorted(row.tile[2] for row in mine if row.causal == causal and not row.options)
            assert plain == [64, 128, 256]
        for kind in ((), ("lengths",), ("lengths", "paged")):
            for more, wanted in (((), [64, 128, 256]), (("softcap",), [128, 256])):
                assert sorted(row.tile[2] for row in mine if row.options == (*kind, "window", "sinks", *more)) == wanted
    assert all(row.threads == 128 and not row.measured for row in ROWS)


@pytest.mark.parametrize("row", [ONE, TWO], ids=lambda row: row.name)
def test_each_site_is_used_once_and_each_quote_is_the_programs(row):
    found = list(map(int, re.findall(r"\bsite\((\d+)\)", text(row))))
    assert sorted(found) == list(range(1, len(found) + 1))
    program = Path(MODULES["flash_attention"].__file__).read_text().splitlines()
    quoted = re.findall(r"^ *// flash_attention\.py:(\d+): (.*)$", text(row), re.M)
    assert len(set(quoted)) > 40
    for at, line in quoted:
        assert program[int(at) - 1].strip() == line


def test_parameters_and_report():
    made = output.compile_config(TWO)
    names = [name for name, _, _ in made.entry["params"]]
    assert names[6:13] == ["batches", "heads", "kv_heads", "sq", "sk", "head_dim", "head_dim_v"]
    assert names[13:18] == ["q_stride", "k_stride", "v_stride", "out_stride", "lse_stride"]
    assert made.entry["maps"] == {} and made.entry["threads"] == 128 and made.entry["shared_bytes"] == 96 << 10
    lines = made.report.splitlines()
    assert "   16384  k_tile       2 stages x 16384 bytes; shared 64 x 128, swizzle of 128 bytes" in lines
    assert "// 4 warps of 16 rows" in made.text.splitlines()
    source = output.source_text([made])
    assert "#include <tileops/copy_async_part.h>" in source and "stmatrix" not in source


def test_a_deep_product_goes_box_by_box():
    assert "for (int box = 0; box < 4; ++box)" in text(ONE) and "int box" not in text(TWO)


def test_rows_of_no_power_of_two_are_copied_in_parts():
    copies = [line.strip() for line in text(replace(TWO, tile=(64, 64, 96))).splitlines() if "copy_async_part" in line]
    assert copies[0].startswith("copy_async_part<8>(to, q_tile_place + x * 1024 + c * 2048, q_first, c * 32, ")


def test_each_row_of_a_page_is_looked_up():
    """By the thread that copies it, as the program says of boxes of rows: here each has one. Beyond the end, zeros."""
    found = [line.strip() for line in text(PAGED).splitlines()]
    at = found.index("const int box_row = k_tile_line + x * 8;")
    start = "load_global<1>(block_table, 0, global<int>(p.block_table), first_key[0] * p.block_table_stride"
    assert found[at + 2].startswith(start)
    assert found[at + 3].endswith(" < k_len[0] ? block_table[0] : -1);")
    assert "page0 >= 0 && k_row < p.page ? inside : 0" in found[at + 7]
    names = [name for name, _, _ in output.compile_config(PAGED).entry["params"]]
    assert {"k_stride", "block_table", "block_table_stride", "unit", "inverse"} < {*names} and "sk" not in names


BUILT = [row for row in ROWS if row.x == "bfloat16"]
BUILT = [(row, "80") for row in BUILT] + [(row, "90") for row in BUILT if row.tile[2] == 256]


@pytest.mark.parametrize("row, architecture", BUILT, ids=lambda value: getattr(value, "name", value))
def test_nvcc_makes_no_spill(row, architecture, tmp_path):
    sys.path.insert(0, str(GOLDEN))
    launch = pytest.importorskip("launch")
    from build_backend import checks, toolkit

    try:
        toolkit.find()
    except Exception:
        pytest.skip("needs nvcc")
    made, path = output.compile_config(row), tmp_path / f"{row.name}.{architecture}.cu"
    header = output.params_header(made.params, made.fields)
    path.write_text(output.source_text([made]).replace(f'#include "{made.params}.h"', header))  # the cache looks at one file
    _, log = launch.compile_cubin(path, f"arch=compute_{architecture},code=sm_{architecture}")
    report = checks.Report(row.name, log, {})
    assert checks.parse_ptxas(log), "ptxas named no kernel"
    assert checks.register_problems(report) + checks.warning_problems(report) == []


# ---- errors


def turned_round(kernel: ir.Kernel) -> ir.Kernel:
    """V is loaded before K."""

    def body(stmts):
        stmts = [replace(s, body=body(s.body)) if hasattr(s, "body") else s for s in stmts]
        loads = [n for n, s in enumerate(stmts) if plan.is_load(s) and s.dst.name in ("k_tile", "v_tile")]
        if loads:
            stmts[loads[0]], stmts[loads[1]] = stmts[loads[1]], stmts[loads[0]]
        return tuple(stmts)

    return replace(kernel, body=body(kernel.body))


def transposed(kernel: ir.Kernel) -> ir.Kernel:
    """As if q were stored by columns."""

    def body(stmts):
        stmts = [replace(s, body=body(s.body)) if hasattr(s, "body") else s for s in stmts]
        return tuple(replace(s, transpose_a=True) if isinstance(s, ir.Gemm) and s.transpose_b else s for s in stmts)

    return replace(kernel, body=body(kernel.body))


REFUSED = [
    ({"warps": 8, "tile": (128, 64, 64)}, "256 threads have products that follow each other"),
    ({"stages": 4}, "fewer stages or a smaller tile"),
    ({"tile": (64, 24, 128)}, "form of product .* a multiple of 16 columns"),
    ({"tile": (96, 32, 64)}, "64 rows for each 128 threads"),
    ({"tile": (64, 16, 96)}, "128 threads do not divide"),
]


def refused(change: dict, message: str) -> TileError:
    with pytest.raises(TileError, match=f"(?s){message}") as caught:
        compiled(replace(TWO, **change, head_dim_v=change.get("tile", TWO.tile)[2]))
    return caught.value


@pytest.mark.parametrize("change, message", REFUSED)
def test_what_does_not_fit_is_refused(change, message):
    refused(change, message)


def errors() -> list[TileError]:
    """One of each that the passes raise of such products."""
    found = [refused(change, message) for change, message in REFUSED]
    for change, message in (
        (turned_round, "copies of the loop do not belong to one product each"),
        (transposed, "a form of product that no mma is written for"),
    ):
        with pytest.raises(TileError, match=message) as caught:
            compiled(TWO, change)
        found.append(caught.value)
    return found


def test_errors():
    assert len(errors()) == len(REFUSED) + 2
