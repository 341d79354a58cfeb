import os
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))  # for launch, gemm, ...

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = (pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no GPU of capability 9.0"))


@pytest.fixture
def rng():
    return torch.Generator(device="cuda").manual_seed(0)
