"""The public contract: schemas, signatures and names. A change here is a change for users, made on purpose or not at all."""
import inspect

import pytest
import torch
from ops_reference import EXACT, check, check_gemm, operands

import tileops
from tileops import _schemas

_ATTENTION_OPTIONS = (
    "bool causal=False, float? scale=None, int window_left=-1, int window_right=-1, float softcap=0., Tensor? sinks=None"
)
_DESCALES = "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None"
_PAIR_ARGUMENTS = {  # of the operators with the results out and lse
    "flash_attention": f"Tensor q, Tensor k, Tensor v, *, {_ATTENTION_OPTIONS}, {_DESCALES}",
    "flash_attention_varlen": "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, "
    f"int max_seqlen_k, *, Tensor? seqused_k=None, {_ATTENTION_OPTIONS}, {_DESCALES}",
    "flash_attention_paged": "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor cache_seqlens, *, "
    f"Tensor? cu_seqlens_q=None, int max_seqlen_q=0, {_ATTENTION_OPTIONS}, int num_splits=0, {_DESCALES}",
    "mla_decode": "Tensor q, Tensor kv_cache, Tensor block_table, Tensor cache_seqlens, float scale, *, Tensor? q_rope=None, "
    "int head_dim_v=512, bool causal=True, int num_splits=0",
    "merge_attention": "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b",
}
PAIRS = tuple(_PAIR_ARGUMENTS)
SCHEMAS = {  # what torch has registered
    "softmax": "tileops::softmax(Tensor x, int dim=-1, *, ScalarType? dtype=None) -> Tensor",
    "softmax.out": "tileops::softmax.out(Tensor x, int dim=-1, *, ScalarType? dtype=None, Tensor(a!) out) -> Tensor(a!)",
    "rms_norm": "tileops::rms_norm(Tensor x, Tensor? weight=None, float? eps=9.9999999999999995e-07, *, int dim=-1, "
    "float weight_offset=0., bool round_before_weight=False) -> Tensor",
    "rms_norm.out": "tileops::rms_norm.out(Tensor x, Tensor? weight=None, float? eps=9.9999999999999995e-07, *, int dim=-1, "
    "float weight_offset=0., bool round_before_weight=False, Tensor(a!) out) -> Tensor(a!)",
    "rms_norm_silu": "tileops::rms_norm_silu(Tensor x, Tensor? weight=None, float? eps=1.0000000000000001e-05, *, int dim=-1, "
    "bool round_before_weight=False) -> Tensor",
    "rms_norm_silu.out": "tileops::rms_norm_silu.out(Tensor x, Tensor? weight=None, float? eps=1.0000000000000001e-05, *, "
    "int dim=-1, bool round_before_weight=False, Tensor(a!) out) -> Tensor(a!)",
    "gemm": "tileops::gemm(Tensor a, Tensor b, Tensor? bias=None, *, str activation=\"none\", Tensor? residual=None, "
    "ScalarType? out_dtype=None, Tensor? scale_a=None, Tensor? scale_b=None) -> Tensor",
    "gemm.out": "tileops::gemm.out(Tensor a, Tensor b, Tensor? bias=None, *, str activation=\"none\", Tensor? residual=None, "
    "ScalarType? out_dtype=None, Tensor? scale_a=None, Tensor? scale_b=None, Tensor(a!) out) -> Tensor(a!)",
    **{op: f"tileops::{op}({arguments}) -> (Tensor out, Tensor lse)" for op, arguments in _PAIR_ARGUMENTS.items()},
    **{
        f"{op}.out": f"tileops::{op}.out({arguments}{', *' * (', *' not in arguments)}, Tensor(a!) out, Tensor(b!) lse)"
        " -> (Tensor(a!), Tensor(b!))"
        for op, arguments in _PAIR_ARGUMENTS.items()
    },
}
_ATTENTION = "causal=False, scale=None, window_left=-1, window_right=-1, softcap=0.0, sinks=None"
_REST = "q_descale=None, k_descale=None, v_descale=None, out=None, lse=None"
SIGNATURES = {
    "softmax": "(x, dim=-1, *, dtype=None, out=None)",
    "rms_norm": "(x, weight=None, eps=1e-06, *, dim=-1, weight_offset=0.0, round_before_weight=False, out=None)",
    "rms_norm_silu": "(x, weight=None, eps=1e-05, *, dim=-1, round_before_weight=False, out=None)",
    "gemm": "(a, b, bias=None, *, activation='none', residual=None, out_dtype=None, scale_a=None, scale_b=None, out=None)",
    "flash_attention": f"(q, k, v, *, {_ATTENTION}, {_REST})",
    "flash_attention_varlen": "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, seqused_k=None, "
    f"{_ATTENTION}, {_REST})",
    "flash_attention_paged": "(q, k_cache, v_cache, block_table, cache_seqlens, *, cu_seqlens_q=None, max_seqlen_q=0, "
    f"{_ATTENTION}, num_splits=0, {_REST})",
    "mla_decode": "(q, kv_cache, block_table, cache_seqlens, scale, *, q_rope=None, head_dim_v=512, causal=True, num_splits=0, "
    "out=None, lse=None)",
    "merge_attention": "(out_a, lse_a, out_b, lse_b, *, out=None, lse=None)",
}
PUBLIC = sorted(("__version__", "explain", "knobs", "status", "gemm", "rms_norm", "rms_norm_silu", "softmax", *PAIRS))


def overload(name):
    op, _, variant = name.partition(".")
    return getattr(getattr(torch.ops.tileops, op), variant or "default")


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name):
    assert str(overload(name)._schema) == SCHEMAS[name]


def test_the_list_is_whole():
    assert set(_schemas.operators()) == set(SIGNATURES), "each has a line in SCHEMAS, SIGNATURES and PUBLIC of this file"
    assert sorted(tileops.__all__) == PUBLIC and all(hasattr(tileops, name) for name in PUBLIC)


@pytest.mark.parametrize("op", SIGNATURES)
def test_python_and_schema_agree(op):
    """Names, order, defaults and what is keyword-only: the Python function adds those that take results, and that is
    all."""
    parameters = inspect.signature(getattr(tileops, op)).parameters.values()
    bare = inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters])
    assert str(bare) == SIGNATURES[op]
    in_python = [(p.name, p.default, p.kind is p.KEYWORD_ONLY) for p in parameters if p.name not in ("out", "lse")]
    in_schema = [
        (a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty, a.kwarg_only)
        for a in overload(op)._schema.arguments
    ]
    assert in_python == in_schema


@pytest.mark.parametrize("op", [op for op in SIGNATURES if op not in PAIRS])
def test_defaults_of_the_eager_twin_are_those_of_the_schema(op):
    """torch leaves out arguments that equal their default, so the twin's own defaults decide then."""
    x = torch.tensor([[1e-3, 2e-3, -3e-3]])
    args = operands(op, x)
    assert torch.equal(getattr(torch.ops.tileops, op)(*args), getattr(tileops, op)(*args))
    assert torch.equal(getattr(torch.ops.tileops, f"_eager_{op}")(*args), getattr(tileops, op)(*args))
    if op == "gemm":
        check_gemm(*args)
    elif op in EXACT:
        check(op, *args)
    if op.startswith("rms_norm"):
        eps = overload(op)._schema.arguments[2].default_value
        assert not torch.equal(getattr(tileops, op)(x), getattr(tileops, op)(x, None, eps * 1.01)), "x is too large to tell"


@pytest.mark.parametrize("op", SIGNATURES)
def test_companions(op):
    arguments = lambda name: str(overload(name)._schema).partition("(")[2]  # noqa: E731
    # a str passed by C++ leaks in torch before 2.14: the twin takes the number of the activation
    assert arguments(f"_eager_{op}") == arguments(op).replace('str activation="none"', "int activation=0")
    assert arguments(f"_explain_{op}") == arguments(op).rpartition(" -> ")[0] + " -> str"


@pytest.mark.parametrize("op", SIGNATURES)
def test_docstrings_say_what_counts(op):
    text = getattr(tileops, op).__doc__
    for section in ("Args:", "Returns:", "Raises:", "Gradients:", "Source:", "float16", "stride", "round"):
        assert section in text, section
    for name in inspect.signature(getattr(tileops, op)).parameters:
        assert f" {name}: " in text, name
