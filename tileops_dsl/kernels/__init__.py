"""The tile programs: `<op>.py` has the function `<op>` from a configuration to a kernel; other modules have their macros, and
the classes of configurations.

`PROGRAMS[op](config)` records the program of an operator for one row of `configs/<op>.json`, one of `configs_of(op)`.
"""

from importlib import import_module
from pkgutil import iter_modules

from tileops_dsl.configs import Config, load

MODULES = {module.name: import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)}
PROGRAMS = {op: getattr(module, op) for op, module in MODULES.items() if hasattr(module, op)}
KINDS = {op: program.__annotations__["config"] for op, program in PROGRAMS.items()}  # what a row becomes
LIBRARY = [op for op, kind in KINDS.items() if kind.table]  # whose kernels the library is built of


def configs_of(op: str) -> list[Config]:
    """The rows of an operator, in order of preference."""
    return load(op, KINDS[op])
