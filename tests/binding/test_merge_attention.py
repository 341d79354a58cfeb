"""merge_attention's kernels through the binding: strides of six tensors, the choice of a kernel, results in place."""

import pytest
import torch

import tileops

BF16 = torch.bfloat16
V8, V1 = "merge_attention_sm_90a_bf16_bf16_v8", "merge_attention_sm_90a_bf16_bf16_v1"


def sides(*shape):
    torch.manual_seed(0)
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    out_a, out_b = torch.randn(2, *shape).to(BF16)
    lse_a, lse_b = torch.randn(2, *lse_shape)
    lse_a[..., ::3] = -torch.inf
    return out_a, lse_a, out_b, lse_b


def same(found, args):
    expected = tileops.merge_attention(*args)
    torch.testing.assert_close(found[0].float(), expected[0].float(), atol=0, rtol=2**-7)
    torch.testing.assert_close(found[1], expected[1], atol=1e-6, rtol=0)


LAYOUTS = {
    "dense": lambda t: t,
    "innermost first": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "transposed": lambda t: t.mT.contiguous().mT,
    "slices": lambda t: torch.stack((t, t), -2)[..., 1, :],
    "with gaps": lambda t: torch.stack((t, t), -1)[..., 1],
    "expanded": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (7, 3, 24), (2, 1, 40, 8), (3, 5, 40, 7)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(fake, shape, layout):
    args = [LAYOUTS[layout](t) for t in sides(*shape)]
    found = []
    kernel = fake.kernel(lambda: found.extend(fake.ops.merge_attention(*args)))
    columns_apart = {"innermost first": shape[1] > 1, "transposed": True, "with gaps": True}
    vectors = shape[-1] % 8 == 0 and not columns_apart.get(layout)
    assert kernel == (V8 if vectors else V1)
    assert all(t.is_contiguous() for t in found)
    same(found, args)


def test_results_in_place(fake):
    args = sides(2, 5, 3, 16)
    for out, kernel in (
        (torch.empty(2, 3, 5, 16, dtype=BF16).transpose(1, 2), V8),
        (torch.empty(2, 5, 3, 16, 2, dtype=BF16)[..., 0], V1),
        (torch.empty(481, dtype=BF16)[1:].view(2, 5, 3, 16), V1),
    ):
        lse = torch.empty(2, 5, 3).mT
        assert fake.kernel(lambda: fake.ops.merge_attention.out(*args, out=out, lse=lse)) == kernel  # noqa: B023
        same((out, lse), args)


def test_unaligned_input(fake):
    args = list(sides(2, 5, 3, 16))
    args[2] = torch.cat((torch.zeros(1, dtype=BF16), args[2].flatten()))[1:].view(args[2].shape)
    assert fake.kernel(lambda: fake.ops.merge_attention(*args)) == V1


@pytest.mark.parametrize(("columns", "launches"), [(2, 1), (1, 2)])  # neighbours of a unit stride lie along x, or the longest
def test_more_rows_than_a_grid_takes(fake, columns, launches):
    out, lse = torch.randn(66000, 2, columns).to(BF16).expand(2, -1, -1, -1), torch.randn(2, 2, 66000)
    args = out, lse, out.flip(1), lse.flip(2)
    before = fake.get("launches")
    same(fake.ops.merge_attention(*args), args)
    assert fake.get("launches") == before + launches


def test_explain_and_force(fake):
    args = sides(2, 5, 3, 16)
    assert fake.ops._explain_merge_attention(*args) == f"kernel\t{V8}\tthe first sm_90a kernel that fits"
    wide = sides(2, 5, 3, 16)
    wide = [t.float() for t in wide]
    assert fake.ops._explain_merge_attention(*wide) == "eager\t\tthis build has no kernel for float32"
    fake.knobs(force=V1)
    assert fake.kernel(lambda: fake.ops.merge_attention(*args)) == V1
    fake.knobs(force="portable")
    assert fake.kernel(lambda: fake.ops.merge_attention(*args)) == "merge_attention_portable_bf16_bf16_v1"
    fake.knobs(force=V8)
    with pytest.raises(RuntimeError, match="cannot apply: it needs a number of columns that is a multiple of its vector"):
        fake.ops.merge_attention(*sides(2, 5, 3, 7))


def test_log(fake, capfd):
    fake.knobs(log="dispatch")
    fake.ops.merge_attention(*sides(2, 4, 3, 16))
    shapes = "[2, 4, 3, 16] [2, 3, 4] [2, 4, 3, 16] [2, 3, 4]"
    line = f"tileops: merge_attention bfloat16 {shapes} -> {V8} (the first sm_90a kernel that fits)\n"
    assert capfd.readouterr().err == line
