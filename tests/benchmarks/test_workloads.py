import json

import pytest

from benchmarks import workloads
from benchmarks.products import ACTIVATIONS
from benchmarks.workloads import GemmWorkload, Workload
from tileops.demo import OPERATORS

ROWS = [w for w in workloads.load() if isinstance(w, Workload)]
PRODUCTS = workloads.load("gemm")


def made(**changes):
    row = {"op": "rms_norm", "label": "a", "shape": (2, 8), "dtype": "bfloat16", "dim": -1, "weight": "same", "source": "here"}
    return Workload(**{**row, **changes})


def test_each_workload_is_one_line_of_the_file_and_has_a_name_and_label_of_its_own():
    found = workloads.load()
    lines = [line for line in workloads.FILE.read_text(encoding="utf-8").splitlines() if line.strip(" ,") not in ("[", "]")]
    assert [json.loads(line.rstrip(","))["label"] for line in lines] == [w.label for w in found]
    assert len({(w.op, w.name) for w in found}) == len(found)
    assert len({(w.op, w.label) for w in found}) == len(found)


@pytest.mark.parametrize("workload", ROWS, ids=lambda w: f"{w.op}-{w.name}")
def test_each_workload_is_one_that_the_operators_take(workload):
    assert workload.op in OPERATORS
    assert workload.dtype in workloads.ITEM_BYTES
    assert workload.weight in ("none", "same", *workloads.ITEM_BYTES)
    assert workload.op != "softmax" or workload.weight == "none"
    assert -len(workload.shape) <= workload.dim < len(workload.shape)
    assert all(size > 0 for size in workload.shape)
    assert workload.label and workload.source


@pytest.mark.parametrize("workload", PRODUCTS, ids=lambda w: w.name)
def test_each_product_is_one_that_gemm_takes(workload):
    assert workload.dtype in workloads.ITEM_BYTES and workload.result_dtype in workloads.ITEM_BYTES
    assert workload.layout in ("nn", "nt", "tn", "tt")
    assert set(workload.steps) <= {"bias", "residual", *ACTIVATIONS} and "none" not in workload.steps
    assert len(workload.shape) in (3, 4) and all(size > 0 for size in workload.shape)
    assert workload.label and workload.source


def test_products_have_decode_sizes_ragged_ones_every_layout_and_batches():
    assert {w.layout for w in PRODUCTS} == {"nn", "nt", "tn", "tt"}
    assert min(w.mnk[0] for w in PRODUCTS) == 1 and any(w.batch > 1 for w in PRODUCTS)
    assert any(size % 16 for w in PRODUCTS for size in w.mnk if size > 1)
    assert {"bias", "residual"} <= {step for w in PRODUCTS for step in w.steps}


def test_a_product_moves_each_operand_once_and_says_what_departs_from_the_usual():
    plain = GemmWorkload("gemm", "a", (2, 3, 5), "bfloat16", "here")
    assert (plain.name, plain.bytes, plain.flops) == ("2x3x5 bf16 nt", (2 * 5 + 3 * 5 + 2 * 3) * 2, 2 * 2 * 3 * 5)
    options = {"layout": "tn", "epilogue": "bias+silu+residual", "out": "float32"}
    other = GemmWorkload("gemm", "a", (4, 2, 3, 5), "bfloat16", "here", **options)
    assert other.name == "2x3x5 bf16 tn batch 4 f32 out bias+silu+residual" and other.activation == "silu"
    assert other.bytes == 4 * ((2 * 5 + 3 * 5) * 2 + 2 * 2 * 3 * 4) + 3 * 2 and other.flops == 4 * plain.flops


def test_every_operator_has_decode_sizes_odd_rows_or_channels_first():
    found = ROWS
    assert {w.op for w in found} == set(OPERATORS)
    assert any(w.axis != len(w.shape) - 1 for w in found if w.op == "rms_norm_silu")
    for op in OPERATORS:
        assert any(w.cols % 8 for w in found if w.op == op), f"{op} has no odd row"


def test_bytes_are_each_input_read_once_and_the_output_written_once():
    assert made().bytes == 2 * 16 * 2 + 8 * 2
    assert made(weight="none").bytes == 2 * 16 * 2
    assert made(weight="float32").bytes == 2 * 16 * 2 + 8 * 4
    assert made(dtype="float32").bytes == 2 * 16 * 4 + 8 * 4
    assert made(shape=(1, 4, 3, 5), dim=1).bytes == 2 * 60 * 2 + 4 * 2, "the weight is as long as dim"
    assert made(op="softmax", weight="none").bytes == 64


def test_names_say_what_departs_from_the_usual():
    assert made().name == "2x8 bf16"
    assert made(dim=0, weight="none").name == "2x8 bf16 dim 0 no weight"
    assert made(dim=1, weight="float32").name == "2x8 bf16 f32 weight", "dim 1 of two is the last"
    assert made(op="softmax", weight="none", dtype="float32").name == "2x8 f32"


def test_load_selects_by_operator_and_by_part_of_a_label():
    assert {w.op for w in workloads.load("softmax")} == {"softmax"}
    assert all("WAN" in w.label.upper() for w in workloads.load("rms_norm_silu", "wan vae"))
    with pytest.raises(SystemExit, match="no operator 'gelu'"):
        workloads.load("gelu")
    with pytest.raises(SystemExit, match="nothing matches 'zzz'"):
        workloads.load("softmax", "zzz")
