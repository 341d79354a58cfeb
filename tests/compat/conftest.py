import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))  # for attention_reference

needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request):
    return request.param
