"""The operators with two results through the whole binding: their arguments, their errors, which are those of Python, and what
is said about them."""

import re
import sys
from pathlib import Path

import pytest
import torch

import tileops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

from attention_errors import BAD, bad_results, good, results

BF16, F32 = torch.bfloat16, torch.float32
OPS = ("flash_attention", "flash_attention_varlen", "flash_attention_paged", "mla_decode", "merge_attention")


def random(call, dtype=F32):
    """Its floating-point tensors, but for an LSE, with random numbers of a dtype."""
    torch.manual_seed(0)
    return {
        name: torch.randn(value.shape).to(F32 if name.startswith("lse") else dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in call.items()
    }


def calls(op):
    """The good call, and one for every option: each must arrive where it belongs."""
    call = random(good(op))
    if op == "flash_attention_paged":
        call["q"] = torch.randn(2, 2, 4, 8)
    yield call
    if op.startswith("flash"):
        numbers = {"causal": True, "scale": 0.25, "window_left": 1, "window_right": 0, "softcap": 0.5}
        for name, value in {**numbers, "sinks": torch.randn(4)}.items():
            yield {**call, name: value}
    if op == "flash_attention_varlen":
        yield {**call, "seqused_k": torch.tensor([1, 3])}
        yield {**call, "max_seqlen_q": 1, "max_seqlen_k": 2}
    if op == "flash_attention_paged":
        packed = {"q": call["q"][:, 0], "cu_seqlens_q": torch.tensor([0, 0, 2]), "max_seqlen_q": 2}
        yield {**call, **packed, "num_splits": 3}
    if op == "mla_decode":
        yield {**call, "scale": 2.0}
        yield {**call, "q": call["q"][..., :4], "q_rope": call["q"][..., 4:]}
        yield {**call, "q": call["q"].expand(2, 3, 4, 6), "causal": False, "num_splits": 2}


@pytest.mark.parametrize("op", OPS)
def test_arguments_arrive_at_the_twin(fake, op):
    first = None
    for call in calls(op):
        expected = getattr(tileops, op)(**call)
        found = getattr(fake.ops, op)(**call)
        assert all(map(torch.equal, found, expected)) and len(found) == 2
        assert first is None or "q_rope" in call or not torch.equal(expected[0], first), "the option makes no difference"
        first = expected[0] if first is None else first
        out = torch.full((*expected[0].shape, 2), 7.0)[..., 0]
        lse = torch.full((*expected[1].shape, 2), 7.0)[..., 1]
        given = getattr(fake.ops, op).out(**call, out=out, lse=lse)
        assert given[0].data_ptr() == out.data_ptr() and given[1].data_ptr() == lse.data_ptr()
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


NO_KERNEL = "this build has no {} kernel for bfloat16 "
COPIES = "it serves bfloat16 head dims 8 and 3{}; by copies with rows of whole 16 bytes: v, out"
BY_COPIES = {"flash_attention_varlen": ("lengths", ""), "flash_attention_paged": ("lengths_paged", ", page 4")}
REASONS = {
    "flash_attention": 'no kernel was measured on Fake "GPU" near bfloat16 head dims 8 and 3, 8 heads of 5x6, with copies',
    "mla_decode": NO_KERNEL + "head dims 6 and 4, page 4",
}


@pytest.mark.parametrize("op", OPS)
def test_explain(fake, op):
    explain = getattr(fake.ops, f"_explain_{op}")
    if op in BY_COPIES:
        kind, page = BY_COPIES[op]
        name = f"flash_attention_sm_90a_bf16_128x128x64_{kind}_window_sinks"
        assert explain(**random(good(op), BF16)) == f"kernel\t{name}\t{COPIES.format(page)}"
    elif op in REASONS:
        assert explain(**random(good(op), BF16)) == f"eager\t\t{REASONS[op].format(op)}"
        assert explain(**good(op)) == f"eager\t\t{op} kernels take bfloat16 and float16, and q is float32"
    fake.knobs(force="eager")
    assert explain(**good(op)) == "eager\t\tTILEOPS_FORCE=eager is set"


def test_one_head_dim_is_named_once(fake):
    q = torch.ones(1, 2, 3, 400, dtype=BF16)
    assert fake.ops._explain_flash_attention(q, q, q).endswith("for bfloat16 head dim 400")


@pytest.mark.parametrize("op", OPS)
def test_knobs(fake, op, capfd):
    call, run = good(op), getattr(fake.ops, op)
    reason = getattr(fake.ops, f"_explain_{op}")(**call).split("\t")[2]
    fake.knobs(require_native="1")
    with pytest.raises(RuntimeError, match=f"^{op}: TILEOPS_REQUIRE_NATIVE is set and no kernel serves this call: {reason}$"):
        run(**call)
    fake.knobs(require_native="", log="dispatch")
    run(**call)
    shapes = " ".join(str(list(value.shape)) for value in call.values() if isinstance(value, torch.Tensor))
    assert capfd.readouterr().err == f"tileops: {op} float32 {shapes} -> eager ({reason})\n"
    fake.knobs(log="", force="portable")
    reason = reason.replace("no kernel", "no portable kernel")
    with pytest.raises(RuntimeError, match=f"^{op}: TILEOPS_FORCE=portable cannot apply: {reason}; unset it, or force a "):
        run(**call)


@pytest.mark.parametrize("op", OPS)
def test_empty_results(fake, op):
    first = next(iter(good(op)))
    call = {**good(op)}
    if op == "merge_attention":
        call = {name: value[:0] for name, value in call.items()}
    elif op == "flash_attention_varlen":
        call["q"] = call["q"][:0]
    else:
        call[first] = call[first][:, :0]
    assert getattr(fake.ops, f"_explain_{op}")(**call) == "kernel\t\tthe results are empty, so nothing is launched"
    expected = getattr(tileops, op)(**call)
    for found, right in zip(getattr(fake.ops, op)(**call), expected):
        assert found.shape == right.shape and found.dtype == right.dtype and found.is_contiguous()
    memory = {name: torch.empty_like(value) for name, value in zip(("out", "lse"), expected)}
    assert getattr(fake.ops, op).out(**call, **memory)[0].data_ptr() == memory["out"].data_ptr()


@pytest.mark.parametrize(("op", "change", "text"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input(fake, op, change, text):
    call = {**good(op), **change}
    for run in (getattr(fake.ops, op), getattr(fake.ops, f"_explain_{op}")):
        with pytest.raises(ValueError) as caught:
            run(**call)
        assert str(caught.value) == f"{op}: {text}"


@pytest.mark.parametrize("op", OPS)
def test_bad_results(fake, op):
    for change, text in bad_results(op):
        with pytest.raises(ValueError) as caught:
            getattr(fake.ops, op).out(**{**good(op), **results(op), **change})
        assert str(caught.value) == f"{op}: {text}"


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize("op", OPS[:3])
def test_descales_are_reserved(fake, op, name):
    with pytest.raises(RuntimeError, match=f"^{op}: {name} was given; scaled operands do not work yet, expected None$"):
        getattr(fake.ops, op)(**good(op), **{name: torch.ones(())})


def test_failure_of_the_twin_is_an_error(fake):
    call = good("flash_attention_paged")
    call["block_table"] = torch.full((2, 2), 2**30, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"index|its eager form failed"):
        fake.ops.flash_attention_paged(**call)


@pytest.mark.parametrize("op", OPS)
def test_results_by_name(fake, op):
    for ops in (fake.ops, torch.ops.tileops):
        assert re.search(r"-> \(Tensor out, Tensor lse\)$", str(getattr(ops, op).default._schema))
        assert str(getattr(ops, op).out._schema).endswith(", Tensor(a!) out, Tensor(b!) lse) -> (Tensor(a!), Tensor(b!))")
