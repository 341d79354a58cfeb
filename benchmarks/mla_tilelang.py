"""TileLang's own MLA decode as a contestant of benchmarks.mla: a kernel of its examples, from a file outside this repository.

The file is examples/deepseek_mla/example_mla_decode_paged.py of TileLang's sources (its 0.1.14 fits 0.1.15), or one of
example_mla_decode.py and example_mla_decode_ws.py, which read a dense cache. Tiles of 64 heads and 64 tokens and no splits, as
the examples choose. Their kernels are float16 unless the file was changed, and want the 512 and the 64 numbers of queries and
tokens apart: those copies are made beforehand and not timed.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

TILE = 64  # heads, and tokens
TILES = 128  # of heads, over all requests: with fewer and no splits, multiprocessors would be idle
BUILDERS = {"mla_decode_tilelang": True, "flashattn": False}  # function -> whether its cache is paged
WANTED = "expected TileLang's example_mla_decode_paged.py, or example_mla_decode.py"


class Example(NamedTuple):
    build: Callable
    paged: bool


def load(path: Path) -> Example:
    if not path.is_file():
        raise SystemExit(f"benchmarks.mla: --tilelang is {path}, which is no file; {WANTED}")
    spec = importlib.util.spec_from_file_location("tilelang_example", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        text = f"benchmarks.mla: --tilelang is {path}, which cannot be imported: {error}; expected tilelang and z3-solver"
        raise SystemExit(f"{text} to be installed, or their wheels on PYTHONPATH") from error
    for name, paged in BUILDERS.items():
        if hasattr(module, name):
            return Example(getattr(module, name), paged)
    raise SystemExit(f"benchmarks.mla: --tilelang is {path}, which has neither {' nor '.join(BUILDERS)}; {WANTED}")


def serves(example: Example, problem) -> bool:
    pages = problem.page % TILE == 0 if example.paged else True
    whole = problem.heads % TILE == 0 and problem.tokens % max(TILE, problem.page) == 0 and not problem.mixed
    return pages and whole and problem.queries == 1 and problem.batch * problem.heads >= TILES * TILE


def contestant(example: Example, problem, lengths, sets, dim_v: int, scale: float):
    """A function of one input set, and the sets in its layout."""
    rope = sets[0][0].shape[-1] - dim_v
    page = [problem.page] * example.paged
    shape = problem.batch, problem.heads, 1, problem.tokens, dim_v, rope, TILE, TILE, 1
    kernel = example.build(*shape, *page, scale)
    return lambda *given: kernel(*given).unsqueeze(1), [_arranged(example, kernel, lengths, dim_v, *each) for each in sets]


def _arranged(example: Example, kernel, lengths, dim_v, q, cache, table):
    """In the order of the examples: queries, tokens, the table, the lengths, room for partial results, which stays unused."""
    dtypes, dim = [parameter.torch_dtype() for parameter in kernel.params], q.shape[-1]
    tokens = cache.view(-1, 1, dim) if example.paged else cache[table.long()].view(len(table), -1, 1, dim)
    parts = [part for whole in (q.squeeze(1), tokens) for part in whole.split((dim_v, dim - dim_v), -1)]
    given = [part.to(dtypes[0]).contiguous() for part in parts] + [table, lengths] * example.paged
    shapes = [[int(size) for size in parameter.shape] for parameter in kernel.params]
    unused = range(len(given), len(shapes) - 1)  # the last one is the result
    return *given, *(torch.empty(shapes[i], dtype=dtypes[i], device=q.device) for i in unused)
