"""The programs of decode without warp groups: their plan, what nvcc makes of them, and that each wait and barrier is needed.

What they compute is in tests/emulator.
"""

from dataclasses import replace

import pytest
from rejected import neighbour

from tileops_dsl import ir, output, plan
from tileops_dsl.instruction_layouts import AccumulatorColumns, SharedTile, Swizzle, WgmmaAccumulator
from tileops_dsl.kernels import PROGRAMS, configs_of
from tileops_dsl.passes import run_passes
from tileops_dsl.passes.meaning import Run, events, numbers
from tileops_dsl.schedule import Commit, Issue, Retire, Sync
from tileops_dsl.targets import TARGETS

attention = neighbour("test_portable_attention")
ROWS = {op: [row for row in configs_of(op) if row.target == "portable"] for op in ("attention_decode", "mla_decode_few")}
MLA = ROWS["mla_decode_few"][0]


def compiled(row) -> ir.Kernel:
    return run_passes(PROGRAMS[row.op](row), TARGETS["portable"])


def test_rows():
    """Head dims up to 256, with and without a softcap; pages of any size; within the shared memory of the smallest."""
    for x in ("bfloat16", "float16"):
        for softcap, wanted in ((False, [64, 128, 256]), (True, [128, 256])):
            found = [row.tile[2] for row in ROWS["attention_decode"] if (row.x, row.softcap) == (x, softcap)]
            assert sorted(found) == wanted
        (row,) = (row for row in ROWS["mla_decode_few"] if row.x == x)
        assert row.unit == 1 and output.compile_config(row).entry["shared_bytes"] == 95008


def test_one_stage_that_two_products_read():
    """Its copies begin behind a barrier of their own: the product with the values has read the tokens before."""
    kernel, found = compiled(replace(MLA, tile=(16, 64, 192, 128))), []
    for event in events(kernel.roles[0].body, Run(numbers(kernel, {"causal": 1}, 2), tiles=1)):
        match event.stmt:
            case Issue(op=op):
                found.append(f"load {op.src.tensor.name}")
            case Retire(pending=pending):
                found.append(f"wait {pending}")
            case Commit() | Sync():
                found.append(type(event.stmt).__name__.lower())
            case ir.Gemm(c=c):
                found.append(f"product {c.name}")
    step = ["sync", "load kv_cache", "commit", "wait 0", "sync", "product s"]
    step += ["sync", "sync", "product o"]  # behind top_all and p_half_all
    assert found == ["load q", *step, *step, "sync"]


def test_layouts():
    kernel = compiled(MLA)
    found = {buffer.name: layout for buffer, layout in kernel.layouts.items()}
    registers = {buffer.name: plan.registers(kernel, buffer) for buffer in kernel.layouts if buffer.scope == "fragment"}
    assert found["s"] == WgmmaAccumulator(16) and found["o"] == WgmmaAccumulator(16, 512)
    assert found["top"] == AccumulatorColumns(16)
    assert (registers["s"], registers["o"], registers["top"]) == (8, 64, 4)
    assert found["p_half_all"] == SharedTile(64, 16, 2, Swizzle.B32) and found["top_all"].extent == 64


SMALL = [replace(MLA, tile=(16, 64, 192, 128)), *(row for row in ROWS["attention_decode"][1:3])]  # of two stages, of one


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_nothing_that_orders_is_too_much(row):
    kernel = compiled(row)
    (role,) = kernel.roles
    assert not attention.is_noticed(kernel)
    orders = [s for s in ir.walk(role.body) if isinstance(s, Retire | Sync | Commit)]
    left_out = (replace(kernel, roles=(replace(role, body=attention.without(role.body, s)),)) for s in orders)
    assert [f"{s.location} {s}" for s, less in zip(orders, left_out, strict=True) if not attention.is_noticed(less)] == []


BUILT = [(row, "80") for rows in ROWS.values() for row in rows if row.x == "bfloat16"]


@pytest.mark.parametrize("row, architecture", [*BUILT, (MLA, "90")], ids=lambda value: getattr(value, "name", value))
def test_nvcc_makes_no_spill(row, architecture, tmp_path):
    attention.test_nvcc_makes_no_spill(row, architecture, tmp_path)
