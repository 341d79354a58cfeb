"""Run by the Python of a fresh environment, outside the tree: an installed tileops on a machine without a GPU.

python check_install.py FOLDER_IT_MUST_COME_FROM EXPECT_NATIVE(0|1)
"""

import sys
from pathlib import Path

import torch

import tileops


def reference(op, x, weight):
    x = x.double()
    if op == "softmax":
        return torch.softmax(x, -1)
    eps = {"rms_norm": 1e-6, "rms_norm_silu": 1e-5}[op]
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    return y * torch.sigmoid(y) if op == "rms_norm_silu" else y


def main(folder, expect_native):
    where = Path(tileops.__file__)
    assert Path(folder).resolve() in where.resolve().parents, f"imported {where}, not what was installed in {folder}"
    status = tileops.status()
    print(status)
    assert status.loaded == expect_native, f"native library loaded: {status.loaded}, expected {expect_native}: {status.reason}"
    if expect_native:
        assert status.variants > 0 and set(status.targets) == {"sm_90a", "portable"}, status
    torch.manual_seed(0)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        x, weight = torch.randn(5, 321, dtype=torch.float64).to(dtype), torch.randn(321, dtype=torch.float64).to(dtype)
        for op in ("softmax", "rms_norm", "rms_norm_silu"):
            arguments = (x,) if op == "softmax" else (x, weight)
            expected = reference(op, x, weight)
            for found in (getattr(tileops, op)(*arguments), getattr(torch.ops.tileops, op)(*arguments)):
                assert found.dtype == dtype
                error = (found.double() - expected).abs().max() / expected.abs().max()
                assert error <= bound, f"{op} {dtype}: relative error {error} on torch {torch.__version__}"
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1")
