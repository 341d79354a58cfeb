"""Facts of the GPU families. One file each; nothing else in the compiler asks which GPU it writes for."""

from tileops_dsl.targets.base import Gpu, Target
from tileops_dsl.targets.portable import PORTABLE
from tileops_dsl.targets.sm_90a import H200, SM_90A

TARGETS = {target.name: target for target in (SM_90A, PORTABLE)}
GPUS = {"h200": H200}  # by the name of its results file

__all__ = ["GPUS", "TARGETS", "Gpu", "Target"]
