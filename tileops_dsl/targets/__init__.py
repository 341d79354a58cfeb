"""Facts of the GPU families. One file each; nothing else in the compiler asks which GPU it writes for."""

from tileops_dsl.targets.base import Target
from tileops_dsl.targets.portable import PORTABLE
from tileops_dsl.targets.sm_90a import SM_90A

TARGETS = {target.name: target for target in (SM_90A, PORTABLE)}

__all__ = ["TARGETS", "Target"]
