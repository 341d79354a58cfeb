import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, os.fspath(HERE))  # for words_reference
sys.path.insert(0, os.fspath(HERE.parent / "golden"))  # for launch


@pytest.fixture
def device() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the words are those of capability 9.0")
    torch.manual_seed(7)
    return "cuda"


@pytest.fixture
def launched(device):
    """Runs a kernel of a file beside this one and waits for it."""
    import launch

    def run(file: str, name: str, *values, grid: int = 1, threads: int = 128, shared: int = 0, cluster: int = 1) -> None:
        launch.load(HERE / file, name)(launch.pack(*values), grid, threads, shared, cluster)
        torch.cuda.synchronize()

    return run
