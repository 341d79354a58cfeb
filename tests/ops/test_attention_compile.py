"""The attention operators under torch.compile, their fake kernels, and torch's own check of custom operators."""

import inspect

import pytest
import torch
from attention_errors import results
from attention_ways import KINDS, ways
from test_attention_contract import DIFFERENTIABLE, OPS, calls, on, random_call, raw

import tileops

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on importing its compilers


def positional(op, call):
    """torch.library.opcheck takes positional arguments and keywords as the schema has them."""
    arguments = raw(op)._schema.arguments
    names = [a.name for a in arguments if not a.kwarg_only]
    return tuple(call[name] for name in names), {name: value for name, value in call.items() if name not in names}


VIEWS = {
    "as they are": lambda t: t,
    "heads first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "slices": lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:-2],
    "no unit stride": lambda t: torch.stack((t, t), -1)[..., 0],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(device, op, view):  # B47
    for call in calls(op, device):
        changed = {n: VIEWS[view](v) if isinstance(v, torch.Tensor) and v.dim() > 2 else v for n, v in call.items()}
        args, options = positional(op, changed)
        torch.library.opcheck(raw(op), args, options)
    torch.library.opcheck(raw(f"_eager_{op}"), args, options)
    args, options = positional(op, {**random_call(op, device), **on(device, results(op))})
    torch.library.opcheck(raw(op, "out"), args, options, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("way", ways(*KINDS[:-1]), indirect=True)
@pytest.mark.parametrize("sizes", [(3, 70, 4, 2), (1, 1, 4, 4), (1, 1, 1, 1)], ids=str)
def test_fake_results_are_like_the_real_ones(way, sizes):  # B47
    """Of kernels too, and of sizes 1, whose strides may be any; used transposed in a compiled graph."""
    batch, keys, heads, kv_heads = sizes
    rows = keys if way.kind in ("dense", "varlen", "paged") else 1
    call = way.call(*way.sequences([rows] * batch, [keys] * batch, heads, kv_heads))
    named = inspect.signature(call.function).bind(*call.args, **call.options).arguments
    args, options = positional(call.function.__name__, named)
    torch._dynamo.reset()

    def program(*args):
        out, lse = call.function(*args, **options)
        return (out + 1).transpose(0, 1) * 2, lse.mT + out[..., 0].float().sum()

    found = call.results()
    with way.scope():
        torch.library.opcheck(raw(call.function.__name__), args, options)
        compiled = torch.compile(program, fullgraph=True, backend="aot_eager")(*args)
        torch.testing.assert_close(compiled, program(*args))
    kinds = [t.untyped_storage().data_ptr() for t in (*found, *args) if isinstance(t, torch.Tensor)]
    assert found[0].is_contiguous() and found[1].is_contiguous()
    assert len({*kinds[:2]}) == 2 and not {*kinds[:2]} & {*kinds[2:]}


@pytest.mark.parametrize("op", ["flash_attention", "flash_attention_varlen"])
def test_opcheck_of_the_backward_pass(device, op):
    call = random_call(op, device)
    q, k, v, *lengths = call.values()
    lengths += [None] if lengths else []  # seqused_k
    out, lse = getattr(tileops, op)(**call)
    for sinks, dlse in ((None, None), (torch.ones(4, device=device).half(), torch.ones_like(lse))):
        args = (torch.ones_like(out), dlse, q, k, v, out, lse, sinks, *lengths, True, None, 3, -1, 0.5)
        torch.library.opcheck(raw(f"_{op}_backward"), args)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("op", "dynamic"), [*((op, True) for op in OPS), ("flash_attention", False)])
def test_compiles_whole(device, op, dynamic):
    def program(**call):
        out, lse = getattr(tileops, op)(**call)
        return (out * 2).transpose(0, 1), lse + 1

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for call in calls(op, device):
        torch.testing.assert_close(compiled(**call), program(**call))
        if op not in DIFFERENTIABLE:
            continue
        floats = [n for n, v in call.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        grads = []
        for run in (compiled, program):
            leaves = {n: call[n].clone().requires_grad_() for n in floats}
            loss = sum(t.square().sum() for t in run(**{**call, **leaves}))
            grads.append(torch.autograd.grad(loss, list(leaves.values())))
        torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore")
def test_one_tensor_twice_compiles(device):
    """Dynamo has no autograd.Function with the same input twice."""

    def program(x, square, index):
        dense, lse = tileops.flash_attention(x[None], x[None], x[None], sinks=x[0, :, 0])
        packed, _ = tileops.flash_attention_varlen(x, x, x, index, index, 3, 3, causal=True)
        merged, _ = tileops.merge_attention(dense, lse, dense, lse)
        return merged[0] + packed, tileops.gemm(square, square)

    torch._dynamo.reset()
    index = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    leaves = [torch.randn(5, 2, 8, device=device).requires_grad_(), torch.randn(4, 4, device=device).requires_grad_()]
    grads = []
    for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        grads.append(torch.autograd.grad(sum(t.square().sum() for t in run(*leaves, index)), leaves))
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS)
def test_compiled_results_are_seen_as_written(device, op):  # B49
    def program(memory, **call):
        before = memory["out"] * 2, memory["lse"] * 2
        out, lse = getattr(tileops, op)(**call, **memory)
        return before[0] + memory["out"], before[1] + memory["lse"], out * 1, lse * 1

    torch._dynamo.reset()
    call, memories = random_call(op, device), [on(device, results(op)) for _ in range(2)]
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")(memories[0], **call)
    torch.testing.assert_close(compiled, program(memories[1], **call))
    torch.testing.assert_close(*memories)
