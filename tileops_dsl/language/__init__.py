"""Every word that a kernel author may write: `import tileops_dsl.language as T`.

A tile program is a Python function that runs once, at build time, and records what it says. Two rules follow:
a Python name is bound while recording (values that change in a loop live in a fragment), and control flow over
run-time values is written with `T.serial`, `T.Parallel`, `T.If` and `T.if_then_else`. Breaking either is an error.
"""

from tileops_dsl.language import memory, program, scalar, tile
from tileops_dsl.language.memory import *  # noqa: F403
from tileops_dsl.language.program import *  # noqa: F403
from tileops_dsl.language.scalar import *  # noqa: F403
from tileops_dsl.language.tile import *  # noqa: F403

__all__ = [*memory.__all__, *program.__all__, *scalar.__all__, *tile.__all__]
