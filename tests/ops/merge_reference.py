"""merge_attention in float64, two sides to merge, and the check of a result."""
import torch
from ops_reference import half_unit, normal

INF = float("inf")


def exact(out_a, lse_a, out_b, lse_b):
    out_a, lse_a, out_b, lse_b = (t.double() for t in (out_a, lse_a, out_b, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    safe = lse.masked_fill(lse == -INF, 0.0)
    shares = [torch.exp(side - safe).mT.unsqueeze(-1) for side in (lse_a, lse_b)]
    return torch.where(shares[0] == 0, 0.0, out_a * shares[0]) + torch.where(shares[1] == 0, 0.0, out_b * shares[1]), lse


def sides(shape, dtype, device, empty=True):
    """Two sides, with rows that are empty on one side (where `out` is poison), on the other and on both."""
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    out_a, out_b = (normal(*shape, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    lse_a, lse_b = (3 * normal(*lse_shape, device=device, seed=seed) for seed in (3, 4))
    if empty:
        lse_a[..., 0::4] = -INF
        lse_b[..., 1::4] = -INF
        lse_a[..., 2::8] = lse_b[..., 2::8] = -INF
        out_a[lse_a.mT == -INF] = float("nan")
        out_b[lse_b.mT == -INF] = float("nan")
    return out_a, lse_a, out_b, lse_b


def check(args, found):
    out, lse = found
    wanted, wanted_lse = exact(*args)
    assert out.dtype == args[0].dtype and lse.dtype == torch.float32
    assert ((out.double() - wanted).abs() <= half_unit(wanted, out.dtype) + 2.0**-20 * 4).all()
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-6, rtol=1e-6)
    both = ((args[1] == -INF) & (args[3] == -INF)).mT
    assert not out[both].any() and (lse.mT[both] == -INF).all()
