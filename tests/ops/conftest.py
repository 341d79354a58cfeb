import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))  # for ops_reference

from attention_ways import Way

import tileops
from tileops.ops import _matmul

GPU = torch.cuda.is_available()
needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no CUDA device"))


@dataclass(frozen=True)
class Route:
    """A device and the path that calls on it must take: the eager twin on the CPU, kernels of one target on a GPU."""

    device: str
    target: str


@pytest.fixture(params=["cpu", pytest.param("sm_90a", marks=needs_gpu), pytest.param("portable", marks=needs_gpu)])
def route(request):
    if request.param == "cpu":
        yield Route("cpu", "")
        return
    if request.param == "sm_90a" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90a runs on capability 9.0 only")
    with tileops.knobs.scope(force=request.param, require_native=True):
        yield Route("cuda", request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    return request.param


@pytest.fixture
def way(request):
    """Of attention, by kind and route; the context must be usable afterwards."""
    kind, route = request.param
    if route == "sm_90a" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90a runs on capability 9.0 only")
    yield Way(kind, route)
    if route != "cpu":
        torch.cuda.synchronize()


@pytest.fixture
def gpu_route_on_cpu(monkeypatch):
    """The path that half precision takes on a GPU; torch.mm and torch.bmm have out_dtype there only."""

    def with_out_dtype(run):
        return lambda p, q, out_dtype=None: run(p, q) if out_dtype is None else run(p.to(out_dtype), q.to(out_dtype))

    monkeypatch.setattr(_matmul, "_on_tensor_cores", lambda a: a.dtype != torch.float32 and a.shape[-1] != 0)
    monkeypatch.setattr(_matmul, "_HAS_OUT_DTYPE", True)
    monkeypatch.setattr(torch, "mm", with_out_dtype(torch.mm))
    monkeypatch.setattr(torch, "bmm", with_out_dtype(torch.bmm))


@pytest.fixture
def run_python():
    """Runs a program in a fresh interpreter that can import tileops, and returns the finished process."""

    def run(program: str, *, check: bool = True, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
        root = path or Path(tileops.__file__).parent.parent
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TILEOPS_")}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**inherited, "PYTHONPATH": str(root), **environment},
            cwd=root,  # which python -c puts first
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run
