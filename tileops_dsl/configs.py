"""The rows of configs/<op>.json: one kernel each, with the sizes that tuning may change and what was measured."""

import json
from dataclasses import dataclass
from pathlib import Path

from tileops_dsl.errors import TileError
from tileops_dsl.ir import FLOATS

SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
CONFIGS = Path(__file__).parent.parent / "configs"


@dataclass(frozen=True)
class Config:
    """What all rows have. `x`, `y`: dtypes of what is read and of what is written.

    The class of an operator, in kernels/*_config.py, adds its sizes, among them `tile`; the `name` of a kernel, made of these;
    `threads` that hold fragments; the class `measurement` of what was measured, if its rows list that; in words for the report
    `step`, what an iteration of the loop with the products takes, or of row-wise kernels `lengths`, the rows that they serve.
    """

    op: str
    target: str
    x: str
    y: str

    table = None  # of csrc/variant.h, for the dispatcher; the library goes without kernels that have none
    facts = ()  # that the dispatcher chooses by
    plain = True  # may stand for the operator in a smoke build
    choices = ()  # lines for the head of the kernel's text
    dtypes = property(lambda self: (SHORT[self.x], SHORT[self.y]))
    params = property(lambda self: f"{self.op}_{self.target}_params")  # the struct that it takes
    file = property(lambda self: self.name)  # of its own: nvcc takes long enough for one

    def __post_init__(self):
        for dtype in (self.x, self.y):
            if dtype not in FLOATS:
                raise TileError(f"configs/{self.op}.json has dtype {dtype!r}", f"one of {', '.join(FLOATS)}")

    def examples(self, multiprocessors: int, moved: int) -> list[str]:
        """Lines for the schedule report: what some problems take, if a CTA loads `moved` bytes in a step of its loop."""
        return []


def load(op: str, kind: type[Config]) -> list[Config]:
    """The rows of an operator, in order of preference."""
    path = CONFIGS / f"{op}.json"
    if not path.exists():
        raise TileError(f"configs/{op}.json, which names the kernels of {op}, is missing", "python -m benchmarks.row_configs")
    rows = json.loads(path.read_text())
    for row in rows:
        row["op"] = op
        if "measured" in row:
            row["measured"] = tuple(kind.measurement(**problem) for problem in row["measured"])
    return [kind(**row) for row in rows]
