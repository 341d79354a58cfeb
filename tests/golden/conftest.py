import os
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))  # for launch, gemm, ...


@pytest.fixture
def rng():
    return torch.Generator(device="cuda").manual_seed(0)
