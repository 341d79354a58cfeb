"""The launchers of tests/golden on the emulator: tensors of the CPU, the same Python that launches on a GPU."""

import types
from pathlib import Path

import launch
import numpy as np
import torch

from tileops_dsl import emulate

GOLDEN = Path(__file__).parents[1] / "golden"
NUMPY = {torch.bfloat16: np.uint16, torch.float16: np.float16, torch.float32: np.float32, torch.int32: np.int32}
SAME_SIZE = {torch.bfloat16: torch.int16}


def as_array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(SAME_SIZE.get(tensor.dtype, tensor.dtype)).numpy().view(NUMPY[tensor.dtype])


class Emulated:
    """Stands in for launch.py and torch.cuda while a launcher runs. seed and mutate: of the next launches."""

    def __init__(self, monkeypatch, multiprocessors: int):
        self.seed, self.mutate, self.arrays, self.reports = 0, None, {}, []
        self.pack_on_gpu = launch.pack
        monkeypatch.setattr(launch, "tensor_map", self.tensor_map)
        monkeypatch.setattr(launch, "pack", self.pack)
        monkeypatch.setattr(launch, "load", self.load)
        properties = types.SimpleNamespace(multi_processor_count=multiprocessors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def remember(self, tensor: torch.Tensor) -> np.ndarray:
        array = as_array(tensor)
        if tensor.numel():
            self.arrays[tensor.data_ptr()] = tensor, array  # the tensor lives as long as its address is known
        return array

    def tensor_map(self, tensor, box, swizzle) -> bytes:
        return emulate.TensorMap(self.remember(tensor), box, swizzle).pack()

    def pack(self, *values) -> bytes:
        for value in values:
            if isinstance(value, torch.Tensor):
                self.remember(value)
        return self.pack_on_gpu(*values)

    def load(self, source, name):
        so = emulate.build(Path(source))

        def kernel(params, grid, threads, shared_bytes=0, cluster=1):
            buffers = [emulate.buffer(f"{tuple(t.shape)} {t.dtype}", a, True) for t, a in self.arrays.values()]
            grid = (grid, 1) if isinstance(grid, int) else grid
            options = {"cluster": cluster, "mutate": self.mutate}
            self.reports.append(emulate.run(so, name, params, grid, threads, shared_bytes, buffers, self.seed, **options))

        return kernel
