"""The tile programs: `<op>.py` has the function `<op>` from a configuration to a kernel; other modules have their macros.

`PROGRAMS[op](config)` records the program of an operator for one row of `configs/<op>.json`.
"""

from importlib import import_module
from pkgutil import iter_modules

from tileops_dsl.configs import KINDS, RowConfig

MODULES = {module.name: import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)}
PROGRAMS = {op: getattr(module, op) for op, module in MODULES.items() if hasattr(module, op)}
LIBRARY = [op for op in PROGRAMS if KINDS.get(op, RowConfig).table]  # whose kernels the library is built of
